"""Check stored frames: seals, body checksums, structure, and the index of a segment against its data.

Runs in Spark tasks, over one reused buffer, with a few NumPy operations and one hash per frame. No stored
value is trusted. In a segment the index gives the start of each frame, so a damaged frame never hides the
frames after it. The log has no index: after a frame with an impossible length, nothing can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch, ScanEnd
from ringlog.frame.routed_frame import has_routed, resolve_copies
from ringlog.limits import MIB
from ringlog.segment.index import Table

CHUNK_BYTES = 4 * MIB
"""Bytes that are read and checked at a time. A larger frame is read as a whole."""

SEAL = "header does not match its seal"
SHAPE = "header is malformed"
INDEX = "index and data differ"
BODY = "body does not match its checksum"
SHORT = "file ends before the frame does"
FOREIGN_FRAME = "frame of another topic or life"

ReadArray = Callable[[int, int], NDArray[np.uint8]]
"""Read bytes [start, stop) of a file, fewer at its end. The result is valid until the next call."""
I64 = NDArray[np.int64]


@dataclass(slots=True)
class AuditedFrames:
    """Some frames and the fault of each (None: sound). Arrays are (n,)."""

    offsets: I64
    bytes: I64
    words: NDArray[np.uint64]
    faults: list[str | None]


def check_sealed(read: ReadArray, entries: Table, owners: Owners, salt: int) -> Iterator[AuditedFrames]:
    """Check the frames of these index rows of a segment, in order, about CHUNK_BYTES at a time."""
    ends = entries["offset"] + entries["length"]
    at = 0
    while at < len(entries):
        start = int(entries["offset"][at])
        stop = max(int(np.searchsorted(ends, start + CHUNK_BYTES, side="right")), at + 1)
        rows = entries[at:stop]
        buffer = read(start, int(ends[stop - 1]))
        yield _check_rows(buffer, start, rows, owners.of(at, stop), salt)
        at = stop


@dataclass(frozen=True, slots=True)
class Owners:
    """Topic id and epoch that each row of an index belongs to; arrays are (n,)."""

    topic_ids: NDArray[np.uint64]
    epochs: I64

    def of(self, start: int, stop: int) -> Owners:
        """Return the owners of rows [start, stop)."""
        return Owners(self.topic_ids[start:stop], self.epochs[start:stop])


def _check_rows(
    buffer: NDArray[np.uint8], origin: int, rows: Table, owners: Owners, salt: int
) -> AuditedFrames:
    offsets = (rows["offset"] - origin).astype(np.int64)
    lengths = rows["length"].astype(np.int64)
    whole = int(np.searchsorted(offsets + lengths, len(buffer), side="right"))
    faults: list[str | None] = [SHORT] * len(rows)
    words = np.zeros((len(rows), layout.HEADER_WORDS), dtype=np.uint64)
    if whole:
        usable = buffer[: len(buffer) & ~7]
        words[:whole] = frames.headers_at(frames.words_of(usable), offsets[:whole])
        batch = FrameBatch(offsets[:whole], words[:whole], int(offsets[whole - 1]), ScanEnd.CLEAN)
        # Use the lengths of the index: those in the headers are under test.
        batch._totals = lengths[:whole]
        faults[:whole] = _faults(usable, batch, rows[:whole], owners, salt)
    return AuditedFrames(rows["offset"].astype(np.int64), lengths, words, faults)


def _faults(
    buffer: NDArray[np.uint8], batch: FrameBatch, rows: Table, owners: Owners, salt: int
) -> list[str | None]:
    words, count = batch.words, len(batch)
    totals = (words[:, layout.W_HEAD] & np.uint64(layout.LEN_MASK)).astype(np.int64) + layout.LEN_FIELD_BYTES
    is_other = (
        (totals != rows["length"])
        | (words[:, layout.W_BASE_SEQ].astype(np.int64) != rows["base_seq"])
        | (frames.counts_of(words).astype(np.int64) != rows["count"])
        | (words[:, layout.W_COMMIT_TS].astype(np.int64) != rows["ts_min"])
    )
    is_strange = (
        (words[:, layout.W_TOPIC] != owners.topic_ids[:count])
        | (frames.epochs_of(words).astype(np.int64) != owners.epochs[:count])
    )  # fmt: skip
    return _named(
        count,
        (SEAL, frames.seals(words, salt) != words[:, layout.W_SEAL_XXH3]),
        (SHAPE, frames.malformed(words)),
        (INDEX, is_other),
        (FOREIGN_FRAME, is_strange),
        (BODY, frames.body_hashes(buffer, batch) != words[:, layout.W_BODY_XXH3]),
    )


def _named(count: int, *found: tuple[str, NDArray[np.bool_]]) -> list[str | None]:
    """Return the first fault of each frame, or None."""
    faults: list[str | None] = [None] * count
    for name, rows in reversed(found):
        for row in np.flatnonzero(rows).tolist():
            faults[row] = name
    return faults


def check_log(
    read: ReadArray, start: int, stop: int, salt: int, *, bodies: bool = True
) -> Iterator[AuditedFrames]:
    """Check the frames of a log range that begins with a frame and is published up to `stop`.

    If a frame has an impossible length, the check ends with one fault that covers the rest up to `stop`.
    Without `bodies` only headers are checked.
    """
    at, window = start, CHUNK_BYTES
    while at < stop:
        end = min(at + window, stop)
        buffer = read(at, end)
        usable = buffer[: len(buffer) & ~7]
        found = frames.scan(frames.words_of(usable)) if len(usable) >= 8 else _nothing()
        if len(found):
            yield _check_scanned(usable, found, at, salt, bodies)
            at += found.stop
            window = CHUNK_BYTES
        elif found.end is ScanEnd.PARTIAL and end < stop and len(buffer) == end - at:
            window = layout.padded(_frame_bytes(usable))
        else:
            yield AuditedFrames(
                np.array([at]), np.array([stop - at]), np.zeros((1, layout.HEADER_WORDS), dtype=np.uint64),
                [found.reason or SHORT],
            )  # fmt: skip
            return


def _check_scanned(
    buffer: NDArray[np.uint8], found: FrameBatch, origin: int, salt: int, bodies: bool
) -> AuditedFrames:
    words = found.words
    faults = [
        (SEAL, frames.seals(words, salt) != words[:, layout.W_SEAL_XXH3]),
        (SHAPE, frames.malformed(words)),
    ]
    if bodies:
        faults.append((BODY, frames.body_hashes(buffer, found) != words[:, layout.W_BODY_XXH3]))
    named = _named(len(found), *faults)
    if has_routed(found):
        found, named = _with_copies(buffer, found, salt, named)
    return AuditedFrames(found.stored_offsets + origin, found.total_bytes, found.words, named)


def _with_copies(
    buffer: NDArray[np.uint8], found: FrameBatch, salt: int, named: list[str | None]
) -> tuple[FrameBatch, list[str | None]]:
    """Replace sound routed frames by the appends they contain; an invalid one becomes a fault."""
    while True:
        sound = np.array([fault is None for fault in named], dtype=np.bool_)
        try:
            good = resolve_copies(buffer, found.take(np.flatnonzero(sound)), salt, is_verified=True)
            break
        except FrameInvalid as e:
            named[int(np.searchsorted(found.offsets, e.offset))] = SHAPE
    bad = found.take(np.flatnonzero(~sound))
    order = np.argsort(np.concatenate((good.stored_offsets, bad.stored_offsets)), kind="stable")
    places = np.concatenate((good.stored_offsets, bad.stored_offsets))[order]
    words = np.concatenate((good.words, bad.words))[order]
    faults = [*[None] * len(good), *[fault for fault in named if fault is not None]]
    return (
        FrameBatch(places, words, found.stop, found.end, found.reason),
        [faults[row] for row in order.tolist()],
    )


def _frame_bytes(buffer: NDArray[np.uint8]) -> int:
    """Return the size of the frame at the start of a buffer; a scan found the size plausible."""
    return int(buffer[:4].view("<u4")[0]) + layout.LEN_FIELD_BYTES


def _nothing() -> FrameBatch:
    empty: Any = np.empty(0, dtype=np.int64)
    return FrameBatch(
        empty,
        np.empty((0, layout.HEADER_WORDS), dtype=np.uint64),
        0,
        ScanEnd.INVALID,
        "nothing is stored there",
    )
