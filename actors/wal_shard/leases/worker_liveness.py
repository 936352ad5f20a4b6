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
        self._process_ids: set[ProcessId] = set()

    def __bool__(self) -> bool:
        return bool(self._process_ids)

    def fileno(self) -> int:
        """Return the epoll descriptor. It is readable when a worker has died."""
        return self._poll.fileno()

    def watch(self, process_id: ProcessId) -> None:
        """Start monitoring a process, if it can be identified for certain and the limit allows it."""
        if (
            process_id in self._process_ids
            or len(self._process_ids) >= WORKERS_WATCHED_MAX
            or not all(process_id)
        ):
            return
        try:
            fd = os.pidfd_open(process_id[0])
        except OSError:
            return
        if process_started_ticks(process_id[0]) != process_id[1]:
            os.close(fd)
            return
        self._poll.register(fd, select.EPOLLIN)
        self._fds[fd] = process_id
        self._process_ids.add(process_id)

    def take_dead(self) -> list[ProcessId]:
        """Return the processes that died since the last call."""
        found = []
        for fd, _ in self._poll.poll(0):
            self._poll.unregister(fd)
            os.close(fd)
            process_id = self._fds.pop(fd)
            self._process_ids.discard(process_id)
            found.append(process_id)
        return found

    def close(self) -> None:
        """Stop monitoring all processes."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._process_ids.clear()
        self._poll.close()
