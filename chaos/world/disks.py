"""A disk for each process on top of one shared disk: calls that fail, are slow, or are interrupted by a kill.

The device is one SimulatedDisk. Each process accesses it through the monitor, which records syncs, and
through the ProcessDisk of this module, which injects the faults.
"""

from __future__ import annotations

import errno
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.world.tasks import Loop, Process
from ringlog.storage.disk import Disk, disk_error
from ringlog.storage.vectored_write import Buffer
from ringlog.testing.disk import DiskFault, FaultyDisk
from ringlog.testing.faulty_disk import Kind, OpClass

FAULTS: tuple[tuple[OpClass, Kind], ...] = (
    ("write", "EIO"), ("write", "ENOSPC"), ("write", "short"), ("write", "EAGAIN"), ("write", "stuck"),
    ("data_sync", "EIO"), ("full_sync", "EIO"), ("rename", "EIO"), ("unlink", "EIO"), ("dir_sync", "EIO"),
    ("size", "EIO"), ("size", "ENOSPC"), ("make_dir", "EIO"), ("read", "EIO"), ("open", "EIO"),
)  # fmt: skip
_SEGMENT = re.compile(r"^/(data|cold)/topics/([0-9a-f]{16})/seg-\d{20}-([0-9a-f]{4})[0-9a-f]{12}\.data$")
SYNCS = frozenset({"data_sync", "full_sync", "dir_sync"})


@dataclass(slots=True)
class Armed:
    """A pending fault: hits the `countdown`-th call of this class by this kind of process."""

    op: OpClass
    kind: Kind
    who: str
    countdown: int


@dataclass(slots=True)
class DiskFaults:
    """The present faults of disk calls, for all processes."""

    loop: Loop
    rng: random.Random
    armed: list[Armed] = field(default_factory=list)
    is_full: bool = False
    slow_until_ns: int = 0
    slowness_s: float = 0.0
    met: Counter[str] = field(default_factory=Counter)
    """Number of injected faults, by class of call and kind."""
    made: dict[int, set[str]] = field(default_factory=dict)
    """Topic id -> operations on segments that belong to this topic only: "seal", "rewrite", "relocate"."""

    def calm(self) -> None:
        """Stop all faults."""
        self.armed.clear()
        self.is_full = False
        self.slow_until_ns = 0

    def meet(self, who: str, op: OpClass) -> DiskFault | None:
        """Return the fault for this call, or None. A slow sync waits here."""
        if op in SYNCS and self.loop.now_ns < self.slow_until_ns:
            self.met["slow sync"] += 1
            self.loop.pause(self.rng.uniform(0, self.slowness_s))
        for armed in self.armed:
            if armed.op == op and armed.who == who:
                armed.countdown -= 1
                if armed.countdown <= 0:
                    self.armed.remove(armed)
                    self.met[f"{op} {armed.kind}"] += 1
                    return DiskFault(op, 1, armed.kind)
        return None


class ProcessDisk(FaultyDisk):
    """The disk of one process. At every call the process may die, or another task may run."""

    def __init__(self, inner: Disk, process: Process, disk_faults: DiskFaults) -> None:
        super().__init__(inner)
        self._process, self._disk_faults = process, disk_faults
        process.disks.append(self)

    def _due(self, op: OpClass, *, changes: bool = True) -> DiskFault | None:
        self.calls[op] += 1
        self._process.point()
        return self._disk_faults.meet(self._process.kind, op)

    def rename(self, source: str, target: str) -> None:
        """Rename a file, and record it if a segment or its cold copy gets its final name."""
        super().rename(source, target)
        found = _SEGMENT.match(target)
        if found is not None:
            what = "relocate" if found[1] == "cold" else "seal" if found[3] == "0001" else "rewrite"
            self._disk_faults.made.setdefault(int(found[2], 16), set()).add(what)

    def close(self, fd: int) -> None:
        """Close a file.

        After a kill this does nothing, because generators of the process are collected later.
        """
        if not self.halted:
            super().close(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Allocate, or fail if the disk is full.

        The log gets this error here, because it allocates before it writes.
        """
        self._refuse_if_full("allocate", self.path_of(fd))
        super().allocate(fd, offset, length)

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write, or fail if the disk is full. The log is exempt, because its blocks are allocated."""
        path = self.path_of(fd)
        if "/wal/" not in path:
            self._refuse_if_full("write_at", path)
        return super().write_at(fd, buffers, offset)

    def _refuse_if_full(self, call: str, path: str) -> None:
        if self._disk_faults.is_full:
            self._process.point()
            self._disk_faults.met["full"] += 1
            raise disk_error(call, path, errno.ENOSPC)
