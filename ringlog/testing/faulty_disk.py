"""A Disk that fails chosen calls, or that simulates the death of the process at the n-th call."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ringlog.errors import DiskError, InvariantViolation, UsageError
from ringlog.storage.disk import Disk, disk_error
from ringlog.storage.vectored_write import Buffer, write_fully
from ringlog.testing.wrapped_disk import WrappedDisk

OpClass = Literal[
    "open",
    "write",
    "data_sync",
    "full_sync",
    "rename",
    "unlink",
    "dir_sync",
    "size",
    "read",
    "make_dir",
    "any",
]
"""`size`: truncate and allocate.

`read`: also list_dir and exists. `any`: every call that changes the disk.
"""

Kind = Literal["EIO", "ENOSPC", "EAGAIN", "ESTALE", "short", "stuck", "halt"]
"""`short`: the first attempt writes half, and the writer must continue. `stuck`: each attempt writes nothing.
`halt`: the process is dead from just before this call."""

T = TypeVar("T")


class Halted(BaseException):
    """The process died at this call. A BaseException, so that no code under test catches it."""


@dataclass(frozen=True, slots=True)
class DiskFault:
    """Fail the `nth` call (from 1) of a class; with `always`, also all later ones."""

    op: OpClass
    nth: int
    kind: Kind
    always: bool = False

    def is_due(self, op: OpClass, count: int) -> bool:
        """Return whether the `count`-th call of class `op` must fail."""
        return op == self.op and (count == self.nth or (self.always and count > self.nth))


class FaultyDisk(WrappedDisk):
    """Fails calls according to a plan. `calls` counts calls by class, for sweeps over every call of a run.

    A write that fails with ENOSPC leaves its first half on the disk. A failed sync poisons its handle, as on
    the real disk. On a simulated disk it also discards the unsynced changes, so that a later successful sync
    does not cover them.
    """

    def __init__(self, inner: Disk, *plan: DiskFault) -> None:
        super().__init__(inner)
        for fault in plan:
            if fault.kind in {"short", "stuck"} and fault.op != "write":
                raise UsageError("only writes can be short or stuck", fault=fault)
        self.plan: list[DiskFault] = list(plan)
        self.calls: Counter[OpClass] = Counter()
        self.halted: bool = False
        self._poisoned: set[int] = set()

    def _due(self, op: OpClass, *, changes: bool = True) -> DiskFault | None:
        """Count a call and return the fault for it, or None; raise Halted if the process is dead."""
        if self.halted:
            raise Halted("the process is dead")
        self.calls[op] += 1
        if changes:
            self.calls["any"] += 1
        if not self.plan:
            return None
        counted: list[OpClass] = [op, "any"] if changes else [op]
        for fault in self.plan:
            if any(fault.is_due(each, self.calls[each]) for each in counted):
                if fault.kind == "halt":
                    self.halted = True
                    raise Halted(f"call {self.calls[fault.op]} of class {fault.op}")
                return fault
        return None

    def _pass(self, op: OpClass, call: str, path: str, act: Callable[[], T], *, changes: bool = True) -> T:
        fault = self._due(op, changes=changes)
        if fault is not None:
            raise _error(fault, call, path)
        return act()

    def _require_sound(self, fd: int, call: str) -> None:
        if fd in self._poisoned:
            raise InvariantViolation(
                "an earlier sync of this file failed: its handle must not be used",
                call=call,
                path=self.path_of(fd),
            )

    def create(self, path: str) -> int:
        act = super().create
        return self._pass("open", "create", path, lambda: act(path))

    def open_read(self, path: str) -> int:
        act = super().open_read
        return self._pass("open", "open_read", path, lambda: act(path), changes=False)

    def open_for_truncate(self, path: str) -> int:
        act = super().open_for_truncate
        return self._pass("open", "open_for_truncate", path, lambda: act(path), changes=False)

    def open_for_overwrite(self, path: str) -> int:
        act = super().open_for_overwrite
        return self._pass("open", "open_for_overwrite", path, lambda: act(path), changes=False)

    def close(self, fd: int) -> None:
        if self.halted:
            return  # A dead process has closed its handles; its Python objects may call close again later.
        self._poisoned.discard(fd)
        super().close(fd)

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._require_sound(fd, "write_at")
        fault = self._due("write")
        if fault is None:
            return super().write_at(fd, buffers, offset)
        attempts = _Attempts(fault, lambda pending, at: self.inner.write_at(fd, pending, at))
        try:
            return write_fully(attempts.write, buffers, offset)
        except OSError as e:
            raise disk_error(
                "write_at", self.path_of(fd), e.errno or 0, str(e.strerror), offset=offset
            ) from None

    def zero_fill(self, fd: int, offset: int, length: int) -> None:
        self.write_at(fd, [bytes(length)], offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._require_sound(fd, "allocate")
        act = super().allocate
        self._pass("size", "allocate", self.path_of(fd), lambda: act(fd, offset, length))

    def truncate(self, fd: int, length: int) -> None:
        self._require_sound(fd, "truncate")
        act = super().truncate
        self._pass("size", "truncate", self.path_of(fd), lambda: act(fd, length))

    def begin_sync(self, fd: int, offset: int, length: int) -> None:
        # A hint: not counted and never failed by plan. But it is invalid for a failed file or a dead process.
        if self.halted:
            raise Halted("the process is dead")
        self._require_sound(fd, "begin_sync")
        super().begin_sync(fd, offset, length)

    def sync_data(self, fd: int) -> None:
        self._sync("data_sync", "sync_data", fd, super().sync_data)

    def sync_file(self, fd: int) -> None:
        self._sync("full_sync", "sync_file", fd, super().sync_file)

    def _sync(self, op: OpClass, call: str, fd: int, act: Callable[[int], None]) -> None:
        self._require_sound(fd, call)
        fault = self._due(op)
        if fault is not None:
            self._poisoned.add(fd)
            self.fail_sync(fd)
            raise _error(fault, call, self.path_of(fd))
        act(fd)

    def rename(self, source: str, target: str) -> None:
        act = super().rename
        self._pass("rename", "rename", source, lambda: act(source, target))

    def unlink(self, path: str) -> None:
        act = super().unlink
        self._pass("unlink", "unlink", path, lambda: act(path))

    def make_dir(self, path: str) -> None:
        act = super().make_dir
        self._pass("make_dir", "make_dir", path, lambda: act(path))

    def remove_dir(self, path: str) -> None:
        act = super().remove_dir
        self._pass("unlink", "remove_dir", path, lambda: act(path))

    def sync_dir(self, path: str) -> None:
        act = super().sync_dir
        self._pass("dir_sync", "sync_dir", path, lambda: act(path))

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        act = super().read_at
        return self._pass("read", "read_at", self.path_of(fd), lambda: act(fd, length, offset), changes=False)

    def read_into(self, fd: int, buffer: Buffer, offset: int) -> int:
        act = super().read_into
        return self._pass(
            "read", "read_into", self.path_of(fd), lambda: act(fd, buffer, offset), changes=False
        )

    def size(self, fd: int) -> int:
        act = super().size
        return self._pass("read", "size", self.path_of(fd), lambda: act(fd), changes=False)

    def list_dir(self, path: str) -> list[str]:
        act = super().list_dir
        return self._pass("read", "list_dir", path, lambda: act(path), changes=False)

    def exists(self, path: str) -> bool:
        act = super().exists
        return self._pass("read", "exists", path, lambda: act(path), changes=False)

    def lock(self, path: str) -> int:
        act = super().lock
        return self._pass("open", "lock", path, lambda: act(path), changes=False)

    def unlock(self, fd: int) -> None:
        if self.halted:
            raise Halted("the process is dead")
        super().unlock(fd)


def _error(fault: DiskFault, call: str, path: str) -> DiskError:
    return disk_error(call, path, getattr(errno, fault.kind))


class _Attempts:
    """Simulates the system calls of one failing write, as write_fully makes them."""

    def __init__(self, fault: DiskFault, write: Callable[[list[Buffer], int], int]) -> None:
        self._fault = fault
        self._write = write
        self._made = 0

    def write(self, pending: list[Buffer], offset: int) -> int:
        self._made += 1
        kind = self._fault.kind
        is_first = self._made == 1
        if kind in {"short", "ENOSPC"} and is_first:
            return self._half(pending, offset)
        if kind == "stuck":
            return 0
        if kind in {"ENOSPC", "EIO", "ESTALE"}:
            raise OSError(getattr(errno, kind), f"injected {kind}")
        if kind == "EAGAIN" and (is_first or self._fault.always):
            raise OSError(errno.EAGAIN, "injected EAGAIN")
        return self._write(pending, offset)

    def _half(self, pending: list[Buffer], offset: int) -> int:
        data = b"".join([memoryview(buffer).tobytes() for buffer in pending])
        part = data[: max(len(data) // 2, 1)]
        return self._write([part], offset)
