"""Copies of frames in doubt, which are written again into the first file of this incarnation. Pure."""

from __future__ import annotations

import numpy as np

from ringlog.actors.wal_shard.commit.admission import AdmittedRange, FrameIntake
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch, RoutedCopy, RoutedPart
from ringlog.actors.wal_shard.commit.control_records import KeyUsed, RangeLost, frame_of
from ringlog.actors.wal_shard.recovery.replay_rows import (
    IS_CONTROL,
    Mask,
    ReplayedFile,
    Rows,
    RowSource,
    runs,
)
from ringlog.actors.wal_shard.recovery.replayed_topics import ReplayedTopics
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.layout import FrameType
from ringlog.frame.routed_frame import CopyRow, routed_content_of, routed_frame
from ringlog.frame.settle_entry import WORDS
from ringlog.storage.recovery import SkippedAppend, WalScanChunk


class CopyForward:
    """Stages frames in doubt of this shard's topics into a commit batch."""

    def __init__(self, topics: ReplayedTopics, batch: CommitBatch) -> None:
        self._topics, self._directory, self._batch = topics, topics.directory, batch

    def copy_loss(self, lost: SkippedAppend) -> None:
        """Stage the loss of given-up records, before the copies of the frames that follow them."""
        topic = self._directory.by_id.get(lost.topic_id)
        if topic is not None and any(a <= lost.first_seq and lost.last_seq <= b for a, b in topic.lost):
            loss = RangeLost(lost.first_seq, lost.last_seq)
            self._batch.add_control(frame_of(loss, topic.topic_id, topic.epoch), topic)

    def copy(self, piece: WalScanChunk, origin: ReplayedFile, *, excluded: Mask | None = None) -> None:
        """Stage the frames of a chunk in doubt to be written again, as far as they belong to this shard.

        Creations of other shards' topics are copied too, since they decide which shard owns a name. Frames of
        deleted topics are not copied.
        """
        source = RowSource(piece, origin)
        words = piece.batch.words
        types = frames.types_of(words)
        appends = types == int(FrameType.APPEND)
        wanted = appends & source.is_of_shard(self._topics.identity)
        if excluded is not None:
            wanted &= ~excluded
        buffer = bytearray(piece.buffer)
        totals = piece.batch.total_bytes
        start = 0
        for row in np.flatnonzero(IS_CONTROL[types]).tolist():
            if not self._is_control_wanted(source, row, excluded):
                continue
            self._copy_appends(piece, buffer, wanted, start, row)
            offset = int(piece.batch.offsets[row])
            topic = self._directory.by_id.get(int(words[row, layout.W_TOPIC]))
            self._batch.add_control(buffer[offset : offset + int(totals[row])], topic)
            start = row + 1
        self._copy_appends(piece, buffer, wanted, start, len(words))

    def _is_control_wanted(self, source: RowSource, row: int, excluded: Mask | None) -> bool:
        if excluded is not None and excluded[row]:
            return False
        words = source.piece.batch.words
        topic_id = int(words[row, layout.W_TOPIC])
        kind = int(frames.types_of(words[row : row + 1])[0])
        if not self._topics.is_mine(topic_id) or not source.is_writer_of(topic_id):
            return kind == FrameType.TOPIC_CREATE
        if kind == FrameType.IDEMPOTENCY_KEY:
            body = source.body(row)
            assert isinstance(body, KeyUsed)
            if not source.is_followed_by_append(row, body):
                return False
        return topic_id in self._directory.by_id or kind == FrameType.TOPIC_DELETE

    def _copy_appends(
        self, piece: WalScanChunk, buffer: bytearray, wanted: Mask, start: int, stop: int
    ) -> None:
        """Stage the wanted append rows of [start, stop) as one intake."""
        rows = start + np.flatnonzero(wanted[start:stop])
        copies = piece.batch.copies
        if copies is None or not copies.routers[rows].any():
            self._copy_plain(piece, buffer, rows)
            return
        # Build a new routed frame from the wanted copies.
        holders = np.where(copies.routers[rows] != 0, copies.container_offsets[rows], -1)
        edges = np.flatnonzero(holders[1:] != holders[:-1]) + 1
        for run in np.split(rows, edges):
            if copies.routers[run[0]]:
                self._copy_routed(piece, run)
            else:
                self._copy_plain(piece, buffer, run)

    def _copy_routed(self, piece: WalScanChunk, rows: Rows) -> None:
        """Stage a new routed frame with the copies in these rows, which come from one routed frame."""
        words, copies = piece.batch.words, piece.batch.copies
        assert copies is not None
        made: list[tuple[CopyRow, RoutedCopy]] = []
        for row in rows.tolist():
            header = [int(word) for word in words[row]]
            topic = self._directory.by_id.get(header[layout.W_TOPIC])
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
            self._batch.add_routed(
                RoutedPart(routed_frame(carried, [each for each, _ in made]), [c for _, c in made])
            )

    def _copy_plain(self, piece: WalScanChunk, buffer: bytearray, rows: Rows) -> None:
        """Stage append frames that are not part of a routed frame."""
        if not len(rows):
            return
        words = piece.batch.words
        stretches = []
        for first, end in runs(rows, words[rows, layout.W_TOPIC]):
            topic = self._directory.by_id.get(int(words[first, layout.W_TOPIC]))
            if topic is not None and bool((frames.epochs_of(words[first:end]) == topic.epoch).all()):
                stretches.append(AdmittedRange(topic, first, end, False))
        if stretches:
            entries = np.zeros((0, WORDS), dtype=np.uint64)
            self._batch.add_intake(FrameIntake(buffer, piece.batch, entries, stretches))
