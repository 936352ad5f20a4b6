"""Lives of processes: a pid names one only together with when that began, since numbers are used again."""

from __future__ import annotations

import os

_own: tuple[int, int] = (0, 0)


def process_started_ticks(pid: int) -> int:
    """When this process began, in clock ticks since the machine did; 0 when there is none, or nobody says."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before it may hold anything, but is closed by the last parenthesis.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def own_process_id() -> tuple[int, int]:
    """(pid, when it began) of this process, also after a fork."""
    global _own  # noqa: PLW0603  asked for at every claim
    if _own[0] != os.getpid():
        _own = (os.getpid(), process_started_ticks(os.getpid()))
    return _own
