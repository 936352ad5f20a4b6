"""Control groups, version 1 or 2: limits of memory, tasks and CPU, and freezing.

Names begin with `ringlog-chaos-`. At the end of its block a group moves its processes back to their former
groups and is removed. CannotRun is raised if the kernel, the mount or the permissions do not allow groups.
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
        """Move processes into the group, with all their threads."""
        for pid in pids:
            before = self._group_of(pid)
            self._write("cgroup.procs", pid)
            self._came_from[pid] = before

    def limit_memory(self, size: int) -> None:
        """Limit the bytes that are charged after a process has joined.

        Earlier memory does not count. -1: no limit.
        """
        if self.is_v1:
            self._write("memory.limit_in_bytes", size)
        else:
            self._write("memory.max", "max" if size < 0 else size)

    @property
    def memory_used(self) -> int:
        """Charged bytes."""
        name = "memory.usage_in_bytes" if self.is_v1 else "memory.current"
        return int((self.path / name).read_text())

    @property
    def killed(self) -> int:
        """Number of processes that the OOM killer has killed."""
        text = (self.path / ("memory.oom_control" if self.is_v1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))

    def limit_tasks(self, most: int) -> None:
        """Limit the number of processes and threads; -1: no limit."""
        self._write("pids.max", "max" if most < 0 else most)

    @property
    def tasks(self) -> int:
        """Current number of processes and threads."""
        return int((self.path / "pids.current").read_text())

    @property
    def tasks_refused(self) -> int:
        """How often the task limit was hit."""
        return int((self.path / "pids.events").read_text().split()[1])

    def limit_cpu(self, part: float) -> None:
        """Limit CPU time to a share of one CPU."""
        quota = int(PERIOD_US * part)
        if self.is_v1:
            self._write("cpu.cfs_period_us", PERIOD_US)
            self._write("cpu.cfs_quota_us", quota)
        else:
            self._write("cpu.max", f"{quota} {PERIOD_US}")

    @property
    def times_throttled(self) -> int:
        """Number of periods in which the CPU limit was hit."""
        text = (self.path / "cpu.stat").read_text()
        return int(dict(line.split() for line in text.splitlines())["nr_throttled"])

    def freeze(self) -> None:
        """Freeze every process of the group, and wait until all are frozen."""
        self._set_frozen(is_frozen=True)

    def thaw(self) -> None:
        """Thaw all processes."""
        self._set_frozen(is_frozen=False)

    def close(self) -> None:
        """Move the processes back and remove the group. Waits until dead processes have left it."""
        if self.controller == "freezer":
            with contextlib.suppress(OSError):
                self.thaw()
        deadline = time.monotonic() + WAIT_S
        while True:
            for pid in (self.path / "cgroup.procs").read_text().split():
                # A child of a moved process belongs to its parent's former group. Errors for dead processes
                # are ignored.
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
        return  # Every group of version 2 can freeze.
    try:
        if controller not in (ROOT / "cgroup.controllers").read_text().split():
            raise CannotRun(f"no control group for {controller} is mounted")
        (ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError as e:
        raise CannotRun(f"no control group for {controller}: {e.strerror}") from None


@contextlib.contextmanager
def group(controller: str) -> Iterator[Group]:
    """Yield a control group that exists for the length of the block."""
    made = Group(controller)
    try:
        yield made
    finally:
        made.close()
