"""Reads a whole closed log file and verifies every seal and every body."""

from __future__ import annotations

from collections.abc import Iterator

from ringlog.envelope.messages import Extent
from ringlog.errors import CorruptData, FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame.batch import FrameBatch, ScanEnd
from ringlog.frame.routed_frame import resolve_copies
from ringlog.limits import FRAME_BYTES_MAX, RECOVERY_READ_BYTES, WAL_HEADER_BYTES
from ringlog.storage.disk import Disk


def read_log(disk: Disk, data_dir: str, file: Extent) -> Iterator[tuple[bytes, FrameBatch]]:
    """Yield (buffer, its frames) in the order of the file, about RECOVERY_READ_BYTES at a time.

    Frames lie without a gap up to the extent's stop; with stop 0 they end at zeros. Raises CorruptData with
    the file and the offset of the first error, or DiskError.
    """
    path = f"{data_dir}/{file.path}"
    fd = disk.open_read(path)
    try:
        at, end = max(file.start, WAL_HEADER_BYTES), file.stop or disk.size(fd)
        while at < end:
            buffer, batch = _window(disk, fd, at, end)
            _verify(buffer, batch, file, at)
            if len(batch):
                yield buffer, _resolved(buffer, batch, file, at)
                at += batch.stop
            has_more = batch.end is ScanEnd.PARTIAL or batch.stop == len(buffer)
            if not has_more or not len(batch):
                break
        if file.stop and at < end:
            raise CorruptData("log file ends before its frames do", file=file.path, offset=at, expected=end)
    finally:
        disk.close(fd)


def _window(disk: Disk, fd: int, at: int, end: int) -> tuple[bytes, FrameBatch]:
    buffer = disk.read_at(fd, min(RECOVERY_READ_BYTES, end - at) & ~7, at)
    batch = frames.scan(buffer[: len(buffer) & ~7])
    if batch.end is ScanEnd.PARTIAL and not len(batch) and len(buffer) < end - at:
        buffer = disk.read_at(fd, min(FRAME_BYTES_MAX, end - at) & ~7, at)
        batch = frames.scan(buffer[: len(buffer) & ~7], frames_max=1)
        return buffer[: batch.stop], batch
    return buffer, batch


def _resolved(buffer: bytes, batch: FrameBatch, file: Extent, at: int) -> FrameBatch:
    """Return the batch with routed copies resolved to appends."""
    try:
        return resolve_copies(buffer, batch, file.salt, is_verified=True)
    except FrameInvalid as e:
        raise CorruptData(f"log file: {e.reason}", file=file.path, offset=at + e.offset) from None


def _verify(buffer: bytes, batch: FrameBatch, file: Extent, at: int) -> None:
    checks = (
        ("malformed header", frames.first_true(frames.malformed(batch.words))),
        ("header does not match its seal", frames.first_bad_seal(batch, file.salt)),
        ("body does not match its checksum", frames.first_bad_body(buffer, batch)),
    )
    for reason, row in checks:
        if row is not None:
            offset = at + int(batch.offsets[row])
            raise CorruptData(f"log file: {reason}", file=file.path, offset=offset)
    if batch.end in {ScanEnd.INVALID, ScanEnd.PAD}:
        raise CorruptData(f"log file: {batch.reason or 'padding'}", file=file.path, offset=at + batch.stop)
