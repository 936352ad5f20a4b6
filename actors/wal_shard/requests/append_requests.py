"""Appends by message, and the state of producers. Pure.

An append is staged into the commit batch like frames of a ring. While nothing can be written, an append that
is in the log already is still answered as a duplicate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlog.actors.wal_shard.commit import idempotency
from ringlog.actors.wal_shard.commit.admission import Admission, FrameIntake
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.control_records import KeyUsed, ProducerClaimed, frame_of
from ringlog.actors.wal_shard.commit.refusal_details import explain_full
from ringlog.actors.wal_shard.requests.read_only_mode import ReadOnlyMode
from ringlog.actors.wal_shard.requests.topic_requests import TopicRequests
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import Internal, InvalidRequest, ProducerFenced, Status, Throttled, TopicNotFound
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.settle_entry import DISK_FULL, FENCED, S_COMMIT_TS, S_FIRST_SEQ
from ringlog.limits import FRAME_BYTES_MAX, PRESSURE_RETRY_MS
from ringlog.topic.config import TopicConfig
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.idempotency import IdempotencyEntry
from ringlog.topic.state import ShardTopic
from ringlog.types import SESSION_BIT, Durability


class AppendRequests:
    """Handles appends and the requests of producers."""

    def __init__(self, directory: TopicDirectory, admission: Admission, topics: TopicRequests) -> None:
        self._directory, self._admission, self._topics = directory, admission, topics
        self.read_only: ReadOnlyMode | None = None
        self.disk_missing_bytes = 0
        """Bytes that must become free on a full device.
        Until then records are refused, but deletes are accepted."""
        self.refused_for_pressure: int = 0
        """Number of appends that were refused because of pressure."""
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message]
        ] = {m.Append: self._append, m.ProducerState: self._producer_state}

    def _append(
        self, message: m.Append, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        frame_batch = self.frames_of(message, event)
        assert event.attachment is not None
        intake = self._admission.open(
            event.attachment, frame_batch, np.arange(len(frame_batch), dtype=np.int64)
        )
        topic = self._directory.find(message.topic)
        is_new = topic is None
        if topic is None:
            if not _may_create(message) or self._topics.redirect(message.topic) is not None:
                raise TopicNotFound("no such topic", topic=message.topic)
            self._require_ids(frame_batch, message.topic, 0)
            if not self._admission.has_valid_frame(intake):
                # Check limits before the topic is created: frames that are all invalid create no topic.
                self._admission.admit(intake, {}, now_us, None)
                return m.Appended(message.topic, 0, 0, False, intake.entries.tobytes())
            topic = self._topics.create(message.topic, message.config, batch)
        elif message.config is not None:
            TopicConfig.parse(message.config, topic.name)
        if (past := idempotency.find_duplicate(topic, message, frame_batch, now_us)) is not None:
            return self._appended(topic, is_new, *past)
        self._require_ids(frame_batch, topic.name, topic.topic_id)
        frame_batch.words[:, layout.W_TOPIC] = topic.topic_id
        self._admission.admit(intake, {topic.topic_id: topic}, now_us, None)
        if (message.idempotency_key or message.ids) and intake.frames == 1:
            self._remember_keys(topic, message, intake, batch, now_us)
        batch.add_intake(intake)
        return self._appended(topic, is_new, intake.entries)

    def append_pressed(
        self, message: m.Append, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        """Handle an append under pressure: refuse new records (L5), and answer duplicates.

        An append with `disable_backpressure` is handled as usual.
        """
        if message.disable_backpressure:
            return self._append(message, event, batch, now_us)
        frame_batch = self.frames_of(message, event)
        repeat = self._repeated(message, event, frame_batch, batch, now_us, Status.THROTTLED)
        if repeat is not None:
            return repeat
        self.refused_for_pressure += 1
        raise Throttled(
            "the shard is under pressure and refuses new writes, retry later", reason="pressure",
            topic=message.topic, retry_after_ms=PRESSURE_RETRY_MS,
        )  # fmt: skip

    def answer_repeat(self, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        """Handle a change while nothing can be written. An append that is in the log is a duplicate (W4).

        Raise Internal or StorageReadOnly for all other changes.
        """
        message, read_only, frame_batch = event.message, self.read_only, None
        if isinstance(message, m.Append):
            frame_batch = self.frames_of(message, event)
            closed = Status.INTERNAL if read_only is None else Status.STORAGE_READ_ONLY
            repeat = self._repeated(message, event, frame_batch, batch, now_us, closed)
            if repeat is not None:
                return repeat
        if read_only is not None:
            raise read_only.refusal(frame_batch.words if frame_batch is not None else None)
        if self.disk_missing_bytes:
            raise Internal(
                DISK_FULL.format(missing=self.disk_missing_bytes), reason="disk_full",
                missing_bytes=self.disk_missing_bytes,
            )  # fmt: skip
        raise Internal(
            "write failed in the engine: no log file can be created, retry later", reason="no_log_space"
        )

    def _repeated(
        self, message: m.Append, event: ControlReceived, frame_batch: frames.FrameBatch, batch: CommitBatch,
        now_us: int,
        closed: Status,
    ) -> m.Message | None:  # fmt: skip
        """Answer an append of which some frames are in the log already. Refuse its new frames with `closed`.

        Return None if all of its frames are new.
        """
        topic = self._directory.find(message.topic)
        if topic is None:
            return None
        assert event.attachment is not None
        self._require_ids(frame_batch, topic.name, topic.topic_id)
        if (
            past := idempotency.find_duplicate(topic, message, frame_batch, now_us, is_whole=True)
        ) is not None:
            return self._appended(topic, False, *past)
        intake = self._admission.open(
            event.attachment, frame_batch, np.arange(len(frame_batch), dtype=np.int64)
        )
        frame_batch.words[:, layout.W_TOPIC] = topic.topic_id
        self._admission.admit(intake, {topic.topic_id: topic}, now_us, closed)
        if not intake.duplicates:
            return None
        batch.add_intake(intake)
        if self.read_only is not None:
            self.read_only.explain(intake)
        elif self.disk_missing_bytes:
            explain_full(intake, self.disk_missing_bytes)
        return self._appended(topic, False, intake.entries)

    @staticmethod
    def _require_ids(batch: frames.FrameBatch, name: str, topic_id: int) -> None:
        ids = batch.words[:, layout.W_TOPIC]
        if ((ids != 0) & (ids != topic_id)).any():
            raise InvalidRequest("a frame belongs to another topic", topic=name, topic_id=topic_id)

    def frames_of(self, message: m.Append, event: ControlReceived) -> frames.FrameBatch:
        """Return the checked frames of an append. Raise InvalidRequest."""
        data = event.attachment
        if data is None or len(data) % 8 or not data:
            raise InvalidRequest("attachment must be a non-empty multiple of 8 bytes", bytes=len(data or b""))
        if len(data) > FRAME_BYTES_MAX:
            raise InvalidRequest(
                f"attachment must be at most {FRAME_BYTES_MAX} bytes, got {len(data)}", bytes=len(data),
                max=FRAME_BYTES_MAX,
            )  # fmt: skip
        batch = frames.scan_checked(data)
        if batch.stop != len(data) or len(batch) != message.frames or not len(batch):
            raise InvalidRequest(
                "attachment does not match the announced number of frames", announced=message.frames,
                found=len(batch), reason=batch.reason or batch.end.value,
            )  # fmt: skip
        idempotency.check_idempotency(message, batch)
        return batch

    def _appended(self, topic: ShardTopic, created: bool, entries: Any, known: bytes = b"") -> m.Appended:
        return m.Appended(topic.name, topic.topic_id, topic.epoch, created, entries.tobytes(), known)

    def _remember_keys(
        self, topic: ShardTopic, message: m.Append, intake: FrameIntake, batch: CommitBatch, now_us: int
    ) -> None:
        entry = intake.entries[0]
        first, stamp = int(entry[S_FIRST_SEQ]), int(entry[S_COMMIT_TS])
        window = topic.config.idempotency_window_ms
        own = message.window_ms if 0 < message.window_ms < window else 0
        seen = IdempotencyEntry(first, intake.records, stamp, now_us, own)
        idempotency.remember_write(topic, message.idempotency_key, message.ids, seen)
        # The key frame precedes its append. Replay accepts a key only if its append follows directly, so a
        # torn tail removes both or neither.
        body = KeyUsed(message.idempotency_key, first, intake.records, stamp, now_us, own, message.ids)
        used = frame_of(body, topic.topic_id, topic.epoch)
        if window and topic.config.durability != Durability.EPHEMERAL:
            batch.add_control(used, sync=False)

    def _producer_state(
        self, message: m.ProducerState, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic = self._directory.require(message.topic)
        if message.owner:
            self._claim(topic, message, batch)
        producer = topic.producers.get(message.producer_id)
        highest = producer.highest if producer else 0
        first, count = (producer.find(highest) if producer and highest else None) or (0, 0)
        claim = producer.claim if producer else 0
        return m.ProducerStateReply(
            topic.name, topic.epoch, message.producer_id, highest, first, count, claim
        )

    @staticmethod
    def _claim(topic: ShardTopic, message: m.ProducerState, batch: CommitBatch) -> None:
        """Claim a named producer for the requesting owner, or confirm the owner's claim (W11).

        Raise ProducerFenced if `message.claim` is not the latest claim.
        """
        producer_id, owner = message.producer_id, message.owner
        if not 0 < producer_id < SESSION_BIT:
            raise InvalidRequest(
                f"producer_id must be that of a named producer, 1 to {SESSION_BIT - 1}, got {producer_id}",
                producer_id=producer_id,
                min=1,
                max=SESSION_BIT - 1,
            )
        known = topic.producers.get(producer_id)
        if message.claim:
            if known is None or known.claim != message.claim:
                raise ProducerFenced(FENCED, topic=topic.name)
            return
        producer = topic.producers.admit(producer_id)
        if producer is None:
            raise Throttled(
                "the topic has the maximum number of named producers, retry later", topic=topic.name,
                limit="producers", max=len(topic.producers), retry_after_ms=1_000,
            )  # fmt: skip
        if producer.claim_for(owner):
            body = ProducerClaimed(producer_id, producer.claim, producer.claimed_at)
            batch.add_control(frame_of(body, topic.topic_id, topic.epoch), topic)


def _may_create(message: m.Append) -> bool:
    """Return True if this write may create its topic.

    The request decides, else the config's `auto_create`.
    """
    if message.create is not None:
        return message.create
    return TopicConfig.parse(message.config or {}, message.topic).auto_create
