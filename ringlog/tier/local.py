"""LocalStore: a directory on another device as the cold tier.

An object is written under a temporary name, synced, renamed, and its directory is synced. Before a read, the
file's pages are dropped from the page cache, so that a verification reads the device.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from ringlog.errors import ColdUnavailable, DiskError
from ringlog.storage.disk import Disk
from ringlog.storage.layout import TMP_SUFFIX
from ringlog.tier.store import ColdMissing, Digest, file_pieces

STALE_TRIES = 3
"""Number of attempts to open a path when a network file system reports a stale handle (ESTALE)."""
T = TypeVar("T")


class LocalStore:
    """A store.SegmentStore below `root`. The root must exist: it is never created, as it may be a mount."""

    is_durable_at_once: bool = False

    def __init__(self, disk: Disk, root: str) -> None:
        self.root = root
        self._disk = disk

    def put(self, name: str, source: str) -> str:
        path = os.path.join(self.root, name)
        digest = Digest()
        pieces = file_pieces(self._disk, source)
        with contextlib.closing(pieces):
            first = next(pieces, b"")  # Raise for an unreadable source before anything is created.
            with _cold(name):
                self._make_parents(name)
                temporary = path + TMP_SUFFIX
                if self._disk.exists(temporary):
                    self._disk.unlink(temporary)
                fd = self._disk.create(temporary)
            try:
                self._fill(fd, name, first, pieces, digest)
            finally:
                self._disk.close(fd)
        with _cold(name):
            self._disk.rename(temporary, path)
            self._disk.sync_dir(os.path.dirname(path))
        return digest.text

    def _fill(self, fd: int, name: str, first: bytes, rest: Iterator[bytes], digest: Digest) -> None:
        piece = first
        while piece:
            with _cold(name):
                self._disk.write_at(fd, [digest.add(piece)], digest.bytes - len(piece))
            piece = next(rest, b"")
        with _cold(name):
            self._disk.sync_file(fd)

    def _make_parents(self, name: str) -> None:
        if not self._disk.exists(self.root):
            raise ColdUnavailable("the cold directory does not exist; mount its volume", dir=self.root)
        above = self.root
        for part in os.path.dirname(name).split("/"):
            below = os.path.join(above, part)
            if not self._disk.exists(below):
                self._disk.make_dir(below)
            self._disk.sync_dir(above)  # Always: a crash may have followed its creation before the sync.
            above = below

    def make_durable(self, name: str) -> None:
        with _cold(name):
            self._make_parents(name)
            self._disk.sync_dir(os.path.dirname(os.path.join(self.root, name)))

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return self._reading(name, lambda fd: self._disk.read_at(fd, stop - start, start))

    def size(self, name: str) -> int:
        return self._reading(name, self._disk.size)

    def _reading(self, name: str, read: Callable[[int], T]) -> T:
        """Open a file by its path, read, and close it. A stale handle is opened again, up to STALE_TRIES."""
        path = os.path.join(self.root, name)
        for attempt in range(1, STALE_TRIES + 1):
            try:
                fd = self._disk.open_read(path)
                try:
                    _forget_pages(fd)
                    return read(fd)
                finally:
                    self._disk.close(fd)
            except DiskError as e:
                if e.errno == errno.ENOENT and self._is_mounted():
                    raise ColdMissing("cold object does not exist", file=name) from None
                if e.errno != errno.ESTALE or attempt == STALE_TRIES:
                    raise to_cold_unavailable(e, name) from None
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _is_mounted(self) -> bool:
        with _cold(self.root):
            return self._disk.exists(self.root)

    def exists(self, name: str) -> bool:
        with _cold(name):
            if not self._disk.exists(self.root):
                raise ColdUnavailable("the cold directory does not exist; mount its volume", dir=self.root)
            return self._disk.exists(os.path.join(self.root, name))

    def list(self, prefix: str) -> Iterator[str]:
        if not self.exists(prefix):
            return
        yield from self._below(prefix)

    def _below(self, folder: str) -> Iterator[str]:
        try:
            names = self._disk.list_dir(os.path.join(self.root, folder))
        except DiskError as e:
            if e.errno == errno.ENOTDIR:
                return  # Not a file of ringlog: parts have a suffix, and folders have none.
            raise to_cold_unavailable(e, folder) from None
        for name in names:
            if "." not in name:
                yield from self._below(f"{folder}/{name}")
            elif not name.endswith(TMP_SUFFIX):
                yield f"{folder}/{name}"

    def delete(self, name: str) -> None:
        path = os.path.join(self.root, name)
        with _cold(name):
            if not self._disk.exists(self.root):
                raise ColdUnavailable("the cold directory does not exist; mount its volume", dir=self.root)
            if self._disk.exists(path):
                self._disk.unlink(path)
                self._disk.sync_dir(os.path.dirname(path))


@contextlib.contextmanager
def _cold(name: str) -> Iterator[None]:
    try:
        yield
    except DiskError as e:
        raise to_cold_unavailable(e, name) from None


def to_cold_unavailable(error: DiskError, name: str) -> ColdUnavailable:
    """Convert a disk error of the cold directory into ColdUnavailable."""
    facts = {key: error.detail[key] for key in ("call", "errno", "strerror") if key in error.detail}
    return ColdUnavailable(f"cold store: {error.message}", file=name, **facts)


def _forget_pages(fd: int) -> None:
    # Best effort: the kernel drops only clean pages, and a file in memory has none.
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
