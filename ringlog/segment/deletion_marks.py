"""The `.del` part of a segment: one byte per record, 0x00 or 0xD5, changed in place.

Marks make deletes durable after the log with the deletes is removed. A byte is written whole or not at all.
A crash can leave only some of the marks written, but then the log still contains all of the deletes.
"""

from __future__ import annotations

import errno
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.errors import CorruptData, DiskError
from ringlog.segment.layout import DEL, DEL_HEADER_BYTES, DELETED, DeletionMarksHeader
from ringlog.segment.parts import publish_parts, write_temporary
from ringlog.storage.disk import Disk

I64 = NDArray[np.int64]


def bitmap_of(seqs: NDArray[Any]) -> BitMap64:
    """Return the bitmap of these seqs."""
    values = array("Q")
    values.frombytes(np.ascontiguousarray(seqs, dtype=np.uint64).tobytes())
    return BitMap64(values)


def seqs_within(bitmap: BitMap64, first: int, last: int) -> NDArray[np.int64]:
    """Return the (n,) seqs of a bitmap from `first` to `last` (inclusive), ascending."""
    if not bitmap.range_cardinality(first, last + 1):
        return np.empty(0, dtype=np.int64)
    both = BitMap64()
    both.add_range(first, last + 1)
    both &= bitmap
    return np.array(both.to_array(), dtype=np.uint64).astype(np.int64)


class DeletionMarks:
    """The marks of one segment. The file is opened on first use."""

    def __init__(self, disk: Disk, data_dir: str, stem: str, header: DeletionMarksHeader) -> None:
        """`header` is the header that the file must have."""
        self._disk, self._data_dir, self._stem = disk, data_dir, stem
        self._path = f"{data_dir}/{stem}{DEL}"
        self._header = header
        self._fd = -1
        self._writable = False

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the mark bytes of records [start, stop) of the segment; zeros if the part does not exist.

        Raises DiskError, and CorruptData for a part of another segment or of another size.
        """
        if not self._open():
            return np.zeros(stop - start, dtype=np.uint8)
        data = self._disk.read_at(self._fd, stop - start, DEL_HEADER_BYTES + start)
        if len(data) != stop - start:
            raise CorruptData(
                f"deletion marks must have {stop - start} bytes here, got {len(data)}",
                file=self._path,
                bytes=len(data),
            )
        return np.frombuffer(data, dtype=np.uint8)

    def write(self, ordinals: I64) -> int:
        """Mark these records (ascending ordinals). Return how many were not marked before. No sync.

        The first mark creates the file durably. Raises DiskError, CorruptData.
        """
        if not len(ordinals):
            return 0
        self._open_writable()
        start, stop = int(ordinals[0]), int(ordinals[-1]) + 1
        marks = self.read(start, stop).copy()
        fresh = int((marks[ordinals - start] != DELETED).sum())
        if fresh:
            marks[ordinals - start] = DELETED
            self._disk.write_at(self._fd, [marks.data], DEL_HEADER_BYTES + start)
        return fresh

    def sync(self) -> None:
        """Make the marks durable. Raises DiskError."""
        if self._writable:
            self._disk.sync_data(self._fd)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._writable = False
            self._disk.close(fd)

    def _open(self) -> bool:
        if self._fd < 0:
            try:
                fd = self._disk.open_read(self._path)
            except DiskError as e:
                if e.errno == errno.ENOENT:
                    return False
                raise
            self._adopt_handle(fd)
        return True

    def _open_writable(self) -> None:
        if self._writable:
            return
        self.close()
        if not self._disk.exists(self._path):
            pieces = [self._header.encode(), bytes(self._header.records)]
            write_temporary(self._disk, self._data_dir, self._header.number, DEL, pieces)
            publish_parts(self._disk, self._data_dir, self._stem, [DEL])
        self._adopt_handle(self._disk.open_for_overwrite(self._path))
        self._writable = True

    def _adopt_handle(self, fd: int) -> None:
        """Keep the handle if its header and size are right; otherwise close it and raise CorruptData."""
        try:
            found = DeletionMarksHeader.decode(self._disk.read_at(fd, DEL_HEADER_BYTES, 0), self._path)
            size = self._disk.size(fd)
            if found != self._header or size != DEL_HEADER_BYTES + found.records:
                raise CorruptData(
                    "deletion marks belong to another segment or have the wrong size",
                    file=self._path, bytes=size, number=found.number,
                )  # fmt: skip
        except BaseException:
            self._disk.close(fd)
            raise
        self._fd = fd
