"""Many frames at once: find them, lift their headers into a matrix, check, fill in and seal.

The kernel does the work; nothing here loops over frames. Offset 0 of a buffer is where words are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.frame import layout
from ringlog.frame.kernel import LIMITS, kernel
from ringlog.frame.settle_entry import WORDS
from ringlog.limits import FRAME_BYTES_MAX

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

FOLLOWS = np.uint64(layout.FLAG_FOLLOWS << layout.FLAGS_SHIFT)
"""layout.FLAG_FOLLOWS within word W_TAIL."""
_HEADER_INDEX = np.arange(layout.HEADER_WORDS, dtype=np.int64)
_FRAMES_MAX = (1 << 63) - 1
_OFFSETS: Final = 0
_TOTALS: Final = 1
_ACCOUNTED: Final = 2
_LARGEST: Final = 3
_FAULTS: Final = 4
_FOLLOWS: Final = 5
_TAKEN: Final = 6
"""Stretches of words behind the headers that the kernel's `take` returns, and how many they are."""
_PARTIAL: Final = 2
_PAD: Final = 3
_LEFT_OVER: Final = 4
_ZERO: Final = 5
"""Why the kernel found no further frame."""


class ScanEnd(Enum):
    """Why a scan stopped."""

    LIMIT = "limit"
    """As many frames as were asked for; more may follow."""
    CLEAN = "clean"
    """The buffer ended exactly after a frame, or unwritten zeros follow."""
    PARTIAL = "partial"
    """The next frame's header is plausible but its bytes run past the buffer."""
    PAD = "pad"
    """Ring padding follows: the rest of this lap holds no frame."""
    INVALID = "invalid"
    """What follows is not a frame; `reason` says why."""


_ENDS = (
    ScanEnd.LIMIT,
    ScanEnd.CLEAN,
    ScanEnd.PARTIAL,
    ScanEnd.PAD,
    ScanEnd.INVALID,
    ScanEnd.INVALID,
    ScanEnd.INVALID,
)


class CheckedFrameRange(NamedTuple):
    """Rows [start, stop) of a batch: one frame, or sound ones of one topic, epoch, producer, claim and class,
    with producer numbers that follow each other."""

    start: int
    stop: int
    fault: int
    """What is wrong with the one frame there is: a measure.Fault, 0 = nothing."""
    records: int
    bytes: int
    """Accounted bytes of all, 0 for a fault."""
    record_bytes_max: int
    records_max: int
    """Most records of any frame."""
    equal_counts: int
    """As many records in each."""
    columns: int
    """Bitmap of the columns that any of them has."""


class ProducerFrameChecks:
    """What is known of frames that a producer sent, beside their headers. Their flag FOLLOWS is off."""

    __slots__ = ("_facts", "entries", "follows", "runs")

    def __init__(self, entries: U64, facts: I64, follows: Mask | None, runs: list[CheckedFrameRange]) -> None:
        self.entries = entries
        """(n, 8) settle entries (settle.py) with position, topic, producer_seq."""
        self._facts = facts
        self.follows = follows
        """(n,) frames that were sent as following the producer's one before; None = none was."""
        self.runs = runs

    @property
    def accounted(self) -> I64:
        """(n,) accounted bytes of each frame, 0 for a fault."""
        found: I64 = self._facts[_ACCOUNTED]
        return found

    @property
    def largest(self) -> I64:
        """(n,) accounted bytes of each frame's largest record, 0 for a fault."""
        found: I64 = self._facts[_LARGEST]
        return found

    @property
    def faults(self) -> I64:
        """(n,) measure.Fault of each frame by itself."""
        found: I64 = self._facts[_FAULTS]
        return found


@dataclass(frozen=True, slots=True)
class RoutedCopies:
    """Which of a batch's frames were resolved from routed ones (routed.py), and what those say of them.

    Such a frame is an append in everything that its header row says. Its body lies in the buffer; where its
    header would lie there is something else.
    """

    container_offsets: I64
    """(n,) where the frame begins that holds it, from the start of the buffer; of others their offset."""
    routers: U64
    """(n,) router that made the copy; 0 = none did."""
    cursors: U64
    """(n,) how far that router is with its source."""

    def take(self, rows: slice | NDArray[Any]) -> RoutedCopies:
        """Those of the chosen rows."""
        return RoutedCopies(self.container_offsets[rows], self.routers[rows], self.cursors[rows])


class FrameBatch:
    """Frames found in one buffer.

    `offsets` (n,) int64: bytes from the start of the buffer; `words` (n, 10) uint64: a private copy
    of the headers; `stop`: offset just past the last frame found.
    """

    __slots__ = ("_totals", "checked", "copies", "end", "offsets", "reason", "stop", "words")

    def __init__(
        self, offsets: I64, words: U64, stop: int, end: ScanEnd, reason: str = "", totals: I64 | None = None,
        copies: RoutedCopies | None = None,
    ) -> None:  # fmt: skip
        self.offsets, self.words, self.stop = offsets, words, stop
        self.end, self.reason = end, reason
        self._totals = totals
        self.checked: ProducerFrameChecks | None = None
        self.copies = copies
        """What is known of frames that were resolved from routed ones; None = none was."""

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def total_bytes(self) -> I64:
        """(n,) whole size of each frame, in bytes."""
        if self._totals is None:
            lengths = self.words[:, layout.W_HEAD] & np.uint64(layout.LEN_MASK)
            self._totals = lengths.astype(np.int64) + layout.LEN_FIELD_BYTES
        return self._totals

    @property
    def stored_offsets(self) -> I64:
        """(n,) where each frame begins that is stored: its own offset, or that of the routed one it is in."""
        return self.offsets if self.copies is None else self.copies.container_offsets

    def take(self, rows: slice | NDArray[Any]) -> FrameBatch:
        """Return the batch of the chosen rows; headers are shared when `rows` is a slice."""
        found = FrameBatch(self.offsets[rows], self.words[rows], self.stop, self.end, self.reason)
        if self.copies is not None:
            found.copies = self.copies.take(rows)
        return found


def words_of(buffer: Any) -> U64:
    """View a buffer, whose length must be a multiple of 8, as 64-bit little-endian words."""
    return np.frombuffer(buffer, dtype="<u8")


def scan(
    buffer: Any, start: int = 0, stop: int | None = None, *, frames_max: int = _FRAMES_MAX
) -> FrameBatch:
    """Find the frames in `buffer[start:stop]`; `start` is a multiple of 8.

    Judges lengths only: nothing outside the range is read and nothing is allocated by an unchecked length.
    """
    limit = memoryview(buffer).nbytes if stop is None else stop
    if limit & 7 and stop is None:
        raise ValueError("a buffer of frames is a multiple of 8 bytes long")
    table, count, found, end = kernel.scan(buffer, start, limit, frames_max, FRAME_BYTES_MAX)
    words = words_of(table)
    split = count * layout.HEADER_WORDS
    offsets, totals = words[split:].view(np.int64).reshape(2, count)
    headers = words[:split].reshape(count, layout.HEADER_WORDS)
    return FrameBatch(offsets, headers, found, _ENDS[end], _reason(buffer, found, limit, end), totals)


def scan_checked(buffer: bytearray, position: int = 0, *, frames_max: int = _FRAMES_MAX) -> FrameBatch:
    """As scan, of what a producer sent: every frame is checked, and the batch says what was found.

    `position`: of the buffer's first byte in the ring it came from. `buffer` is private: nobody may change it
    meanwhile. Flags of the way to the shard are taken off in it.
    """
    table, entries, count, stop, end, has_follows, runs = kernel.take(buffer, frames_max, position, LIMITS)
    words = words_of(table)
    split = count * layout.HEADER_WORDS
    headers = words[:split].reshape(count, layout.HEADER_WORDS)
    facts = words[split:].view(np.int64).reshape(_TAKEN, count)
    reason = "" if end < _PARTIAL else _reason(buffer, stop, len(buffer), end)
    batch = FrameBatch(facts[_OFFSETS], headers, stop, _ENDS[end], reason, facts[_TOTALS])
    batch.checked = ProducerFrameChecks(
        words_of(entries).reshape(count, WORDS), facts, facts[_FOLLOWS] != 0 if has_follows else None,
        list(map(CheckedFrameRange._make, runs)),
    )  # fmt: skip
    return batch


def _reason(buffer: Any, at: int, limit: int, end: int) -> str:
    """Why no frame follows at this offset, where something is wrong."""
    if end < _PARTIAL or end == _PAD:
        return ""
    if end == _LEFT_OVER:
        return "bytes left over"
    if end == _ZERO:
        return "frame_len is zero before a non-zero word"
    length = int.from_bytes(memoryview(buffer).cast("B")[at : at + layout.LEN_FIELD_BYTES], "little")
    if end == _PARTIAL:
        return f"frame of {length + layout.LEN_FIELD_BYTES} bytes runs past the {limit - at} there are"
    return f"frame_len {length} is impossible"


def assign_seqs(
    words: U64, entries: U64, start: int, stop: int, first: int, stamp: int, epoch: int, durability: int
) -> int:
    """Give rows [start, stop) numbers from `first` on, stamp, epoch and class, and note them in `entries`;
    returns the number behind the last record.
    """
    return kernel.number(words, entries, start, stop, first, stamp, epoch, durability)


def seal_rows(buffer: bytearray, batch: FrameBatch, start: int, stop: int, salt: int) -> int:
    """Seal rows [start, stop) of the batch, at least one, and write their headers into the buffer they were
    found in; returns the last seal.
    """
    return kernel.seal(buffer, batch.offsets, batch.words, start, stop, salt)


def headers_at(words: U64, offsets: I64) -> U64:
    """Copy the headers at byte `offsets` into an (n, 10) matrix."""
    found: U64 = words[(offsets >> 3)[:, None] + _HEADER_INDEX]
    return found


def put_headers(words: U64, batch: FrameBatch) -> None:
    """Write the batch's headers back to where they came from; `words` must be writable and private."""
    words[(batch.offsets >> 3)[:, None] + _HEADER_INDEX] = batch.words


def body_hashes(buffer: Any, batch: FrameBatch) -> U64:
    """(n,) XXH3-64 of each frame's body as stored."""
    starts = np.ascontiguousarray(batch.offsets + layout.HEADER_BYTES)
    return words_of(kernel.hashes(buffer, starts, batch.total_bytes - layout.HEADER_BYTES))


def seals(words: U64, seed: int) -> U64:
    """(n,) seal of each header row under the salt of the file the frames lie in."""
    headers = np.ascontiguousarray(words)
    return words_of(kernel.seals(headers, seed))


def first_bad_body(buffer: Any, batch: FrameBatch) -> int | None:
    """Row of the first frame whose body does not match its checksum, or None."""
    return first_true(body_hashes(buffer, batch) != batch.words[:, layout.W_BODY_XXH3])


def first_bad_seal(batch: FrameBatch, seed: int) -> int | None:
    """Row of the first frame whose header does not match its seal under `seed`, or None."""
    return first_true(seals(batch.words, seed) != batch.words[:, layout.W_SEAL_XXH3])


def first_true(mask: Mask) -> int | None:
    """Index of the first True, or None."""
    if not len(mask):
        return None
    at = int(mask.argmax())
    return at if mask[at] else None


def types_of(words: U64) -> U64:
    """(n,) FrameType numbers."""
    return (words[:, layout.W_HEAD] >> np.uint64(layout.TYPE_SHIFT)) & np.uint64(0xFF)


def columns_of(words: U64) -> U64:
    """(n,) column bitmaps."""
    return words[:, layout.W_HEAD] >> np.uint64(layout.COLUMNS_SHIFT)


def shapes_of(words: U64) -> U64:
    """(n,) format version, above 8 bits the columns."""
    return words[:, layout.W_HEAD] >> np.uint64(layout.VERSION_SHIFT)


def shapes_but_nulls_of(words: U64) -> U64:
    """The same without the validity columns: frames with the same are decoded together (spans.py)."""
    return shapes_of(words) & ~np.uint64(((1 << len(layout.NULLABLE)) - 1) << layout.VALID_SHIFT + 8)


def counts_of(words: U64) -> U64:
    """(n,) records in each frame."""
    return words[:, layout.W_COUNT_EPOCH] & np.uint64(0xFFFFFFFF)


def epochs_of(words: U64) -> U64:
    """(n,) topic epochs."""
    return words[:, layout.W_COUNT_EPOCH] >> np.uint64(layout.EPOCH_SHIFT)


def raw_lens_of(words: U64) -> U64:
    """(n,) body bytes before compression."""
    return words[:, layout.W_TAIL] & np.uint64(0xFFFFFFFF)


def codecs_of(words: U64) -> U64:
    """(n,) Codec numbers."""
    return (words[:, layout.W_TAIL] >> np.uint64(layout.CODEC_SHIFT)) & np.uint64(0xFF)


def flags_of(words: U64) -> U64:
    """(n,) flag bytes."""
    return (words[:, layout.W_TAIL] >> np.uint64(layout.FLAGS_SHIFT)) & np.uint64(0xFF)


def hops_of(words: U64) -> U64:
    """(n,) routers that the records of each frame came through."""
    return words[:, layout.W_TAIL] >> np.uint64(layout.HOPS_SHIFT)


def as_stored(words: U64) -> U64:
    """(n, 10) the headers without what only frames on their way to a shard may say; a copy if they say it."""
    if not (words[:, layout.W_TAIL] & FOLLOWS).any():
        return words
    words = words.copy()
    words[:, layout.W_TAIL] &= ~FOLLOWS
    return words


def malformed(words: U64) -> Mask:
    """(n,) True where a header is not one this version may hold: see header.header_fault."""
    return np.frombuffer(kernel.header_faults(np.ascontiguousarray(words), LIMITS), np.bool_)
