"""Admitting frames: from a buffer somebody sent to numbered rows that may be logged. Pure.

All checks run on the header matrix of a whole buffer. Rows then go through in stretches of one topic
and one producer, which is how producers send; a stretch costs the same for one frame and for
thousands. A row's fate is an entry (frame/settle.py): admitted, repeated or refused; entries keep
the order of the frames.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import Status
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import Checked, FrameBatch
from ringlog.frame.facts import record_facts
from ringlog.frame.kernel import number_rows
from ringlog.frame.measure import Fault, measure, measure_alike
from ringlog.frame.settle import (
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
    STATUS_SHIFT,
    WORDS,
    Entries,
    refused_entry,
)
from ringlog.limits import (
    BATCH_RECORDS_MAX,
    KEY_BYTES_MAX,
    META_BYTES_MAX,
    NODE_BYTES_MAX,
    RECORD_BYTES_MAX,
    SEQ_MAX,
    TAG_BYTES_MAX,
)
from ringlog.topic.config import DISCARD_REJECT
from ringlog.topic.dedup import Producer
from ringlog.topic.state import Topic
from ringlog.types import SESSION_BIT, Durability

U64 = np.uint64
_EPOCH_SHIFT = U64(layout.EPOCH_SHIFT)
_LOW32 = U64(0xFFFFFFFF)
_DURABILITY_CLEAR = U64(0xFFFFFFFFFFFFFFFF ^ (layout.DURABILITY_MASK << layout.FLAGS_SHIFT))
_FLAGS_SHIFT = U64(layout.FLAGS_SHIFT)
_DURABILITY_MASK = U64(layout.DURABILITY_MASK)


@dataclass(slots=True)
class Stretch:
    """Admitted rows [start, stop) of one intake, all of one topic."""

    topic: Topic
    start: int
    stop: int
    is_volatile: bool


@dataclass(slots=True)
class Intake:
    """One buffer of frames on its way through the shard."""

    buffer: bytearray
    batch: FrameBatch
    entries: Entries
    stretches: list[Stretch] = field(default_factory=list)
    accounted: NDArray[np.int64] | None = None
    largest: NDArray[np.int64] | None = None
    follows: NDArray[np.bool_] | None = None
    """(n,) frames that were sent as following the producer's one before; None = none was."""
    records: int = 0
    frames: int = 0
    refused: int = 0
    repeats: int = 0
    needs_sync: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that configuration may change; the rest are ringlog.limits."""

    batch_records: int = BATCH_RECORDS_MAX
    record_bytes: int = RECORD_BYTES_MAX
    flush_interval_us: int = 100_000


_FAULT_DETAILS: dict[int, tuple[Status, tuple[int, int]]] = {
    Fault.STRUCTURE: (Status.CORRUPT_FRAME, (0, 0)),
    Fault.TEXT: (Status.INVALID_REQUEST, (0, 0)),
    Fault.TAG_TOO_LONG: (Status.INVALID_REQUEST, (layout.Column.TAG, TAG_BYTES_MAX)),
    Fault.NODE_TOO_LONG: (Status.INVALID_REQUEST, (layout.Column.NODE, NODE_BYTES_MAX)),
    Fault.KEY_TOO_LONG: (Status.INVALID_REQUEST, (layout.Column.KEY, KEY_BYTES_MAX)),
    Fault.META_TOO_LONG: (Status.INVALID_REQUEST, (layout.Column.META, META_BYTES_MAX)),
    Fault.HEADERS_TOO_LARGE: (Status.INVALID_REQUEST, (layout.Column.HEADERS, 0)),
}


class Admission:
    """Turns buffers into intakes, staging what it admits in the topics' state."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.is_volatile_closed = False
        """No room for ephemeral frames: they are refused until there is."""
        self.written: dict[int, Topic] = {}
        """Topics with caps that were written to; whoever applies retention takes them out."""
        self.newly_due: list[Topic] = []
        """Topics whose next record expires earlier than was known."""

    def open(self, buffer: bytearray, batch: FrameBatch, positions: NDArray[np.int64] | int) -> Intake:
        """Begin an intake; entries carry positions, topics and producer numbers already.

        `positions`: of each frame, or of the buffer's first byte in its ring.
        """
        entries, batch.entries = batch.entries, None
        if entries is None:
            entries = np.zeros((len(batch), WORDS), dtype=U64)
            is_start = isinstance(positions, int)
            entries[:, S_POSITION] = batch.offsets + positions if is_start else positions
            entries[:, S_TOPIC] = batch.words[:, layout.W_TOPIC]
            entries[:, S_PRODUCER_SEQ] = batch.words[:, layout.W_PRODUCER_SEQ]
        intake = Intake(buffer, batch, entries)
        checked = batch.checked
        if checked is not None:
            intake.follows, intake.accounted, intake.largest = (
                checked.follows, checked.accounted, checked.largest,
            )  # fmt: skip
        return intake

    def admit(self, intake: Intake, topics: dict[int, Topic], now_us: int, closed: Status | None) -> None:
        """Give every frame of the intake its fate. `closed` refuses all that is new with that status."""
        words = intake.batch.words
        if closed is None and self._admit_run(intake, topics, now_us):
            return
        is_lone = len(words) == 1 and closed is None and intake.follows is None
        if is_lone and self._admit_one(intake, topics, now_us):
            return
        _part_follows(intake)
        if closed is not None:
            self._refuse_new(intake, topics, closed)
            return
        if intake.batch.checked is None and len(words) > 1 and self._admit_alike(intake, topics, now_us):
            return
        faults = self._faults(intake)
        for start, stop in _stretches(words, faults):
            if faults[start]:
                for row in range(start, stop):
                    self._refuse_fault(intake, row, int(faults[row]))
                    self._pass_over(intake, topics.get(int(words[row, layout.W_TOPIC])), row)
                continue
            topic = topics.get(int(words[start, layout.W_TOPIC]))
            if topic is None:
                for row in range(start, stop):
                    self._refuse(intake, row, Status.TOPIC_NOT_FOUND)
                continue
            self._admit_stretch(intake, topic, start, stop, now_us)

    def _admit_one(self, intake: Intake, topics: dict[int, Topic], now_us: int) -> bool:
        """One sound fresh frame, without NumPy: a lone append is all latency. False, with nothing done but
        that its flag may be taken off, when the general path has to look.
        """
        header = intake.batch.words[0].tolist()
        head, topic_id, claim, _, count_epoch, producer_id, producer_seq, tail, body_xxh3, _ = header
        topic = topics.get(topic_id)
        count = count_epoch & 0xFFFFFFFF
        if topic is None or not producer_id or not 0 < count <= self._limits.batch_records:
            return False
        if (head >> 32) & 0xFFFF != _APPEND_HEAD or not _is_plain(head, tail & ~_FOLLOWS):
            return False
        known = topic.producers.get(producer_id)
        if producer_seq <= (known.highest if known else 0):
            return False
        if producer_id < SESSION_BIT and claim != (known.claim if known else 0):
            return False
        if tail & _FOLLOWS:
            if known is None or producer_seq != known.next_seq:
                return False
            tail ^= _FOLLOWS
            intake.follows = _LONE_FOLLOWS
            intake.batch.words[0, layout.W_TAIL] = tail
            with memoryview(intake.buffer) as view, view.cast("Q") as stored:
                stored[(int(intake.batch.offsets[0]) >> 3) + layout.W_TAIL] = tail
        own = int(topic.config.durability)
        has_cap = topic.config.discard == DISCARD_REJECT and (
            topic.config.cap_records or topic.config.cap_bytes
        )
        if count_epoch >> 32 not in (0, topic.epoch) or has_cap or own == Durability.EPHEMERAL:
            return False
        accounted = self._accounted_of_one(intake, head, count, body_xxh3)
        if accounted < 0 or topic.next_seq + count - 1 > SEQ_MAX:
            return False
        producer = topic.producers.admit(producer_id)
        if producer is None:
            return False
        durability = max(own, tail >> layout.FLAGS_SHIFT & layout.DURABILITY_MASK)
        base, stamp = topic.next_seq, max(now_us, topic.last_ts)
        row = intake.batch.words[0]
        row[layout.W_BASE_SEQ] = base
        row[layout.W_COMMIT_TS] = stamp
        row[layout.W_COUNT_EPOCH] = count | topic.epoch << layout.EPOCH_SHIFT
        row[layout.W_TAIL] = tail & int(_DURABILITY_CLEAR) | durability << layout.FLAGS_SHIFT
        topic.is_reserving |= durability < Durability.FSYNC
        producer.extend(producer_seq, 1, base, count)
        topic.next_seq = base + count
        topic.last_ts = stamp
        topic.staged_count += count
        topic.staged_bytes += accounted
        config = topic.config
        if config.ttl_ms or config.cap_records or config.cap_bytes or head >> _EXPIRES_SHIFT & 1:
            self._note_retention(intake, topic, 0, 1, stamp)
        if head & HAVE_MARKS:
            topic.marked_to = base + count - 1
        position = intake.entries[0, S_POSITION]
        intake.entries[0] = (
            position,
            base,
            stamp,
            count,
            base + count - 1,
            topic.epoch,
            topic_id,
            producer_seq,
        )
        intake.stretches.append(Stretch(topic, 0, 1, False))
        intake.records, intake.frames = count, 1
        intake.needs_sync = durability == Durability.FSYNC
        return True

    def _accounted_of_one(self, intake: Intake, head: int, count: int, body_xxh3: int) -> int:
        """Accounted bytes of the intake's only frame, or -1 when anything about its body is not plain."""
        start = int(intake.batch.offsets[0])
        with memoryview(intake.buffer) as view:
            body = view[
                start + layout.HEADER_BYTES : start + (head & layout.LEN_MASK) + layout.LEN_FIELD_BYTES
            ]
            if xxhash.xxh3_64_intdigest(body) != body_xxh3:
                return -1
            if count == 1 and head >> layout.COLUMNS_SHIFT == 1:
                length = int.from_bytes(body[4:8], "little")
                is_plain = (
                    len(body) == 8 + layout.padded(length)
                    and not any(body[:4])
                    and not any(body[8 + length :])
                )
                return length if is_plain and length <= self._limits.record_bytes else -1
        measures = measure(intake.buffer, intake.batch)
        if measures.bad[0] or measures.largest[0] > self._limits.record_bytes:
            return -1
        intake.accounted = measures.accounted
        return int(measures.accounted[0])

    def _admit_run(self, intake: Intake, topics: dict[int, Topic], now_us: int) -> bool:
        """Sound fresh frames of one producer, numbered one after the other: what a busy producer sends, and
        nothing of it is looked at here frame by frame. False, with nothing done, when the general path has to
        look.
        """
        checked = intake.batch.checked
        if checked is None or not checked.is_run or self._is_over_limits(checked):
            return False
        words = intake.batch.words
        _, topic_id, _, _, count_epoch, producer_id, producer_seq, tail, _, _ = words[0].tolist()
        topic = topics.get(topic_id)
        if topic is None or count_epoch >> 32 not in (0, topic.epoch):
            return False
        config = topic.config
        own = int(config.durability)
        if own == Durability.EPHEMERAL or (
            config.discard == DISCARD_REJECT and (config.cap_records or config.cap_bytes)
        ):
            return False
        producer = topic.producers.get(producer_id)
        if producer_seq <= (producer.highest if producer else 0):
            return False
        if producer_id < SESSION_BIT and _other_claims(words, producer).any():
            return False
        is_following = checked.follows is not None and bool(checked.follows[0])
        if is_following and (producer is None or producer_seq != producer.next_seq):
            return False
        if topic.next_seq + checked.records_max * len(words) - 1 > SEQ_MAX:
            return False
        producer = topic.producers.admit(producer_id)
        if producer is None:
            return False
        durability = max(own, tail >> layout.FLAGS_SHIFT & layout.DURABILITY_MASK)
        frames_count, base, stamp = len(words), topic.next_seq, max(now_us, topic.last_ts)
        following = number_rows(words, intake.entries, base, stamp, topic.epoch, durability)
        total = following - base
        topic.is_reserving |= durability < Durability.FSYNC
        if checked.is_even:
            producer.extend(producer_seq, frames_count, base, checked.records_max)
        else:
            counts = words[:, layout.W_COUNT_EPOCH] & _LOW32
            topic.producers.record(
                producer_id, words[:, layout.W_PRODUCER_SEQ], words[:, layout.W_BASE_SEQ], counts
            )
        topic.next_seq = following
        topic.last_ts = stamp
        topic.staged_count += total
        topic.staged_bytes += checked.bytes
        if config.ttl_ms or config.cap_records or config.cap_bytes:
            self._note_retention(intake, topic, 0, frames_count, stamp)
        intake.stretches.append(Stretch(topic, 0, frames_count, False))
        intake.records, intake.frames = total, frames_count
        intake.needs_sync = durability == Durability.FSYNC
        return True

    def _is_over_limits(self, checked: Checked) -> bool:
        limits = self._limits
        return checked.records_max > limits.batch_records or checked.record_bytes_max > limits.record_bytes

    def _admit_alike(self, intake: Intake, topics: dict[int, Topic], now_us: int) -> bool:
        """The common case at a fraction of the cost: sound frames of one producer that differ in nothing
        but content and number. False, with nothing done, when the general path has to look.
        """
        words = intake.batch.words
        if len(words) > 1 and not (words[1:, _ALIKE] == words[0, _ALIKE]).all():
            return False
        head, topic_id, _, _, count_epoch, producer_id, _, tail, _, _ = words[0].tolist()
        topic = topics.get(topic_id)
        count = count_epoch & 0xFFFFFFFF
        if topic is None or not producer_id or not 0 < count <= self._limits.batch_records:
            return False
        if (head >> 32) & 0xFFFF != _APPEND_HEAD or not _is_plain(head, tail):
            return False
        if not words[:, layout.W_PRODUCER_SEQ].all():
            return False
        if (frames.body_hashes(intake.buffer, intake.batch) != words[:, layout.W_BODY_XXH3]).any():
            return False
        holds_payloads = head >> layout.COLUMNS_SHIFT == 1
        found = measure_alike(intake.buffer, intake.batch, count) if holds_payloads else None
        if found is None:
            measures = measure(intake.buffer, intake.batch)
            if measures.bad.any():
                return False
            intake.accounted, intake.largest = measures.accounted, measures.largest
        else:
            intake.accounted, intake.largest = found
        if intake.largest.max() > self._limits.record_bytes:
            return False
        self._admit_stretch(intake, topic, 0, len(words), now_us)
        return True

    def is_any_sound(self, intake: Intake) -> bool:
        """Is there a frame that would not be refused whatever the topic?"""
        _part_follows(intake)
        return bool((self._faults(intake) == 0).any())

    def _faults(self, intake: Intake) -> NDArray[np.int64]:
        """(n,) 0 for a sound frame, else a code >= 1: what is wrong with it by itself."""
        batch, words = intake.batch, intake.batch.words
        faults = np.zeros(len(words), dtype=np.int64)
        if batch.checked is not None and not self._is_over_limits(batch.checked):
            return faults
        counts = frames.counts_of(words)
        unsound = (
            frames.malformed(words)
            | ((frames.columns_of(words) & ~U64(layout.PRODUCER_COLUMNS)) != 0)
            | (frames.types_of(words) != layout.FrameType.APPEND)
            | (frames.hops_of(words) != 0)
            | (words[:, layout.W_PRODUCER_ID] == 0)
            | (words[:, layout.W_PRODUCER_SEQ] == 0)
            | (counts == 0)
        )
        faults[frames.body_hashes(intake.buffer, batch) != words[:, layout.W_BODY_XXH3]] = _CORRUPT
        faults[unsound] = _UNSOUND
        if faults.any():
            # Only sound rows may be measured: the others' lengths mean nothing.
            sound = np.flatnonzero(faults == 0)
            measures = measure(intake.buffer, batch.take(sound))
            intake.accounted = np.zeros(len(words), dtype=np.int64)
            intake.largest = np.zeros(len(words), dtype=np.int64)
            intake.accounted[sound] = measures.accounted
            intake.largest[sound] = measures.largest
            faults[sound] = np.where(measures.bad != 0, measures.bad.astype(np.int64) + _MEASURED, 0)
        else:
            measures = measure(intake.buffer, batch)
            intake.accounted, intake.largest = measures.accounted, measures.largest
            if measures.bad.any():
                faults = np.where(measures.bad != 0, measures.bad.astype(np.int64) + _MEASURED, 0)
        faults[(faults == 0) & (counts > self._limits.batch_records)] = _TOO_MANY
        faults[(faults == 0) & (intake.largest > self._limits.record_bytes)] = _RECORD_LARGE
        return faults

    def _refuse_fault(self, intake: Intake, row: int, fault: int) -> None:
        if fault == _CORRUPT:
            self._refuse(intake, row, Status.CORRUPT_FRAME, int(intake.batch.offsets[row]))
        elif fault == _UNSOUND:
            self._refuse(
                intake,
                row,
                Status.INVALID_REQUEST,
                0,
                int(frames.types_of(intake.batch.words[row : row + 1])[0]),
            )
        elif fault == _TOO_MANY:
            count = int(frames.counts_of(intake.batch.words[row : row + 1])[0])
            self._refuse(intake, row, Status.BATCH_TOO_LARGE, count, self._limits.batch_records)
        elif fault == _RECORD_LARGE:
            assert intake.largest is not None
            self._refuse(
                intake, row, Status.RECORD_TOO_LARGE, int(intake.largest[row]), self._limits.record_bytes
            )
        else:
            status, details = _FAULT_DETAILS[fault - _MEASURED]
            self._refuse(intake, row, status, *details)

    def _refuse(self, intake: Intake, row: int, status: Status, *details: int) -> None:
        entry = intake.entries[row]
        intake.entries[row] = np.array(
            refused_entry(
                int(entry[S_POSITION]), status, int(entry[S_TOPIC]), int(entry[S_PRODUCER_SEQ]), *details
            ),
            dtype=U64,
        )
        intake.refused += 1

    def _refuse_new(self, intake: Intake, topics: dict[int, Topic], closed: Status) -> None:
        """Nothing can be written now. What is in the log already is a repeat all the same (W4): its producer,
        told that it was refused, would send it again under a new number.
        """
        faults = self._faults(intake)
        for row, words in enumerate(intake.batch.words):
            topic = None if faults[row] else topics.get(int(words[layout.W_TOPIC]))
            epoch = int(words[layout.W_COUNT_EPOCH] >> _EPOCH_SHIFT)
            if topic is None or epoch not in {0, topic.epoch}:
                self._refuse(intake, row, closed, 100)
            elif _is_fenced(words, topic.producers.get(int(words[layout.W_PRODUCER_ID]))):
                self._refuse_fenced(intake, topic.producers.get(int(words[layout.W_PRODUCER_ID])), row)
            elif _is_known(topic, words):
                self._repeat(intake, topic, row)
            else:
                self._refuse(intake, row, closed, 100)

    def _admit_stretch(self, intake: Intake, topic: Topic, start: int, stop: int, now_us: int) -> None:
        words = intake.batch.words[start:stop]
        epochs = words[:, layout.W_COUNT_EPOCH] >> _EPOCH_SHIFT
        stale = (epochs != 0) & (epochs != topic.epoch)
        if stale.any():
            self._row_by_row(intake, topic, start, stop, now_us, stale)
            return
        producer_id = int(words[0, layout.W_PRODUCER_ID])
        producer = topic.producers.get(producer_id)
        if producer_id < SESSION_BIT and _other_claims(words, producer).any():
            if stop - start > 1:
                for row in range(start, stop):
                    self._admit_stretch(intake, topic, row, row + 1, now_us)
            else:
                self._refuse_fenced(intake, producer, start)
            return
        if producer is None and not topic.producers.has_room:
            for row in range(start, stop):
                self._refuse(intake, row, Status.THROTTLED, 1_000, len(topic.producers))
            return
        seqs = words[:, layout.W_PRODUCER_SEQ]
        ascending = len(seqs) == 1 or bool((seqs[1:] > seqs[:-1]).all())
        if int(seqs[0]) <= (producer.highest if producer else 0) or not ascending:
            if stop - start > 1:
                for row in range(start, stop):
                    self._admit_stretch(intake, topic, row, row + 1, now_us)
                return
            self._repeat(intake, topic, start)
            return
        # Only what is new is turned away: a repeat that is refused would come again under a new number.
        if self.is_volatile_closed and topic.config.durability == Durability.EPHEMERAL:
            for row in range(start, stop):
                self._refuse(intake, row, Status.THROTTLED, 1_000)
            return
        if topic.config.discard == DISCARD_REJECT and (topic.config.cap_records or topic.config.cap_bytes):
            if stop - start > 1:
                for row in range(start, stop):
                    self._admit_stretch(intake, topic, row, row + 1, now_us)
                return
            if self._over_cap(intake, topic, start):
                self._pass_over(intake, topic, start)
                return
        if intake.follows is not None:
            self._stage_unbroken(intake, topic, producer_id, start, stop, now_us)
            return
        self._stage(intake, topic, producer_id, start, stop, now_us)

    def _stage_unbroken(
        self, intake: Intake, topic: Topic, producer_id: int, start: int, stop: int, now_us: int
    ) -> None:
        """Stage these fresh, ascending frames. One that follows what was refused for the moment is refused
        as well, or one producer's records would change places (W9).
        """
        assert intake.follows is not None
        while start < stop:
            producer = topic.producers.get(producer_id)
            seqs = intake.batch.words[start:stop, layout.W_PRODUCER_SEQ]
            broken = intake.follows[start:stop].copy()
            broken[0] &= producer is None or int(seqs[0]) != producer.next_seq
            broken[1:] &= seqs[1:] - seqs[:-1] != 1
            sound = frames.first_true(broken)
            if sound != 0:
                until = stop if sound is None else start + sound
                self._stage(intake, topic, producer_id, start, until, now_us)
            else:
                leader = frames.first_true(~intake.follows[start:stop])
                until = stop if leader is None else start + leader
                for row in range(start, until):
                    self._refuse(intake, row, Status.NOT_READY, 0)
            start = until

    def _refuse_fenced(self, intake: Intake, producer: Producer | None, row: int) -> None:
        """The frame was sent under a claim that is not the latest one of its producer's name."""
        number = int(intake.batch.words[row, layout.W_PRODUCER_SEQ])
        in_doubt = producer is not None and producer.is_in_doubt(number)
        self._refuse(intake, row, Status.PRODUCER_FENCED, int(in_doubt))

    def _pass_over(self, intake: Intake, topic: Topic | None, row: int) -> None:
        """A frame was refused for good, so nobody sends it again: what follows it may come (W9)."""
        words = intake.batch.words[row]
        producer = topic.producers.get(int(words[layout.W_PRODUCER_ID])) if topic is not None else None
        number = int(words[layout.W_PRODUCER_SEQ])
        if producer is None or number != producer.next_seq or _is_fenced(words, producer):
            return
        producer.passed = number

    def _row_by_row(
        self, intake: Intake, topic: Topic, start: int, stop: int, now_us: int, stale: Any
    ) -> None:
        for row in range(start, stop):
            if stale[row - start]:
                sent = int(intake.batch.words[row, layout.W_COUNT_EPOCH] >> _EPOCH_SHIFT)
                self._refuse(intake, row, Status.STALE_EPOCH, sent, topic.epoch)
            else:
                self._admit_stretch(intake, topic, row, row + 1, now_us)

    def _repeat(self, intake: Intake, topic: Topic, row: int) -> None:
        """A frame this topic has already: answer with the numbers it got then."""
        producer = topic.producers.get(int(intake.batch.words[row, layout.W_PRODUCER_ID]))
        assert producer is not None
        producer_seq = int(intake.entries[row, S_PRODUCER_SEQ])
        found = producer.find(producer_seq)
        if found is None and producer_seq > producer.forgotten:
            # Surely never appended: it was refused, and the refusal got lost with the engine. To call it
            # a repeat would acknowledge what is not there; under a new number it may be sent again.
            self._refuse(intake, row, Status.NOT_READY, 0)
            return
        first_seq, count = found or (0, int(frames.counts_of(intake.batch.words[row : row + 1])[0]))
        entry = intake.entries[row]
        entry[S_FIRST_SEQ] = first_seq
        entry[S_COMMIT_TS] = topic.last_ts
        entry[S_COUNT_STATUS] = count | (FLAG_DEDUPED << FLAGS_SHIFT)
        entry[S_HEAD_SEQ] = topic.next_seq - 1
        entry[S_EPOCH] = topic.epoch
        intake.repeats += 1
        # The first copy may be in this very group, so the answer waits for the group like any other.

    def _over_cap(self, intake: Intake, topic: Topic, row: int) -> bool:
        """Refuse a frame that would exceed the caps of a `discard: reject` topic (W-12 to W-14)."""
        assert intake.accounted is not None
        config = topic.config
        count = int(frames.counts_of(intake.batch.words[row : row + 1])[0])
        size = int(intake.accounted[row])
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
        self, intake: Intake, topic: Topic, producer_id: int, start: int, stop: int, now_us: int
    ) -> None:
        """Assign numbers and stamps to rows [start, stop) and count them in (W1, CK-3)."""
        assert intake.accounted is not None
        words = intake.batch.words[start:stop]
        counts = words[:, layout.W_COUNT_EPOCH] & _LOW32
        ends = np.cumsum(counts)
        total = int(ends[-1])
        if topic.next_seq + total - 1 > SEQ_MAX:
            for row in range(start, stop):
                self._refuse(intake, row, Status.INTERNAL)
            return
        bases = ends - counts + U64(topic.next_seq)
        stamp = max(now_us, topic.last_ts)
        words[:, layout.W_BASE_SEQ] = bases
        words[:, layout.W_COMMIT_TS] = stamp
        words[:, layout.W_COUNT_EPOCH] = counts | U64(topic.epoch << layout.EPOCH_SHIFT)
        durability = self._effective_class(topic, words)
        tail = words[:, layout.W_TAIL]
        words[:, layout.W_TAIL] = (tail & _DURABILITY_CLEAR) | U64(durability << layout.FLAGS_SHIFT)
        topic.is_reserving |= durability < Durability.FSYNC
        topic.producers.admit(producer_id)
        topic.producers.record(producer_id, words[:, layout.W_PRODUCER_SEQ], bases, counts)
        topic.next_seq += total
        topic.last_ts = stamp
        topic.staged_count += total
        topic.staged_bytes += int(intake.accounted[start:stop].sum())
        config = topic.config
        heads = int(np.bitwise_or.reduce(words[:, layout.W_HEAD]))
        if config.ttl_ms or config.cap_records or config.cap_bytes or heads >> _EXPIRES_SHIFT & 1:
            self._note_retention(intake, topic, start, stop, stamp)
        if heads & HAVE_MARKS:
            topic.marked_to = topic.next_seq - 1
        entries = intake.entries[start:stop]
        entries[:, S_FIRST_SEQ] = bases
        entries[:, S_COMMIT_TS] = stamp
        entries[:, S_COUNT_STATUS] = counts
        entries[:, S_HEAD_SEQ] = topic.next_seq - 1
        entries[:, S_EPOCH] = topic.epoch
        is_volatile = durability == Durability.EPHEMERAL
        intake.stretches.append(Stretch(topic, start, stop, is_volatile))
        intake.records += total
        intake.frames += stop - start
        intake.needs_sync |= durability == Durability.FSYNC

    def _note_retention(self, intake: Intake, topic: Topic, start: int, stop: int, stamp: int) -> None:
        """Records of a topic with caps or TTL, or with an expiry of their own, were staged."""
        self.written[topic.topic_id] = topic
        if note_written(topic, intake.buffer, intake.batch.take(slice(start, stop)), stamp):
            self.newly_due.append(topic)

    @staticmethod
    def _effective_class(topic: Topic, words: NDArray[np.uint64]) -> int:
        """The topic's class, or a stronger one that a frame of the stretch asks for.

        A stretch is one producer's, so one class for all of it is what its frames ask for. Records of
        an ephemeral topic stay ephemeral: they have no place in the log.
        """
        own = int(topic.config.durability)
        if own == Durability.EPHEMERAL:
            return own
        asked = int(((words[:, layout.W_TAIL] >> _FLAGS_SHIFT) & _DURABILITY_MASK).max())
        return max(own, asked)


_ALIKE = np.array([layout.W_HEAD, layout.W_TOPIC, layout.W_COUNT_EPOCH, layout.W_PRODUCER_ID, layout.W_TAIL])
"""Words in which frames of one producer, of one shape, do not differ."""
_EXPIRES_SHIFT = layout.COLUMNS_SHIFT + layout.Column.EXPIRES_AT
HAVE_MARKS = (1 << layout.Column.NOT_BEFORE | 1 << layout.Column.PRIORITY) << layout.COLUMNS_SHIFT
"""Frames with one of these columns in their head hold records that queues have to know more of."""
_APPEND_HEAD = layout.FrameType.APPEND | layout.VERSION << 8
_FOLLOWS = int(frames.FOLLOWS)
_LONE_FOLLOWS = np.array([True])
_PLAIN_TAIL = ~(layout.FLAGS_KNOWN << layout.FLAGS_SHIFT | 0xFFFFFFFF)


def note_written(topic: Topic, buffer: Any, batch: FrameBatch, stamp: int) -> bool:
    """Bring forward when the topic's next record expires; True when it is earlier than was known."""
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


def _is_plain(head: int, tail: int) -> bool:
    """Uncompressed, nothing unknown set, and as long as it says."""
    raw_len, columns = tail & 0xFFFFFFFF, head >> layout.COLUMNS_SHIFT
    kind = tail >> layout.FLAGS_SHIFT & layout.PAYLOAD_KIND_MASK
    is_known = not columns & ~layout.PRODUCER_COLUMNS and not tail & _PLAIN_TAIL
    is_known = is_known and columns & 1 == 1 and kind != layout.PAYLOAD_KIND_MASK
    return is_known and raw_len == (head & layout.LEN_MASK) - layout.FRAME_LEN_MIN


def _part_follows(intake: Intake) -> None:
    """Take from the headers what must not be stored. Once is enough, twice is harmless.

    From the buffer too: what opens a frame there on the way to the log takes the flag for damage.
    """
    tails = intake.batch.words[:, layout.W_TAIL]
    flags = tails & frames.FOLLOWS
    if flags.any():
        intake.follows = flags != 0
        tails ^= flags
        frames.words_of(intake.buffer)[(intake.batch.offsets >> 3) + layout.W_TAIL] = tails


_CORRUPT, _UNSOUND, _TOO_MANY, _RECORD_LARGE, _MEASURED = 1, 2, 3, 4, 16


def _stretches(words: NDArray[np.uint64], faults: NDArray[np.int64]) -> list[tuple[int, int]]:
    """[start, stop) of rows with equal topic, producer and soundness."""
    if len(words) == 0:
        return []
    if len(words) == 1:
        return [(0, 1)]
    changes = (
        (words[1:, layout.W_TOPIC] != words[:-1, layout.W_TOPIC])
        | (words[1:, layout.W_PRODUCER_ID] != words[:-1, layout.W_PRODUCER_ID])
        | ((faults[1:] != 0) != (faults[:-1] != 0))
    )
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(words)]
    return list(itertools.pairwise(edges))


assert S_COUNT_STATUS == 3
assert STATUS_SHIFT == 32


def _other_claims(words: NDArray[np.uint64], producer: Producer | None) -> NDArray[np.bool_]:
    """(n,) frames of this producer that were sent under another claim than the latest."""
    latest = producer.claim if producer is not None else 0
    return np.asarray(words[:, layout.W_BASE_SEQ] != U64(latest), dtype=np.bool_)


def _is_fenced(words: Any, producer: Producer | None) -> bool:
    """Was this frame of a named producer sent under another claim than the latest?"""
    latest = producer.claim if producer is not None else 0
    return int(words[layout.W_PRODUCER_ID]) < SESSION_BIT and int(words[layout.W_BASE_SEQ]) != latest


def _is_known(topic: Topic, words: Any) -> bool:
    """Was the frame appended before?"""
    producer = topic.producers.get(int(words[layout.W_PRODUCER_ID]))
    number = int(words[layout.W_PRODUCER_SEQ])
    return producer is not None and (number <= producer.forgotten or producer.find(number) is not None)
