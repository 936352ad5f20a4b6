"""An in-memory file system that can lose power.

Every file has two versions: the content that the kernel shows to readers (`shown`), and the content on the
device after a power loss (`durable`, plus any subset of the unsynced changes). A directory is a table of
names with the same two versions.

A failed sync behaves as on Linux: its changes are discarded, readers still see them, and the next sync
through any handle succeeds without writing them. They vanish when caches are dropped or power is lost. A sync
can also be ignored (nothing reaches the device) or late (it takes effect a few changes later).

All random choices of a power loss come from one seed.
"""

from __future__ import annotations

import copy
import errno
import posixpath
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import xxhash

from ringlog.errors import InvariantViolation
from ringlog.storage.disk import disk_error
from ringlog.storage.vectored_write import Buffer
from ringlog.testing.simulated_file import (
    DirectoryNode,
    FileNode,
    PowerLossDamage,
    all_children,
    apply,
    lose_power,
)

PATHS_MAX = 4_096
"""Maximum number of paths in the caches of split paths."""


@dataclass(slots=True, eq=False)
class _Handle:
    path: str
    node: FileNode
    writable: bool
    is_truncate_only: bool = False
    in_place: bool = False
    """Deletion marks: bytes are overwritten in place, and each byte is either written or not."""
    poisoned: bool = False


class SimulatedDisk:
    """An in-memory Disk. `directories` exist from the start and are durable.

    `ignore_syncs` makes syncs return without effect. `late_by` delays the effect of a sync by that many
    changes. `fail_syncs` makes that many of the next file syncs fail. `changes` counts calls that change the
    disk.
    """

    def __init__(self, *directories: str) -> None:
        self.ignore_syncs = False
        self.late_by = 0
        self.fail_syncs: int = 0
        self.changes: int = 0
        self._root = DirectoryNode()
        self._handles: dict[int, _Handle] = {}
        self._next_fd = 1 << 20  # far above real descriptors, so that a mix-up fails at once
        self._late: list[tuple[int, Callable[[], None]]] = []
        for path in directories:
            self._make_durable_dir(path)

    # -- handles --------------------------------------------------------------------------------------

    def create(self, path: str) -> int:
        directory, name = self._parent("create", path)
        if name in directory.shown:
            raise disk_error("create", path, errno.EEXIST)
        self._changed()
        node = FileNode()
        directory.change({name: node})
        return self._open(path, node, writable=True)

    def open_read(self, path: str) -> int:
        return self._open(path, self._node("open_read", path), writable=False)

    def open_for_truncate(self, path: str) -> int:
        fd = self._open(path, self._node("open_for_truncate", path), writable=True)
        self._handles[fd].is_truncate_only = True
        return fd

    def open_for_overwrite(self, path: str) -> int:
        fd = self._open(path, self._node("open_for_overwrite", path), writable=True)
        self._handles[fd].in_place = True
        return fd

    def close(self, fd: int) -> None:
        self._handle(fd)
        del self._handles[fd]

    def _open(self, path: str, node: FileNode, *, writable: bool) -> int:
        fd = self._next_fd
        self._next_fd += 1
        self._handles[fd] = _Handle(path, node, writable)
        return fd

    def _handle(self, fd: int) -> _Handle:
        try:
            return self._handles[fd]
        except KeyError:
            raise InvariantViolation("unknown or closed file handle", fd=fd) from None

    def _changeable(self, fd: int, call: str) -> _Handle:
        handle = self._handle(fd)
        if handle.poisoned:
            raise InvariantViolation(
                "an earlier sync of this file failed: its handle must not be used",
                call=call,
                path=handle.path,
            )
        return handle

    def _writable(self, fd: int, call: str) -> FileNode:
        handle = self._changeable(fd, call)
        if not handle.writable:
            raise disk_error(call, handle.path, errno.EBADF)
        if handle.is_truncate_only and call != "truncate":
            raise _must_not_grow(handle.path, call)
        self._changed()
        return handle.node

    # -- contents -------------------------------------------------------------------------------------

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        node = self._writable(fd, "write_at")
        data = b"".join([memoryview(buffer).tobytes() for buffer in buffers])
        if self._handle(fd).in_place:
            node.change_bytes(offset, data)
        elif data:
            node.change(offset, data)
        return len(data)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        node = self._writable(fd, "allocate")
        if length <= 0:
            raise disk_error("allocate", self._handle(fd).path, errno.EINVAL)
        if offset + length > len(node.shown):
            node.change(offset + length, None, grows=True)

    def zero_fill(self, fd: int, offset: int, length: int) -> None:
        self._writable(fd, "zero_fill").change(offset, bytes(length))

    def truncate(self, fd: int, length: int) -> None:
        handle = self._handle(fd)
        if handle.is_truncate_only and length > len(handle.node.shown):
            raise _must_not_grow(handle.path, "truncate")
        self._writable(fd, "truncate").change(length, None)

    def write_back(self, fd: int, offset: int, length: int) -> None:
        self._changeable(fd, "write_back")

    def begin_sync(self, fd: int, offset: int, length: int) -> None:
        self._changeable(fd, "begin_sync")

    def sync_data(self, fd: int) -> None:
        self._sync(fd, "sync_data")

    def sync_file(self, fd: int) -> None:
        self._sync(fd, "sync_file")

    def _sync(self, fd: int, call: str) -> None:
        handle = self._changeable(fd, call)
        self._changed()
        if self.fail_syncs > 0:
            self.fail_syncs -= 1
            self.fail_sync(fd)
            raise disk_error(call, handle.path, errno.EIO)
        node = handle.node
        serial = node.serial
        node.dirty = False
        self._reach_device(lambda: node.promote(serial))

    def fail_sync(self, fd: int) -> None:
        """Simulate a failed sync: discard unsynced changes, keep them visible, and poison the handle."""
        handle = self._changeable(fd, "fail_sync")
        handle.poisoned = True
        handle.node.pending.clear()

    # -- names ----------------------------------------------------------------------------------------

    def rename(self, source: str, target: str) -> None:
        node = self._node("rename", source)
        if node.dirty:
            raise InvariantViolation("file must be synced before rename", path=source, target=target)
        old, old_name = self._parent("rename", source)
        new, new_name = self._parent("rename", target)
        if isinstance(new.shown.get(new_name), DirectoryNode):
            raise disk_error("rename", source, errno.EISDIR, target=target)
        self._changed()
        if old is new:
            old.change({old_name: None, new_name: node})
        else:
            new.change({new_name: node})
            old.change({old_name: None})
        for handle in self._handles.copy().values():
            if handle.path == source:
                handle.path = target

    def unlink(self, path: str) -> None:
        self._node("unlink", path)
        directory, name = self._parent("unlink", path)
        self._changed()
        directory.change({name: None})

    def make_dir(self, path: str) -> None:
        directory, name = self._parent("make_dir", path)
        existing = directory.shown.get(name)
        if isinstance(existing, FileNode):
            raise disk_error("make_dir", path, errno.EEXIST, "exists and is not a directory")
        if existing is None:
            self._changed()
            directory.change({name: DirectoryNode()})

    def remove_dir(self, path: str) -> None:
        if self._directory("remove_dir", path).shown:
            raise disk_error("remove_dir", path, errno.ENOTEMPTY)
        directory, name = self._parent("remove_dir", path)
        self._changed()
        directory.change({name: None})

    def sync_dir(self, path: str) -> None:
        directory = self._directory("sync_dir", path)
        self._changed()
        upto = directory.changes
        self._reach_device(lambda: directory.promote(upto))

    # -- reads ----------------------------------------------------------------------------------------

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        shown = self._handle(fd).node.shown
        return (
            bytes(shown) if offset == 0 and length >= len(shown) else bytes(shown[offset : offset + length])
        )

    def read_into(self, fd: int, buffer: Buffer, offset: int) -> int:
        if memoryview(buffer).nbytes == 0:
            return 0
        view = memoryview(buffer).cast("B")
        data = self._handle(fd).node.shown[offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)

    def size(self, fd: int) -> int:
        return len(self._handle(fd).node.shown)

    def list_dir(self, path: str) -> list[str]:
        return sorted(self._directory("list_dir", path).shown)

    def exists(self, path: str) -> bool:
        above, name = _split(path)
        parent = self._find(above)
        if isinstance(parent, FileNode):
            raise disk_error("exists", path, errno.ENOTDIR)
        return parent is not None and (name == "" or name in parent.shown)

    # -- locks ----------------------------------------------------------------------------------------

    def lock(self, path: str) -> int:
        directory, name = self._parent("lock", path)
        if name not in directory.shown:
            self.close(self.create(path))
        node = self._node("lock", path)
        if node.locked:
            raise disk_error("lock", path, errno.EWOULDBLOCK, holder="simulated")
        node.locked = True
        return self._open(path, node, writable=True)

    def unlock(self, fd: int) -> None:
        self._handle(fd).node.locked = False
        self.close(fd)

    # -- failures -------------------------------------------------------------------------------------

    def process_kill(self) -> None:
        """End the process: handles and locks are released, and written bytes stay."""
        self._handles.clear()
        for node in self._all_nodes():
            node.locked = False
            node.dirty = False

    def drop_caches(self) -> None:
        """Show the device content plus unsynced changes; changes of a failed sync vanish."""
        for node in self._all_nodes():
            node.shown = bytearray(node.durable)
            for made in node.pending:
                apply(node.shown, made)

    def power_loss(self, seed: int, damage: PowerLossDamage | None = None) -> None:
        """Cut the power and restart with the content of the device.

        `damage` applies to all files; with None the seed selects one for each file. In each directory, name
        changes are lost from a random point on: all of them with LOST, none with KEPT.
        """
        rng = random.Random(seed)
        self.process_kill()
        self._late.clear()
        for directory in self._all_directories():
            directory.promote(_names_kept(directory, damage, rng))
            directory.pending.clear()
        for node in self._all_nodes():
            lose_power(node, damage or rng.choice(list(PowerLossDamage)), rng)
        for directory in self._all_directories():
            directory.shown = dict(directory.durable)

    def copy(self) -> SimulatedDisk:
        """Return an independent disk in the same state, including open handles."""
        if self._late:
            raise InvariantViolation("a late sync is on its way", waiting=len(self._late))
        known: dict[int, Any] = {}
        twin = copy.copy(self)
        twin._root, twin._late = self._root.copy(known), []
        # The garbage collector may close handles of discarded objects at any line: iterate over a copy.
        handles = self._handles.copy()
        twin._handles = {fd: replace(each, node=each.node.copy(known)) for fd, each in handles.items()}
        return twin

    def digest(self) -> bytes:
        """Return a hash of every visible name and byte. Disks with equal digests look the same to readers."""
        found = xxhash.xxh3_128()
        queue = [("", self._root)]
        for path, directory in queue:
            for name in sorted(directory.shown):
                node = directory.shown[name]
                if isinstance(node, DirectoryNode):
                    queue.append((f"{path}/{name}", node))
                    found.update(f"{path}/{name}/\0".encode())
                else:
                    found.update(f"{path}/{name}\0{len(node.shown)}\0".encode())
                    found.update(node.shown)
        return found.digest()

    def _changed(self) -> None:
        self.changes += 1
        if not self._late:
            return
        due = [effect for at, effect in self._late if at <= self.changes]
        self._late = [(at, effect) for at, effect in self._late if at > self.changes]
        for effect in due:
            effect()

    def _reach_device(self, effect: Callable[[], None]) -> None:
        if self.ignore_syncs:
            return
        if self.late_by > 0:
            self._late.append((self.changes + self.late_by, effect))
        else:
            effect()

    def add_file(self, path: str, data: bytes) -> None:
        """Add a file that exists from the start and is durable; its directory must exist."""
        directory, name = self._parent("place", path)
        directory.shown[name] = directory.durable[name] = FileNode(bytearray(data), bytearray(data))

    def contents(self) -> dict[str, bytes]:
        """Return the visible content of every file, by path."""
        found: dict[str, bytes] = {}
        queue = [("", self._root)]
        for path, directory in queue:
            for name, node in directory.shown.items():
                if isinstance(node, DirectoryNode):
                    queue.append((f"{path}/{name}", node))
                else:
                    found[f"{path}/{name}"] = bytes(node.shown)
        return found

    # -- the tree -------------------------------------------------------------------------------------

    def _find(self, path: str) -> FileNode | DirectoryNode | None:
        at: FileNode | DirectoryNode | None = self._root
        for name in _names(path):
            if not isinstance(at, DirectoryNode):
                return None
            at = at.shown.get(name)
        return at

    def _directory(self, call: str, path: str) -> DirectoryNode:
        found = self._find(path)
        if found is None:
            raise disk_error(call, path, errno.ENOENT)
        if not isinstance(found, DirectoryNode):
            raise disk_error(call, path, errno.ENOTDIR)
        return found

    def _parent(self, call: str, path: str) -> tuple[DirectoryNode, str]:
        above, name = _split(path)
        return self._directory(call, above), name

    def _node(self, call: str, path: str) -> FileNode:
        found = self._find(path)
        if found is None:
            raise disk_error(call, path, errno.ENOENT)
        if not isinstance(found, FileNode):
            raise disk_error(call, path, errno.EISDIR)
        return found

    def _make_durable_dir(self, path: str) -> None:
        at = self._root
        for name in _names(path):
            below = at.shown.setdefault(name, DirectoryNode())
            at.durable[name] = below
            if not isinstance(below, DirectoryNode):
                raise disk_error("make_dir", path, errno.ENOTDIR)
            at = below

    def _all_directories(self) -> list[DirectoryNode]:
        found = [self._root]
        for directory in found:
            for below in all_children(directory):
                if isinstance(below, DirectoryNode) and below not in found:
                    found.append(below)
        return found

    def _all_nodes(self) -> list[FileNode]:
        nodes = [
            each
            for directory in self._all_directories()
            for each in all_children(directory)
            if isinstance(each, FileNode)
        ]
        nodes += [handle.node for handle in self._handles.copy().values()]
        return list({id(node): node for node in nodes}.values())


@lru_cache(PATHS_MAX)
def _names(path: str) -> tuple[str, ...]:
    return tuple(filter(None, path.split("/")))


@lru_cache(PATHS_MAX)
def _split(path: str) -> tuple[str, str]:
    return posixpath.dirname(path), posixpath.basename(path)


def _must_not_grow(path: str, call: str) -> InvariantViolation:
    return InvariantViolation(
        "file was opened with open_for_truncate and must not grow", call=call, path=path
    )


def _names_kept(directory: DirectoryNode, damage: PowerLossDamage | None, rng: random.Random) -> int:
    """Return how many name changes of a directory survive a power loss: later ones are lost."""
    if damage is PowerLossDamage.LOST:
        return directory.reached
    if damage is PowerLossDamage.KEPT:
        return directory.changes
    return rng.randint(directory.reached, directory.changes)
