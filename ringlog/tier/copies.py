"""Copies of a segment's parts on the host and in the cold store: verify, upload, download, remove.

The relocator uses this module to move segments, the reclaimer to scrub, repair and remove them. Every step
can be repeated after a crash at any point. On both sides a part gets its final name only after it is synced,
and a copy counts only after it was read back. No function here removes the last complete copy of a segment.

The index, the tags and the marks stay on the host when the data part moves. The cold store has all parts of a
segment, so that the cold tier can be read without the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from ringlog.errors import CorruptData, DiskError
from ringlog.segment.layout import DATA, DEL, IDX, TAGS, parse_stem
from ringlog.storage.disk import Disk
from ringlog.storage.layout import TMP_SUFFIX
from ringlog.tier.ownership import OwnedStore
from ringlog.tier.store import (
    COPY_BYTES,
    ColdMissing,
    digest_of,
    file_pieces,
    object_pieces,
    verify_object,
)
from ringlog.tier.verify_copy import verify_data_part

LOCAL_INDEX = (IDX, TAGS, DEL)
"""Suffixes of the parts that stay on the host."""
Progress = Callable[[int], None]


def no_progress(_bytes: int) -> None:
    """Do nothing: the default, for callers that neither pace nor count."""


class SegmentCopies:
    """Access to both copies of every segment of one data directory. Use one thread at a time per segment."""

    def __init__(
        self, disk: Disk, data_dir: str, store: OwnedStore | None, progress: Progress = no_progress
    ) -> None:
        """`progress` is called with the number of bytes of each read. It may sleep, to limit the rate."""
        self.disk: Disk = disk
        self.data_dir: str = data_dir
        self.store: OwnedStore | None = store
        self._progress = progress

    def path(self, name: str) -> str:
        """Return the path of a part on the host."""
        return os.path.join(self.data_dir, name)

    def has_local(self, name: str) -> bool:
        """Return whether the host has a part. Raises DiskError if the check fails."""
        return self.disk.exists(self.path(name))

    def require_store(self) -> OwnedStore:
        """Return the store. The caller must know that one is configured."""
        assert self.store is not None, "nothing is cold without a store"
        return self.store

    # -- verification -------------------------------------------------------------------------------

    def local_digest(self, name: str) -> str:
        """Return the digest (store.digest_of) of a part on the host. Raises DiskError."""
        with contextlib.closing(file_pieces(self.disk, self.path(name))) as pieces:
            return digest_of(self._paced(pieces))

    def verify_local(self, stem: str) -> int:
        """Verify the data part on the host and return its size in bytes. Raises CorruptData, DiskError."""
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
        """Verify the data part in the store and return its size in bytes.

        Raises CorruptData, ColdMissing, ColdUnavailable.
        """
        store, name = self.require_store(), stem + DATA
        store.check()
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
        """Copy a part from the host to the store, verify the copy, and return its digest.

        An identical object in the store is kept and made durable. Raises DiskError and ColdUnavailable.
        Raises CorruptData if the store returns other bytes than it was given.
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
        """Upload index, tags and marks, if they exist. Returns digests by suffix."""
        return {
            suffix: self.upload_part(stem + suffix) for suffix in LOCAL_INDEX if self.has_local(stem + suffix)
        }

    def upload_changed_marks(self, stem: str, sent: str) -> str:
        """Upload the marks if their digest differs from `sent`. Returns the current digest; "" = no marks."""
        if not self.has_local(stem + DEL):
            return ""
        digest = self.local_digest(stem + DEL)
        return sent if digest == sent else self.upload_part(stem + DEL)

    # -- store to host --------------------------------------------------------------------------------

    def download_part(self, name: str) -> None:
        """Replace the host's part by the store's copy: write a temporary file, sync it, rename it.

        The caller must have verified the copy. Raises DiskError, ColdUnavailable. Raises CorruptData if the
        copy changes meanwhile.
        """
        store, path = self.require_store(), self.path(name)
        store.check()
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
        """Remove parts of a segment from the host, in this order. Returns the number of freed bytes."""
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
        """Remove a segment from the store; see OwnedStore.delete. Raises ColdUnavailable, DiskError."""
        self.require_store().delete(*(stem + suffix for suffix in (IDX, TAGS, DEL, DATA)))

    def _size(self, path: str) -> int:
        try:
            fd = self.disk.open_read(path)
        except DiskError:
            return 1  # The part is removed anyway. Only the count of freed bytes is wrong.
        try:
            return max(self.disk.size(fd), 1)
        finally:
            self.disk.close(fd)

    # -- repair ---------------------------------------------------------------------------------------

    def heal_local(self, stem: str) -> bool:
        """Replace a damaged data part on the host by the cold copy, if that is valid. Returns whether."""
        if self.store is None:
            return False
        try:
            self.verify_cold(stem)
        except CorruptData:  # Includes ColdMissing.
            return False
        self.download_part(stem + DATA)
        self.verify_local(stem)
        return True

    def heal_cold(self, name: str) -> bool:
        """Replace a damaged part in the store by the host's part, if that is valid. Returns whether."""
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
