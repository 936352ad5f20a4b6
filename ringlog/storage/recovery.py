"""Judging a WAL file: which frames to believe, where it ends, and whether that end is damage. Pure.

Bytes come through a function that the caller gives; nothing here opens a file. The judgement rests on
what the log says of itself (storage/layout.py): every group's mark names the end and the seal of the
group before it, and how far a sync had succeeded when it was written. So whatever lies below the
largest such statement must be there, and an invalid frame there is corruption; what lies above may be
torn by a crash, and is cut (RE-6, RD-4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np

from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch, ScanEnd
from ringlog.frame.routed_frame import is_valid_routed_frame, resolve_copies
from ringlog.limits import FRAME_BYTES_MAX, RECOVERY_READ_BYTES, WAL_HEADER_BYTES
from ringlog.storage.layout import MARK_COPIED, MARK_ORDERLY, WalHeader
from ringlog.types import Durability

ReadBytes = Callable[[int, int], bytes]
"""(offset, length) -> the bytes there, fewer only at the end of the file."""


class ChainMark(msgspec.Struct, array_like=True, frozen=True):
    """Body of a GROUP_MARK."""

    group: int
    prev_stop: int
    prev_seal: int
    durable_stop: int
    group_bytes: int
    flags: int
    settled: list[tuple[int, int]] = []
    damaged: list[int] = []


_decode_mark = msgspec.msgpack.Decoder(ChainMark).decode
_MARK_HEAD = np.uint64(layout.FrameType.GROUP_MARK << layout.TYPE_SHIFT)
_BAD_BODY = "body does not verify"
_HEAD_MASK = np.uint64(0xFFFF00FF_00000000)
"""Type and columns: marks of every version are found."""


def read_mark(buffer: bytes, offset: int, words: frames.U64) -> ChainMark | None:
    """Decode the mark frame at `offset` of `buffer`, whose header row is `words`; None if it is not one."""
    raw_len = int(words[layout.W_TAIL] & np.uint64(0xFFFFFFFF))
    start = offset + layout.HEADER_BYTES
    try:
        return _decode_mark(memoryview(buffer)[start : start + raw_len])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


@dataclass(frozen=True, slots=True)
class WalScanChunk:
    """Valid frames that lie one behind the other; `file_offset` is where byte 0 of `buffer` lies."""

    file_offset: int
    buffer: bytes
    batch: FrameBatch

    @property
    def stop(self) -> int:
        """File offset just past the last frame."""
        return self.file_offset + self.batch.stop

    def from_offset(self, offset: int) -> WalScanChunk:
        """The frames that begin at this file offset or behind it."""
        row = int(np.searchsorted(self.batch.offsets, offset - self.file_offset))
        return WalScanChunk(self.file_offset, self.buffer, self.batch.take(slice(row, None)))


class SkippedAppend(NamedTuple):
    """An append whose body does not verify, and which its class allows to be lost."""

    offset: int
    stop: int
    topic_id: int
    epoch: int
    first_seq: int
    last_seq: int


class WalTailState(Enum):
    """How a file ends."""

    CLEAN = "clean"
    """Nothing but zeros, or nothing, follows the last frame."""
    TORN = "torn"
    """Something else follows, above everything that was known to be durable."""
    CORRUPT = "corrupt"
    """Something is invalid that was durable."""


@dataclass(slots=True)
class FileScan:
    """One pass over a file's valid frames. After `pieces()` is exhausted the other fields are final."""

    header: WalHeader
    size: int
    """Where to stop looking: the file's length, or where it ends by a later file's word."""
    read: ReadBytes
    stop: int = WAL_HEADER_BYTES
    reason: str = ""
    """Why the frames end at `stop`; empty = zeros or the end of the file."""
    durable: int = WAL_HEADER_BYTES
    last_seal: int = 0
    orderly: bool = False
    copied: ChainMark | None = None
    """The MARK_COPIED mark, if there is one."""
    known_durable: int = 0
    """How far others say that a sync had succeeded."""
    skipped_appends: list[SkippedAppend] = field(default_factory=list)
    """Those before the piece that was yielded last, or before the end."""
    _ends: deque[tuple[int, int]] = field(default_factory=deque)
    """(offset, seal of the frame that ends there) where groups begin, from `durable` on."""

    def iter_chunks(self) -> Iterator[WalScanChunk]:
        """Yield the valid frames in order, about RECOVERY_READ_BYTES at a time."""
        end = self.size & ~7
        while self.stop < end:
            buffer = self.read(self.stop, min(RECOVERY_READ_BYTES, end - self.stop))
            batch = _scan(buffer)
            if batch.end is ScanEnd.PARTIAL and not len(batch):
                total = _total_at(buffer)
                if len(buffer) < total <= end - self.stop:
                    buffer = self.read(self.stop, total)
                    batch = _scan(buffer)
            batch = self._verified_prefix(buffer, batch)
            if len(batch):
                piece = WalScanChunk(self.stop, buffer, batch)
                self.stop = piece.stop
                self.last_seal = int(batch.words[-1, layout.W_SEAL_XXH3])
                yield self._resolved(piece)
            if batch.reason == _BAD_BODY and self._skip_damaged_append():
                continue
            if not len(batch) or not _goes_on(buffer, batch):
                self.reason = "padding in a file" if batch.end is ScanEnd.PAD else batch.reason
                return

    def _skip_damaged_append(self) -> bool:
        """Go on behind the append at `stop`, whose header verifies and whose body does not, if it is of class
        memory: that class promises nothing, so it keeps nobody from what else there is."""
        head = self.read(self.stop, layout.HEADER_BYTES)
        words = frames.words_of(memoryview(head)).reshape(1, -1)
        tail = int(words[0, layout.W_TAIL])
        durability = tail >> layout.FLAGS_SHIFT & layout.DURABILITY_MASK
        is_append = int(frames.types_of(words)[0]) == layout.FrameType.APPEND
        if not is_append or durability != Durability.MEMORY:
            return False
        if max(self.known_durable, self.durable, scan_trailing_data(self).durable) <= self.stop:
            return False  # a torn end, which nobody was promised either
        stop, first = self.stop + _total_at(head), int(words[0, layout.W_BASE_SEQ])
        last = first + int(frames.counts_of(words)[0]) - 1
        topic_id, epoch = int(words[0, layout.W_TOPIC]), int(frames.epochs_of(words)[0])
        self.skipped_appends.append(SkippedAppend(self.stop, stop, topic_id, epoch, first, last))
        self.stop, self.last_seal = stop, int(words[0, layout.W_SEAL_XXH3])
        return True

    def _resolved(self, piece: WalScanChunk) -> WalScanChunk:
        """With copies as the appends they stand for; `_believe` looked at the frames that hold them."""
        batch = resolve_copies(piece.buffer, piece.batch, self.header.salt, is_verified=True)
        return WalScanChunk(piece.file_offset, piece.buffer, batch)

    def seal_at(self, offset: int) -> int:
        """Seal of the frame that ends at `offset`: `stop`, or a group's end behind `durable`; else 0."""
        if offset == self.stop:
            return self.last_seal
        return next((seal for end, seal in self._ends if end == offset), 0)

    def _verified_prefix(self, buffer: bytes, batch: FrameBatch) -> FrameBatch:
        """Cut the batch at the first frame whose header, seal, body or place in the chain is wrong."""
        if not len(batch):
            return batch
        checks = (
            ("malformed header", frames.first_true(frames.malformed(batch.words))),
            ("seal does not verify", frames.first_bad_seal(batch, self.header.salt)),
            (_BAD_BODY, frames.first_bad_body(buffer, batch)),
        )
        cut, reason = len(batch), ""
        for text, row in checks:
            if row is not None and row < cut:
                cut, reason = row, text
        marks = np.flatnonzero(frames.types_of(batch.words[:cut]) == layout.FrameType.GROUP_MARK)
        for row in marks.tolist():
            if not self._apply_mark(buffer, batch, row):
                cut, reason = row, "the chain of groups is broken"
                break
        for row in np.flatnonzero(frames.types_of(batch.words[:cut]) == layout.FrameType.ROUTED).tolist():
            if not is_valid_routed_frame(buffer, batch, row):
                cut, reason = row, "a routed frame makes no sense"
                break
        if cut == len(batch):
            return batch
        stop = int(batch.offsets[cut])
        return FrameBatch(batch.offsets[:cut], batch.words[:cut], stop, ScanEnd.INVALID, reason)

    def _apply_mark(self, buffer: bytes, batch: FrameBatch, row: int) -> bool:
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
            self.copied = mark
        self._ends.append((here, mark.prev_seal))
        while self._ends[0][0] < self.durable:
            self._ends.popleft()
        return True


def _scan(buffer: bytes) -> FrameBatch:
    return frames.scan(memoryview(buffer)[: len(buffer) & ~7])


def _goes_on(buffer: bytes, batch: FrameBatch) -> bool:
    """Did only the buffer end, behind a frame or within one?"""
    return batch.end is ScanEnd.PARTIAL or (batch.end is ScanEnd.CLEAN and batch.stop == len(buffer))


def _total_at(buffer: bytes) -> int:
    return int.from_bytes(buffer[:4], "little") + layout.LEN_FIELD_BYTES


def classify_tail(scan: FileScan, evidence: int) -> WalTailState:
    """How does the scanned file end? `evidence`: an offset up to which a sync is known to have succeeded."""
    if scan.stop < max(scan.durable, evidence):
        return WalTailState.CORRUPT
    behind = scan_trailing_data(scan)
    if behind.durable > scan.stop:
        return WalTailState.CORRUPT
    return WalTailState.TORN if scan.reason or behind.has_bytes else WalTailState.CLEAN


class WalTrailingData(NamedTuple):
    """What lies behind the end of a file's frames."""

    durable: int
    """Largest durable_stop that a valid mark there speaks of; 0 = there is none."""
    has_bytes: bool
    """Something there is not zero."""


def scan_trailing_data(scan: FileScan) -> WalTrailingData:
    """Look for bytes, and for what marks say, behind the end of a scanned file's frames."""
    durable, has_bytes = 0, False
    offset = scan.stop
    while offset < scan.size:
        chunk = scan.read(offset, min(RECOVERY_READ_BYTES, scan.size - offset))
        if not chunk:
            break
        if has_content(chunk):
            has_bytes = True
            for at in mark_offsets(chunk, offset):
                found = mark_at(at, scan)
                durable = max(durable, found.durable_stop if found else 0)
        offset += len(chunk)
    return WalTrailingData(durable, has_bytes)


def last_nonzero_byte(scan: FileScan) -> int:
    """One past the last byte that is not zero behind the end of a file's frames; 0 when all are."""
    last, offset = 0, scan.stop
    while offset < scan.size:
        chunk = scan.read(offset, min(RECOVERY_READ_BYTES, scan.size - offset))
        if not chunk:
            break
        found = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8))
        last = offset + int(found[-1]) + 1 if len(found) else last
        offset += len(chunk)
    return last


def has_content(chunk: bytes) -> bool:
    """Is anything in these bytes not zero?"""
    return bool(np.frombuffer(chunk, dtype=np.uint8).any())


def mark_offsets(chunk: bytes, offset: int) -> list[int]:
    """File offsets in a chunk, which begins at `offset`, at which the first word is that of a mark."""
    words = frames.words_of(memoryview(chunk)[: len(chunk) & ~7])
    return [offset + int(at) * 8 for at in np.flatnonzero((words & _HEAD_MASK) == _MARK_HEAD)]


def mark_at(offset: int, scan: FileScan) -> ChainMark | None:
    """The valid mark at a file offset, believed by its seal, which is salted with the file, and its body."""
    found = _sound_frame(scan.read, offset, scan.size)
    if found is None or frames.first_bad_seal(found[1], scan.header.salt) is not None:
        return None
    return read_mark(found[0], 0, found[1].words[0])


def _sound_frame(read: ReadBytes, offset: int, size: int) -> tuple[bytes, FrameBatch] | None:
    """The frame at a file offset, if its length is possible and its body verifies."""
    head = read(offset, layout.HEADER_BYTES)
    if len(head) < layout.HEADER_BYTES:
        return None
    total = _total_at(head)
    if not layout.HEADER_BYTES < total <= min(FRAME_BYTES_MAX, size - offset) or total & 7:
        return None
    buffer = read(offset, total)
    batch = _scan(buffer).take(slice(0, 1))
    if not len(batch) or frames.first_bad_body(buffer, batch) is not None:
        return None
    return buffer, batch


def holds_marks(read: ReadBytes, size: int) -> bool:
    """Does a file whose header makes no sense hold anything that was once a group of frames?

    Without the salt no seal can be checked, but a mark's body verifies by itself. It is looked for where the
    header should be, too: a page that was written to the wrong place may lie there.
    """
    for offset in range(0, size, RECOVERY_READ_BYTES):
        chunk = read(offset, min(RECOVERY_READ_BYTES, size - offset))
        for at in mark_offsets(chunk, offset) if has_content(chunk) else ():
            if _sound_frame(read, at, size) is not None:
                return True
    return False


def copied_mark(header: WalHeader, size: int, read: ReadBytes) -> ChainMark | None:
    """An incarnation's MARK_COPIED, which is the mark of its first or its second group; None without one."""
    scan = FileScan(header, size, read)
    first = mark_at(WAL_HEADER_BYTES, scan)
    if first is None or first.flags & MARK_COPIED:
        return first
    second = mark_at(WAL_HEADER_BYTES + first.group_bytes, scan)
    return second if second is not None and second.flags & MARK_COPIED else None


def copied_frames(header: WalHeader, size: int, read: ReadBytes) -> Iterator[WalScanChunk]:
    """What an incarnation copied out of earlier files: its groups up to the one with MARK_COPIED. Nothing
    without that mark."""
    scan = FileScan(header, size, read)
    stop = WAL_HEADER_BYTES
    for _ in range(2):
        mark = mark_at(stop, scan)
        if mark is None:
            return
        stop += mark.group_bytes
        if mark.flags & MARK_COPIED:
            yield from FileScan(header, min(stop, size), read).iter_chunks()
            return


def frames_after_damage(scan: FileScan) -> Iterator[WalScanChunk]:
    """Yield what can still be identified behind damage: frames whose header verifies, bodies perhaps not.

    For learning what was there and is lost, never for reading it (RE-5). After bytes that make no sense
    it goes on at the next valid mark.
    """
    at, end = scan.stop, scan.size & ~7
    while at < end:
        buffer = scan.read(at, min(RECOVERY_READ_BYTES, end - at))
        batch = _scan(buffer)
        if batch.end is ScanEnd.PARTIAL and not len(batch):
            total = _total_at(buffer)
            if len(buffer) < total <= end - at:
                buffer = scan.read(at, total)
                batch = _scan(buffer)
        bad = frames.first_bad_seal(batch, scan.header.salt)
        if bad is not None:
            offsets, words = batch.offsets[:bad], batch.words[:bad]
            batch = FrameBatch(offsets, words, int(batch.offsets[bad]), ScanEnd.INVALID)
        if len(batch):
            yield WalScanChunk(at, buffer, _identified(buffer, batch, scan.header.salt))
            at += batch.stop
        if not len(batch) or not _goes_on(buffer, batch):
            at = _next_mark(scan, at)


def _identified(buffer: bytes, batch: FrameBatch, salt: int) -> FrameBatch:
    """With the copies of those routed frames that can be read; what the others held nobody knows."""
    rows = np.flatnonzero(frames.types_of(batch.words) == layout.FrameType.ROUTED)
    unread = [row for row in rows.tolist() if not is_valid_routed_frame(buffer, batch, row, has_sums=False)]
    known = batch.take(np.setdiff1d(np.arange(len(batch)), unread)) if unread else batch
    return resolve_copies(buffer, known, salt, is_verified=True)


def _next_mark(scan: FileScan, offset: int) -> int:
    """File offset of the first valid mark at or behind `offset`, or the end."""
    while offset < scan.size:
        chunk = scan.read(offset, min(RECOVERY_READ_BYTES, scan.size - offset))
        if not chunk:
            break
        for at in mark_offsets(chunk, offset) if has_content(chunk) else ():
            if mark_at(at, scan) is not None:
                return at
        offset += len(chunk)
    return scan.size
