"""The rows of the log that replay reads: the chunk and the file that they come from. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringlog.actors.wal_shard.commit.control_records import Body, KeyUsed, decode_body
from ringlog.actors.wal_shard.shard_state import ShardIdentity
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.layout import FrameType
from ringlog.placement import shard_of, shards_of
from ringlog.storage.recovery import WalScanChunk

IS_CONTROL = np.ones(256, dtype=np.bool_)
"""True for frame types that are neither records nor marks.
A table lookup is faster than `isin` for few frames."""
IS_CONTROL[[FrameType.APPEND, FrameType.GROUP_MARK, FrameType.CHECKPOINT_MARK]] = False

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
class RowSource:
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

    def is_of_shard(self, identity: ShardIdentity) -> Mask:
        """Return a mask (n,) of rows whose topics belong to this shard under the current shard count."""
        words = self.piece.batch.words
        if not self.is_other_layout:
            return np.ones(len(words), dtype=np.bool_)
        owners = shards_of(words[:, layout.W_TOPIC], identity.shards)
        return np.asarray(owners == identity.shard, dtype=np.bool_)

    def body(self, row: int) -> Body:
        """Decode the body of a control frame. Raise CorruptData."""
        words = self.piece.batch.words[row]
        start = int(self.piece.batch.offsets[row]) + layout.HEADER_BYTES
        raw_len = int(words[layout.W_TAIL] & np.uint64(0xFFFFFFFF))
        frame_type = int(words[layout.W_HEAD] >> np.uint64(layout.TYPE_SHIFT)) & 0xFF
        try:
            return decode_body(frame_type, memoryview(self.piece.buffer)[start : start + raw_len])
        except CorruptData as e:
            e.detail.update(file=self.origin.path, offset=self.offset(row))
            raise

    def is_followed_by_append(self, row: int, key: KeyUsed) -> bool:
        """Return True if the next row is the append that belongs to the key frame `key` in this row.

        A key is the last row of a chunk only if the log ends or is damaged behind it.
        """
        words = self.piece.batch.words
        if row + 1 >= len(words):
            return False
        header = [int(word) for word in words[row + 1]]
        return (
            header[layout.W_HEAD] >> layout.TYPE_SHIFT & 0xFF == FrameType.APPEND
            and header[layout.W_TOPIC] == int(words[row, layout.W_TOPIC])
            and header[layout.W_BASE_SEQ] == key.first_seq
            and header[layout.W_COUNT_EPOCH] & 0xFFFFFFFF == key.records
            and header[layout.W_COMMIT_TS] == key.commit_ts
        )


def by_value(rows: Rows, values: frames.U64) -> Iterator[Rows]:
    """Split rows by value; within one value they keep their order."""
    if len(rows) == 1 or bool((values == values[0]).all()):
        yield rows
        return
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order].astype(np.int64)) != 0) + 1
    yield from np.split(rows[order], edges)


def runs(rows: Rows, values: frames.U64) -> Iterator[tuple[int, int]]:
    """Yield [first, stop) of adjacent rows with equal values."""
    edges = np.flatnonzero((np.diff(rows) != 1) | (values[1:] != values[:-1])) + 1
    for run in np.split(rows, edges):
        yield int(run[0]), int(run[-1]) + 1
