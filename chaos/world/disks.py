"""A disk for each process over the one that all share: calls that fail, take long, or are the last.

The device is one SimulatedDisk; between it and a process lie the monitor, which knows what was synced, and
this, which decides what happens to a call.
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
    """A fault that waits for its call: the `countdown`-th of this class by this kind of process."""

    op: OpClass
    kind: Kind
    who: str
    countdown: int


@dataclass(slots=True)
class Weather:
    """What calls meet at present, for all processes."""

    loop: Loop
    rng: random.Random
    armed: list[Armed] = field(default_factory=list)
    is_full: bool = False
    slow_until_ns: int = 0
    slowness_s: float = 0.0
    met: Counter[str] = field(default_factory=Counter)
    """Faults that calls met, by class of call and kind."""
    made: dict[int, set[str]] = field(default_factory=dict)
    """topic id -> what became of segments of its own: sealed, rewritten, moved to the cold tier."""

    def calm(self) -> None:
        """From now on nothing fails."""
        self.armed.clear()
        self.is_full = False
        self.slow_until_ns = 0

    def meet(self, who: str, op: OpClass) -> DiskFault | None:
        """What this call meets."""
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
    """The disk as one process meets it; every call is a place where it may die or be overtaken."""

    def __init__(self, inner: Disk, process: Process, weather: Weather) -> None:
        super().__init__(inner)
        self._process, self._weather = process, weather
        process.disks.append(self)

    def _due(self, op: OpClass, *, changes: bool = True) -> DiskFault | None:
        self.calls[op] += 1
        self._process.point()
        return self._weather.meet(self._process.kind, op)

    def rename(self, source: str, target: str) -> None:
        """Where a segment, or its cold copy, gets its name."""
        super().rename(source, target)
        found = _SEGMENT.match(target)
        if found is not None:
            what = "relocate" if found[1] == "cold" else "seal" if found[3] == "0001" else "rewrite"
            self._weather.made.setdefault(int(found[2], 16), set()).add(what)

    def close(self, fd: int) -> None:
        """What a dead process held is nobody's: its generators may be collected at any time."""
        if not self.halted:
            super().close(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Where the log notices a full disk: its files are allocated before they are written."""
        self._refuse_if_full("allocate", self.path_of(fd))
        super().allocate(fd, offset, length)

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Everything but the log, whose blocks are there, notices it here."""
        path = self.path_of(fd)
        if "/wal/" not in path:
            self._refuse_if_full("write_at", path)
        return super().write_at(fd, buffers, offset)

    def _refuse_if_full(self, call: str, path: str) -> None:
        if self._weather.is_full:
            self._process.point()
            self._weather.met["full"] += 1
            raise disk_error(call, path, errno.ENOSPC)
