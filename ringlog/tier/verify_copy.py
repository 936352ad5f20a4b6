"""Verification of a segment's data part from its bytes only, on the host or in the cold tier.

A data part is self-contained. Its header has a checksum. Each frame has a seal under the header's salt and a
checksum over its body. The header contains the numbers of frames and records and the length of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame.batch import FrameBatch, ScanEnd
from ringlog.limits import FRAME_BYTES_MAX, MIB
from ringlog.segment.layout import DATA_HEADER_BYTES, SegmentDataHeader

ReadRange = Callable[[int, int], bytes]
"""(start, stop) -> the bytes [start, stop); fewer only at the end."""
WINDOW_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class VerifiedSegmentFrames:
    """Verified frames of a data part. `batch.offsets` are relative to the start of `buffer`."""

    buffer: bytes
    batch: FrameBatch
    offset: int
    """Offset of `buffer` in the data part."""


def read_header(read: ReadRange, path: str, number: int) -> SegmentDataHeader:
    """Return the header of the data part `path`. Raises CorruptData, also for another segment's part."""
    header = SegmentDataHeader.decode(read(0, DATA_HEADER_BYTES), path)
    if header.number != number:
        raise CorruptData("data part of another segment", file=path, number=header.number, expected=number)
    return header


def verify_frames(
    read: ReadRange, path: str, salt: int, start: int, stop: int
) -> Iterator[VerifiedSegmentFrames]:
    """Yield the frames in [start, stop) of a data part, in windows. Raises CorruptData at a bad frame."""
    window = WINDOW_BYTES
    while start < stop:
        buffer = read(start, min(start + window, stop))
        batch = frames.scan(buffer[: len(buffer) & ~7])
        if not len(batch):
            if batch.end is ScanEnd.PARTIAL and start + len(buffer) < stop and window <= FRAME_BYTES_MAX:
                window *= 4  # The frame is larger than the window.
                continue
            reason = batch.reason or "expected a frame at this offset"
            raise CorruptData("data part is damaged", file=path, offset=start, reason=reason)
        checks = (
            (_first_bad_seal, "header does not match its seal"),
            (_first_bad_body, "body does not match its checksum"),
        )
        for find, reason in checks:
            row = find(buffer, batch, salt)
            if row is not None:
                at = start + int(batch.offsets[row])
                raise CorruptData(f"data part: {reason}", file=path, offset=at)
        yield VerifiedSegmentFrames(buffer, batch, start)
        start += batch.stop
        window = WINDOW_BYTES


def verify_data_part(
    read: ReadRange, path: str, number: int, size: int, progress: Callable[[int], None]
) -> SegmentDataHeader:
    """Verify a whole data part of `size` bytes. Raises CorruptData.

    `progress` is called with the number of bytes of each verified window.
    """
    header = read_header(read, path, number)
    if header.data_bytes != size:
        raise CorruptData("data part has another size than its header says", file=path, bytes=size,
                          expected=header.data_bytes)  # fmt: skip
    count = records = 0
    for window in verify_frames(read, path, header.salt, DATA_HEADER_BYTES, size):
        count += len(window.batch)
        records += int(frames.counts_of(window.batch.words).sum())
        progress(window.batch.stop)
    if (count, records) != (header.frames, header.records):
        raise CorruptData("data part has other frames than its header says", file=path, frames=count,
                          records=records)  # fmt: skip
    return header


def _first_bad_seal(_buffer: bytes, batch: FrameBatch, salt: int) -> int | None:
    return frames.first_bad_seal(batch, salt)


def _first_bad_body(buffer: bytes, batch: FrameBatch, _salt: int) -> int | None:
    return frames.first_bad_body(buffer, batch)
