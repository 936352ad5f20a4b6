"""Copies: the parts of a segment on the host and in the cold store, proven, sent, fetched and removed.

Used by the relocator, which moves, and by the reclaimer, which scrubs, heals and drops. Every step may be
repeated after a crash at any point: names change by ST-3 on both sides, and a copy counts only after it
was read back (RD-22). Nothing here removes the last complete copy of anything (TI-4).

The index, the tags and the marks stay on the host when the data part goes; a cold segment has all parts, so
that the cold tier alone can be read (TI-12).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from ringlog.errors import CorruptData, DiskError
from ringlog.segment.layout import DATA, DEL, IDX, TAGS, parse_stem
from ringlog.storage.disk import Disk
from ringlog.storage.layout import TMP_SUFFIX
from ringlog.tier.store import (
    COPY_BYTES,
    ColdMissing,
    SegmentStore,
    digest_of,
    file_pieces,
    object_pieces,
    verify_object,
)
from ringlog.tier.verify_copy import verify_data_part

LOCAL_INDEX = (IDX, TAGS, DEL)
"""Parts that stay on the host."""
Progress = Callable[[int], None]


def no_progress(_bytes: int) -> None:
    """Nobody paces or counts."""


class SegmentCopies:
    """Both sides of every segment of one data directory. For one thread at a time for each segment."""

    def __init__(
        self, disk: Disk, data_dir: str, store: SegmentStore | None, progress: Progress = no_progress
    ) -> None:
        """`progress` is told of bytes as they are read, and may wait: that is how work is paced."""
        self.disk, self.data_dir, self.store = disk, data_dir, store
        self._progress = progress

    def path(self, name: str) -> str:
        """Where a part lies on the host."""
        return os.path.join(self.data_dir, name)

    def has_local(self, name: str) -> bool:
        """Raises DiskError when it cannot be said."""
        return self.disk.exists(self.path(name))

    def require_store(self) -> SegmentStore:
        """The store; only where there is one."""
        assert self.store is not None, "nothing is cold without a store"
        return self.store

    # -- proofs -------------------------------------------------------------------------------------

    def local_digest(self, name: str) -> str:
        """store.digest_of a part on the host; raises DiskError."""
        with contextlib.closing(file_pieces(self.disk, self.path(name))) as pieces:
            return digest_of(self._paced(pieces))

    def verify_local(self, stem: str) -> int:
        """Verify the data part on the host; its size. Raises CorruptData, DiskError."""
        path = self.path(stem + DATA)
        fd = self.disk.open_read(path)
        try:
            size = self.disk.size(fd)
            read = lambda start, stop: self.disk.read_at(fd, stop - start, start)  # noqa: E731
            verify_data_part(read, path, _number(stem), size, self._progress)
        finally:
            self.disk.close(fd)
        return size

    def verify_cold(self, stem: str) -> int:
        """Verify the data part in the store; its size. Raises CorruptData, ColdMissing, ColdUnavailable."""
        store, name = self.require_store(), stem + DATA
        size = store.size(name)
        verify_data_part(
            lambda start, stop: store.get_range(name, start, stop), name, _number(stem), size, self._progress
        )
        return size

    def _paced(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self._progress(len(piece))
            yield piece

    # -- host to store --------------------------------------------------------------------------------

    def upload_part(self, name: str) -> str:
        """Make the store hold what the host holds under `name`, and read it back; returns its digest.

        What is there already and the same is left, and made durable. Raises DiskError, ColdUnavailable, and
        CorruptData when the store does not give back what it was given.
        """
        store, digest = self.require_store(), self.local_digest(name)
        try:
            verify_object(store, name, digest)
        except CorruptData:
            sent = store.put(name, self.path(name))
            verify_object(store, name, sent)
            return sent
        store.make_durable(name)
        return digest

    def upload_index_parts(self, stem: str) -> dict[str, str]:
        """Send index, tags and marks, as far as there are any; digest by suffix."""
        return {
            suffix: self.upload_part(stem + suffix) for suffix in LOCAL_INDEX if self.has_local(stem + suffix)
        }

    def upload_changed_marks(self, stem: str, sent: str) -> str:
        """Send the marks again when they changed since `sent`, their digest then; returns the digest now."""
        if not self.has_local(stem + DEL):
            return ""
        digest = self.local_digest(stem + DEL)
        return sent if digest == sent else self.upload_part(stem + DEL)

    # -- store to host --------------------------------------------------------------------------------

    def download_part(self, name: str) -> None:
        """Put the store's copy of a part in the place of the host's, by ST-3.

        The caller has proven the copy. Raises DiskError, ColdUnavailable, CorruptData when it changed.
        """
        store, path = self.require_store(), self.path(name)
        expected = digest_of(object_pieces(store, name))
        temporary = path + TMP_SUFFIX
        if self.disk.exists(temporary):
            self.disk.unlink(temporary)
        fd = self.disk.create(temporary)
        try:
            offset = 0
            for piece in object_pieces(store, name, COPY_BYTES):
                self._progress(len(piece))
                offset += self.disk.write_at(fd, [piece], offset)
            self.disk.sync_file(fd)
        finally:
            self.disk.close(fd)
        if self.local_digest(name + TMP_SUFFIX) != expected:
            raise CorruptData("cold copy changed while it was fetched", file=name)
        self.disk.rename(temporary, path)
        self.disk.sync_dir(os.path.dirname(path))

    # -- removal --------------------------------------------------------------------------------------

    def drop_local(self, stem: str, suffixes: tuple[str, ...]) -> int:
        """Remove parts of a segment from the host, in this order; bytes that became free (RC-4)."""
        freed = 0
        for suffix in suffixes:
            path = self.path(stem + suffix)
            if self.disk.exists(path):
                freed += self._size(path)
                self.disk.unlink(path)
        if freed:
            self.disk.sync_dir(os.path.dirname(self.path(stem)))
        return freed

    def drop_cold(self, stem: str) -> None:
        """Remove a segment from the store; absence is success. Raises ColdUnavailable."""
        for suffix in (IDX, TAGS, DEL, DATA):
            self.require_store().delete(stem + suffix)

    def _size(self, path: str) -> int:
        try:
            fd = self.disk.open_read(path)
        except DiskError:
            return 1  # It goes all the same; only the count of freed bytes is off.
        try:
            return max(self.disk.size(fd), 1)
        finally:
            self.disk.close(fd)

    # -- healing (SG-10) ------------------------------------------------------------------------------

    def heal_local(self, stem: str) -> bool:
        """Replace a damaged data part on the host by the cold copy, if that verifies; was it healed?"""
        if self.store is None:
            return False
        try:
            self.verify_cold(stem)
        except CorruptData:  # ColdMissing is one
            return False
        self.download_part(stem + DATA)
        self.verify_local(stem)
        return True

    def heal_cold(self, name: str) -> bool:
        """Replace a damaged part in the store by the host's, if that verifies; was it healed?"""
        stem, _, suffix = name.rpartition(".")
        if not self.has_local(name):
            return False
        if "." + suffix == DATA:
            try:
                self.verify_local(stem)
            except CorruptData:
                return False
        self.upload_part(name)
        return True


def _number(stem: str) -> int:
    parsed = parse_stem(stem)
    assert parsed is not None, stem
    return parsed[2]


__all__ = ["LOCAL_INDEX", "ColdMissing", "SegmentCopies", "no_progress"]
