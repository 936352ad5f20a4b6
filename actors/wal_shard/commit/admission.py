"""Admission of frames: turns a received buffer into numbered rows that may be logged. Pure.

The compiled kernel has checked each frame on its own (frame/batch.py, `scan_checked`) and grouped the rows
into runs. A run is a sequence of valid frames of one topic and one producer with consecutive producer
numbers, as producers send them. Admission of a run costs the same for one frame and for thousands.

The result for each row is a settle entry (frame/settle_entry.py): admitted, duplicate or refused. Entries are
in the order of the frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.actors.wal_shard.commit.total_bytes import TotalBytes
from ringlog.errors import Status
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import CheckedFrameRange, FrameBatch, ProducerFrameChecks
from ringlog.frame.facts import record_facts
from ringlog.frame.measure import FrameFault, measure_unchecked
from ringlog.frame.settle_entry import (
    CAP_BYTES,
    CAP_RECORDS,
    FLAG_DEDUPED,
    FLAGS_SHIFT,
    S_COMMIT_TS,
    S_COUNT_STATUS,
    S_EPOCH,
    S_FIRST_SEQ,
    S_HEAD_SEQ,
    S_POSITION,
    S_PRODUCER_SEQ,
    S_TOPIC,
    TOTAL_BYTES,
    SettleEntries,
    refused_entry,
)
from ringlog.limits import (
    BATCH_RECORDS_MAX,
    KEY_BYTES_MAX,
    META_BYTES_MAX,
    NODE_BYTES_MAX,
    RECORD_BYTES_DEFAULT,
    SEQ_MAX,
    TAG_BYTES_MAX,
)
from ringlog.topic.config import DISCARD_REJECT
from ringlog.topic.dedup import ProducerHistory
from ringlog.topic.state import ShardTopic
from ringlog.types import SESSION_BIT, Durability

U64 = np.uint64


class AdmittedRange:
    """Admitted rows [start, stop) of one intake, all of one topic."""

    __slots__ = ("is_volatile", "start", "stop", "topic")

    def __init__(self, topic: ShardTopic, start: int, stop: int, is_volatile: bool) -> None:
        self.topic: ShardTopic = topic
        self.start: int = start
        self.stop: int = stop
        self.is_volatile: bool = is_volatile


class FrameIntake:
    """One buffer of received frames, their checks and their results."""

    __slots__ = (
        "admitted_ranges",
        "batch",
        "buffer",
        "checked",
        "duplicates",
        "entries",
        "frames",
        "needs_sync",
        "records",
        "refused",
        "runs",
    )  # fmt: skip

    def __init__(
        self, buffer: bytearray, batch: FrameBatch, entries: SettleEntries, stretches: list[AdmittedRange],
        checked: ProducerFrameChecks | None = None,
    ) -> None:  # fmt: skip
        self.buffer: bytearray = buffer
        self.batch: FrameBatch = batch
        self.entries: SettleEntries = entries
        self.admitted_ranges: list[AdmittedRange] = stretches
        self.checked: ProducerFrameChecks | None = checked
        self.runs: list[CheckedFrameRange] = checked.runs if checked is not None else []
        """All rows, in order, with the faults that the checks of the single frames found."""
        self.records: int = 0
        self.frames: int = 0
        self.refused: int = 0
        self.duplicates: int = 0
        self.needs_sync: bool = False


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Configurable limits. The fixed limits are in ringlog.limits."""

    batch_records: int = BATCH_RECORDS_MAX
    record_bytes: int = RECORD_BYTES_DEFAULT
    flush_interval_us: int = 100_000
    total_bytes: int = 0
    """See TotalBytes."""


_FAULT_DETAILS: dict[int, tuple[Status, tuple[int, int]]] = {
    FrameFault.STRUCTURE: (Status.CORRUPT_FRAME, (0, 0)),
    FrameFault.TEXT: (Status.INVALID_REQUEST, (0, 0)),
    FrameFault.TAG_TOO_LONG: (Status.INVALID_REQUEST, (layout.Column.TAG, TAG_BYTES_MAX)),
    FrameFault.NODE_TOO_LONG: (Status.INVALID_REQUEST, (layout.Column.NODE, NODE_BYTES_MAX)),
    FrameFault.KEY_TOO_LONG: (Status.INVALID_REQUEST, (layout.Column.KEY, KEY_BYTES_MAX)),
    FrameFault.META_TOO_LONG: (Status.INVALID_REQUEST, (layout.Column.META, META_BYTES_MAX)),
    FrameFault.HEADERS_TOO_LARGE: (Status.INVALID_REQUEST, (layout.Column.HEADERS, 0)),
}


class Admission:
    """Turns buffers into intakes, and stages admitted records in the state of their topics."""

    def __init__(self, limits: AdmissionLimits, total: TotalBytes) -> None:
        self.limits = limits
        self.total = total
        self.is_volatile_closed = False
        """True while the volatile log has no room. New frames of ephemeral topics are then refused."""
        self.needs_retention: dict[int, ShardTopic] = {}
        """Topics with retention that received records, by topic id. Retention removes the entries."""
        self.earlier_expiry: list[ShardTopic] = []
        """Topics whose next expiry became earlier."""

    def open(
        self, buffer: bytearray, batch: FrameBatch, positions: NDArray[np.int64] | None = None
    ) -> FrameIntake:
        """Begin the intake of a checked batch. Its entries contain positions, topics and producer numbers.

        `positions` replaces the ring positions of the frames, for frames that did not arrive through a ring.
        """
        checked, batch.checked = batch.checked, None
        assert checked is not None
        if positions is not None:
            checked.entries[:, S_POSITION] = positions
        intake = FrameIntake(buffer, batch, checked.entries, [], checked)
        if any(run.fault == FrameFault.UNCHECKED or self._is_over_limits(run) for run in checked.runs):
            measure_unchecked(buffer, batch, checked.accounted, checked.largest, checked.faults)
            intake.runs = [part for run in checked.runs for part in self._check_frames(intake, run)]
        return intake

    def admit(
        self, intake: FrameIntake, topics: dict[int, ShardTopic], now_us: int, closed: Status | None
    ) -> None:
        """Admit or refuse every frame of the intake.

        If `closed` is given, refuse all new frames with this status.
        """
        words = intake.batch.words
        for run in intake.runs:
            topic = topics.get(int(words[run.start, layout.W_TOPIC]))
            if closed is not None:
                self._refuse_new(intake, topic, run, closed)
            elif run.fault:
                self._refuse_fault(intake, run)
                self._advance_past(intake, topic, run.start)
            elif topic is None:
                self._refuse_run(intake, run, Status.TOPIC_NOT_FOUND)
            else:
                self._admit_run(intake, topic, run, now_us)

    def has_valid_frame(self, intake: FrameIntake) -> bool:
        """Return True if at least one frame has no fault of its own, whatever its topic is."""
        return any(not run.fault for run in intake.runs)

    def _is_over_limits(self, run: CheckedFrameRange) -> bool:
        limits = self.limits
        return run.records_max > limits.batch_records or run.record_bytes_max > limits.record_bytes

    def _check_frames(self, intake: FrameIntake, run: CheckedFrameRange) -> list[CheckedFrameRange]:
        """Split a run that needs a check of each frame into runs of one frame.

        Return other runs unchanged.
        """
        if run.fault != FrameFault.UNCHECKED and not self._is_over_limits(run):
            return [run]
        checked = intake.checked
        assert checked is not None
        found = []
        for part in _single_frames(intake, run):
            fault = int(checked.faults[part.start])
            if not fault and part.records_max > self.limits.batch_records:
                fault = _TOO_MANY
            elif not fault and part.record_bytes_max > self.limits.record_bytes:
                fault = _RECORD_LARGE
            found.append(part._replace(fault=fault))
        return found

    def _admit_run(self, intake: FrameIntake, topic: ShardTopic, run: CheckedFrameRange, now_us: int) -> None:
        """Admit or refuse a run of valid frames.

        The cost does not depend on the number of frames. Exceptions are runs that contain duplicates and
        topics that refuse records above their caps; the frames of these runs are processed one by one.
        """
        header: list[int] = intake.batch.words[run.start].tolist()
        epoch = header[layout.W_COUNT_EPOCH] >> layout.EPOCH_SHIFT
        if epoch not in (0, topic.epoch):
            self._refuse_run(intake, run, Status.STALE_EPOCH, epoch, topic.epoch)
            return
        producer_id, number = header[layout.W_PRODUCER_ID], header[layout.W_PRODUCER_SEQ]
        producer = topic.producers.get(producer_id)
        if _is_fenced(header, producer):
            for row in range(run.start, run.stop):
                self._refuse_fenced(intake, producer, row)
            return
        if producer is None and not topic.producers.has_room:
            self._refuse_run(intake, run, Status.THROTTLED, 1_000, len(topic.producers))
            return
        config = topic.config
        is_capped = config.discard == DISCARD_REJECT and (config.cap_records or config.cap_bytes)
        is_repeat = number <= (producer.highest if producer else 0)
        if run.stop - run.start > 1 and (is_repeat or is_capped):
            for part in _single_frames(intake, run):
                self._admit_run(intake, topic, part, now_us)
            return
        if is_repeat:
            self._repeat(intake, topic, run.start)
            return
        # Refuse only new frames. A producer sends a refused frame again under a new number, so the refusal of
        # a duplicate would append its records twice.
        if self.is_volatile_closed and config.durability == Durability.EPHEMERAL:
            self._refuse_run(intake, run, Status.THROTTLED, 1_000)
            return
        if is_capped and self._over_cap(intake, topic, run):
            self._advance_past(intake, topic, run.start)
            return
        if self.total.room_for(run.bytes) < run.bytes:
            if run.stop - run.start > 1:
                for part in _single_frames(intake, run):
                    self._admit_run(intake, topic, part, now_us)
            else:
                self._refuse_run(intake, run, Status.THROTTLED, 1_000, self.total.most, TOTAL_BYTES)
            return
        follows = intake.checked.follows if intake.checked is not None else None
        if follows is not None and follows[run.start] and (producer is None or number != producer.next_seq):
            self._refuse_followers(intake, topic, run, follows, now_us)
            return
        self._stage(intake, topic, run, header, now_us)

    def _refuse_followers(
        self,
        intake: FrameIntake,
        topic: ShardTopic,
        run: CheckedFrameRange,
        follows: NDArray[np.bool_],
        now_us: int,
    ) -> None:
        """Refuse the followers of a frame that was refused for the moment.

        Otherwise the records of one producer would be reordered (W9). Admission continues at the first frame
        of the run that does not have to follow another one.
        """
        leader = frames.first_true(~follows[run.start : run.stop])
        until = run.stop if leader is None else run.start + leader
        for row in range(run.start, until):
            self._refuse(intake, row, Status.NOT_READY, 0)
        if until < run.stop:
            self._admit_run(intake, topic, _slice_run(intake, run, until, run.stop), now_us)

    def _refuse_fault(self, intake: FrameIntake, run: CheckedFrameRange) -> None:
        row, words = run.start, intake.batch.words[run.start : run.stop]
        if run.fault == FrameFault.CORRUPT:
            self._refuse(intake, row, Status.CORRUPT_FRAME, int(intake.batch.offsets[row]))
        elif run.fault == FrameFault.UNSOUND:
            self._refuse(intake, row, Status.INVALID_REQUEST, 0, int(frames.types_of(words)[0]))
        elif run.fault == _TOO_MANY:
            self._refuse(intake, row, Status.BATCH_TOO_LARGE, run.records_max, self.limits.batch_records)
        elif run.fault == _RECORD_LARGE:
            most = self.limits.record_bytes
            self._refuse(intake, row, Status.RECORD_TOO_LARGE, run.record_bytes_max, most)
        else:
            status, details = _FAULT_DETAILS[run.fault]
            self._refuse(intake, row, status, *details)

    def _refuse_run(self, intake: FrameIntake, run: CheckedFrameRange, status: Status, *details: int) -> None:
        for row in range(run.start, run.stop):
            self._refuse(intake, row, status, *details)

    def _refuse(self, intake: FrameIntake, row: int, status: Status, *details: int) -> None:
        entry = intake.entries[row]
        intake.entries[row] = np.array(
            refused_entry(
                int(entry[S_POSITION]), status, int(entry[S_TOPIC]), int(entry[S_PRODUCER_SEQ]), *details
            ),
            dtype=U64,
        )
        intake.refused += 1

    def _refuse_new(
        self, intake: FrameIntake, topic: ShardTopic | None, run: CheckedFrameRange, closed: Status
    ) -> None:
        """Refuse the new frames of a run with status `closed`, while the shard cannot write.

        Frames that are in the log already are still answered as duplicates (W4). If they were refused, their
        producer would send them again under a new number.
        """
        for row in range(run.start, run.stop):
            words = intake.batch.words[row].tolist()
            epoch = words[layout.W_COUNT_EPOCH] >> layout.EPOCH_SHIFT
            if run.fault or topic is None or epoch not in {0, topic.epoch}:
                self._refuse(intake, row, closed, 100)
            elif _is_fenced(words, topic.producers.get(words[layout.W_PRODUCER_ID])):
                self._refuse_fenced(intake, topic.producers.get(words[layout.W_PRODUCER_ID]), row)
            elif _is_known(topic, words):
                self._repeat(intake, topic, row)
            else:
                self._refuse(intake, row, closed, 100)

    def _refuse_fenced(self, intake: FrameIntake, producer: ProducerHistory | None, row: int) -> None:
        """Refuse a frame that was sent under an older claim of its producer name than the latest one."""
        number = int(intake.batch.words[row, layout.W_PRODUCER_SEQ])
        in_doubt = producer is not None and producer.is_in_doubt(number)
        self._refuse(intake, row, Status.PRODUCER_FENCED, int(in_doubt))

    def _advance_past(self, intake: FrameIntake, topic: ShardTopic | None, row: int) -> None:
        """Skip the number of a frame that was refused permanently, so that its followers are admitted (W9).

        The producer never sends such a frame again.
        """
        words = intake.batch.words[row].tolist()
        producer = topic.producers.get(words[layout.W_PRODUCER_ID]) if topic is not None else None
        number = words[layout.W_PRODUCER_SEQ]
        if producer is None or number != producer.next_seq or _is_fenced(words, producer):
            return
        producer.refused_to = number

    def _repeat(self, intake: FrameIntake, topic: ShardTopic, row: int) -> None:
        """Answer a frame that the topic already has with the seqs of the first attempt."""
        producer = topic.producers.get(int(intake.batch.words[row, layout.W_PRODUCER_ID]))
        assert producer is not None
        producer_seq = int(intake.entries[row, S_PRODUCER_SEQ])
        found = producer.find(producer_seq)
        if found is None and not producer.is_settled(producer_seq):
            # This frame was never appended: the shard refused it, and a crash lost the refusal. Answering it
            # as a duplicate would acknowledge records that do not exist. The producer may resend it under a
            # new number.
            self._refuse(intake, row, Status.NOT_READY, 0)
            return
        first_seq, count = found or (0, int(frames.counts_of(intake.batch.words[row : row + 1])[0]))
        entry = intake.entries[row]
        entry[S_FIRST_SEQ] = first_seq
        entry[S_COMMIT_TS] = topic.last_ts
        entry[S_COUNT_STATUS] = count | (FLAG_DEDUPED << FLAGS_SHIFT)
        entry[S_HEAD_SEQ] = topic.next_seq - 1
        entry[S_EPOCH] = topic.epoch
        intake.duplicates += 1
        # The first copy may be in the current commit batch, so this result waits for the batch like all
        # others.

    def _over_cap(self, intake: FrameIntake, topic: ShardTopic, run: CheckedFrameRange) -> bool:
        """Refuse a frame that exceeds the caps of a topic with `discard: reject`.

        Return True if it was refused. A frame that alone exceeds a cap gets RECORD_TOO_LARGE. A frame that
        does not fit at present gets TOPIC_FULL.
        """
        config, row = topic.config, run.start
        count, size = run.records, run.bytes
        if config.cap_records and count > config.cap_records:
            self._refuse(intake, row, Status.RECORD_TOO_LARGE, count, config.cap_records, CAP_RECORDS)
            return True
        if config.cap_bytes and size > config.cap_bytes:
            self._refuse(intake, row, Status.RECORD_TOO_LARGE, size, config.cap_bytes, CAP_BYTES)
            return True
        full = (config.cap_records and topic.staged_count + count > config.cap_records) or (
            config.cap_bytes and topic.staged_bytes + size > config.cap_bytes
        )
        if full:
            head, earliest = topic.next_seq - 1, topic.earliest_seq
            self._refuse(intake, row, Status.TOPIC_FULL, config.cap_records, config.cap_bytes, head, earliest)
        return bool(full)

    def _stage(
        self, intake: FrameIntake, topic: ShardTopic, run: CheckedFrameRange, header: list[int], now_us: int
    ) -> None:
        """Assign dense seqs (W1) and commit timestamps to a run, and add it to the topic's staged counters.

        Timestamps of a topic never decrease, whatever the clock does.
        """
        start, stop = run.start, run.stop
        if topic.next_seq + run.records - 1 > SEQ_MAX:
            self._refuse_run(intake, run, Status.INTERNAL)
            return
        config, base = topic.config, topic.next_seq
        stamp = max(now_us, topic.last_ts)
        durability = int(config.durability)
        # Records of an ephemeral topic stay ephemeral, because they are never written to the WAL.
        if durability != Durability.EPHEMERAL:
            durability = max(durability, header[layout.W_TAIL] >> layout.FLAGS_SHIFT & layout.DURABILITY_MASK)
        words, entries = intake.batch.words, intake.entries
        following = frames.assign_seqs(words, entries, start, stop, base, stamp, topic.epoch, durability)
        topic.is_reserving |= durability < Durability.FSYNC
        producer_id, number = header[layout.W_PRODUCER_ID], header[layout.W_PRODUCER_SEQ]
        producer = topic.producers.admit(producer_id)
        assert producer is not None
        if run.equal_counts:
            producer.extend(number, stop - start, base, run.records_max)
        else:
            rows = words[start:stop]
            topic.producers.record(
                producer_id,
                rows[:, layout.W_PRODUCER_SEQ],
                rows[:, layout.W_BASE_SEQ],
                frames.counts_of(rows),
            )
        topic.next_seq = following
        topic.last_ts = stamp
        topic.staged_count += run.records
        topic.staged_bytes += run.bytes
        self.total.add(run.bytes)
        if config.ttl_ms or config.cap_records or config.cap_bytes or run.columns & _HAVE_EXPIRES:
            self._note_retention(intake, topic, start, stop, stamp)
        if run.columns << layout.COLUMNS_SHIFT & HAVE_DELIVERY_ATTRIBUTES:
            topic.attributes_to = following - 1
        last = intake.admitted_ranges[-1] if intake.admitted_ranges else None
        if last is not None and last.topic is topic and last.stop == start:
            last.stop = stop
        else:
            intake.admitted_ranges.append(
                AdmittedRange(topic, start, stop, durability == Durability.EPHEMERAL)
            )
        intake.records += run.records
        intake.frames += stop - start
        intake.needs_sync |= durability == Durability.FSYNC

    def _note_retention(
        self, intake: FrameIntake, topic: ShardTopic, start: int, stop: int, stamp: int
    ) -> None:
        """Mark a topic for retention after records with caps, a TTL or their own expiry were staged."""
        self.needs_retention[topic.topic_id] = topic
        if update_next_expiry(topic, intake.buffer, intake.batch.take(slice(start, stop)), stamp):
            self.earlier_expiry.append(topic)


_HAVE_EXPIRES = 1 << layout.Column.EXPIRES_AT
HAVE_DELIVERY_ATTRIBUTES = (
    1 << layout.Column.NOT_BEFORE | 1 << layout.Column.PRIORITY
) << layout.COLUMNS_SHIFT
"""Header bits of the columns `not_before` and `priority`. Queues need the attributes of such records."""
_TOO_MANY, _RECORD_LARGE = 32, 33
"""Additional FrameFault values for the configured limits: too many records, or a record that is too large."""


def _slice_run(intake: FrameIntake, run: CheckedFrameRange, start: int, stop: int) -> CheckedFrameRange:
    """Return rows [start, stop) of a run as a run."""
    checked = intake.checked
    assert checked is not None
    words = intake.batch.words[start:stop]
    counts = frames.counts_of(words)
    columns = int(np.bitwise_or.reduce(frames.columns_of(words)))
    return CheckedFrameRange(
        start, stop, run.fault, int(counts.sum()), int(checked.accounted[start:stop].sum()),
        int(checked.largest[start:stop].max()), int(counts.max()), run.equal_counts, columns,
    )  # fmt: skip


def _single_frames(intake: FrameIntake, run: CheckedFrameRange) -> list[CheckedFrameRange]:
    """Split a run into runs of one frame."""
    return [_slice_run(intake, run, row, row + 1) for row in range(run.start, run.stop)]


def update_next_expiry(topic: ShardTopic, buffer: Any, batch: FrameBatch, stamp: int) -> bool:
    """Update the time at which the topic's next record expires. Return True if it became earlier.

    `stamp` is the commit timestamp of the frames in microseconds.
    """
    known = topic.due_us
    if topic.config.ttl_ms:
        by_ttl = stamp + topic.config.ttl_ms * 1_000 + 1
        topic.due_us = min(known or by_ttl, by_ttl)
    having = frames.columns_of(batch.words) & U64(1 << layout.Column.EXPIRES_AT)
    if having.any():
        expires = record_facts(buffer, batch.take(np.flatnonzero(having))).expires
        assert expires is not None
        if expires.any():
            earliest = max(int(expires[expires != 0].min()), 1)
            topic.own_due_us = min(topic.own_due_us or earliest, earliest)
            topic.due_us = min(topic.due_us or earliest, earliest)
    return topic.due_us != known


def _is_fenced(header: Sequence[int], producer: ProducerHistory | None) -> bool:
    """Return True if a named producer sent this frame under another claim than the latest one."""
    latest = producer.claim if producer is not None else 0
    return header[layout.W_PRODUCER_ID] < SESSION_BIT and header[layout.W_BASE_SEQ] != latest


def _is_known(topic: ShardTopic, header: Sequence[int]) -> bool:
    """Return True if the frame was appended before."""
    producer = topic.producers.get(header[layout.W_PRODUCER_ID])
    return producer is not None and producer.is_settled(header[layout.W_PRODUCER_SEQ])
