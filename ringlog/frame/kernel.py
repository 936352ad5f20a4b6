"""The compiled kernel's per-frame work as NumPy sees it, a batch in one call (native/kernel.c)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.compiled import kernel
from ringlog.frame import layout
from ringlog.frame.batch import Checked, End, FrameBatch, scan, words_of
from ringlog.frame.settle import WORDS
from ringlog.limits import FRAME_BYTES_MAX, RECORD_BYTES_MAX, SEQ_MAX

_ENDS = (End.LIMIT, End.CLEAN, End.PARTIAL, End.PAD)
_COLUMNS = 5
_IS_RUN, _IS_EVEN, _HAS_FOLLOWS = 1, 2, 4
_FRAMES_MAX = 1 << 62


def find(buffer: bytearray, position: int = 0, *, frames_max: int = _FRAMES_MAX) -> FrameBatch:
    """As batch.scan; where all frames found are sound and hold payloads alone, the batch is `checked`.

    `position`: of the buffer's first byte in the ring it came from.

    `buffer` is private: nobody may change it meanwhile. Flags of the way to the shard are taken off in it.
    """
    found = kernel.take(buffer, frames_max, FRAME_BYTES_MAX, SEQ_MAX, position)
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

    `header` gives what all have in common and the first producer_seq. None where a payload is not bytes or a
    limit is exceeded: the caller says which.
    """
    found = kernel.encode(payloads, records, header, RECORD_BYTES_MAX, FRAME_BYTES_MAX)
    return None if found is None else (found[0], np.frombuffer(found[1], dtype=np.int64))


def stamp_frames(
    buffer: bytearray | memoryview, offsets: NDArray[np.int64], topic_id: int, epoch: int, producer_id: int,
    first_seq: int, follows: bool,
) -> int:  # fmt: skip
    """Write identity into all frames, as link.runs.Run.stamp says.

    Returns the size that all frames have, in bytes, or 0.
    """
    return kernel.stamp(buffer, offsets, topic_id, epoch, producer_id, first_seq, follows)


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
    return kernel.number(words, entries, 0, len(words), first, stamp, epoch, durability)


def seal_rows(buffer: bytearray, batch: FrameBatch, start: int, stop: int, salt: int) -> int:
    """Seal rows [start, stop) of the batch, at least one, and write their headers into the buffer they were
    found in; returns the last seal.
    """
    return kernel.seal(buffer, batch.offsets, batch.words, start, stop, salt)
