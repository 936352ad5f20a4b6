"""The frames of one staged file: located and checked once, then read as often as they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import CorruptData
from ringlog.frame import layout
from ringlog.frame.batch import counts_of, scan
from ringlog.limits import FRAME_BYTES_MAX
from ringlog.spark.staging import StagedFile
from ringlog.storage.disk import Disk

READ_BYTES = 8 << 20


@dataclass(slots=True)
class StagedFrames:
    """Frames of one staged file: (frames,) offsets and sizes in bytes, topics by index, and record counts."""

    disk: Disk
    path: str
    file: StagedFile
    first: int
    """Plan index of the file's first frame."""
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    topics: NDArray[np.int64]
    records: NDArray[np.int64]

    @property
    def span(self) -> slice:
        """Plan indexes of the file's frames."""
        return slice(self.first, self.first + self.file.frames)

    def read(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, str, bytearray]]:
        """Yield (plan index, topic, private copy) of the frames with these numbers in the file.

        Raises CorruptData.
        """
        if not len(rows):
            return
        with _open_file(self.disk, self.path) as fd:
            for row in rows.tolist():
                frame = bytearray(int(self.sizes[row]))
                if self.disk.read_into(fd, frame, int(self.offsets[row])) != len(frame):
                    raise CorruptData("a staged file ends early", file=self.path)
                yield self.first + row, self.file.topics[int(self.topics[row])], frame


@contextmanager
def _open_file(disk: Disk, path: str) -> Iterator[int]:
    fd = disk.open_read(path)
    try:
        yield fd
    finally:
        disk.close(fd)


def locate_frames(disk: Disk, path: str, file: StagedFile, first: int) -> StagedFrames:
    """Read a staged file, compare it with its task's description, and locate its frames.

    Raises CorruptData.
    """
    with _open_file(disk, path) as fd:
        return _locate(disk, fd, path, file, first)


def _locate(disk: Disk, fd: int, path: str, file: StagedFile, first: int) -> StagedFrames:
    digest = xxhash.xxh3_64()
    offsets: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    topics: list[NDArray[np.int64]] = []
    records: list[NDArray[np.int64]] = []
    at, want = 0, READ_BYTES
    buffer = np.empty(0, dtype="<u8")  # Reused for all reads: fresh memory costs as much as the read.
    while at < file.size:
        count = min(want, file.size - at) // 8
        if len(buffer) < count:
            buffer = np.empty(count, dtype="<u8")
        words = buffer[:count]
        got = disk.read_into(fd, words, at)
        found = scan(words) if got == 8 * count and got else None
        if found is None or (not len(found) and want >= FRAME_BYTES_MAX):
            raise CorruptData("a staged file is damaged", file=path, offset=at)
        if not len(found):
            want = FRAME_BYTES_MAX  # A frame is larger than the bytes read.
            continue
        digest.update(words[: found.stop // 8].data)
        offsets.append(found.offsets + at)
        sizes.append(found.total_bytes)
        topics.append(found.words[:, layout.W_TOPIC].astype(np.int64))
        records.append(counts_of(found.words).astype(np.int64))
        at, want = at + found.stop, READ_BYTES
    table = StagedFrames(
        disk, path, file, first, *(np.concatenate(each) for each in (offsets, sizes, topics, records))
    )
    is_right = (
        digest.intdigest() == file.digest
        and int(table.records.sum()) == file.rows
        and len(table.offsets) == file.frames
    )
    if not is_right or disk.size(fd) != file.size or int(table.topics.max()) >= len(file.topics):
        raise CorruptData("a staged file differs from what its task wrote", file=path, bytes=disk.size(fd))
    return table
