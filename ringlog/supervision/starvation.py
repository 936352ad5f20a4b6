"""Is a child that shows no progress stuck, or has it had no processor?

Background processes take a processor only when nobody else wants it (hardening.set_background_priority), and
any
process may be bounded by its container. A thread that waits for a processor may hold what the one that
reports progress waits for. A successor of such a child would get no further: it is left alone, for longer
than one that sleeps, spins or hangs in a device.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ringlog.supervision.restart import NS_PER_S

STARVED_FACTOR = 10
"""Who waits for a processor has so many times as long to show progress; then it is replaced all the same."""
WINDOW_NS = NS_PER_S
"""Over so long at least it is judged what a child got."""
SHARE_MIN = 0.25
"""Who got so much of one processor was not starved."""
_TICK_NS = NS_PER_S // os.sysconf("SC_CLK_TCK")
_STATE, _UTIME, _STIME = 0, 11, 12
"""Fields of /proc/PID/stat, counted from behind the name."""


class CpuSample(NamedTuple):
    """What the kernel says of a process."""

    wants_cpu: bool
    """One of its threads runs or waits for a processor."""
    used_ns: int
    """Of processors, by all its threads since it began."""


def sample_cpu(pid: int) -> CpuSample | None:
    """Look at a process; None when it is gone."""
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
    """One child that shows no progress, from look to look. Pure."""

    def __init__(self) -> None:
        self._since: tuple[int, int] | None = None

    @property
    def has_waited_for_cpu(self) -> bool:
        """It has waited for a processor since it showed progress last."""
        return self._since is not None

    def reset(self) -> None:
        """It showed progress."""
        self._since = None

    def is_starved(self, sight: CpuSample | None, now_ns: int) -> bool:
        """Does it wait for a processor? Yes until a window has shown what it got."""
        if sight is None or not sight.wants_cpu:
            return False
        if self._since is None:
            self._since = now_ns, sight.used_ns
            return True
        begun_ns, used_ns = self._since
        if now_ns - begun_ns < WINDOW_NS:
            return True
        self._since = now_ns, sight.used_ns
        return sight.used_ns - used_ns < SHARE_MIN * (now_ns - begun_ns)
