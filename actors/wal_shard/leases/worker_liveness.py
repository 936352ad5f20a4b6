"""Monitors the worker processes on this host that hold leases, to detect their death.

A process is identified by pid and start time (Q10). It is monitored only if /proc shows the same start time
for its pid. A worker in another container has other pids, and must not lose its leases when an unrelated
process dies.
"""

from __future__ import annotations

import os
import select

from ringlog.limits import WORKERS_WATCHED_MAX
from ringlog.process_id import process_started_ticks

ProcessId = tuple[int, int]
"""(pid, start time in clock ticks)"""


class WorkerLiveness:
    """Process descriptors of the workers of one shard, combined in one epoll descriptor."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._fds: dict[int, ProcessId] = {}
        self._lives: set[ProcessId] = set()

    def __bool__(self) -> bool:
        return bool(self._lives)

    def fileno(self) -> int:
        """Return the epoll descriptor. It is readable when a worker has died."""
        return self._poll.fileno()

    def watch(self, life: ProcessId) -> None:
        """Start monitoring a process, if it can be identified for certain and the limit allows it."""
        if life in self._lives or len(self._lives) >= WORKERS_WATCHED_MAX or not all(life):
            return
        try:
            fd = os.pidfd_open(life[0])
        except OSError:
            return
        if process_started_ticks(life[0]) != life[1]:
            os.close(fd)
            return
        self._poll.register(fd, select.EPOLLIN)
        self._fds[fd] = life
        self._lives.add(life)

    def take_dead(self) -> list[ProcessId]:
        """Return the processes that died since the last call."""
        found = []
        for fd, _ in self._poll.poll(0):
            self._poll.unregister(fd)
            os.close(fd)
            life = self._fds.pop(fd)
            self._lives.discard(life)
            found.append(life)
        return found

    def close(self) -> None:
        """Stop monitoring all processes."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._lives.clear()
        self._poll.close()
