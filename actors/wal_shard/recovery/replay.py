"""Replay: applies the frames of the log to the state of the topics. Pure.

Replay uses the same state objects as normal operation. A frame that is already applied is skipped. A frame
after an unexplained gap is damage. Frames of topics that belong to other shards under the current shard count
are not applied. Only the names of these topics are recorded, because they decide which shard owns a name
(topic/directory.py).

Appends between two control frames are applied topic by topic instead of row by row. Within one topic they
keep their order, and no state depends on the order between topics.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.actors.wal_shard.commit.admission import (
    HAVE_DELIVERY_ATTRIBUTES,
    AdmittedRange,
    FrameIntake,
    update_next_expiry,
)
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch, RoutedCopy, RoutedPart
from ringlog.actors.wal_shard.commit.control_records import (
    Body,
    ConfigChanged,
    FloorsRaised,
    HeadReserved,
    KeyUsed,
    ProducerClaimed,
    RangeLost,
    RecordsRemoved,
    RouterCreated,
    RouterMoved,
    RouterRemoved,
    TopicCreated,
    TopicRemoved,
    create_frame,
    decode_body,
    frame_of,
)
from ringlog.actors.wal_shard.commit.idempotency import remember_write
from ringlog.actors.wal_shard.leases.lease_registry import replay_change, replay_config
from ringlog.actors.wal_shard.recovery.shard_facts import ShardFacts
from ringlog.actors.wal_shard.requests.socket_requests import ShardIdentity
from ringlog.actors.wal_shard.retention.removal import replay_removal
from ringlog.actors.wal_shard.routing import mark_trimmed, replay_router
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.layout import FrameType
from ringlog.frame.measure import measure
from ringlog.frame.routed_frame import CopyRow, routed_content_of, routed_frame
from ringlog.frame.settle_entry import WORDS
from ringlog.leases.change import LeaseChange
from ringlog.limits import RECORDS_PER_BYTE_MAX
from ringlog.placement import home_shard, shard_of, shards_of
from ringlog.segment.layout import parse_stem
from ringlog.storage.layout import ids_upper_bound
from ringlog.storage.recovery import SkippedAppend, WalScanChunk
from ringlog.topic.config import TopicConfig
from ringlog.topic.directory import Halt, TopicDirectory
from ringlog.topic.idempotency import IdempotencyEntry
from ringlog.topic.segment_catalog import MissingSegment, SegmentCatalog
from ringlog.topic.state import ShardTopic, with_range
from ringlog.types import Durability

_IS_CONTROL = np.ones(256, dtype=np.bool_)
"""True for frame types that are neither records nor marks.
A table lookup is faster than `isin` for few frames."""
_IS_CONTROL[[FrameType.APPEND, FrameType.GROUP_MARK, FrameType.CHECKPOINT_MARK]] = False

Mask = NDArray[np.bool_]
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReplayedFile:
    """The file that is being applied, the shard that wrote it, and the shard count of that time."""

    file_id: int
    path: str
    shard: int
    shards: int
    is_other_layout: bool


@dataclass(frozen=True, slots=True)
class _RowSource:
    """Origin of the rows that are being applied, for the index and for error messages."""

    piece: WalScanChunk
    origin: ReplayedFile

    def offset(self, row: int) -> int:
        """Return the file offset of a row's frame."""
        return self.piece.file_offset + int(self.piece.batch.stored_offsets[row])

    @property
    def is_other_layout(self) -> bool:
        """True if the file was written under another shard count."""
        return self.origin.is_other_layout

    def is_writer_of(self, topic_id: int) -> bool:
        """Return True if the shard that wrote the file owned the topic at that time."""
        return shard_of(topic_id, self.origin.shards) == self.origin.shard


@dataclass(slots=True)
class _PendingKey:
    """A frame with an idempotency key. Its append must be the next frame."""

    topic_id: int
    body: KeyUsed


@dataclass(slots=True)
class Orphan:
    """State of a topic from its segments, for topics without snapshot and perhaps without log."""

    epoch: int = 0
    records: int = 0
    bytes: int = 0
    last_ts: int = 0
    due_us: int = 0
    """Earliest expiry time of its records in microseconds; 0 if no record has its own expiry."""
    dead: BitMap64 = field(default_factory=BitMap64)


@dataclass(frozen=True, slots=True)
class _LostLog:
    """A part of a shard's log with unknown content."""

    lost_parts: int
    shard: int
    shards: int
    bytes: int


@dataclass(slots=True)
class Replay:
    """Applies chunks of the log, in file order, to the topic directory of one shard."""

    identity: ShardIdentity
    directory: TopicDirectory
    is_lenient: bool = False
    """True with `wal.corruption = truncate`: damage is cut off and reported, and does not end the start."""
    has_damage: bool = False
    """True if an earlier file was cut at damage. Later gaps are then expected and reported as losses."""
    has_skipped: bool = False
    """True if `is_lenient` accepted a gap in a log without visible damage.
    The file is then recorded as damaged, so that later starts accept the gap too."""
    segments: SegmentCatalog = field(default_factory=SegmentCatalog)
    """Existing segments. Records in segments are not added to the index of the log."""
    is_known: Callable[[int], bool] = lambda topic_id: False
    """Returns True if the topic's governing snapshot knew the topic. Without a row it was deleted then."""
    touched_topics: set[int] = field(default_factory=set)
    """Ids of topics that the log changes after the snapshot."""
    records: int = 0
    gaps: list[tuple[str, int, int]] = field(default_factory=list)
    halts: list[Halt] = field(default_factory=list)
    """Topics with records in a missing segment."""
    _gone: set[int] = field(default_factory=set)
    _held: dict[int, int] = field(default_factory=dict)
    """Topic -> last seq that segments and the log read so far contain."""
    _rows: list[ShardTopic] = field(default_factory=list)
    """Topics that were loaded from snapshot rows."""
    _open: dict[int, ShardTopic] = field(default_factory=dict)
    """Topics whose reservation of seqs is not settled."""
    _reserved_in: dict[int, int] = field(default_factory=dict)
    """Topic -> incarnation that wrote its snapshot row, for topics with an open reservation in a snapshot."""
    _placeholders: set[int] = field(default_factory=set)
    """Topics whose creation was lost to damage."""
    _lost_parts: int = 0
    """Number of lost parts of the log so far."""
    _last_seen: dict[int, int] = field(default_factory=dict)
    """Topic -> value of `_lost_parts` when its last records were found."""
    _unknown: list[_LostLog] = field(default_factory=list)
    _key: _PendingKey | None = None
    """The key frame that was applied last, if its append has not followed yet."""

    def load(self, topics: Iterable[tuple[ShardTopic, bool, int]]) -> None:
        """Load topics from snapshot rows: (topic, True if it belongs to this shard, incarnation of the row).

        Of topics of other shards, only the name is recorded.
        """
        ours = []
        for topic, is_ours, incarnation in topics:
            if not is_ours:
                self._note_name(topic.topic_id, TopicCreated(topic.name, topic.epoch, b""))
                continue
            ours.append(topic)
            if not self._is_home(topic.name):
                self.directory.adopted.add(topic.name)
            if topic.has_reservation and topic.reservation.reserved > topic.head_seq:
                self._open[topic.topic_id] = topic
                self._reserved_in[topic.topic_id] = incarnation
        # Snapshots of different times may contain two topics of one name. The one with the greater epoch is
        # valid.
        latest = {topic.name: topic for topic in sorted(ours, key=lambda each: each.epoch)}
        if len(latest) < len(ours):
            self._gone.update([each.topic_id for each in ours if latest[each.name] is not each])
            self.touched_topics |= self._gone
            ours = list(latest.values())
            self._open = {key: each for key, each in self._open.items() if key not in self._gone}
        self.directory.add_all(ours)
        self._rows += ours

    def take_facts(self, facts: ShardFacts, *, is_own: bool) -> None:
        """Load the state of the shard itself from a snapshot."""
        self.directory.advance_identity(facts.last_id, facts.last_epoch)
        for name, (topic_id, epoch) in facts.remote_names.items():
            self._note_name(topic_id, TopicCreated(name, epoch, b""))
        if is_own:
            self.directory.adopted.update(facts.adopted)

    def apply(self, piece: WalScanChunk, origin: ReplayedFile, *, excluded: Mask | None = None) -> None:
        """Apply one chunk of a file without the `excluded` rows. Raise CorruptData for damage."""
        source = _RowSource(piece, origin)
        words = piece.batch.words
        types = frames.types_of(words)
        appends = types == FrameType.APPEND
        ours = appends & self._mine(words, origin)
        if excluded is not None:
            ours &= ~excluded
        start = 0
        for row in np.flatnonzero(_IS_CONTROL[types]).tolist():
            if types[row] == FrameType.IDEMPOTENCY_KEY:
                self._key_used(source, row, ours)
                continue
            self._append_rows(source, ours, start, row)
            is_excluded = excluded is not None and bool(excluded[row])
            self._control(source, row, is_excluded=is_excluded)
            start = row + 1
        self._append_rows(source, ours, start, len(words))

    def _mine(self, words: frames.U64, origin: ReplayedFile) -> Mask:
        if not origin.is_other_layout:
            return np.ones(len(words), dtype=np.bool_)
        owners = shards_of(words[:, layout.W_TOPIC], self.identity.shards)
        return np.asarray(owners == self.identity.shard, dtype=np.bool_)

    def _is_mine(self, topic_id: int) -> bool:
        return shard_of(topic_id, self.identity.shards) == self.identity.shard

    def _is_home(self, name: str) -> bool:
        return home_shard(name, self.identity.shards) == self.identity.shard

    # -- appends --------------------------------------------------------------------------------------

    def _append_rows(self, source: _RowSource, ours: Mask, start: int, stop: int) -> None:
        """Apply this shard's append rows in [start, stop), topic by topic."""
        if self._key is not None and stop > start:
            self._confirm_key(source, start)
        rows = start + np.flatnonzero(ours[start:stop])
        if not len(rows):
            return
        for of_topic in _by_value(rows, source.piece.batch.words[rows, layout.W_TOPIC]):
            self.touched_topics.add(int(source.piece.batch.words[of_topic[0], layout.W_TOPIC]))
            self._appends(source, of_topic)

    def _appends(self, source: _RowSource, rows: Rows) -> None:
        """Apply append rows of one topic, in order."""
        words = source.piece.batch.words[rows]
        topic = self._topic_of(source, int(rows[0]), words)
        if topic is None:
            return
        self._last_seen[topic.topic_id] = self._lost_parts
        stops = words[:, layout.W_BASE_SEQ] + frames.counts_of(words)
        is_current = frames.epochs_of(words) == topic.epoch
        self._note_places(topic, source, rows, words, is_current)
        self._advance_routers(topic, source, rows[is_current])
        fresh = is_current & (stops > np.uint64(topic.next_seq))
        if not fresh.all():
            rows, words, stops = rows[fresh], words[fresh], stops[fresh]
        while len(rows):
            bases = words[:, layout.W_BASE_SEQ]
            self._close_gap(topic, int(bases[0]), source, int(rows[0]))
            broken = frames.first_true(bases[1:] != stops[:-1])
            end = len(rows) if broken is None else broken + 1
            self._stage(topic, source, rows[:end], words[:end])
            rows, words, stops = rows[end:], words[end:], stops[end:]

    def _note_places(
        self, topic: ShardTopic, source: _RowSource, rows: Rows, words: frames.U64, which: Mask
    ) -> None:
        """Add rows that no segment contains to the index, even if the snapshot counts them."""
        held = self._held.get(topic.topic_id)
        if held is None:
            held = self.segments.sealed_to(topic.topic_id) if self.segments.refs else 0
        stops = words[:, layout.W_BASE_SEQ] + frames.counts_of(words)
        which = which & (stops > np.uint64(held + 1))
        if which.any():
            offsets = source.piece.batch.stored_offsets[rows[which]] + source.piece.file_offset
            topic.index.add_run(words[which, layout.W_BASE_SEQ], source.origin.file_id, offsets)
            held = int(stops[which][-1]) - 1
        self._held[topic.topic_id] = held

    @staticmethod
    def _advance_routers(topic: ShardTopic, source: _RowSource, rows: Rows) -> None:
        """Advance the cursors of routers from the copies in these rows."""
        copies = source.piece.batch.copies
        if copies is None or not topic.routers:
            return
        made = rows[copies.routers[rows] != 0]
        counts = frames.counts_of(source.piece.batch.words[made]).tolist()
        for number, cursor, count in zip(
            copies.routers[made].tolist(), copies.cursors[made].tolist(), counts, strict=True
        ):
            if number in topic.routers:
                topic.routers[number].advance(cursor, count)

    def _topic_of(self, source: _RowSource, row: int, words: frames.U64) -> ShardTopic | None:
        """Return the topic of these rows, or None if it was deleted later.

        Rows of a topic that was never created are damage: raise CorruptData, or create a placeholder if
        damage is accepted.
        """
        topic_id = int(words[0, layout.W_TOPIC])
        topic = self.directory.by_id.get(topic_id)
        if topic is not None or topic_id in self._gone or self.is_known(topic_id):
            return topic
        if not self._may_be_missing():
            raise CorruptData(
                "records of a topic that was never created", topic_id=topic_id, file=source.origin.path,
                offset=source.offset(row),
            )  # fmt: skip
        return self.create_placeholder(topic_id, int(frames.epochs_of(words)[0]))

    def create_placeholder(self, topic_id: int, epoch: int) -> ShardTopic:
        """Create a topic for records whose topic creation was lost. It gets an unused name, `topic-<id>`."""
        names = (f"topic-{topic_id}" + (f"-{n}" if n else "") for n in itertools.count())
        name = next(each for each in names if self._is_home(each) and self.directory.find(each) is None)
        topic = ShardTopic(topic_id, epoch, name, TopicConfig())
        self._placeholders.add(topic_id)
        self._last_seen[topic_id] = self._lost_parts
        self.directory.add(topic)
        self.touched_topics.add(topic_id)
        return topic

    def _stage(self, topic: ShardTopic, source: _RowSource, rows: Rows, words: frames.U64) -> None:
        part = source.piece.batch.take(rows)
        counts = frames.counts_of(words)
        bases = words[:, layout.W_BASE_SEQ]
        total = int(counts.sum())
        topic.next_seq = int(bases[-1] + counts[-1])
        topic.last_ts = max(topic.last_ts, int(words[-1, layout.W_COMMIT_TS]))
        topic.staged_count += total
        topic.staged_bytes += int(measure(source.piece.buffer, part).accounted.sum())
        update_next_expiry(topic, source.piece.buffer, part, int(words[0, layout.W_COMMIT_TS]))
        if (words[:, layout.W_HEAD] & np.uint64(HAVE_DELIVERY_ATTRIBUTES)).any():
            topic.attributes_to = topic.next_seq - 1
        topic.publish()
        for of_producer in _by_value(np.arange(len(words)), words[:, layout.W_PRODUCER_ID]):
            self._remember(topic, words[of_producer])
        self.records += total

    @staticmethod
    def _remember(topic: ShardTopic, words: frames.U64) -> None:
        producer_id = int(words[0, layout.W_PRODUCER_ID])
        producer = topic.producers.admit(producer_id) if producer_id else None
        if producer is None:
            return
        seqs = words[:, layout.W_PRODUCER_SEQ]
        if int(seqs[0]) > producer.highest and bool((seqs[1:] > seqs[:-1]).all()):
            topic.producers.record(producer_id, seqs, words[:, layout.W_BASE_SEQ], frames.counts_of(words))

    def _close_gap(self, topic: ShardTopic, base: int, source: _RowSource, row: int) -> None:
        if base == topic.next_seq:
            return
        if base < topic.next_seq:
            raise self._damage("a frame overlaps existing records", topic, base, source, row)
        if not self._may_be_missing():
            raise self._damage("records are missing before a frame", topic, base, source, row)
        self._lose(topic, base - 1)

    def _may_be_missing(self) -> bool:
        """Return True if records may be missing: damage was found before, or `is_lenient` accepts losses."""
        self.has_skipped |= self.is_lenient and not self.has_damage
        return self.has_damage or self.is_lenient

    def _lose(self, topic: ShardTopic, last: int) -> None:
        lost = topic.skip_to(last)
        if lost is not None:
            self.gaps.append((topic.name, *lost))

    @staticmethod
    def _damage(text: str, topic: ShardTopic, base: int, source: _RowSource, row: int) -> CorruptData:
        return CorruptData(
            text, topic=topic.name, expected_seq=topic.next_seq, found_seq=base, file=source.origin.path,
            offset=source.offset(row),
        )  # fmt: skip

    # -- idempotency keys -----------------------------------------------------------------------------

    def _key_used(self, source: _RowSource, row: int, ours: Mask) -> None:
        """Apply an idempotency key only if its append follows directly.

        A torn tail removes both or neither.
        """
        body = self._decoded(source, row)
        assert isinstance(body, KeyUsed)
        self._key = _PendingKey(int(source.piece.batch.words[row, layout.W_TOPIC]), body)
        if row + 1 < len(ours):
            self._confirm_key(source, row + 1)

    def _confirm_key(self, source: _RowSource, row: int) -> None:
        pending, self._key = self._key, None
        assert pending is not None
        topic = self.directory.by_id.get(pending.topic_id)
        if topic is None or not _is_append_of(pending, source.piece.batch.words[row]):
            return
        body = pending.body
        past = IdempotencyEntry(body.first_seq, body.records, body.commit_ts, body.created_us, body.window_ms)
        remember_write(topic, body.key, body.ids, past)

    # -- control frames -------------------------------------------------------------------------------

    def _decoded(self, source: _RowSource, row: int) -> Body:
        words = source.piece.batch.words[row]
        start = int(source.piece.batch.offsets[row]) + layout.HEADER_BYTES
        raw_len = int(words[layout.W_TAIL] & np.uint64(0xFFFFFFFF))
        frame_type = int(words[layout.W_HEAD] >> np.uint64(layout.TYPE_SHIFT)) & 0xFF
        try:
            return decode_body(frame_type, memoryview(source.piece.buffer)[start : start + raw_len])
        except CorruptData as e:
            e.detail.update(file=source.origin.path, offset=source.offset(row))
            raise

    def _control(self, source: _RowSource, row: int, *, is_excluded: bool) -> None:
        body = self._decoded(source, row)
        topic_id = int(source.piece.batch.words[row, layout.W_TOPIC])
        mine = self._is_mine(topic_id)
        if isinstance(body, TopicCreated):
            if source.is_other_layout or not mine:
                self._note_name(topic_id, body)
            if mine and not self._is_home(body.name):
                # The home shard of a name decides which shard owns the topic. That shard must accept requests
                # for it.
                self.directory.adopted.add(body.name)
        # Control frames of topics that the file's writer did not own only concern names.
        if mine and not is_excluded and source.is_writer_of(topic_id):
            self._apply_control(topic_id, body)

    def learn_names(self, piece: WalScanChunk, origin: ReplayedFile) -> None:
        """Record the topic names in the log of another shard, and the ids of their topics."""
        source = _RowSource(piece, origin)
        types = frames.types_of(piece.batch.words)
        for row in np.flatnonzero(types == FrameType.TOPIC_CREATE).tolist():
            body = self._decoded(source, row)
            assert isinstance(body, TopicCreated)
            self._note_name(int(piece.batch.words[row, layout.W_TOPIC]), body)

    def _note_name(self, topic_id: int, body: TopicCreated) -> None:
        """Record the latest creation of a name.

        Deletions are not recorded: the same shard keeps owning the name.
        """
        remote_names = self.directory.remote_names
        if body.epoch > remote_names.get(body.name, (0, 0))[1]:
            remote_names[body.name] = (topic_id, body.epoch)
        self.directory.advance_identity(topic_id, body.epoch)

    def _apply_control(self, topic_id: int, body: Body) -> None:
        topic = self.directory.by_id.get(topic_id)
        self.touched_topics.add(topic_id)
        if isinstance(body, TopicCreated):
            self._create(topic_id, body, topic)
        elif topic is None:
            if isinstance(body, TopicRemoved):
                self._gone.add(topic_id)
        elif isinstance(body, TopicRemoved):
            self._gone.add(topic_id)
            self._open.pop(topic_id, None)
            self.directory.remove(topic)
        elif isinstance(body, ConfigChanged):
            topic.config = TopicConfig.from_bytes(body.config)
            replay_config(topic)
            # The TTL may have changed. Make the topic due at once; retention then computes its next expiry.
            topic.due_us = 1 if topic.config.ttl_ms and topic.staged_count else topic.own_due_us
            self.directory.register_config(topic)
        elif isinstance(body, HeadReserved):
            self._reserve(topic, body)
        elif isinstance(body, RangeLost):
            if topic.skip_to(body.last) is None:
                self._note_lost(topic, body)
            elif body.is_trim is True:
                mark_trimmed(topic, body.first, body.last)
            self.gaps = [gap for gap in self.gaps if gap != (topic.name, body.first, body.last)]
        elif isinstance(body, FloorsRaised | RecordsRemoved):
            replay_removal(topic, body)
        elif isinstance(body, RouterCreated | RouterRemoved | RouterMoved):
            replay_router(topic, body)
        elif isinstance(body, LeaseChange):
            replay_change(topic, body)
        elif isinstance(body, ProducerClaimed):
            producer = topic.producers.admit(body.producer_id)
            if producer is not None and body.claim > producer.claim:
                producer.claim, producer.claimed_at = body.claim, body.settled

    def _create(self, topic_id: int, body: TopicCreated, topic: ShardTopic | None) -> None:
        config = TopicConfig.from_bytes(body.config)
        there = self.directory.find(body.name)
        if there is not None and there.epoch > body.epoch:
            self._lived_before(topic_id, topic)
        elif topic_id in self._placeholders and topic is not None:
            self._placeholders.discard(topic_id)
            self.directory.rename(topic, body.name)
            topic.config = config
        elif topic is None and self.is_known(topic_id):
            self._gone.add(topic_id)  # deleted before the rows of its snapshot were captured
        elif topic_id not in self._gone and topic is None:
            if there is not None:
                self._gone.add(there.topic_id)
            self.directory.add(ShardTopic(topic_id, body.epoch, body.name, config))
            self._last_seen[topic_id] = self._lost_parts

    def _lived_before(self, topic_id: int, topic: ShardTopic | None) -> None:
        """Handle the creation of a topic whose name has a later topic already. The earlier topic is deleted.

        This happens because snapshot rows are loaded before the log is replayed. The later topic may be in a
        snapshot of another shard count that does not govern the earlier one.
        """
        self._gone.add(topic_id)
        if topic is not None:
            self._placeholders.discard(topic_id)
            self._open.pop(topic_id, None)
            self.directory.remove(topic)

    @staticmethod
    def _note_lost(topic: ShardTopic, body: RangeLost) -> None:
        """Apply the loss of a range below the head, from a missing segment.

        An older snapshot does not have it.
        """
        first, last = max(body.first, topic.earliest_seq), body.last
        if first <= last and not any(a <= first and last <= b for a, b in topic.lost):
            topic.mark_lost(first, last)

    def _reserve(self, topic: ShardTopic, body: HeadReserved) -> None:
        if body.settled:
            topic.skip_to(body.reserved)
            topic.reservation.settle(topic.head_seq)
            self._open.pop(topic.topic_id, None)
        else:
            topic.reservation.restore(body.reserved)
            topic.is_reserving = True
            self._open[topic.topic_id] = topic

    # -- damage ---------------------------------------------------------------------------------------

    def announce_loss(self, lost: SkippedAppend, origin: ReplayedFile) -> None:
        """Report the records of a damaged frame of class `memory` as lost, at its position in the log."""
        topic = self.directory.by_id.get(lost.topic_id)
        if topic is None or topic.epoch != lost.epoch or not self._is_mine(lost.topic_id):
            return
        self.touched_topics.add(lost.topic_id)
        self._last_seen[lost.topic_id] = self._lost_parts
        if lost.last_seq < topic.next_seq:
            first = max(lost.first_seq, self._held.get(lost.topic_id, 0) + 1, topic.earliest_seq)
            first = max(first, self.segments.sealed_to(lost.topic_id) + 1)
            if first <= lost.last_seq and topic.live_within(first, lost.last_seq):
                self._lose_below(topic, first, lost.last_seq)
            return
        if lost.first_seq > topic.next_seq and not self._may_be_missing():
            raise CorruptData(
                "records are missing before a frame", topic=topic.name, expected_seq=topic.next_seq,
                found_seq=lost.first_seq, file=origin.path, offset=lost.offset,
            )  # fmt: skip
        self._lose(topic, lost.last_seq)

    def copy_loss(self, lost: SkippedAppend, batch: CommitBatch) -> None:
        """Stage the loss of given-up records, before the copies of the frames that follow them."""
        topic = self.directory.by_id.get(lost.topic_id)
        if topic is not None and any(a <= lost.first_seq and lost.last_seq <= b for a, b in topic.lost):
            loss = RangeLost(lost.first_seq, lost.last_seq)
            batch.add_control(frame_of(loss, topic.topic_id, topic.epoch), topic)

    def lose_log(self, shard: int, shards: int, size: int) -> None:
        """Record that `size` bytes of a shard's log are lost at this point, with unknown content.

        Later log shows how far some topics had advanced. The lost bytes may have contained further seqs of
        all other topics, and new topics. `skip_lost` makes sure that none of these numbers is assigned
        again."""
        self._unknown.append(_LostLog(self._lost_parts, shard, shards, size))
        self._lost_parts += 1

    def skip_lost(self) -> None:
        """Skip all seqs, topic ids and epochs that may have been assigned in lost parts of the log."""
        if not self._unknown:
            return
        for topic in list(self.directory.by_id.values()):
            last_seen = self._last_seen.get(topic.topic_id, 0)
            if topic.config.durability < Durability.FSYNC:
                last_seen = 0  # the lost log may have contained a reservation of seqs
            size = sum(
                each.bytes
                for each in self._unknown
                if last_seen <= each.lost_parts and shard_of(topic.topic_id, each.shards) == each.shard
            )
            if size:
                self.touched_topics.add(topic.topic_id)
                self._lose(topic, topic.next_seq - 1 + size * RECORDS_PER_BYTE_MAX)
        size = sum(each.bytes for each in self._unknown)
        shards = max(each.shards for each in self._unknown)
        self.directory.advance_identity(*ids_upper_bound(self.directory.last_identity, size, shards))

    def adopt_orphan(self, topic_id: int, orphan: Orphan) -> ShardTopic:
        """Restore a topic that only exists in segments.

        Seqs that are missing in the segments were deleted or lost, which cannot be distinguished. They are
        reported as lost.
        """
        topic = self.create_placeholder(topic_id, orphan.epoch)
        ranges = self.segments.covered(topic_id)
        topic.next_seq = ranges[-1][1] + 1
        reached = 0
        for first, last in ranges:
            if first > reached + 1:
                topic.lost = with_range(topic.lost, reached + 1, first - 1)
                self.gaps.append((topic.name, reached + 1, first - 1))
            reached = last
        topic.dead = orphan.dead or None
        held = sum(last - first + 1 for first, last in ranges)
        topic.staged_count = max(held - len(orphan.dead), 0)
        topic.staged_bytes = orphan.bytes * topic.staged_count // max(orphan.records, 1)
        topic.last_ts, topic.due_us, topic.own_due_us = orphan.last_ts, orphan.due_us, orphan.due_us
        topic.attributes_to = topic.next_seq - 1
        topic.publish()
        return topic

    def stage_placeholders(self, batch: CommitBatch) -> list[ShardTopic]:
        """Stage the creation of the placeholder topics, and return them."""
        found = [self.directory.by_id[each] for each in self._placeholders if each in self.directory.by_id]
        for topic in found:
            batch.add_control(create_frame(topic), topic)
        return found

    def scan_behind_damage(
        self, pieces: Iterable[WalScanChunk], origin: ReplayedFile, start: int, *, is_new: bool
    ) -> int:
        """Evaluate the frames after damage at `start`: created and deleted topics, and lost seqs.

        The headers of these frames are valid; their bodies may be damaged. Their records are not recovered,
        because the log was cut before them. The missing records are reported. If `is_new`, the bytes between
        these frames are lost log. Otherwise an earlier start has reported them, after the frames that it
        copied.

        Return the offset at which the frames end.
        """
        last: dict[int, tuple[int, int]] = {}
        for piece in pieces:
            if is_new and piece.file_offset > start:
                self.lose_log(origin.shard, origin.shards, piece.file_offset - start)
            start = piece.stop
            source = _RowSource(piece, origin)
            words = piece.batch.words
            types = frames.types_of(words)
            mine = self._mine(words, origin)
            for row in np.flatnonzero(_IS_CONTROL[types]).tolist():
                one = piece.batch.take(slice(row, row + 1))
                if frames.first_bad_body(piece.buffer, one) is not None:
                    # The header alone shows the id and the epoch of a topic that was created here.
                    if types[row] == FrameType.TOPIC_CREATE:
                        epoch = int(frames.epochs_of(words[row : row + 1])[0])
                        last.setdefault(int(words[row, layout.W_TOPIC]), (epoch, 0))
                elif types[row] != FrameType.IDEMPOTENCY_KEY:
                    self._control(source, row, is_excluded=False)
            for row in np.flatnonzero(mine & (types == FrameType.APPEND)).tolist():
                stop = int(words[row, layout.W_BASE_SEQ] + frames.counts_of(words[row : row + 1])[0])
                epoch = int(frames.epochs_of(words[row : row + 1])[0])
                last[int(words[row, layout.W_TOPIC])] = (epoch, stop - 1)
                self._last_seen[int(words[row, layout.W_TOPIC])] = self._lost_parts
        for topic_id, (epoch, seq) in last.items() if is_new else ():
            topic = self.directory.by_id.get(topic_id)
            is_gone = topic_id in self._gone or self.is_known(topic_id) or not self._is_mine(topic_id)
            if topic is None and not is_gone:
                topic = self.create_placeholder(topic_id, epoch)
            if topic is not None and topic.epoch == epoch and seq:
                self._lose(topic, seq)
        return start

    # -- end of a file, end of replay -----------------------------------------------------------------

    def settle_reservations(self, shard: int, shards: int, incarnation: int) -> None:
        """Settle reservations after an orderly end of a shard's stream.

        This incarnation and earlier ones acknowledged no seq above the heads. A reservation that a later
        incarnation made, according to a snapshot, stays open. So do those of ephemeral topics, whose records
        are in no stream.
        """
        for topic in list(self._open.values()):
            is_its_own = shard_of(topic.topic_id, shards) == shard
            is_its_own &= topic.config.durability != Durability.EPHEMERAL
            if is_its_own and self._reserved_in.get(topic.topic_id, 0) <= incarnation:
                topic.reservation.settle(topic.head_seq)
                self.touched_topics.add(topic.topic_id)
                del self._open[topic.topic_id]

    def settle_rows(self, missing: Sequence[MissingSegment]) -> None:
        """Compare the snapshot rows with the existing records, after the complete log is applied (C3).

        Every live record of a row must be in a segment or in the log. If a segment is missing, the topic is
        halted, because the segment may come back. With `is_lenient`, the records are given up and reported
        instead, unless they are in the cold tier. If no segment is missing, the log has lost its tail, and
        the records are reported as lost.
        """
        ids = np.fromiter(sorted([topic.topic_id for topic in self._rows]), dtype=np.uint64)
        tails = dict(zip(ids.tolist(), self.segments.sealed_to_many(ids).tolist(), strict=True))
        for topic in self._rows:
            if not topic.count or self.directory.by_id.get(topic.topic_id) is not topic:
                continue
            held = max(self._held.get(topic.topic_id, 0), tails[topic.topic_id])
            holes = self._holes(topic, held) if missing else []
            if held < topic.head_seq and topic.live_within(held + 1, topic.head_seq):
                holes.append((max(held + 1, topic.earliest_seq), topic.head_seq))
            cause = _cause(missing, topic.topic_id, holes[0][0]) if holes else None
            if cause is not None and (cause.is_cold or not self.is_lenient):
                self.halts.append(Halt(topic, cause.part, cause.reason, holes[0][0], holes[-1][1]))
                continue
            for first, last in holes:
                self._lose_below(topic, first, last)
        if self.halts:
            self._keep_missing(missing)
        self._rows.clear()

    def _keep_missing(self, missing: Sequence[MissingSegment]) -> None:
        """Keep missing segments in the next snapshot: those of halted topics, and all shared ones."""
        halted = {halt.topic.topic_id for halt in self.halts}
        for each in missing:
            topic_id, _, _ = parse_stem(each.stem) or (0, 0, 0)
            if each.ref is not None and (not topic_id or topic_id in halted):
                self.segments.missing[each.ref.number] = each.ref

    def _holes(self, topic: ShardTopic, held: int) -> list[tuple[int, int]]:
        """Return ranges up to `held` with live records in neither a segment nor the log."""
        covered = self.segments.covered(topic.topic_id, topic.earliest_seq - 1)
        if topic.has_index:
            covered.append((topic.index.first_seq, held))
        holes, reached = [], topic.earliest_seq - 1
        for first, last in sorted(covered):
            if first > reached + 1 and topic.live_within(reached + 1, first - 1):
                holes.append((reached + 1, first - 1))
            reached = max(reached, last)
        return holes

    def _lose_below(self, topic: ShardTopic, first: int, last: int) -> None:
        topic.mark_lost(first, last)
        self.touched_topics.add(topic.topic_id)
        self.gaps.append((topic.name, first, last))

    def settle_names(self) -> None:
        """Decide which shard owns the names of topics that other shards created (C6)."""
        for name, (topic_id, epoch) in list(self.directory.remote_names.items()):
            here = self.directory.find(name)
            if here is not None and here.epoch > epoch:
                # The name was created again here. After a deletion of that topic, this shard still owns the
                # name.
                del self.directory.remote_names[name]
                continue
            owner = shard_of(topic_id, self.identity.shards)
            if owner != self.identity.shard and self._is_home(name):
                self.directory.delegated_names[name] = owner
            elif owner == self.identity.shard and not self._is_home(name):
                # The home shard redirects to this shard, even if the topic is deleted by now.
                self.directory.adopted.add(name)

    def settle_open_reservations(
        self, batch: CommitBatch, lost_streams: list[tuple[int, int]]
    ) -> list[tuple[str, int, int]]:
        """Settle the reservations that a crash left open. Stage the control frames for this.

        If a topic's stream is in `lost_streams`, seqs above the head may have been acknowledged. These
        reserved seqs are skipped and reported as lost. For other topics the kernel kept all written frames,
        so the reservation is reduced to the head. The records of ephemeral topics are always lost, and their
        reserved seqs are skipped too. Gaps from damage are also logged.

        Return the skipped ranges as (topic name, first, last).
        """
        announced = []
        for topic in self._open.values():
            reserved = topic.reservation.reserved
            is_lossy = any(shard_of(topic.topic_id, shards) == shard for shards, shard in lost_streams)
            is_lossy |= topic.config.durability == Durability.EPHEMERAL
            lost = topic.skip_to(reserved) if is_lossy else None
            if lost is not None:
                announced.append((topic.name, *lost))
                batch.add_control(frame_of(RangeLost(*lost), topic.topic_id, topic.epoch), topic)
            settled = frame_of(HeadReserved(topic.head_seq, True), topic.topic_id, topic.epoch)
            batch.add_control(settled, topic)
            topic.reservation.settle(topic.head_seq)
        self._open.clear()
        for name, first, last in self.gaps:
            gapped = self.directory.find(name)
            if gapped is not None and any(a <= first and last <= b for a, b in gapped.lost):
                batch.add_control(frame_of(RangeLost(first, last), gapped.topic_id, gapped.epoch), gapped)
        return announced

    def copy(
        self, piece: WalScanChunk, batch: CommitBatch, origin: ReplayedFile, *, excluded: Mask | None = None
    ) -> None:
        """Stage the frames of a chunk in doubt to be written again, as far as they belong to this shard.

        Creations of other shards' topics are copied too, since they decide which shard owns a name. Frames of
        deleted topics are not copied.
        """
        words = piece.batch.words
        types = frames.types_of(words)
        appends = types == FrameType.APPEND
        wanted = appends & self._mine(words, origin)
        if excluded is not None:
            wanted &= ~excluded
        buffer = bytearray(piece.buffer)
        totals = piece.batch.total_bytes
        start = 0
        for row in np.flatnonzero(_IS_CONTROL[types]).tolist():
            if not self._is_control_wanted(_RowSource(piece, origin), row, excluded):
                continue
            self._copy_appends(piece, buffer, wanted, start, row, batch)
            offset = int(piece.batch.offsets[row])
            topic = self.directory.by_id.get(int(words[row, layout.W_TOPIC]))
            batch.add_control(buffer[offset : offset + int(totals[row])], topic)
            start = row + 1
        self._copy_appends(piece, buffer, wanted, start, len(words), batch)

    def _is_control_wanted(self, source: _RowSource, row: int, excluded: Mask | None) -> bool:
        if excluded is not None and excluded[row]:
            return False
        words = source.piece.batch.words
        topic_id = int(words[row, layout.W_TOPIC])
        kind = int(frames.types_of(words[row : row + 1])[0])
        if not self._is_mine(topic_id) or not source.is_writer_of(topic_id):
            return kind == FrameType.TOPIC_CREATE
        if kind == FrameType.IDEMPOTENCY_KEY:
            body = self._decoded(source, row)
            assert isinstance(body, KeyUsed)
            pending = _PendingKey(topic_id, body)
            if row + 1 >= len(words) or not _is_append_of(pending, words[row + 1]):
                return False
        return topic_id in self.directory.by_id or kind == FrameType.TOPIC_DELETE

    def _copy_appends(
        self, piece: WalScanChunk, buffer: bytearray, wanted: Mask, start: int, stop: int, batch: CommitBatch
    ) -> None:
        """Stage the wanted append rows of [start, stop) as one intake."""
        rows = start + np.flatnonzero(wanted[start:stop])
        copies = piece.batch.copies
        if copies is None or not copies.routers[rows].any():
            self._copy_plain(piece, buffer, rows, batch)
            return
        # Build a new routed frame from the wanted copies.
        holders = np.where(copies.routers[rows] != 0, copies.container_offsets[rows], -1)
        edges = np.flatnonzero(holders[1:] != holders[:-1]) + 1
        for run in np.split(rows, edges):
            if copies.routers[run[0]]:
                self._copy_routed(piece, run, batch)
            else:
                self._copy_plain(piece, buffer, run, batch)

    def _copy_routed(self, piece: WalScanChunk, rows: Rows, batch: CommitBatch) -> None:
        """Stage a new routed frame with the copies in these rows, which come from one routed frame."""
        words, copies = piece.batch.words, piece.batch.copies
        assert copies is not None
        made: list[tuple[CopyRow, RoutedCopy]] = []
        for row in rows.tolist():
            header = [int(word) for word in words[row]]
            topic = self.directory.by_id.get(header[layout.W_TOPIC])
            count, epoch = header[layout.W_COUNT_EPOCH] & 0xFFFFFFFF, header[layout.W_COUNT_EPOCH] >> 32
            if topic is None or topic.epoch != epoch:
                continue
            base = header[layout.W_BASE_SEQ]
            durability = header[layout.W_TAIL] >> layout.FLAGS_SHIFT & layout.DURABILITY_MASK
            router, cursor = int(copies.routers[row]), int(copies.cursors[row])
            copy = CopyRow(
                topic.topic_id, base, header[layout.W_COMMIT_TS], epoch, router, cursor, durability
            )
            made.append((copy, RoutedCopy(topic, base, base + count - 1, 0)))
        if made:
            hops = int(frames.hops_of(words[rows[:1]])[0])
            carried = routed_content_of(piece.buffer, piece.batch, int(rows[0]), hops=hops)
            batch.add_routed(
                RoutedPart(routed_frame(carried, [each for each, _ in made]), [c for _, c in made])
            )

    def _copy_plain(self, piece: WalScanChunk, buffer: bytearray, rows: Rows, batch: CommitBatch) -> None:
        """Stage append frames that are not part of a routed frame."""
        if not len(rows):
            return
        words = piece.batch.words
        stretches = []
        for first, end in _runs(rows, words[rows, layout.W_TOPIC]):
            topic = self.directory.by_id.get(int(words[first, layout.W_TOPIC]))
            if topic is not None and bool((frames.epochs_of(words[first:end]) == topic.epoch).all()):
                stretches.append(AdmittedRange(topic, first, end, False))
        if stretches:
            entries = np.zeros((0, WORDS), dtype=np.uint64)
            batch.add_intake(FrameIntake(buffer, piece.batch, entries, stretches))


def _cause(missing: Sequence[MissingSegment], topic_id: int, first_seq: int) -> MissingSegment | None:
    """Return the missing segment to report for a topic's records from `first_seq` on.

    This is the topic's own segment with the greatest start up to `first_seq`, otherwise a shared segment.
    None means that no missing segment can contain these records.
    """
    own: list[tuple[int, MissingSegment]] = []
    shared: list[MissingSegment] = []
    for each in missing:
        of_topic, first, _ = parse_stem(each.stem) or (0, 0, 0)
        if not of_topic:
            shared.append(each)
        elif of_topic == topic_id:
            own.append((first, each))
    before = [each for first, each in sorted(own, key=lambda one: one[0]) if first <= first_seq]
    candidates = before[-1:] or shared or [each for _, each in own]
    return candidates[0] if candidates else None


def _is_append_of(pending: _PendingKey, words: Any) -> bool:
    """Return True if this row is the append that belongs to the key frame."""
    header = [int(word) for word in words]
    return (
        header[layout.W_HEAD] >> layout.TYPE_SHIFT & 0xFF == FrameType.APPEND
        and header[layout.W_TOPIC] == pending.topic_id
        and header[layout.W_BASE_SEQ] == pending.body.first_seq
        and header[layout.W_COUNT_EPOCH] & 0xFFFFFFFF == pending.body.records
        and header[layout.W_COMMIT_TS] == pending.body.commit_ts
    )


def _by_value(rows: Rows, values: frames.U64) -> Iterator[Rows]:
    """Split rows by value; within one value they keep their order."""
    if len(rows) == 1 or bool((values == values[0]).all()):
        yield rows
        return
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order].astype(np.int64)) != 0) + 1
    yield from np.split(rows[order], edges)


def _runs(rows: Rows, values: frames.U64) -> Iterator[tuple[int, int]]:
    """Yield [first, stop) of adjacent rows with equal values."""
    edges = np.flatnonzero((np.diff(rows) != 1) | (values[1:] != values[:-1])) + 1
    for run in np.split(rows, edges):
        yield int(run[0]), int(run[-1]) + 1
