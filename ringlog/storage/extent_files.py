"""The files of extents: where they are, and how a reader opens and reads them."""

from __future__ import annotations

import errno
import os

from ringlog.errors import ColdUnavailable, DiskError
from ringlog.storage.disk import Disk
from ringlog.storage.extents import TIER_COLD, VOLATILE_PREFIX, ExtentFacts
from ringlog.storage.windows import MappedFile, PreadFile, RemoteFile, Window, WindowFile


class ExtentFiles:
    """Opens the files of one topic's extents."""

    def __init__(
        self, disk: Disk, topic: str, data_dir: str, shm_dir: str, cold_dir: str, *, is_mapped: bool
    ) -> None:
        self._disk = disk
        self._topic = topic
        self._roots = (data_dir, shm_dir)
        self._cold_dir = cold_dir
        self._open: type[PreadFile] | type[MappedFile] = MappedFile if is_mapped else PreadFile
        self._cold_missing = ""  # A missing cold file is an error only the second time.

    def open(self, extent: ExtentFacts) -> WindowFile | None:
        """Open the extent's file. Return None if it no longer exists."""
        is_cold = extent.tier == TIER_COLD
        if is_cold and not self._cold_dir:
            return RemoteFile(extent.path)
        try:
            return self._open(self._disk, self.path_of(extent))
        except DiskError as e:
            if is_cold and (e.errno != errno.ENOENT or self._cold_missing == extent.path):
                raise self._cold_unavailable(extent, e) from None
            self._cold_missing = extent.path if is_cold else ""
            if e.errno == errno.ENOENT:
                return None
            raise

    def path_of(self, extent: ExtentFacts) -> str:
        """Return the path of the extent's file on this host."""
        if extent.tier == TIER_COLD:
            return os.path.join(self._cold_dir, extent.path)
        is_volatile = extent.path.startswith(VOLATILE_PREFIX)
        return os.path.join(self._roots[is_volatile], extent.path.removeprefix(VOLATILE_PREFIX))

    def window(self, extent: ExtentFacts, file: WindowFile, start: int, stop: int) -> Window | None:
        """Read bytes [start, stop) of an open file; None if the caller must fetch them first."""
        try:
            return file.window(start, stop)
        except DiskError as e:
            if extent.tier == TIER_COLD:
                raise self._cold_unavailable(extent, e) from None
            raise

    def _cold_unavailable(self, extent: ExtentFacts, error: DiskError) -> ColdUnavailable:
        return ColdUnavailable(
            "the cold tier does not answer or lacks the data part of a segment; check the cold store",
            topic=self._topic, file=extent.path, errno=error.errno,
        )  # fmt: skip
