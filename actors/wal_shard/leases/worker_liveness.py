"""Presence: workers on this host who hold leases, watched until they die.

A process is believed to be who it says only while /proc shows it under that number and beginning: a worker in
another container has other numbers, and must not lose its leases for somebody else's death.
"""

from __future__ import annotations

import os
import select

from ringlog.limits import WORKERS_WATCHED_MAX
from ringlog.process_id import process_started_ticks

ProcessId = tuple[int, int]
"""(pid, when it began)"""


class WorkerLiveness:
    """Descriptors of the workers of one shard, under one descriptor of its own."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._fds: dict[int, ProcessId] = {}
        self._lives: set[ProcessId] = set()

    def __bool__(self) -> bool:
        return bool(self._lives)

    def fileno(self) -> int:
        """Readable when one of them died."""
        return self._poll.fileno()

    def watch(self, life: ProcessId) -> None:
        """Look after this one from now on, if it can be told apart for certain."""
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
        """Those that died since."""
        found = []
        for fd, _ in self._poll.poll(0):
            self._poll.unregister(fd)
            os.close(fd)
            life = self._fds.pop(fd)
            self._lives.discard(life)
            found.append(life)
        return found

    def close(self) -> None:
        """Watch nobody any more."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._lives.clear()
        self._poll.close()
