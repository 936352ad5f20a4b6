"""Control groups, version 1 or 2, whichever is mounted: limits of memory, processes, CPU; freezing.

Names begin with `ringlog-chaos-`. A group is left by moving its processes back to where they came from and
removed at the end of its block; CannotRun where the kernel, the mount or the rights do not allow it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from chaos.order import CannotRun

ROOT = Path("/sys/fs/cgroup")
WAIT_S = 10.0
PERIOD_US = 100_000
_numbers = itertools.count()


class Group:
    """One control group of one controller: `memory`, `pids`, `cpu` or `freezer`."""

    def __init__(self, controller: str) -> None:
        self.controller = controller
        self.is_v1 = (ROOT / controller / "cgroup.procs").exists()
        parent = ROOT / controller if self.is_v1 else ROOT
        if not self.is_v1:
            _delegate(controller)
        self.path = parent / f"ringlog-chaos-{os.getpid()}-{next(_numbers)}"
        self._came_from: dict[int, Path] = {}
        try:
            self.path.mkdir()
        except OSError as e:
            raise CannotRun(f"no control group for {controller}: {e.strerror}") from None

    def take(self, pids: Iterable[int]) -> None:
        """Move processes in, all threads of each."""
        for pid in pids:
            before = self._group_of(pid)
            self._write("cgroup.procs", pid)
            self._came_from[pid] = before

    def limit_memory(self, size: int) -> None:
        """Bound the bytes charged since a process came; what it had before is not counted. -1: none."""
        if self.is_v1:
            self._write("memory.limit_in_bytes", size)
        else:
            self._write("memory.max", "max" if size < 0 else size)

    @property
    def memory_used(self) -> int:
        """Bytes charged."""
        name = "memory.usage_in_bytes" if self.is_v1 else "memory.current"
        return int((self.path / name).read_text())

    @property
    def killed(self) -> int:
        """Processes killed for want of memory."""
        text = (self.path / ("memory.oom_control" if self.is_v1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))

    def limit_tasks(self, most: int) -> None:
        """Bound processes and threads; -1: none."""
        self._write("pids.max", "max" if most < 0 else most)

    @property
    def tasks(self) -> int:
        """Processes and threads now."""
        return int((self.path / "pids.current").read_text())

    @property
    def tasks_refused(self) -> int:
        """How often the bound was met."""
        return int((self.path / "pids.events").read_text().split()[1])

    def limit_cpu(self, part: float) -> None:
        """Bound CPU time to a part of one processor."""
        quota = int(PERIOD_US * part)
        if self.is_v1:
            self._write("cpu.cfs_period_us", PERIOD_US)
            self._write("cpu.cfs_quota_us", quota)
        else:
            self._write("cpu.max", f"{quota} {PERIOD_US}")

    @property
    def times_throttled(self) -> int:
        """Periods in which the bound was met."""
        text = (self.path / "cpu.stat").read_text()
        return int(dict(line.split() for line in text.splitlines())["nr_throttled"])

    def freeze(self) -> None:
        """Stop every process of the group between two instructions, and wait until they are."""
        self._set_frozen(is_frozen=True)

    def thaw(self) -> None:
        """Let them go on."""
        self._set_frozen(is_frozen=False)

    def close(self) -> None:
        """Move the processes back and remove the group; waits for the dead to leave it."""
        if self.controller == "freezer":
            with contextlib.suppress(OSError):
                self.thaw()
        deadline = time.monotonic() + WAIT_S
        while True:
            for pid in (self.path / "cgroup.procs").read_text().split():
                # A child of one we took came from where its parent came from; a dead one needs nothing.
                home = self._came_from.get(int(pid), self.path.parent)
                with contextlib.suppress(OSError):
                    (home / "cgroup.procs").write_text(pid)
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def _set_frozen(self, *, is_frozen: bool) -> None:
        if self.is_v1:
            self._write("freezer.state", "FROZEN" if is_frozen else "THAWED")
            name, wanted = "freezer.state", "FROZEN" if is_frozen else "THAWED"
        else:
            self._write("cgroup.freeze", int(is_frozen))
            name, wanted = "cgroup.events", f"frozen {int(is_frozen)}"
        deadline = time.monotonic() + WAIT_S
        while wanted not in (self.path / name).read_text():
            if time.monotonic() > deadline:
                raise CannotRun(f"the freezer does not reach {wanted}")
            time.sleep(0.005)

    def _group_of(self, pid: int) -> Path:
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if self.controller in names.split(",") if self.is_v1 else not names:
                return self.path.parent / path.strip("/")
        return self.path.parent

    def _write(self, name: str, value: object) -> None:
        try:
            (self.path / name).write_text(str(value))
        except OSError as e:
            raise CannotRun(f"{self.controller} group: {name} = {value}: {e.strerror}") from None


def _delegate(controller: str) -> None:
    if controller == "freezer":
        return  # A part of every group of version 2.
    try:
        if controller not in (ROOT / "cgroup.controllers").read_text().split():
            raise CannotRun(f"no control group for {controller} is mounted")
        (ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError as e:
        raise CannotRun(f"no control group for {controller}: {e.strerror}") from None


@contextlib.contextmanager
def group(controller: str) -> Iterator[Group]:
    """A control group for the length of the block."""
    made = Group(controller)
    try:
        yield made
    finally:
        made.close()
