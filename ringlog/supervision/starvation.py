"""Decide whether a child without progress is stuck or is starved of CPU.

Background processes run only when no other process wants the CPU (hardening.set_background_priority), and a
container can limit the CPU of any process. A thread that waits for a CPU may hold a lock that the thread
with the heartbeat needs. A successor of such a child would be starved as well. The supervisor therefore
grants a starved child more time than a child that sleeps, spins or hangs in a device call.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ringlog.supervision.restart import NS_PER_S

STARVED_FACTOR = 10
"""A starved child gets this many times the normal limit to show progress. Then the supervisor replaces it."""
WINDOW_NS = NS_PER_S
"""Shortest interval (ns) over which the CPU share of a child is measured."""
SHARE_MIN = 0.25
"""A child that used at least this share of one CPU within the window is not starved."""
_TICK_NS = NS_PER_S // os.sysconf("SC_CLK_TCK")
_STATE, _UTIME, _STIME = 0, 11, 12
"""Fields of /proc/PID/stat, counted from the first field after the command name."""


class CpuSample(NamedTuple):
    """CPU state of one process, as the kernel reports it."""

    wants_cpu: bool
    """At least one thread runs or waits for a CPU (state R)."""
    used_ns: int
    """CPU time (ns) of all threads since the process started."""


def sample_cpu(pid: int) -> CpuSample | None:
    """Return the CPU state of a process, or None if it has exited."""
    proc = Path(f"/proc/{pid}")
    try:
        fields = _fields(proc / "stat")
        threads = [_fields(each / "stat")[_STATE] for each in (proc / "task").iterdir()]
    except OSError:
        return None
    return CpuSample("R" in threads, (int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_NS)


def _fields(path: Path) -> list[str]:
    return path.read_text().rpartition(")")[2].split()


class CpuStarvation:
    """Starvation state of one child without progress, updated at each poll. Pure."""

    def __init__(self) -> None:
        self._since: tuple[int, int] | None = None

    @property
    def has_waited_for_cpu(self) -> bool:
        """Whether the child has waited for a CPU since its last progress."""
        return self._since is not None

    def reset(self) -> None:
        """Forget all samples. The caller calls this when the child shows progress."""
        self._since = None

    def is_starved(self, sample: CpuSample | None, now_ns: int) -> bool:
        """Return whether the child waits for a CPU.

        The result is True until a whole window is measured, and after that while the child's share of one CPU
        is below SHARE_MIN. `sample` None (the process has exited) gives False. `now_ns` is monotonic.
        """
        if sample is None or not sample.wants_cpu:
            return False
        if self._since is None:
            self._since = now_ns, sample.used_ns
            return True
        begun_ns, used_ns = self._since
        if now_ns - begun_ns < WINDOW_NS:
            return True
        self._since = now_ns, sample.used_ns
        return sample.used_ns - used_ns < SHARE_MIN * (now_ns - begun_ns)
