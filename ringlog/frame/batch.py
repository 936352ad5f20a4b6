"""Many frames at once: find them, lift their headers into a matrix, check, fill in and seal.

Nothing here loops over records, and what loops over frames does so in a list comprehension around
one C call. A frame costs about 0.3 us on the way through a shard. Sources are buffers that start at
a multiple of 8 bytes of memory-independent offset: offset 0 of the buffer is where words are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.frame import layout
from ringlog.frame.header import header_fault, shape_fault, unpack_header
from ringlog.limits import FRAME_BYTES_MAX, SEQ_MAX

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

FOLLOWS = np.uint64(layout.FLAG_FOLLOWS << layout.FLAGS_SHIFT)
"""layout.FLAG_FOLLOWS within word W_TAIL."""
_HEADER_INDEX = np.arange(layout.HEADER_WORDS, dtype=np.int64)
_SHAPE_MASK = 0xFFFFFFFF << 32
_FEW_SHAPES = 32
"""Up to so many are looked up one by one: finding the different ones costs more."""
_SHAPES_MAX = 1_024
"""Shapes of which is remembered whether they are wrong; sound frames have a few dozen."""
_RUN_LOOKAHEAD_MIN = 8
_RUN_LOOKAHEAD_MAX = 8_192
_UNIFORM_FRAMES_MIN = 4
_UNIFORM_BYTES_MAX = 4_096
"""Bodies of so many equal frames are lifted at once, which copies them; larger ones are hashed in place."""
_hash = xxhash.xxh3_64_intdigest


class End(Enum):
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


@dataclass(slots=True)
class Checked:
    """What is known of a batch's frames beside their headers: all are sound, as admission means it, and
    hold payloads alone. Their flag FOLLOWS was taken off, in headers and buffer.
    """

    accounted: I64
    """(n,) payload bytes of each frame."""
    largest: I64
    """(n,) bytes of each frame's largest record."""
    bytes: int
    """Payload bytes of all."""
    record_bytes_max: int
    records_max: int
    """Most records of any frame."""
    is_run: bool
    """One topic, epoch, producer and class, with producer numbers that follow each other."""
    is_even: bool
    """As many records in each."""
    follows: Mask | None
    """(n,) frames that were sent as following the producer's one before; None = none was."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Which of a batch's frames were resolved from routed ones (routed.py), and what those say of them.

    Such a frame is an append in everything that its header row says. Its body lies in the buffer; where its
    header would lie there is something else.
    """

    places: I64
    """(n,) where the frame begins that holds it, from the start of the buffer; of others their offset."""
    routers: U64
    """(n,) router that made the copy; 0 = none did."""
    cursors: U64
    """(n,) how far that router is with its source."""

    def take(self, rows: slice | NDArray[Any]) -> Copies:
        """Those of the chosen rows."""
        return Copies(self.places[rows], self.routers[rows], self.cursors[rows])


@dataclass(slots=True)
class FrameBatch:
    """Frames found in one buffer.

    `offsets` (n,) int64: bytes from the start of the buffer; `words` (n, 10) uint64: a private copy
    of the headers; `stop`: offset just past the last frame found.
    """

    offsets: I64
    words: U64
    stop: int
    end: End
    reason: str = ""
    _totals: I64 | None = None
    checked: Checked | None = None
    entries: U64 | None = None
    """(n, 8) settle entries (settle.py) with position, topic, producer_seq; where they were made beside."""
    copies: Copies | None = None
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
    def places(self) -> I64:
        """(n,) where each frame begins that is stored: its own offset, or that of the routed one it is in."""
        return self.offsets if self.copies is None else self.copies.places

    def take(self, rows: slice | NDArray[Any]) -> FrameBatch:
        """Return the batch of the chosen rows; headers are shared when `rows` is a slice."""
        found = FrameBatch(self.offsets[rows], self.words[rows], self.stop, self.end, self.reason)
        if self.copies is not None:
            found.copies = self.copies.take(rows)
        return found


def words_of(buffer: Any) -> U64:
    """View a buffer, whose length must be a multiple of 8, as 64-bit little-endian words."""
    return np.frombuffer(buffer, dtype="<u8")


def scan(buffer: Any, start: int = 0, stop: int | None = None, *, frames_max: int = 1 << 62) -> FrameBatch:
    """Find the frames in `buffer[start:stop]`; `start` is a multiple of 8.

    Judges lengths only: nothing outside the range is read and nothing is allocated by an unchecked
    length. Runs of equally long frames, the common case, are found with one strided comparison.
    """
    words = buffer if isinstance(buffer, np.ndarray) else words_of(buffer)
    if not start and stop is None and frames_max > 0 and len(words) >= layout.HEADER_WORDS:
        lone = _lone_frame(words)
        if lone is not None:
            return lone
    limit = len(words) * 8 if stop is None else stop
    lengths = words.data.cast("B").cast("I")
    parts: list[I64] = []
    singles: list[int] = []
    found, offset, lookahead = 0, start, _RUN_LOOKAHEAD_MIN
    end, reason = End.CLEAN, ""
    while True:
        if limit - offset < 8:
            end, reason = (End.CLEAN, "") if limit == offset else (End.INVALID, "bytes left over")
            break
        if found >= frames_max:
            end = End.LIMIT
            break
        frame_len = lengths[offset >> 2]
        if frame_len == 0:
            if lengths[(offset >> 2) + 1]:
                end, reason = End.INVALID, "frame_len is zero before a non-zero word"
            break
        if frame_len == layout.PAD_WORD:
            end = End.PAD
            break
        total = frame_len + layout.LEN_FIELD_BYTES
        if frame_len < layout.FRAME_LEN_MIN or total & 7 or total > FRAME_BYTES_MAX:
            end, reason = End.INVALID, f"frame_len {frame_len} is impossible"
            break
        if offset + total > limit:
            end, reason = End.PARTIAL, f"frame of {total} bytes runs past the {limit - offset} there are"
            break
        singles.append(offset)
        found += 1
        offset += total
        if limit - offset >= total and lengths[offset >> 2] == frame_len:
            run = _run_length(words, offset, total, frame_len, min((limit - offset) // total, lookahead))
            run = min(run, frames_max - found)
            if run >= _RUN_LOOKAHEAD_MIN:
                parts.append(np.array(singles, dtype=np.int64))
                singles.clear()
                parts.append(np.arange(offset, offset + run * total, total, dtype=np.int64))
                lookahead = min(lookahead * 8, _RUN_LOOKAHEAD_MAX)
            else:
                singles.extend(range(offset, offset + run * total, total))
                lookahead = _RUN_LOOKAHEAD_MIN
            found += run
            offset += run * total
    if singles or not parts:
        parts.append(np.array(singles, dtype=np.int64))
    offsets = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return FrameBatch(offsets, headers_at(words, offsets), offset, end, reason)


def _lone_frame(words: U64) -> FrameBatch | None:
    """The whole buffer as one frame, when it is exactly that: what a lone append looks like."""
    total = (int(words[0]) & layout.LEN_MASK) + layout.LEN_FIELD_BYTES
    if total != len(words) * 8 or total > FRAME_BYTES_MAX:
        return None
    headers = words[: layout.HEADER_WORDS].reshape(1, layout.HEADER_WORDS).copy()
    return FrameBatch(np.zeros(1, dtype=np.int64), headers, total, End.CLEAN, "", np.full(1, total))


def _run_length(words: U64, offset: int, total: int, frame_len: int, most: int) -> int:
    """Count how many frames of the same length follow at `offset`, at most `most` (which is >= 1)."""
    stride, first = total >> 3, offset >> 3
    heads = words[first : first + (most - 1) * stride + 1 : stride] & np.uint64(layout.LEN_MASK)
    differs = heads != frame_len
    at = int(differs.argmax())
    return at if differs[at] else most


def headers_at(words: U64, offsets: I64) -> U64:
    """Copy the headers at byte `offsets` into an (n, 10) matrix."""
    found: U64 = words[(offsets >> 3)[:, None] + _HEADER_INDEX]
    return found


def put_headers(words: U64, batch: FrameBatch) -> None:
    """Write the batch's headers back to where they came from; `words` must be writable and private."""
    words[(batch.offsets >> 3)[:, None] + _HEADER_INDEX] = batch.words


def body_hashes(buffer: Any, batch: FrameBatch) -> U64:
    """(n,) XXH3-64 of each frame's body as stored."""
    count = len(batch)
    if count == 0:
        return np.empty(0, dtype=np.uint64)
    totals = batch.total_bytes
    if count < _UNIFORM_FRAMES_MIN:
        return np.fromiter(_hashes(buffer, batch.offsets, totals), dtype=np.uint64, count=count)
    # Stretches of frames of one size, one behind the other: most of any log of small frames.
    offsets = batch.offsets
    breaks = np.flatnonzero((totals[1:] != totals[:-1]) | (offsets[:-1] + totals[:-1] != offsets[1:]))
    if len(breaks) * _UNIFORM_FRAMES_MIN > count:
        return np.fromiter(_hashes(buffer, batch.offsets, totals), dtype=np.uint64, count=count)
    hashes: list[Iterator[int]] = []
    for start, stop in pairwise([0, *(breaks + 1).tolist(), count]):
        total = int(totals[start])
        if stop - start >= _UNIFORM_FRAMES_MIN and layout.HEADER_BYTES < total <= _UNIFORM_BYTES_MAX:
            hashes.append(_uniform_hashes(buffer, int(batch.offsets[start]), total, stop - start))
        else:
            hashes.append(_hashes(buffer, batch.offsets[start:stop], totals[start:stop]))
    return np.fromiter(chain.from_iterable(hashes), dtype=np.uint64, count=count)


def _uniform_hashes(buffer: Any, first: int, total: int, count: int) -> Iterator[int]:
    body = total - layout.HEADER_BYTES
    start = first + layout.HEADER_BYTES
    return map(_hash, np.ndarray((count,), f"V{body}", buffer, start, (total,)).tolist())


def _hashes(buffer: Any, offsets: I64, totals: I64) -> Iterator[int]:
    view = memoryview(buffer).cast("B")
    starts, stops = (offsets + layout.HEADER_BYTES).tolist(), (offsets + totals).tolist()
    return (_hash(view[a:b]) for a, b in zip(starts, stops, strict=True))


def seals(words: U64, seed: int) -> U64:
    """(n,) seal of each header row under the salt of the file the frames lie in."""
    sealed = np.ascontiguousarray(words[:, : layout.W_SEAL_XXH3])
    rows = sealed.view(f"V{layout.SEALED_BYTES}").ravel().tolist()
    return np.fromiter(map(_hash, rows, repeat(seed)), dtype=np.uint64, count=len(rows))


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


def versions_of(words: U64) -> U64:
    """(n,) format versions."""
    return (words[:, layout.W_HEAD] >> np.uint64(layout.VERSION_SHIFT)) & np.uint64(0xFF)


def columns_of(words: U64) -> U64:
    """(n,) column bitmaps."""
    return words[:, layout.W_HEAD] >> np.uint64(layout.COLUMNS_SHIFT)


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
    """(n,) True where a header is not one this version may hold: see header.header_fault, which agrees.

    frame_len is taken as judged: scan does that.
    """
    if len(words) == 1:
        return np.array([header_fault(unpack_header(words[0].tobytes(), 0)) is not None])
    heads, tails = words[:, layout.W_HEAD], words[:, layout.W_TAIL]
    # What frames of one shape share, as one number: it is judged once, for however many frames.
    shapes = (heads & np.uint64(_SHAPE_MASK)) | (tails >> np.uint64(32))
    wrong = _wrong_shapes(shapes)
    appends = types_of(words) == layout.FrameType.APPEND
    counts = counts_of(words)
    wrong |= (counts > 0) != appends
    wrong |= words[:, layout.W_BASE_SEQ] > np.uint64(SEQ_MAX + 1) - counts
    wrong |= words[:, layout.W_COMMIT_TS] > SEQ_MAX
    raw_lens = raw_lens_of(words)
    stored = (heads & np.uint64(layout.LEN_MASK)) - np.uint64(layout.FRAME_LEN_MIN)
    plain = codecs_of(words) == 0
    wrong |= plain & (((raw_lens + np.uint64(7)) & ~np.uint64(7)) != stored)
    wrong |= ~plain & ((raw_lens == 0) | (raw_lens > FRAME_BYTES_MAX - layout.HEADER_BYTES))
    wrong |= appends & ((raw_lens & np.uint64(7)) != 0)
    return wrong


def _wrong_shapes(shapes: U64) -> Mask:
    """(n,) True where type, version, columns, codec, flags or reserved bits are not allowed."""
    if len(shapes) and (shapes == shapes[0]).all():
        return np.full(len(shapes), _shape_is_wrong(int(shapes[0])))
    if len(shapes) <= _FEW_SHAPES:
        return np.array([_shape_is_wrong(shape) for shape in shapes.tolist()], dtype=np.bool_)
    distinct, which = np.unique(shapes, return_inverse=True)
    found: Mask = np.array([_shape_is_wrong(shape) for shape in distinct.tolist()], dtype=np.bool_)[which]
    return found


@lru_cache(_SHAPES_MAX)
def _shape_is_wrong(shape: int) -> bool:
    """`shape` is bytes 4..7 of a header above its bytes 60..63."""
    kind, version, columns = shape >> 32 & 0xFF, shape >> 40 & 0xFF, shape >> 48
    codec, flags, hops = shape & 0xFF, shape >> 8 & 0xFF, shape >> 16 & 0xFFFF
    return shape_fault(kind, version, columns, codec, flags, hops) is not None
