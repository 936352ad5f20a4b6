"""The compiled kernel, where it was built: per-frame work of the commit path, a batch in one call.

Optional. It does what batch.py, codec.py, measure.py and the admission do, for the common case (frames of
payloads alone) and at a fraction of the cost; everything else, and every machine without it, goes the way
through NumPy, which is also what it is tested against. RINGLOG_KERNEL=0 leaves it out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog import compiled
from ringlog.frame import layout
from ringlog.frame.batch import Checked, End, FrameBatch, put_headers, scan, seals, words_of
from ringlog.frame.settle import WORDS
from ringlog.limits import FRAME_BYTES_MAX, RECORD_BYTES_MAX, SEQ_MAX

_ENDS = (End.LIMIT, End.CLEAN, End.PARTIAL, End.PAD)
_COLUMNS = 5
_IS_RUN, _IS_EVEN, _HAS_FOLLOWS = 1, 2, 4
_FRAMES_MAX = 1 << 62


_kernel: Any = compiled.kernel
"""The compiled module, or None. Nobody else asks it for frames: tests take it away in this one place."""


def has_kernel() -> bool:
    """Was it built, and is it wanted?"""
    return _kernel is not None


def find(buffer: bytearray, position: int = 0, *, frames_max: int = _FRAMES_MAX) -> FrameBatch:
    """As batch.scan; where all frames found are sound and hold payloads alone, the batch is `checked`.

    `position`: of the buffer's first byte in the ring it came from.

    `buffer` is private: nobody may change it meanwhile. Flags of the way to the shard are taken off in it.
    """
    found = None if _kernel is None else _kernel.take(buffer, frames_max, FRAME_BYTES_MAX, SEQ_MAX, position)
    if found is None:
        return scan(buffer, frames_max=frames_max)
    table, entries, count, stop, end, is_sound, flags, total, largest, records = found
    words = words_of(table)
    split = count * layout.HEADER_WORDS
    headers = words[:split].reshape(count, layout.HEADER_WORDS)
    offsets, totals, accounted, sizes, follows = words[split:].view(np.int64).reshape(_COLUMNS, count)
    batch = FrameBatch(offsets, headers, stop, _ENDS[end], "", totals)
    batch.entries = words_of(entries).reshape(count, WORDS)
    if count and is_sound:
        batch.checked = Checked(
            accounted, sizes, total, largest, records, bool(flags & _IS_RUN), bool(flags & _IS_EVEN),
            follows != 0 if flags & _HAS_FOLLOWS else None,
        )  # fmt: skip
    return batch


def encode_plain(payloads: Any, records: int, header: bytes) -> tuple[bytearray, NDArray[np.int64]] | None:
    """Frames of `records` payloads each, the last one perhaps smaller: (buffer, (n + 1,) offsets).

    `header` gives what all have in common and the first producer_seq. None where there is no kernel, or where
    something is not as it should be: then the caller's other way says what.
    """
    found = (
        None
        if _kernel is None
        else _kernel.encode(payloads, records, header, RECORD_BYTES_MAX, FRAME_BYTES_MAX)
    )
    return None if found is None else (found[0], np.frombuffer(found[1], dtype=np.int64))


def stamp_frames(
    buffer: bytearray | memoryview, offsets: NDArray[np.int64], topic_id: int, epoch: int, producer_id: int,
    first_seq: int, follows: bool,
) -> int:  # fmt: skip
    """Write identity into all frames, as link.runs.Run.stamp says. With a kernel only.

    Returns the size that all frames have, in bytes, or 0.
    """
    size: int = _kernel.stamp(buffer, offsets, topic_id, epoch, producer_id, first_seq, follows)
    return size


def number_rows(
    words: NDArray[np.uint64],
    entries: NDArray[np.uint64],
    first: int,
    stamp: int,
    epoch: int,
    durability: int,
) -> int:
    """Give all rows numbers from `first` on, stamp, epoch and class, and note them in `entries`; returns the
    number behind the last record. For a batch that is `checked`.
    """
    following: int = _kernel.number(words, entries, 0, len(words), first, stamp, epoch, durability)
    return following


def seal_rows(buffer: bytearray, batch: FrameBatch, start: int, stop: int, salt: int) -> int:
    """Seal rows [start, stop) of the batch, at least one, and write their headers into the buffer they were
    found in; returns the last seal.
    """
    if _kernel is not None:
        last: int = _kernel.seal(buffer, batch.offsets, batch.words, start, stop, salt)
        return last
    rows = batch.take(slice(start, stop))
    sealed = seals(rows.words, salt)
    rows.words[:, layout.W_SEAL_XXH3] = sealed
    put_headers(words_of(buffer), rows)
    return int(sealed[-1])
