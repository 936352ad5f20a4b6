"""Operations on many frames: scan a buffer, copy the headers into a matrix, verify, number and seal.

The compiled kernel does the work; no function here loops over frames in Python. Offsets count from the start
of the buffer.
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
"""Word columns after the headers in the result of the kernel's `take`, and (_TAKEN) their number."""
_PARTIAL: Final = 2
_PAD: Final = 3
_LEFT_OVER: Final = 4
_ZERO: Final = 5
"""Codes of the kernel for why it found no further frame."""


class ScanEnd(Enum):
    """Reason why a scan stopped."""

    LIMIT = "limit"
    """The requested number of frames was found. More may follow."""
    CLEAN = "clean"
    """The buffer ends exactly after a frame, or unwritten zeros follow."""
    PARTIAL = "partial"
    """The next header is plausible, but its frame extends beyond the buffer."""
    PAD = "pad"
    """Ring padding follows: the rest of the ring's buffer before its wrap-around has no frame."""
    INVALID = "invalid"
    """The following bytes are not a frame. `reason` states why."""


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
    """Rows [start, stop) of a batch: one frame of any kind, or several consecutive valid frames.

    Several frames have the same topic, epoch, producer, claim and class, and consecutive producer numbers.
    """

    start: int
    stop: int
    fault: int
    """FrameFault of the single frame; 0 = valid."""
    records: int
    bytes: int
    """Accounted bytes of all frames; 0 for an invalid frame."""
    record_bytes_max: int
    records_max: int
    """Largest number of records in one frame."""
    equal_counts: int
    """1 if all frames have the same number of records, else 0."""
    columns: int
    """Bitmap of the columns that at least one frame has."""


class ProducerFrameChecks:
    """Results of checking frames that a producer sent. Flag FOLLOWS is already removed from the headers."""

    __slots__ = ("_facts", "entries", "follows", "runs")

    def __init__(self, entries: U64, facts: I64, follows: Mask | None, runs: list[CheckedFrameRange]) -> None:
        self.entries: U64 = entries
        """(n, 8) settle entries (settle_entry.py) with position, topic and producer_seq set."""
        self._facts = facts
        self.follows: Mask | None = follows
        """(n,) True if the frame was sent with FLAG_FOLLOWS; None if no frame was."""
        self.runs: list[CheckedFrameRange] = runs

    @property
    def accounted(self) -> I64:
        """(n,) accounted bytes of each frame, 0 for an invalid frame."""
        found: I64 = self._facts[_ACCOUNTED]
        return found

    @property
    def largest(self) -> I64:
        """(n,) accounted bytes of each frame's largest record, 0 for an invalid frame."""
        found: I64 = self._facts[_LARGEST]
        return found

    @property
    def faults(self) -> I64:
        """(n,) FrameFault of each frame, without regard to other frames."""
        found: I64 = self._facts[_FAULTS]
        return found


@dataclass(frozen=True, slots=True)
class RoutedCopies:
    """Facts of the frames of a batch that were resolved from routed frames (routed_frame.py).

    The header row of such a frame is that of an append. Its body lies in the buffer, but no header lies
    before the body.
    """

    container_offsets: I64
    """(n,) offset of the routed frame that contains the frame; for all other frames their own offset."""
    routers: U64
    """(n,) router that made the copy; 0 = not a copy."""
    cursors: U64
    """(n,) position of that router in its source topic."""

    def take(self, rows: slice | NDArray[Any]) -> RoutedCopies:
        """Return the facts of the chosen rows."""
        return RoutedCopies(self.container_offsets[rows], self.routers[rows], self.cursors[rows])


class FrameBatch:
    """Frames found in one buffer.

    `offsets` (n,) int64 count bytes from the start of the buffer. `words` (n, 10) uint64 is a private copy of
    the headers. `stop` is the offset after the last frame found.
    """

    __slots__ = ("_totals", "checked", "copies", "end", "offsets", "reason", "stop", "words")

    def __init__(
        self, offsets: I64, words: U64, stop: int, end: ScanEnd, reason: str = "", totals: I64 | None = None,
        copies: RoutedCopies | None = None,
    ) -> None:  # fmt: skip
        self.offsets: I64 = offsets
        self.words: U64 = words
        self.stop: int = stop
        self.end: ScanEnd = end
        self.reason: str = reason
        self._totals = totals
        self.checked: ProducerFrameChecks | None = None
        self.copies: RoutedCopies | None = copies
        """Facts of frames that were resolved from routed frames; None if there are none."""

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def total_bytes(self) -> I64:
        """(n,) size of each frame in bytes, header included."""
        if self._totals is None:
            lengths = self.words[:, layout.W_HEAD] & np.uint64(layout.LEN_MASK)
            self._totals = lengths.astype(np.int64) + layout.LEN_FIELD_BYTES
        return self._totals

    @property
    def stored_offsets(self) -> I64:
        """(n,) offset of each stored frame: its own, or that of the routed frame that contains it."""
        return self.offsets if self.copies is None else self.copies.container_offsets

    def take(self, rows: slice | NDArray[Any]) -> FrameBatch:
        """Return a batch of the chosen rows. It shares the headers if `rows` is a slice."""
        found = FrameBatch(self.offsets[rows], self.words[rows], self.stop, self.end, self.reason)
        if self.copies is not None:
            found.copies = self.copies.take(rows)
        return found


def words_of(buffer: Any) -> U64:
    """Return a view of a buffer as little-endian 64-bit words. Its length must be a multiple of 8."""
    return np.frombuffer(buffer, dtype="<u8")


def scan(
    buffer: Any, start: int = 0, stop: int | None = None, *, frames_max: int = _FRAMES_MAX
) -> FrameBatch:
    """Find the frames in `buffer[start:stop]`. `start` must be a multiple of 8.

    Only lengths are validated. The function reads nothing outside the range and allocates nothing by an
    unchecked length.
    """
    limit = memoryview(buffer).nbytes if stop is None else stop
    if limit & 7 and stop is None:
        raise ValueError(f"buffer length must be a multiple of 8, got {limit}")
    table, count, found, end = kernel.scan(buffer, start, limit, frames_max, FRAME_BYTES_MAX)
    words = words_of(table)
    split = count * layout.HEADER_WORDS
    offsets, totals = words[split:].view(np.int64).reshape(2, count)
    headers = words[:split].reshape(count, layout.HEADER_WORDS)
    return FrameBatch(offsets, headers, found, _ENDS[end], _reason(buffer, found, limit, end), totals)


def scan_checked(buffer: bytearray, position: int = 0, *, frames_max: int = _FRAMES_MAX) -> FrameBatch:
    """Scan frames that a producer sent and check each of them. The result is in `checked` of the batch.

    `position` is the position in the ring of the buffer's first byte. `buffer` must be private to the caller.
    The function removes from it the header flags that only frames on their way to a shard have.
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
    """Return why no frame follows at this offset; empty if that is not an error."""
    if end < _PARTIAL or end == _PAD:
        return ""
    if end == _LEFT_OVER:
        return "unexpected bytes after the last frame"
    if end == _ZERO:
        return "frame_len is zero before a non-zero word"
    length = int.from_bytes(memoryview(buffer).cast("B")[at : at + layout.LEN_FIELD_BYTES], "little")
    if end == _PARTIAL:
        return f"frame of {length + layout.LEN_FIELD_BYTES} bytes runs past the {limit - at} there are"
    return f"frame_len {length} is impossible"


def assign_seqs(
    words: U64, entries: U64, start: int, stop: int, first: int, stamp: int, epoch: int, durability: int
) -> int:
    """Assign seqs from `first` on, stamp, epoch and class to rows [start, stop), and set them in `entries`.

    Return the seq after the last record.
    """
    return kernel.number(words, entries, start, stop, first, stamp, epoch, durability)


def seal_rows(buffer: bytearray, batch: FrameBatch, start: int, stop: int, salt: int) -> int:
    """Seal rows [start, stop), at least one, and write their headers into the scanned buffer.

    Return the last seal.
    """
    return kernel.seal(buffer, batch.offsets, batch.words, start, stop, salt)


def headers_at(words: U64, offsets: I64) -> U64:
    """Copy the headers at byte `offsets` into an (n, 10) matrix."""
    found: U64 = words[(offsets >> 3)[:, None] + _HEADER_INDEX]
    return found


def write_headers(words: U64, batch: FrameBatch) -> None:
    """Write the batch's headers to their offsets. `words` must be writable and private to the caller."""
    words[(batch.offsets >> 3)[:, None] + _HEADER_INDEX] = batch.words


def body_hashes(buffer: Any, batch: FrameBatch) -> U64:
    """(n,) XXH3-64 of each frame's body as stored."""
    starts = np.ascontiguousarray(batch.offsets + layout.HEADER_BYTES)
    return words_of(kernel.hashes(buffer, starts, batch.total_bytes - layout.HEADER_BYTES))


def seals(words: U64, seed: int) -> U64:
    """(n,) seal of each header row under the salt of the frames' file."""
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


def is_of_type(words: U64, kind: int) -> Mask:
    """(n,) which frames have this FrameType."""
    # A plain integer: for a member of an enum, numpy looks up attributes in Python, and loses the exceptions
    # of signals there.
    found: Mask = types_of(words) == int(kind)
    return found


def columns_of(words: U64) -> U64:
    """(n,) column bitmaps."""
    return words[:, layout.W_HEAD] >> np.uint64(layout.COLUMNS_SHIFT)


def shapes_of(words: U64) -> U64:
    """(n,) format version, with the column bitmap above its 8 bits."""
    return words[:, layout.W_HEAD] >> np.uint64(layout.VERSION_SHIFT)


def shapes_but_nulls_of(words: U64) -> U64:
    """(n,) as shapes_of, without validity columns. spans.py decodes frames with equal values together."""
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
    """(n,) number of routers that the records of each frame passed."""
    return words[:, layout.W_TAIL] >> np.uint64(layout.HOPS_SHIFT)


def as_stored(words: U64) -> U64:
    """(n, 10) headers without FLAG_FOLLOWS, which stored frames never have. A copy if a row has the flag."""
    if not (words[:, layout.W_TAIL] & FOLLOWS).any():
        return words
    words = words.copy()
    words[:, layout.W_TAIL] &= ~FOLLOWS
    return words


def malformed(words: U64) -> Mask:
    """(n,) True where this version does not permit the header; see header.header_fault."""
    return np.frombuffer(kernel.header_faults(np.ascontiguousarray(words), LIMITS), np.bool_)
