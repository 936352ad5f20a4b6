"""Judging a WAL file: which frames to believe, where it ends, and whether that end is damage. Pure.

Bytes come through a function that the caller gives; nothing here opens a file. The judgement rests on
what the log says of itself (storage/layout.py): every group's mark names the end and the seal of the
group before it, and how far a sync had succeeded when it was written. So whatever lies below the
largest such statement must be there, and an invalid frame there is corruption; what lies above may be
torn by a crash, and is cut (RE-6, RD-4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import msgspec
import numpy as np

from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import End, FrameBatch
from ringlog.limits import RECOVERY_READ_BYTES, WAL_HEADER_BYTES
from ringlog.storage.layout import MARK_COPIED, MARK_ORDERLY, WalHeader

Read = Callable[[int, int], bytes]
"""(offset, length) -> the bytes there, fewer only at the end of the file."""


class Mark(msgspec.Struct, array_like=True, frozen=True):
    """Body of a GROUP_MARK."""

    group: int
    prev_stop: int
    prev_seal: int
    durable_stop: int
    group_bytes: int
    flags: int
    settled: list[tuple[int, int]] = []


_decode_mark = msgspec.msgpack.Decoder(Mark).decode
_MARK_HEAD = np.uint64(
    (layout.FrameType.GROUP_MARK << layout.TYPE_SHIFT) | (layout.VERSION << layout.VERSION_SHIFT)
)
_HEAD_MASK = np.uint64(0xFFFFFFFF_00000000)


def read_mark(buffer: bytes, offset: int, words: frames.U64) -> Mark | None:
    """Decode the mark frame at `offset` of `buffer`, whose header row is `words`; None if it is not one."""
    raw_len = int(words[layout.W_TAIL] & np.uint64(0xFFFFFFFF))
    start = offset + layout.HEADER_BYTES
    try:
        return _decode_mark(memoryview(buffer)[start : start + raw_len])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


@dataclass(frozen=True, slots=True)
class Piece:
    """Valid frames that lie one behind the other; `file_offset` is where byte 0 of `buffer` lies."""

    file_offset: int
    buffer: bytes
    batch: FrameBatch


class Tail(Enum):
    """How a file ends."""

    CLEAN = "clean"
    """Nothing but zeros, or nothing, follows the last frame."""
    TORN = "torn"
    """Something invalid follows, above everything that was known to be durable."""
    CORRUPT = "corrupt"
    """Something is invalid that was durable."""


@dataclass(slots=True)
class FileScan:
    """One pass over a file's valid frames. After `pieces()` is exhausted the other fields are final."""

    header: WalHeader
    size: int
    read: Read
    limit: int = 0
    """Where the file ends by a later file's word; 0 = wherever its frames end."""
    stop: int = WAL_HEADER_BYTES
    reason: str = ""
    """Why the frames end at `stop`; empty = zeros or the end of the file."""
    durable: int = WAL_HEADER_BYTES
    last_seal: int = 0
    orderly: bool = False
    copied: list[tuple[int, int]] | None = None
    """Pairs of the MARK_COPIED mark, if there is one."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the valid frames in order, about RECOVERY_READ_BYTES at a time."""
        end = min(self.limit or self.size, self.size)
        while self.stop < end:
            length = min(RECOVERY_READ_BYTES, end - self.stop) & ~7
            buffer = self.read(self.stop, length)
            batch = self._scan(buffer)
            if batch.end is End.PARTIAL and not len(batch):
                buffer = self.read(self.stop, self._total_at(buffer))
                batch = self._scan(buffer)
            batch = self._believe(buffer, batch)
            if len(batch):
                piece = Piece(self.stop, buffer, batch)
                self.stop += batch.stop
                self.last_seal = int(batch.words[-1, layout.W_SEAL_XXH3])
                yield piece
            if (
                batch.end in (End.CLEAN, End.INVALID, End.PAD)
                and self.stop < end
                and not self._more(buffer, batch)
            ):
                self.reason = batch.reason
                return
            if batch.end is End.PARTIAL and not len(batch):
                self.reason = batch.reason
                return

    def plain_pieces(self) -> Iterator[Piece]:
        """Yield the frames of a stretch that `pieces` has judged before, from `stop` up to `limit`."""
        while self.stop < self.limit:
            buffer = self.read(self.stop, min(RECOVERY_READ_BYTES, self.limit - self.stop))
            batch = self._scan(buffer)
            if batch.end is End.PARTIAL and not len(batch):
                buffer = self.read(self.stop, self._total_at(buffer))
                batch = self._scan(buffer)
            if not len(batch):
                return
            piece = Piece(self.stop, buffer, batch)
            self.stop += batch.stop
            yield piece

    def _more(self, buffer: bytes, batch: FrameBatch) -> bool:
        """True when the buffer simply ended after a frame and the file goes on."""
        return batch.end is End.CLEAN and batch.stop == len(buffer)

    def _scan(self, buffer: bytes) -> FrameBatch:
        usable = len(buffer) & ~7
        return frames.scan(memoryview(buffer)[:usable])

    def _total_at(self, buffer: bytes) -> int:
        return int.from_bytes(buffer[:4], "little") + layout.LEN_FIELD_BYTES

    def _believe(self, buffer: bytes, batch: FrameBatch) -> FrameBatch:
        """Cut the batch at the first frame whose header, seal, body or place in the chain is wrong."""
        if not len(batch):
            return batch
        checks = (
            ("malformed header", frames.first_true(frames.malformed(batch.words))),
            ("seal does not verify", frames.first_bad_seal(batch, self.header.salt)),
            ("body does not verify", frames.first_bad_body(buffer, batch)),
        )
        cut, reason = len(batch), ""
        for text, row in checks:
            if row is not None and row < cut:
                cut, reason = row, text
        marks = np.flatnonzero(frames.types_of(batch.words[:cut]) == layout.FrameType.GROUP_MARK)
        for row in marks.tolist():
            if not self._follow(buffer, batch, row):
                cut, reason = row, "the chain of groups is broken"
                break
        if cut == len(batch):
            return batch
        stop = int(batch.offsets[cut])
        return FrameBatch(batch.offsets[:cut], batch.words[:cut], stop, End.INVALID, reason)

    def _follow(self, buffer: bytes, batch: FrameBatch, row: int) -> bool:
        """Take one mark's word, if it fits what came before it."""
        offset = int(batch.offsets[row])
        mark = read_mark(buffer, offset, batch.words[row])
        here = self.stop + offset
        before = int(batch.words[row - 1, layout.W_SEAL_XXH3]) if row else self.last_seal
        first = here == WAL_HEADER_BYTES
        if mark is None or mark.prev_stop != here or mark.durable_stop > here:
            return False
        if mark.prev_seal != (0 if first else before):
            return False
        self.durable = max(self.durable, mark.durable_stop)
        self.orderly = bool(mark.flags & MARK_ORDERLY)
        if mark.flags & MARK_COPIED:
            self.copied = mark.settled
        return True


def judge(scan: FileScan, evidence: int) -> Tail:
    """How does the scanned file end? `evidence`: an offset up to which a sync is known to have succeeded."""
    known = max(scan.durable, evidence)
    if scan.stop < known:
        return Tail.CORRUPT
    later = last_later_mark(scan)
    if later > scan.stop:
        return Tail.CORRUPT
    if scan.reason or later:
        return Tail.TORN
    return Tail.CLEAN


def last_later_mark(scan: FileScan) -> int:
    """Largest durable_stop that a valid mark behind the end of the frames speaks of; 0 if there is none.

    Marks are found by their pattern and believed by their seal, which is salted with the file: stale
    bytes of another file's life cannot pose as one.
    """
    largest = 0
    offset = scan.stop
    while offset < scan.size:
        length = min(RECOVERY_READ_BYTES, scan.size - offset) & ~7
        if not length:
            break
        buffer = scan.read(offset, length)
        words = frames.words_of(memoryview(buffer)[: len(buffer) & ~7])
        for at in np.flatnonzero((words & _HEAD_MASK) == _MARK_HEAD).tolist():
            if at + layout.HEADER_WORDS > len(words):
                continue
            row = words[at : at + layout.HEADER_WORDS].reshape(1, -1)
            if int(frames.seals(row, scan.header.salt)[0]) == int(row[0, layout.W_SEAL_XXH3]):
                mark = read_mark(buffer, at * 8, row[0])
                largest = max(largest, mark.durable_stop if mark else 0, 1)
        offset += length
    return largest


def copied_pairs(header: WalHeader, size: int, read: Read) -> list[tuple[int, int]] | None:
    """Pairs of an incarnation's MARK_COPIED, which is its first or its second group; None without one."""
    offset = WAL_HEADER_BYTES
    for _ in range(2):
        buffer = read(offset, min(layout.HEADER_BYTES + (1 << 20), size - offset) & ~7)
        batch = frames.scan(buffer, frames_max=1)
        if not len(batch) or int(frames.types_of(batch.words)[0]) != layout.FrameType.GROUP_MARK:
            return None
        if (
            frames.first_bad_seal(batch, header.salt) is not None
            or frames.first_bad_body(buffer, batch) is not None
        ):
            return None
        mark = read_mark(buffer, 0, batch.words[0])
        if mark is None:
            return None
        if mark.flags & MARK_COPIED:
            return mark.settled
        offset += mark.group_bytes
        if offset >= size:
            return None
    return None
