"""Replay: applies the frames of the log to the state of the topics. Pure.

Replay uses the same state objects as normal operation. A frame that is already applied is skipped. A frame
after an unexplained gap is damage. Frames of topics that belong to other shards under the current shard count
are not applied. Only the names of these topics are recorded, because they decide which shard owns a name
(topic/directory.py).

Appends between two control frames are applied topic by topic instead of row by row. Within one topic they
keep their order, and no state depends on the order between topics.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ringlog.actors.wal_shard.commit.admission import HAVE_DELIVERY_ATTRIBUTES, update_next_expiry
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
)
from ringlog.actors.wal_shard.commit.idempotency import remember_write
from ringlog.actors.wal_shard.leases.lease_registry import replay_change, replay_config
from ringlog.actors.wal_shard.recovery.held_records import HeldRecords
from ringlog.actors.wal_shard.recovery.losses import ReplayLosses
from ringlog.actors.wal_shard.recovery.open_reservations import OpenReservations
from ringlog.actors.wal_shard.recovery.replay_rows import (
    IS_CONTROL,
    Mask,
    ReplayedFile,
    Rows,
    RowSource,
    by_value,
)
from ringlog.actors.wal_shard.recovery.replayed_topics import ReplayedTopics
from ringlog.actors.wal_shard.retention.removal import replay_removal
from ringlog.actors.wal_shard.routing import mark_trimmed, replay_router
from ringlog.actors.wal_shard.shard_state import ShardIdentity
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.layout import FrameType
from ringlog.frame.measure import measure
from ringlog.leases.change import LeaseChange
from ringlog.storage.recovery import SkippedAppend, WalScanChunk
from ringlog.topic.config import TopicConfig
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.idempotency import IdempotencyEntry
from ringlog.topic.segment_catalog import SegmentCatalog
from ringlog.topic.state import ShardTopic


class Replay:
    """Applies chunks of the log, in file order, to the topic directory of one shard."""

    def __init__(
        self, identity: ShardIdentity, directory: TopicDirectory, segments: SegmentCatalog, *,
        is_lenient: bool = False,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.touched_topics: set[int] = set()
        """Ids of topics that the log changes after the snapshot."""
        self.records: int = 0
        self.losses: ReplayLosses = ReplayLosses(directory, self.touched_topics, is_lenient=is_lenient)
        self.reservations: OpenReservations = OpenReservations(self.touched_topics)
        self.topics: ReplayedTopics = ReplayedTopics(
            identity, directory, self.losses, self.reservations, self.touched_topics
        )
        self.held: HeldRecords = HeldRecords(directory, segments, self.losses)
        self._identity = identity

    def load(self, topics: Iterable[tuple[ShardTopic, bool, int]]) -> None:
        """Load topics from snapshot rows: (topic, True if it belongs to this shard, incarnation of the row).

        Of topics of other shards, only the name is recorded.
        """
        ours = []
        for topic, is_ours, incarnation in topics:
            if not is_ours:
                self.topics.note_name(topic.topic_id, TopicCreated(topic.name, topic.epoch, b""))
                continue
            ours.append(topic)
            self.reservations.load(topic, incarnation)
        self.held.load(self.topics.load(ours))

    def apply(self, piece: WalScanChunk, origin: ReplayedFile, *, excluded: Mask | None = None) -> None:
        """Apply one chunk of a file without the `excluded` rows. Raise CorruptData for damage."""
        source = RowSource(piece, origin)
        words = piece.batch.words
        types = frames.types_of(words)
        appends = types == int(FrameType.APPEND)
        ours = appends & source.is_of_shard(self._identity)
        if excluded is not None:
            ours &= ~excluded
        start = 0
        for row in np.flatnonzero(IS_CONTROL[types]).tolist():
            if int(types[row]) == FrameType.IDEMPOTENCY_KEY:
                self._key_used(source, row)
                continue
            self._append_rows(source, ours, start, row)
            is_excluded = excluded is not None and bool(excluded[row])
            self._control(source, row, is_excluded=is_excluded)
            start = row + 1
        self._append_rows(source, ours, start, len(words))

    # -- appends --------------------------------------------------------------------------------------

    def _append_rows(self, source: RowSource, ours: Mask, start: int, stop: int) -> None:
        """Apply this shard's append rows in [start, stop), topic by topic."""
        rows = start + np.flatnonzero(ours[start:stop])
        if not len(rows):
            return
        for of_topic in by_value(rows, source.piece.batch.words[rows, layout.W_TOPIC]):
            self.touched_topics.add(int(source.piece.batch.words[of_topic[0], layout.W_TOPIC]))
            self._appends(source, of_topic)

    def _appends(self, source: RowSource, rows: Rows) -> None:
        """Apply append rows of one topic, in order."""
        words = source.piece.batch.words[rows]
        topic = self.topics.of_rows(source, int(rows[0]), words)
        if topic is None:
            return
        self.losses.see(topic.topic_id)
        stops = words[:, layout.W_BASE_SEQ] + frames.counts_of(words)
        is_current = frames.epochs_of(words) == topic.epoch
        self.held.add(topic, source, rows, words, is_current)
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

    @staticmethod
    def _advance_routers(topic: ShardTopic, source: RowSource, rows: Rows) -> None:
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

    def _stage(self, topic: ShardTopic, source: RowSource, rows: Rows, words: frames.U64) -> None:
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
        for of_producer in by_value(np.arange(len(words)), words[:, layout.W_PRODUCER_ID]):
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

    def _close_gap(self, topic: ShardTopic, base: int, source: RowSource, row: int) -> None:
        if base == topic.next_seq:
            return
        if base < topic.next_seq:
            raise self._damage("a frame overlaps existing records", topic, base, source, row)
        if not self.losses.may_be_missing():
            raise self._damage("records are missing before a frame", topic, base, source, row)
        self.losses.lose(topic, base - 1)

    @staticmethod
    def _damage(text: str, topic: ShardTopic, base: int, source: RowSource, row: int) -> CorruptData:
        return CorruptData(
            text, topic=topic.name, expected_seq=topic.next_seq, found_seq=base, file=source.origin.path,
            offset=source.offset(row),
        )  # fmt: skip

    # -- idempotency keys -----------------------------------------------------------------------------

    def _key_used(self, source: RowSource, row: int) -> None:
        """Apply an idempotency key only if its append follows directly.

        A torn tail removes both or neither.
        """
        body = source.body(row)
        assert isinstance(body, KeyUsed)
        topic = self.directory.by_id.get(int(source.piece.batch.words[row, layout.W_TOPIC]))
        if topic is None or not source.is_followed_by_append(row, body):
            return
        past = IdempotencyEntry(body.first_seq, body.records, body.commit_ts, body.created_us, body.window_ms)
        remember_write(topic, body.key, body.ids, past)

    # -- control frames -------------------------------------------------------------------------------

    def _control(self, source: RowSource, row: int, *, is_excluded: bool) -> None:
        body = source.body(row)
        topic_id = int(source.piece.batch.words[row, layout.W_TOPIC])
        mine = self.topics.is_mine(topic_id)
        if isinstance(body, TopicCreated):
            if source.is_other_layout or not mine:
                self.topics.note_name(topic_id, body)
            if mine and not self.topics.is_home(body.name):
                # The home shard of a name decides which shard owns the topic. That shard must accept requests
                # for it.
                self.directory.adopted.add(body.name)
        # Control frames of topics that the file's writer did not own only concern names.
        if mine and not is_excluded and source.is_writer_of(topic_id):
            self._apply_control(topic_id, body)

    def _apply_control(self, topic_id: int, body: Body) -> None:
        topic = self.directory.by_id.get(topic_id)
        self.touched_topics.add(topic_id)
        if isinstance(body, TopicCreated):
            self.topics.create(topic_id, body, topic)
        elif isinstance(body, TopicRemoved):
            self.topics.remove(topic_id, topic)
        elif topic is None:
            return
        elif isinstance(body, ConfigChanged):
            topic.config = TopicConfig.from_bytes(body.config)
            replay_config(topic)
            # The TTL may have changed. Make the topic due at once; retention then computes its next expiry.
            topic.due_us = 1 if topic.config.ttl_ms and topic.staged_count else topic.own_due_us
            self.directory.register_config(topic)
        elif isinstance(body, HeadReserved):
            self.reservations.apply(topic, body)
        elif isinstance(body, RangeLost):
            if topic.skip_to(body.last) is None:
                self._note_lost(topic, body)
            elif body.is_trim is True:
                mark_trimmed(topic, body.first, body.last)
            self.losses.confirm(topic, body)
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

    @staticmethod
    def _note_lost(topic: ShardTopic, body: RangeLost) -> None:
        """Apply the loss of a range below the head, from a missing segment.

        An older snapshot does not have it.
        """
        first, last = max(body.first, topic.earliest_seq), body.last
        if first <= last and not any(a <= first and last <= b for a, b in topic.lost):
            topic.mark_lost(first, last)

    # -- damage ---------------------------------------------------------------------------------------

    def announce_loss(self, lost: SkippedAppend, origin: ReplayedFile) -> None:
        """Report the records of a damaged frame of class `memory` as lost, at its position in the log."""
        topic = self.directory.by_id.get(lost.topic_id)
        if topic is None or topic.epoch != lost.epoch or not self.topics.is_mine(lost.topic_id):
            return
        self.touched_topics.add(lost.topic_id)
        self.losses.see(lost.topic_id)
        if lost.last_seq < topic.next_seq:
            first = self.held.first_unheld(topic, lost.first_seq)
            if first <= lost.last_seq and topic.live_within(first, lost.last_seq):
                self.losses.lose_below(topic, first, lost.last_seq)
            return
        if lost.first_seq > topic.next_seq and not self.losses.may_be_missing():
            raise CorruptData(
                "records are missing before a frame", topic=topic.name, expected_seq=topic.next_seq,
                found_seq=lost.first_seq, file=origin.path, offset=lost.offset,
            )  # fmt: skip
        self.losses.lose(topic, lost.last_seq)

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
                self.losses.lose_log(origin.shard, origin.shards, piece.file_offset - start)
            start = piece.stop
            source = RowSource(piece, origin)
            words = piece.batch.words
            types = frames.types_of(words)
            mine = source.is_of_shard(self._identity)
            for row in np.flatnonzero(IS_CONTROL[types]).tolist():
                one = piece.batch.take(slice(row, row + 1))
                if frames.first_bad_body(piece.buffer, one) is not None:
                    # The header alone shows the id and the epoch of a topic that was created here.
                    if int(types[row]) == FrameType.TOPIC_CREATE:
                        epoch = int(frames.epochs_of(words[row : row + 1])[0])
                        last.setdefault(int(words[row, layout.W_TOPIC]), (epoch, 0))
                elif int(types[row]) != FrameType.IDEMPOTENCY_KEY:
                    self._control(source, row, is_excluded=False)
            for row in np.flatnonzero(mine & (types == int(FrameType.APPEND))).tolist():
                stop = int(words[row, layout.W_BASE_SEQ] + frames.counts_of(words[row : row + 1])[0])
                epoch = int(frames.epochs_of(words[row : row + 1])[0])
                last[int(words[row, layout.W_TOPIC])] = (epoch, stop - 1)
                self.losses.see(int(words[row, layout.W_TOPIC]))
        for topic_id, (epoch, seq) in last.items() if is_new else ():
            topic = self.directory.by_id.get(topic_id)
            is_gone = self.topics.is_gone(topic_id) or not self.topics.is_mine(topic_id)
            if topic is None and not is_gone:
                topic = self.topics.create_placeholder(topic_id, epoch)
            if topic is not None and topic.epoch == epoch and seq:
                self.losses.lose(topic, seq)
        return start
