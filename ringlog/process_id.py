"""Identity of processes: pid and start time. A pid alone is ambiguous, because the kernel reuses numbers."""

from __future__ import annotations

import os

_own: tuple[int, int] = (0, 0)


def process_started_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it does not exist or is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name before the fields may contain anything. The last parenthesis ends it.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def own_process_id() -> tuple[int, int]:
    """Return (pid, start time in ticks) of this process. Correct after a fork."""
    global _own  # noqa: PLW0603  asked for at every claim
    if _own[0] != os.getpid():
        _own = (os.getpid(), process_started_ticks(os.getpid()))
    return _own
