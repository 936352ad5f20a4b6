"""A Disk that fails a test at once if operations happen in an order that could lose data.

One Monitor watches all incarnations of a run. Each incarnation has its own MonitorDisk:

    monitor = Monitor()
    disk = monitor.watch(inner, incarnation=1)
    ...
    monitor.require_durable(path, stop)     when a frame that needs a sync is acked or published
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ringlog.segment.layout import DEL, IDX, TAGS
from ringlog.storage.disk import Disk
from ringlog.storage.layout import TMP_SUFFIX
from ringlog.storage.log_register import parse_register_name
from ringlog.storage.vectored_write import Buffer
from ringlog.testing.wrapped_disk import WrappedDisk

_REPLACES_NOTHING = (DEL, IDX, TAGS, TMP_SUFFIX)
"""Files that replace no other file: deletion marks, parts of a segment before its data part is named,
temporary files.
"""


class SyncOrderViolation(AssertionError):
    """An operation happened before an operation that it depends on."""


@dataclass(slots=True)
class _Facts:
    """State of one file: its writer, how far it is written and synced, and whether its name is durable."""

    incarnation: int
    written: int = 0
    synced: int = 0
    is_dirty: bool = False
    ever_synced: bool = False
    name_synced: bool = False
    sync_failed: bool = False


class Monitor:
    """State of files. It survives the processes that wrote the files."""

    def __init__(self) -> None:
        self.files: dict[str, _Facts] = {}
        self.made: set[str] = set()

    def copy(self) -> Monitor:
        """Return an independent copy."""
        twin = Monitor()
        twin.files = {path: replace(facts) for path, facts in self.files.items()}
        twin.made = set(self.made)
        return twin

    def watch(self, inner: Disk, incarnation: int) -> MonitorDisk:
        """Return the disk for this incarnation."""
        return MonitorDisk(inner, self, incarnation)

    def power_loss(self, exists: Callable[[str], bool]) -> None:
        """Simulate a power loss: forget files that no longer exist; existing names are durable."""
        for path in [path for path in self.files if not exists(path)]:
            del self.files[path]
        self.made = {path for path in self.made if exists(path)}
        for facts in self.files.values():
            facts.name_synced = True

    def require_written(self, path: str, stop: int) -> None:
        """Fail unless the bytes below `stop` were written (durability class disk)."""
        facts = self._facts(path)
        if facts.written < stop:
            raise SyncOrderViolation(f"{path} is written up to {facts.written}, relied on up to {stop}")

    def require_durable(self, path: str, stop: int) -> None:
        """Fail unless a sync covers the bytes below `stop` and the file's name (durability class fsync)."""
        facts = self._facts(path)
        if facts.sync_failed:
            raise SyncOrderViolation(f"{path} is relied on after its sync failed")
        if facts.synced < stop:
            raise SyncOrderViolation(f"{path} is synced up to {facts.synced}, relied on up to {stop}")
        if not facts.name_synced:
            raise SyncOrderViolation(f"{path} is relied on and no directory sync covers its name")

    def _facts(self, path: str) -> _Facts:
        try:
            return self.files[path]
        except KeyError:
            raise SyncOrderViolation(f"{path} is relied on and was never made") from None


class MonitorDisk(WrappedDisk):
    """Watches the operations of one incarnation."""

    def __init__(self, inner: Disk, monitor: Monitor, incarnation: int) -> None:
        super().__init__(inner)
        self._monitor = monitor
        self._files = monitor.files
        self._incarnation = incarnation
        self._cuts: set[int] = set()

    def create(self, path: str) -> int:
        fd = super().create(path)
        if path in self._monitor.made and not path.endswith(TMP_SUFFIX):
            self.close(fd)
            raise SyncOrderViolation(f"{path} is made a second time; a file belongs to one incarnation")
        self._monitor.made.add(path)
        self._files[path] = _Facts(self._incarnation)
        return fd

    def open_for_truncate(self, path: str) -> int:
        fd = super().open_for_truncate(path)
        self._cuts.add(fd)
        return fd

    def open_for_overwrite(self, path: str) -> int:
        if not path.endswith(DEL) and parse_register_name(path.rpartition("/")[2]) is None:
            raise SyncOrderViolation(
                f"{path} is opened to be changed by an incarnation which did not make it"
            )
        fd = super().open_for_overwrite(path)
        # Deletion marks and the register of a log outlive the incarnation that created the file: each later
        # one writes to them. The durability of the name does not change.
        before = self._files.get(path)
        self._files[path] = _Facts(self._incarnation, name_synced=before is not None and before.name_synced)
        return fd

    def close(self, fd: int) -> None:
        self._cuts.discard(fd)
        super().close(fd)

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        facts = self._changing(fd)
        count = super().write_at(fd, buffers, offset)
        facts.written = max(facts.written, offset + count)
        # Bytes that are rewritten below the synced point are not durable any more.
        facts.synced = min(facts.synced, offset)
        return count

    def zero_fill(self, fd: int, offset: int, length: int) -> None:
        self._changing(fd)
        super().zero_fill(fd, offset, length)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._changing(fd)
        super().allocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        if fd in self._cuts:  # cutting the end of a predecessor's file adds nothing to it
            super().truncate(fd, length)
            return
        facts = self._changing(fd)
        super().truncate(fd, length)
        facts.written = min(facts.written, length)
        facts.synced = min(facts.synced, length)

    def sync_data(self, fd: int) -> None:
        self._sync(fd, super().sync_data)

    def sync_file(self, fd: int) -> None:
        self._sync(fd, super().sync_file)

    def _changing(self, fd: int) -> _Facts:
        path = self.path_of(fd)
        facts = self._files.get(path)
        if facts is None or facts.incarnation != self._incarnation:
            raise SyncOrderViolation(
                f"{path} is changed by incarnation {self._incarnation}, which did not make it"
            )
        if facts.sync_failed:
            raise SyncOrderViolation(f"{path} is changed after its sync failed")
        facts.is_dirty = True
        return facts

    def _sync(self, fd: int, sync: Callable[[int], None]) -> None:
        facts = self._files.get(self.path_of(fd))
        if facts is None or fd in self._cuts:
            sync(fd)
            return
        if facts.sync_failed:
            raise SyncOrderViolation(f"{self.path_of(fd)} is synced again after its sync failed")
        covered = facts.written
        facts.sync_failed = True  # until the sync returns
        sync(fd)
        facts.sync_failed = False
        facts.synced, facts.is_dirty, facts.ever_synced = covered, False, True

    def rename(self, source: str, target: str) -> None:
        facts = self._files.get(source)
        if facts is not None and (facts.is_dirty or not facts.ever_synced):
            raise SyncOrderViolation(f"{source} is renamed to {target} before it is synced")
        super().rename(source, target)
        if facts is not None:
            del self._files[source]
            self._files[target] = facts
            facts.name_synced = False

    def unlink(self, path: str) -> None:
        if not path.endswith(TMP_SUFFIX):
            self._require_names_durable_beside(path)
        super().unlink(path)
        self._files.pop(path, None)

    def _require_names_durable_beside(self, path: str) -> None:
        """Fail if a synced file next to `path` has no durable name: it may be the replacement of `path`."""
        gone = self._files.get(path)
        is_own = gone is not None and gone.incarnation == self._incarnation
        if gone is not None and is_own and not (gone.ever_synced and gone.written):
            return  # never synced, or empty: no process can rely on its content
        directory = posixpath.dirname(path)
        for other, facts in self._files.items():
            if facts.incarnation != self._incarnation:
                continue  # written by another process, which works independently
            if other == path or posixpath.dirname(other) != directory or other.endswith(_REPLACES_NOTHING):
                continue
            if facts.ever_synced and not facts.name_synced:
                raise SyncOrderViolation(f"{path} is removed before a directory sync covers {other}")

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        prefix = path.rstrip("/") + "/"
        for name, facts in self._files.items():
            if name.startswith(prefix) and "/" not in name[len(prefix) :]:
                facts.name_synced = True
