"""Handlers of socket requests: topics, appends by message, record positions for readers. Pure.

Changes are staged into the commit batch like frames. Their replies wait until the batch is committed. All
other requests are answered from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pyroaring import BitMap64

from ringlog import __version__
from ringlog.actors.wal_shard.commit import idempotency
from ringlog.actors.wal_shard.commit.admission import Admission, FrameIntake
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.control_records import (
    HeadReserved,
    KeyUsed,
    ProducerClaimed,
    TopicRemoved,
    config_frame,
    create_frame,
    frame_of,
)
from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.actors.wal_shard.requests.read_only_mode import READ_ONLY_REQUESTS, ReadOnlyMode
from ringlog.actors.wal_shard.retention.checkpoint import HandlerReply, ShardCheckpoint
from ringlog.actors.wal_shard.retention.idle_topic_expiry import IdleTopicExpiry
from ringlog.actors.wal_shard.retention.removal import Removals
from ringlog.actors.wal_shard.retention.volatile_files import VolatileFileTable
from ringlog.actors.wal_shard.routing import ShardRouters
from ringlog.actors.wal_shard.shard_state import ShardIdentity
from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.envelope.refusal import error_reply
from ringlog.envelope.wire import PROTOCOL
from ringlog.errors import (
    Internal,
    InvalidRequest,
    ProducerFenced,
    Refused,
    Status,
    Throttled,
    TopicNotEmpty,
    TopicNotFound,
)
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.settle_entry import (
    DISK_FULL,
    FENCED,
    S_COMMIT_TS,
    S_COUNT_STATUS,
    S_FIRST_SEQ,
    S_HEAD_SEQ,
    S_TOPIC,
    STATUS_SHIFT,
)
from ringlog.leases.holders import ProcessId
from ringlog.limits import (
    DELETED_PER_LOCATE_BYTES,
    EXTENTS_PER_LOCATE_MAX,
    FRAME_BYTES_MAX,
    LIST_PAGE_MAX,
    PRESSURE_RETRY_MS,
    REQUEST_BYTES_MAX,
)
from ringlog.names import check_topic_name
from ringlog.placement import home_shard
from ringlog.segment.layout import parse_stem
from ringlog.topic.config import TopicConfig
from ringlog.topic.directory import Halt, TopicDirectory
from ringlog.topic.idempotency import IdempotencyEntry
from ringlog.topic.retention import retained_from
from ringlog.topic.state import ShardTopic
from ringlog.types import SESSION_BIT, Durability

MUTATING_REQUESTS = (
    m.TopicPut, m.TopicDelete, m.Append, m.RecordsDelete, m.LiveAsk, m.CheckpointRows, m.RouterPut,
    m.RouterDrop, m.Route,
)  # fmt: skip
"""Requests that may write to the log. Lease requests are not listed here."""

Handler = Callable[[Any, ControlReceived, CommitBatch, int], HandlerReply | None]


_MODES = ("upsert", "create", "merge", "update")


class Requests:
    """Answers requests from the topic directory, and stages changes into the commit batch."""

    def __init__(
        self, identity: ShardIdentity, directory: TopicDirectory, admission: Admission,
        log_files: LogFileTable, checkpoint: ShardCheckpoint, ephemerals: VolatileFileTable,
        publish_topic_count: Callable[[int], int],
    ) -> None:  # fmt: skip
        """Set up the handlers.

        `publish_topic_count` publishes the number of topics of this shard, and returns that of all other
        shards.
        """
        self._me = identity
        self._publish_topic_count = publish_topic_count
        self._directory = directory
        self._admission = admission
        self._log_files = log_files
        self._segments = checkpoint.segments
        self.lease_clock_us = 0
        """The clock of leases and waits, in microseconds.
        It advances with the monotonic clock, so steps of the wall clock do not affect it."""
        self.read_only: ReadOnlyMode | None = None
        self.disk_missing_bytes = 0
        """Bytes that must become free on the device before records are accepted; 0 if there is space."""
        self.is_overloaded = False
        """True if the governor refuses new records and the queue of requests is full."""
        self.refused_for_pressure = 0
        """Number of appends that were refused because of pressure."""
        self.free_slots = 1 << 32
        """Number of free topic slots in shared memory, as last counted by the shell."""
        self._without_slot: list[ShardTopic] = []
        """New topics that have no slot yet."""
        self.retired: list[ShardTopic] = []
        """Topics whose deletion is staged. The core releases their slots when the batch is committed."""
        self.removals = Removals(identity.incarnation, directory, self._all_extents, ephemerals.files_of)
        self.routing = ShardRouters(directory, admission, self._invalidate_readers)
        self.leases = ShardLeases(identity.incarnation, directory, self.removals)
        self.idle_topic_expiry = IdleTopicExpiry(directory, self.leases)
        self._handlers: dict[type[m.Message], Handler] = {
            m.Hello: self._hello,
            m.TopicPut: self._put,
            m.TopicResolve: self._resolve,
            m.TopicState: self._state,
            m.TopicList: self._list,
            m.TopicDelete: self._delete,
            m.Append: self._append,
            m.RecordsDelete: self.removals.delete,
            m.ProducerState: self._producer_state,
            m.Locate: self._locate,
            **checkpoint.handlers,
            **self.routing.handlers,
            **self.leases.handlers,
        }

        self._timed = self.leases.handlers.keys()
        """Lease requests. Their handlers get `lease_clock_us` as the current time."""

    @property
    def kinds(self) -> tuple[type[m.Message], ...]:
        """Request types that a shard accepts."""
        return tuple(self._handlers)

    def process_ids(self) -> set[ProcessId]:
        """Return the known processes that hold leases."""
        return {*self.leases.registry.process_ids()}

    def may_log(self, message: m.Message) -> bool:
        """Return True if this request may write to the log.

        A ProducerState request does so if it claims a name.
        """
        if isinstance(message, m.ProducerState):
            return message.owner != 0
        return isinstance(message, MUTATING_REQUESTS) or self.leases.registry.may_log(message)

    def handle(
        self, event: ControlReceived, batch: CommitBatch, now_us: int, *, can_log: bool = True
    ) -> Reply | None:
        """Handle one request. Return the reply, or None if it follows later.

        With `can_log` False, changes are refused, except for retries of appends that are in the log already.
        """
        handler = self._handlers.get(type(event.message))
        try:
            if handler is None:
                raise InvalidRequest(
                    "a shard does not handle this kind of request", kind=type(event.message).__name__
                )
            answer: HandlerReply | None
            if self._directory.halted:
                self._require_served(event)
            is_answered = isinstance(event.message, (*READ_ONLY_REQUESTS, m.Append)) and not (
                isinstance(event.message, m.ProducerState) and event.message.owner
            )
            if self.read_only is not None and not is_answered:
                raise self.read_only.refusal()
            if not can_log and self.may_log(event.message):
                answer = self._answer_repeat(event, batch, now_us)
            elif self.is_overloaded and isinstance(event.message, m.Append):
                answer = self._append_pressed(event.message, event, batch, now_us)
            else:
                is_timed = type(event.message) in self._timed
                answer = handler(event.message, event, batch, self.lease_clock_us if is_timed else now_us)
        except Refused as e:
            self.removals.cancel_delete()
            self.leases.deletes.cancel_pending()
            answer = error_reply(e)
        else:
            if self.idle_topic_expiry:
                self.idle_topic_expiry.record_use(event.message, now_us)
        if answer is None:
            return None
        message, attachment = answer if isinstance(answer, tuple) else (answer, None)
        return Reply(event.client, event.corr, message, attachment)

    def _require_served(self, event: ControlReceived) -> None:
        """Raise TopicHalted for a request to a halted topic. TopicState and TopicResolve are allowed."""
        message: Any = event.message
        if isinstance(message, m.TopicState | m.TopicResolve):
            return
        halt = None
        if isinstance(message, m.RouterPut):
            halt = self._directory.halted.get(message.facts.dest_id)
        elif isinstance(name := getattr(message, "topic", None), str):
            halt = self._directory.halt_of(name)
        if halt is None:
            return
        is_unknown = isinstance(message, m.Append) and any(
            is_in_doubt(halt.topic, words) for words in self._frames_of(message, event).words
        )
        raise halt.error("unknown" if is_unknown else "not_applied")

    def _invalidate_readers(self, topic: ShardTopic, batch: CommitBatch) -> None:
        """Increment the topic's version, so that its readers query the shard again."""
        self.removals.bump_version(topic)
        batch.dirty_topics[topic.topic_id] = topic
        batch.has_removals = True

    # -- topics ---------------------------------------------------------------------------------------

    def _hello(self, message: m.Hello, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        if message.protocol != PROTOCOL:
            raise InvalidRequest("unknown protocol version", version=message.protocol, known=PROTOCOL)
        me = self._me
        limits = {
            "record_bytes": self._admission.limits.record_bytes,
            "request_bytes": REQUEST_BYTES_MAX,
            "topics": me.topics_max,
        }
        return m.Welcome(PROTOCOL, __version__, me.engine_id, me.shards, me.shard, me.incarnation, limits)

    def _put(self, message: m.TopicPut, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        if message.mode not in _MODES:
            raise InvalidRequest("unknown mode", field="mode", found=message.mode, known=list(_MODES))
        check_topic_name(message.topic)
        topic = self._directory.find(message.topic)
        if topic is None and (redirect := self._redirect(message.topic)):
            return redirect
        if topic is None:
            if message.mode == "merge":
                raise TopicNotFound("no such topic", topic=message.topic)
            return self.topic_info(self._create(message.topic, message.config, batch), created=True)
        if message.mode in {"merge", "update"}:
            config = topic.config.merged(message.config, topic.name)
        else:
            config = TopicConfig.parse(message.config, topic.name)
        if message.mode != "create":
            config.require_type_of(topic.config, topic.name)
            if config != topic.config:
                config.require_lifetime_of(topic.config, topic.name)
                self.leases.registry.require_room(topic, config)
                self._reconfigure(topic, config, batch, now_us)
        return self.topic_info(topic, created=False)

    def _reconfigure(self, topic: ShardTopic, config: TopicConfig, batch: CommitBatch, now_us: int) -> None:
        old, topic.config = topic.config.durability, config
        # A smaller cap or TTL takes effect after the config frame, in the same commit batch.
        self.removals.schedule.request(topic)
        self._directory.register_config(topic)
        batch.add_control(config_frame(topic), topic)
        self.idle_topic_expiry.start_period(topic)
        self.leases.apply_config(topic, batch, now_us)
        was_volatile = old == Durability.EPHEMERAL and config.durability != Durability.EPHEMERAL
        ends_reserving = topic.is_reserving and config.durability == Durability.FSYNC
        if was_volatile or ends_reserving:
            # The log lacks the ephemeral records so far, so their last seq becomes the base for the following
            # appends. Earlier records of class `disk` are synced with this frame and need no reservation.
            batch.add_control(head_base_frame(topic), topic)
            topic.reservation.settle(topic.next_seq - 1)
            topic.is_reserving = False

    def _create(self, name: str, config: dict[str, Any] | None, batch: CommitBatch) -> ShardTopic:
        check_topic_name(name)
        parsed = TopicConfig.parse(config or {}, name)
        if (halt := self._directory.halt_of(name)) is not None:
            raise halt.error()
        self._require_slot()
        self._require_room()
        topic_id, epoch = self._directory.next_identity()
        topic = ShardTopic(topic_id, epoch, name, parsed)
        self._directory.add(topic)
        self._without_slot.append(topic)
        self.idle_topic_expiry.start_period(topic)
        batch.add_control(create_frame(topic), topic)
        return topic

    def _require_room(self) -> None:
        """Raise Throttled if the engine has reached `limits.max_topics`.

        The shard first publishes its new count and then adds up the counts of all shards. If several shards
        create the last allowed topic at the same time, at most one of them succeeds.
        """
        most, own = self._me.topics_max, len(self._directory)
        if not most or own + 1 + self._publish_topic_count(own + 1) <= most:
            return
        self._publish_topic_count(own)
        raise Throttled(
            f"the engine has as many topics as limits.max_topics allows ({most})", limit="max_topics",
            max=most, retry_after_ms=1_000,
        )  # fmt: skip

    def _require_slot(self) -> None:
        """Raise Throttled if shared memory has no slot for one more topic."""
        if len(self._without_slot) < self.free_slots:
            return
        by_id = self._directory.by_id
        self._without_slot = [t for t in self._without_slot if t.slot < 0 and t.topic_id in by_id]
        if len(self._without_slot) >= self.free_slots:
            raise Throttled(
                "shared memory has no room for one more topic: enlarge /dev/shm or delete topics",
                limit="shared_memory", topics=len(self._directory), retry_after_ms=1_000,
            )  # fmt: skip

    def _redirect(self, name: str) -> m.TopicInfo | None:
        """Return a redirect if another shard owns this name; None if this shard owns it."""
        if name in self._directory.delegated_names:
            shard = self._directory.delegated_names[name]
        else:
            shard = home_shard(name, self._me.shards)
            if name in self._directory.adopted:
                shard = self._me.shard
        if shard == self._me.shard:
            return None
        return m.TopicInfo(name, 0, 0, shard, -1, False, {})

    def _resolve(
        self, message: m.TopicResolve, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        halt = self._directory.halt_of(message.topic)
        topic = self._directory.find(message.topic) if halt is None else halt.topic
        if topic is not None:
            return self.topic_info(topic, created=False)
        redirect = self._redirect(message.topic)
        if redirect is not None:
            return redirect
        raise TopicNotFound("no such topic", topic=message.topic)

    def topic_info(self, topic: ShardTopic, *, created: bool) -> m.TopicInfo:
        """Return a topic's identity, slot and config for a reply."""
        return m.TopicInfo(
            topic.name,
            topic.topic_id,
            topic.epoch,
            self._me.shard,
            topic.slot,
            created,
            topic.config.to_dict(),
        )

    def _find(self, name: str) -> ShardTopic:
        topic = self._directory.find(name)
        if topic is None:
            raise TopicNotFound("no such topic", topic=name)
        return topic

    def _state(
        self, message: m.TopicState, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        halt = self._directory.halt_of(message.topic)
        topic = self._find(message.topic) if halt is None else halt.topic
        if message.touch:
            topic.last_read_us = now_us
        return self._state_of(topic)

    def _state_of(self, topic: ShardTopic) -> m.TopicStateReply:
        keys, keys_forgotten = topic.keys_counted()
        return m.TopicStateReply(
            topic=topic.name,
            topic_id=topic.topic_id,
            epoch=topic.epoch,
            shard=self._me.shard,
            type=topic.config.type,
            head_seq=topic.head_seq,
            earliest_seq=topic.earliest_seq,
            count=topic.count,
            bytes=topic.bytes,
            evict_floor=topic.evict_floor,
            last_write_ts=topic.last_ts // 1000 or None,
            last_read_ts=topic.last_read_us // 1000 or None,
            config=topic.config.to_dict(),
            held_by=retained_from(topic)[1] if topic.retained_at else "",
            is_fed=bool(topic.routers),
            keys=keys,
            keys_forgotten=keys_forgotten,
            missing_part=halt.part if (halt := self._directory.halted.get(topic.topic_id)) else "",
        )

    def _list(
        self, message: m.TopicList, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        size = min(max(message.page_size, 1), LIST_PAGE_MAX)
        topics, more = self._directory.page(message.prefix, message.after, size)
        return m.TopicListReply([self._state_of(topic) for topic in topics], more)

    def _delete(
        self, message: m.TopicDelete, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic = self._directory.find(message.topic)
        if topic is None:
            return m.TopicDeleted(message.topic, False)
        if message.if_empty and topic.staged_count > 0:
            raise TopicNotEmpty(
                f"topic is not empty, it has {topic.staged_count} records", topic=topic.name,
                count=topic.staged_count,
            )  # fmt: skip
        self._remove(topic, batch)
        return m.TopicDeleted(topic.name, True, [each.name for each in topic.routers.values()])

    def expire_idle_topics(self, batch: CommitBatch, now_us: int) -> None:
        """Delete topics that were idle for their `expire_unused_ms`."""
        self.idle_topic_expiry.expire_idle(now_us, lambda topic: self._remove(topic, batch))

    def _remove(self, topic: ShardTopic, batch: CommitBatch) -> None:
        """Stage the deletion of a topic."""
        batch.add_control(frame_of(TopicRemoved(topic.epoch), topic.topic_id, topic.epoch))
        batch.dirty_topics.pop(topic.topic_id, None)
        self._directory.remove(topic)
        self.routing.forget(topic)
        self.leases.forget_topic(topic)
        self.idle_topic_expiry.forget(topic)
        self.retired.append(topic)
        self._publish_topic_count(len(self._directory))

    # -- appends by message ---------------------------------------------------------------------------

    def _append(
        self, message: m.Append, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        frame_batch = self._frames_of(message, event)
        assert event.attachment is not None
        intake = self._admission.open(
            event.attachment, frame_batch, np.arange(len(frame_batch), dtype=np.int64)
        )
        topic = self._directory.find(message.topic)
        is_new = topic is None
        if topic is None:
            if not _may_create(message) or self._redirect(message.topic) is not None:
                raise TopicNotFound("no such topic", topic=message.topic)
            self._require_ids(frame_batch, message.topic, 0)
            if not self._admission.has_valid_frame(intake):
                # Check limits before the topic is created: frames that are all invalid create no topic.
                self._admission.admit(intake, {}, now_us, None)
                return m.Appended(message.topic, 0, 0, False, intake.entries.tobytes())
            topic = self._create(message.topic, message.config, batch)
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

    def _append_pressed(
        self, message: m.Append, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        """Handle an append under pressure: refuse new records (L5), and answer duplicates.

        An append with `disable_backpressure` is handled as usual.
        """
        if message.disable_backpressure:
            return self._append(message, event, batch, now_us)
        frame_batch = self._frames_of(message, event)
        repeat = self._repeated(message, event, frame_batch, batch, now_us, Status.THROTTLED)
        if repeat is not None:
            return repeat
        self.refused_for_pressure += 1
        raise Throttled(
            "the shard is under pressure and refuses new writes, retry later", reason="pressure",
            topic=message.topic, retry_after_ms=PRESSURE_RETRY_MS,
        )  # fmt: skip

    def _answer_repeat(self, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        """Handle a change while nothing can be written. An append that is in the log is a duplicate (W4).

        Raise Internal or StorageReadOnly for all other changes.
        """
        message, read_only, frame_batch = event.message, self.read_only, None
        if isinstance(message, m.Append):
            frame_batch = self._frames_of(message, event)
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

    def _frames_of(self, message: m.Append, event: ControlReceived) -> frames.FrameBatch:
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
        topic = self._find(message.topic)
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

    # -- reading --------------------------------------------------------------------------------------

    def _locate(
        self, message: m.Locate, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic = self._find(message.topic)
        topic.last_read_us = now_us
        is_behind = self.read_only is not None
        recreated = bool(message.epoch and message.epoch != topic.epoch) or (
            message.after > topic.head_seq and not is_behind
        )
        after = 0 if recreated else message.after
        return self.locate_records(topic, after, recreated=recreated)

    def locate_records(self, topic: ShardTopic, after: int, *, recreated: bool = False) -> m.Located:
        """Return the positions of the records above `after`, with floors and deleted seqs."""
        extents = self._extents(topic, max(after, topic.earliest_seq - 1), EXTENTS_PER_LOCATE_MAX)
        return m.Located(
            topic=topic.name,
            topic_id=topic.topic_id,
            epoch=topic.epoch,
            shard=self._me.shard,
            slot=topic.slot,
            head_seq=topic.head_seq,
            earliest_seq=topic.earliest_seq,
            cap_floor=topic.cap_floor,
            ttl_floor=topic.ttl_floor,
            trim_floor=topic.trim_floor,
            recreated=recreated,
            extents=extents,
            lost=[n for pair in topic.lost for n in pair],
            delete_floor=topic.delete_floor,
            ttl_us=topic.config.hidden_after_us,
            version=topic.version,
            is_behind=self.read_only is not None,
            trimmed=[n for pair in topic.trimmed for n in pair],
            is_fed=bool(topic.routers),
            **self._deleted(topic, after),
        )

    @staticmethod
    def _deleted(topic: ShardTopic, after: int) -> dict[str, Any]:
        """Return the seqs above `after` that were deleted one by one, as many as fit into one reply."""
        if topic.dead is None:
            return {}
        dead = topic.dead - BitMap64(range(after + 1))
        deleted_to = 0
        while len(data := dead.serialize()) > DELETED_PER_LOCATE_BYTES:
            deleted_to = int(dead[len(dead) // 2])
            dead.remove_range(deleted_to + 1, (1 << 64) - 1)
        return {"deleted": data, "deleted_to": deleted_to} if dead else {}

    def _all_extents(self, topic: ShardTopic, after: int) -> list[m.Extent]:
        return self._extents(topic, after, 1 << 62)

    def _extents(self, topic: ShardTopic, after: int, most: int) -> list[m.Extent]:
        """Return at most `most` extents above `after`: segments first, then log files."""
        segments = self._segments.ranges(topic.topic_id, after)
        if len(segments) >= most:
            return segments[:most]
        after = max([after, *[each.last_seq for each in segments[-1:]]])
        return segments + self._in_log(topic, after, most - len(segments))

    def _in_log(self, topic: ShardTopic, after: int, most: int) -> list[m.Extent]:
        """Return the log extents with a topic's records above `after`."""
        if topic.has_index:
            topic.index.retain_files(self._log_files.paths.__contains__)
        positions = topic.index.positions_after(after)
        is_whole = len(positions) <= most
        positions = positions[:most]
        known = {file_id for file_id, _ in positions}
        # A reader of a truncated list queries again after its last extent. With the open end of the current
        # file in the list, the reader would skip the extents between.
        current = [f for f in self._log_files.paths if f not in self._log_files.stops] if is_whole else []
        wanted_volatile = topic.config.durability == Durability.EPHEMERAL
        for file_id in current:
            # The open end of the current file, where the next records will be appended.
            if file_id not in known and self._log_files.paths[file_id].startswith("@") == wanted_volatile:
                positions.append((file_id, self._log_files.starts[file_id]))
        return [
            m.Extent(
                path=self._log_files.paths[file_id],
                file_id=file_id,
                salt=self._log_files.salts[file_id],
                start=offset,
                stop=self._log_files.stops.get(file_id, 0),
            )
            for file_id, offset in positions
        ]


def explain_full(intake: FrameIntake, missing_bytes: int) -> None:
    """Fill in the settle entries of frames that were refused because the device is nearly full."""
    entries = intake.entries
    statuses = entries[:, S_COUNT_STATUS] >> np.uint64(STATUS_SHIFT) & np.uint64(0xFFFF)
    for row in np.flatnonzero(statuses == int(Status.INTERNAL)).tolist():
        entries[row][S_FIRST_SEQ] = missing_bytes


def explain_halted(intake: FrameIntake, halted: dict[int, Halt]) -> None:
    """Change the settle entries of frames to halted topics from TOPIC_NOT_FOUND to TOPIC_HALTED."""
    entries = intake.entries
    for row in np.flatnonzero(np.isin(entries[:, S_TOPIC], list(halted))).tolist():
        entry = entries[row]
        status = int(entry[S_COUNT_STATUS]) >> STATUS_SHIFT & 0xFFFF
        halt = halted[int(entry[S_TOPIC])]
        if status != Status.TOPIC_NOT_FOUND:
            continue
        _, first, number = parse_stem(halt.part.partition(".")[0]) or (0, 0, 0)
        entry[S_COUNT_STATUS] = int(Status.TOPIC_HALTED) << STATUS_SHIFT
        entry[S_FIRST_SEQ] = is_in_doubt(halt.topic, intake.batch.words[row])
        entry[S_COMMIT_TS], entry[S_HEAD_SEQ] = number, first


def is_in_doubt(topic: ShardTopic, words: Any) -> bool:
    """Return True if the frame with this (10,) header may have been stored before its topic was halted."""
    producer = topic.producers.get(int(words[layout.W_PRODUCER_ID]))
    return producer is not None and int(words[layout.W_PRODUCER_SEQ]) <= producer.highest


def _may_create(message: m.Append) -> bool:
    """Return True if this write may create its topic.

    The request decides, else the config's `auto_create`.
    """
    if message.create is not None:
        return message.create
    return TopicConfig.parse(message.config or {}, message.topic).auto_create


def head_base_frame(topic: ShardTopic) -> bytearray:
    """Build the frame that makes the topic's head so far a durable base for the following appends."""
    return frame_of(HeadReserved(topic.next_seq - 1, settled=True), topic.topic_id, topic.epoch)
