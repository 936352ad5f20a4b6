"""Verification of a WAL file: its valid frames, its end, and whether this end is damage. Pure.

The caller provides a function that reads bytes; this module opens no file. The decision uses the chain
marks of the log (storage/layout.py). Each mark states the end and the seal of the previous commit batch. It
also states up to which offset the file was synced when the mark was written. Bytes below the largest such
offset must be valid, and an invalid frame there is corruption. A crash may tear the bytes above it; recovery
removes them.
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
from ringlog.limits import (
    FRAME_BYTES_MAX,
    MARK_CANDIDATES_MAX,
    MARK_SEARCH_BYTES_MAX,
    RECOVERY_READ_BYTES,
    WAL_HEADER_BYTES,
)
from ringlog.storage.layout import MARK_COPIED, MARK_ORDERLY, WalHeader
from ringlog.types import Durability

ReadBytes = Callable[[int, int], bytes]
"""(offset, length) -> the bytes at this place, fewer only at the end of the file."""


class ChainMark(msgspec.Struct, array_like=True, frozen=True):
    """Body of a GROUP_MARK frame. storage/layout.py describes the fields."""

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
_BAD_BODY = "body does not match its checksum"
_HEAD_MASK = np.uint64(0xFFFF00FF_00000000)
"""Masks type and columns, so that marks of every format version are found."""


def read_mark(buffer: bytes, offset: int, words: frames.U64) -> ChainMark | None:
    """Decode the mark at `offset` of `buffer`, with header row `words`. Return None if it does not decode."""
    raw_len = int(words[layout.W_TAIL] & np.uint64(0xFFFFFFFF))
    start = offset + layout.HEADER_BYTES
    try:
        return _decode_mark(memoryview(buffer)[start : start + raw_len])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


@dataclass(frozen=True, slots=True)
class WalScanChunk:
    """Adjacent valid frames. `file_offset` is the file offset of byte 0 of `buffer`."""

    file_offset: int
    buffer: bytes
    batch: FrameBatch

    @property
    def stop(self) -> int:
        """File offset after the last frame."""
        return self.file_offset + self.batch.stop

    def from_offset(self, offset: int) -> WalScanChunk:
        """Return the frames that begin at or after this file offset."""
        row = int(np.searchsorted(self.batch.offsets, offset - self.file_offset))
        return WalScanChunk(self.file_offset, self.buffer, self.batch.take(slice(row, None)))


class SkippedAppend(NamedTuple):
    """An append of class `memory` whose body does not verify. Its class permits the loss."""

    offset: int
    stop: int
    topic_id: int
    epoch: int
    first_seq: int
    last_seq: int


class WalTailState(Enum):
    """State of a file's end."""

    CLEAN = "clean"
    """The last frame is followed by zeros or by the end of the file."""
    TORN = "torn"
    """Other bytes follow the last frame, all above the known durable offset."""
    CORRUPT = "corrupt"
    """A byte below the known durable offset is invalid."""


@dataclass(slots=True)
class FileScan:
    """One pass over a file's valid frames. When `iter_chunks()` is exhausted, the other fields are final."""

    header: WalHeader
    size: int
    """End of the scan: the length of the file, or the end that a later file states for it."""
    read: ReadBytes
    stop: int = WAL_HEADER_BYTES
    reason: str = ""
    """Reason why the frames end at `stop`; empty for zeros or the end of the file."""
    durable: int = WAL_HEADER_BYTES
    last_seal: int = 0
    orderly: bool = False
    copied: ChainMark | None = None
    """The mark with MARK_COPIED, if the file has one."""
    known_durable: int = 0
    """Offset up to which a sync had succeeded according to other files."""
    skipped_appends: list[SkippedAppend] = field(default_factory=list)
    """Skipped appends before the last yielded chunk, or before `stop` when the scan is finished."""
    _ends: deque[tuple[int, int]] = field(default_factory=deque)
    """(offset, seal of the frame that ends there) of the starts of commit batches, from `durable` on."""

    def iter_chunks(self) -> Iterator[WalScanChunk]:
        """Yield the valid frames in order, in chunks of about RECOVERY_READ_BYTES.

        The frame of an idempotency key and the append after it are in one chunk.
        """
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
            if _ends_with_key(batch) and _goes_on(buffer, batch):
                buffer, batch = self._without_last_key(buffer, batch, end)
            if len(batch):
                piece = WalScanChunk(self.stop, buffer, batch)
                self.stop = piece.stop
                self.last_seal = int(batch.words[-1, layout.W_SEAL_XXH3])
                yield self._resolved(piece)
            if batch.reason == _BAD_BODY and self._skip_damaged_append():
                continue
            if not len(batch) or not _goes_on(buffer, batch):
                self.reason = "ring padding in a WAL file" if batch.end is ScanEnd.PAD else batch.reason
                return

    def _without_last_key(self, buffer: bytes, batch: FrameBatch, end: int) -> tuple[bytes, FrameBatch]:
        """Leave the last frame, which is that of a key, to the next chunk.

        If it is the only one, return it together with the frame after it, however long that is.
        """
        if len(batch) > 1:
            stop = int(batch.offsets[-1])
            return buffer, FrameBatch(batch.offsets[:-1], batch.words[:-1], stop, ScanEnd.PARTIAL)
        following = self.read(self.stop + batch.stop, layout.LEN_FIELD_BYTES)
        total = batch.stop + _total_at(following)
        if not len(buffer) < total <= end - self.stop:
            return buffer, batch
        buffer = self.read(self.stop, total)
        return buffer, self._verified_prefix(buffer, _scan(buffer))

    def _skip_damaged_append(self) -> bool:
        """Skip the append at `stop` if it is of class memory and only its body does not verify.

        The class `memory` promises nothing after a crash, so such a frame must not hide the frames after it.
        Return False if the frame is of another kind or part of a torn end.
        """
        head = self.read(self.stop, layout.HEADER_BYTES)
        words = frames.words_of(memoryview(head)).reshape(1, -1)
        tail = int(words[0, layout.W_TAIL])
        durability = tail >> layout.FLAGS_SHIFT & layout.DURABILITY_MASK
        is_append = int(frames.types_of(words)[0]) == layout.FrameType.APPEND
        if not is_append or durability != Durability.MEMORY:
            return False
        if max(self.known_durable, self.durable, scan_trailing_data(self).durable) <= self.stop:
            return False  # Part of a torn end, which recovery cuts.
        stop, first = self.stop + _total_at(head), int(words[0, layout.W_BASE_SEQ])
        last = first + int(frames.counts_of(words)[0]) - 1
        topic_id, epoch = int(words[0, layout.W_TOPIC]), int(frames.epochs_of(words)[0])
        self.skipped_appends.append(SkippedAppend(self.stop, stop, topic_id, epoch, first, last))
        self.stop, self.last_seal = stop, int(words[0, layout.W_SEAL_XXH3])
        return True

    def _resolved(self, piece: WalScanChunk) -> WalScanChunk:
        """Replace routed frames by the copies in them. `_verified_prefix` has verified these frames."""
        batch = resolve_copies(piece.buffer, piece.batch, self.header.salt, is_verified=True)
        return WalScanChunk(piece.file_offset, piece.buffer, batch)

    def seal_at(self, offset: int) -> int:
        """Return the seal of the frame that ends at `offset`.

        Known for `stop` and for ends of commit batches from `durable` on; 0 for all other offsets.
        """
        if offset == self.stop:
            return self.last_seal
        return next((seal for end, seal in self._ends if end == offset), 0)

    def _verified_prefix(self, buffer: bytes, batch: FrameBatch) -> FrameBatch:
        """Cut the batch at the first frame with an invalid header, seal, body, or place in the chain."""
        if not len(batch):
            return batch
        checks = (
            ("malformed header", frames.first_true(frames.malformed(batch.words))),
            ("header does not match its seal", frames.first_bad_seal(batch, self.header.salt)),
            (_BAD_BODY, frames.first_bad_body(buffer, batch)),
        )
        cut, reason = len(batch), ""
        for text, row in checks:
            if row is not None and row < cut:
                cut, reason = row, text
        marks = np.flatnonzero(frames.is_of_type(batch.words[:cut], layout.FrameType.GROUP_MARK))
        for row in marks.tolist():
            if not self._apply_mark(buffer, batch, row):
                cut, reason = row, "the chain of commit batches is broken"
                break
        for row in np.flatnonzero(frames.is_of_type(batch.words[:cut], layout.FrameType.ROUTED)).tolist():
            if not is_valid_routed_frame(buffer, batch, row):
                cut, reason = row, "routed frame is invalid"
                break
        if cut == len(batch):
            return batch
        stop = int(batch.offsets[cut])
        return FrameBatch(batch.offsets[:cut], batch.words[:cut], stop, ScanEnd.INVALID, reason)

    def _apply_mark(self, buffer: bytes, batch: FrameBatch, row: int) -> bool:
        """Apply one chain mark. Return False if it contradicts the frames before it."""
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


def _ends_with_key(batch: FrameBatch) -> bool:
    return bool(len(batch)) and int(frames.types_of(batch.words[-1:])[0]) == layout.FrameType.IDEMPOTENCY_KEY


def _goes_on(buffer: bytes, batch: FrameBatch) -> bool:
    """Return whether the batch ended only because the buffer ended, after or within a frame."""
    return batch.end is ScanEnd.PARTIAL or (batch.end is ScanEnd.CLEAN and batch.stop == len(buffer))


def _total_at(buffer: bytes) -> int:
    return int.from_bytes(buffer[:4], "little") + layout.LEN_FIELD_BYTES


def classify_tail(scan: FileScan, evidence: int) -> WalTailState:
    """Classify the end of a scanned file. A sync is known to have succeeded up to offset `evidence`."""
    if scan.stop < max(scan.durable, evidence):
        return WalTailState.CORRUPT
    behind = scan_trailing_data(scan)
    if behind.durable > scan.stop:
        return WalTailState.CORRUPT
    return WalTailState.TORN if scan.reason or behind.has_bytes else WalTailState.CLEAN


class WalTrailingData(NamedTuple):
    """Bytes after the end of a file's valid frames."""

    durable: int
    """Largest durable_stop of a valid mark among them; 0 if there is no mark."""
    has_bytes: bool
    """True if a byte among them is not zero."""


def scan_trailing_data(scan: FileScan) -> WalTrailingData:
    """Search the bytes after a file's valid frames for marks and for non-zero bytes."""
    durable, has_bytes = 0, False
    offset = scan.stop
    while offset < scan.size:
        chunk = scan.read(offset, min(RECOVERY_READ_BYTES, scan.size - offset))
        if not chunk:
            break
        if has_content(chunk):
            has_bytes = True
            for at in mark_offsets(chunk, offset, scan.header.salt):
                found = mark_at(at, scan)
                durable = max(durable, found.durable_stop if found else 0)
        offset += len(chunk)
    return WalTrailingData(durable, has_bytes)


def last_nonzero_byte(scan: FileScan) -> int:
    """Return the offset after the last non-zero byte behind a file's valid frames; 0 if all are zero."""
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
    """Return whether any of these bytes is not zero."""
    return bool(np.frombuffer(chunk, dtype=np.uint8).any())


def mark_offsets(chunk: bytes, offset: int, salt: int | None = None) -> list[int]:
    """Return the file offsets in a chunk at which a mark may begin. The chunk begins at `offset`.

    With `salt`, that of the file, only headers with a valid seal are taken, and the last few bytes of the
    chunk, which have no room for a whole header. Any payload may contain the other words of one.
    """
    words = frames.words_of(memoryview(chunk)[: len(chunk) & ~7])
    found = np.flatnonzero((words & _HEAD_MASK) == _MARK_HEAD)
    if salt is not None and len(found):
        is_whole = found + layout.HEADER_WORDS <= len(words)
        whole = found[is_whole]
        headers = words[whole[:, None] + np.arange(layout.HEADER_WORDS)]
        is_sealed = frames.seals(headers, salt) == headers[:, layout.W_SEAL_XXH3]
        found = np.concatenate((whole[is_sealed], found[~is_whole]))
    return [offset + int(at) * 8 for at in found]


def mark_at(offset: int, scan: FileScan) -> ChainMark | None:
    """Return the mark at a file offset if its body and its seal (salted) are valid, else None."""
    head = scan.read(offset, layout.HEADER_BYTES)
    # The seal first: what is no header may state any length.
    if len(head) < layout.HEADER_BYTES or offset not in mark_offsets(head, offset, scan.header.salt):
        return None
    found = _sound_frame(scan.read, offset, scan.size)
    return None if found is None else read_mark(found[0], 0, found[1].words[0])


def _sound_frame(
    read: ReadBytes, offset: int, size: int, bytes_max: int = FRAME_BYTES_MAX
) -> tuple[bytes, FrameBatch] | None:
    """Return the frame at a file offset if its length is possible and its body verifies, else None."""
    head = read(offset, layout.HEADER_BYTES)
    if len(head) < layout.HEADER_BYTES:
        return None
    total = _total_at(head)
    if not layout.HEADER_BYTES < total <= min(bytes_max, size - offset) or total & 7:
        return None
    buffer = read(offset, total)
    batch = _scan(buffer).take(slice(0, 1))
    if not len(batch) or frames.first_bad_body(buffer, batch) is not None:
        return None
    return buffer, batch


def holds_marks(read: ReadBytes, size: int) -> bool:
    """Return whether a file with an invalid header contains a chain mark, and so had commit batches.

    Without the salt no seal can be verified, but the body of a mark has its own checksum. The search includes
    the place of the header, because a misdirected write may have put another page there. A file with more
    than MARK_CANDIDATES_MAX places like the start of a mark is taken to have one: it has content.
    """
    candidates = 0
    for offset in range(0, size, RECOVERY_READ_BYTES):
        chunk = read(offset, min(RECOVERY_READ_BYTES, size - offset))
        for at in mark_offsets(chunk, offset) if has_content(chunk) else ():
            candidates += 1
            if candidates > MARK_CANDIDATES_MAX or _sound_frame(read, at, size, MARK_SEARCH_BYTES_MAX):
                return True
    return False


def copied_mark(header: WalHeader, size: int, read: ReadBytes) -> ChainMark | None:
    """Return the MARK_COPIED of the first or second commit batch of an incarnation's file, else None."""
    scan = FileScan(header, size, read)
    first = mark_at(WAL_HEADER_BYTES, scan)
    if first is None or first.flags & MARK_COPIED:
        return first
    second = mark_at(WAL_HEADER_BYTES + first.group_bytes, scan)
    return second if second is not None and second.flags & MARK_COPIED else None


def copied_frames(header: WalHeader, size: int, read: ReadBytes) -> Iterator[WalScanChunk]:
    """Yield the frames that an incarnation copied from earlier files, up to and including its MARK_COPIED.

    Yields nothing without that mark.
    """
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
    """Yield the frames after damage whose header verifies. Their bodies may be damaged.

    The result only shows which records existed and are lost; it must not be served to readers. After invalid
    bytes the search continues at the next valid mark.
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
    """Replace readable routed frames by their copies. The contents of other routed frames are unknown."""
    rows = np.flatnonzero(frames.is_of_type(batch.words, layout.FrameType.ROUTED))
    unread = [
        row for row in rows.tolist() if not is_valid_routed_frame(buffer, batch, row, is_verified=False)
    ]
    known = batch.take(np.setdiff1d(np.arange(len(batch)), unread)) if unread else batch
    return resolve_copies(buffer, known, salt, is_verified=True)


def _next_mark(scan: FileScan, offset: int) -> int:
    """Return the file offset of the first valid mark at or after `offset`, or the end of the file."""
    while offset < scan.size:
        chunk = scan.read(offset, min(RECOVERY_READ_BYTES, scan.size - offset))
        if not chunk:
            break
        for at in mark_offsets(chunk, offset, scan.header.salt) if has_content(chunk) else ():
            if mark_at(at, scan) is not None:
                return at
        offset += len(chunk)
    return scan.size
