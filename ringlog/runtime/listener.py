"""Who listens stops in time: a process that is out of descriptors must not accept one more connection.

libzmq 4.3.5 aborts the process when accepting on a local socket meets EMFILE. So connections are taken only
while there are descriptors to spare; who has one keeps it, and others try again until we listen anew. A
burst of more than `DESCRIPTORS_RESERVED` connections between two looks still gets past this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Sequence
from typing import Any, cast

import zmq

from ringlog.limits import DESCRIPTORS_CHECK_MS, DESCRIPTORS_RESERVED
from ringlog.logs import log_event

log = logging.getLogger("ringlog.runtime")

_NS_PER_MS = 1_000_000
_IPC = "ipc://"
_PAUSED = ".paused"
_PLENTY = 16 * DESCRIPTORS_RESERVED
CHECK_MS_RARE = 1_000
_NS_PER_USED = 30_000
"""To count takes about a twentieth of this for each open descriptor: looks take no larger part of time."""


def count_descriptors() -> tuple[int, int]:
    """(how many more this process may open, how many it has open); (0, 0) when it cannot even look."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return 0, 0
    used = len(numbers) - 1  # One of those listed was open for the listing.
    if limit == resource.RLIM_INFINITY:
        return _PLENTY + 1, used
    return max(limit - sum(number < limit for number in numbers) + 1, 0), used


class Listener:
    """A bound endpoint of a socket."""

    def __init__(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        """Bind; raises zmq.ZMQError."""
        socket.bind(endpoint)
        self.endpoint = cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        """Where it listens, a port chosen by the system included."""
        self.is_paused = False
        self._path = self.endpoint[len(_IPC) :] if self.endpoint.startswith(_IPC) else ""

    def pause(self) -> None:
        """Take no more local connections; those that are there stay.

        The name goes, not the listener: libzmq ends every connection together with the listener that took
        it. On TCP it waits by itself until there are descriptors.
        """
        if self._path:
            with contextlib.suppress(OSError):
                os.rename(self._path, self._path + _PAUSED)
        self.is_paused = True

    def resume(self) -> None:
        """Take connections again."""
        if self._path:
            with contextlib.suppress(OSError):
                os.rename(self._path + _PAUSED, self._path)
        self.is_paused = False


class AcceptGuard:
    """Pauses listeners when fewer than DESCRIPTORS_RESERVED are free, until there are twice as many."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners
        self._look_at_ns = 0

    def check_descriptors(self, now_ns: int) -> None:
        """Look, if it is time to: after CHECK_MS_RARE while there are plenty, else after
        DESCRIPTORS_CHECK_MS.

        `now_ns` is monotonic.
        """
        if now_ns < self._look_at_ns:
            return
        free, used = count_descriptors()
        pause_ns = (CHECK_MS_RARE if free > _PLENTY else DESCRIPTORS_CHECK_MS) * _NS_PER_MS
        self._look_at_ns = now_ns + max(pause_ns, used * _NS_PER_USED)
        if free < DESCRIPTORS_RESERVED:
            self._pause(free)
        elif free >= 2 * DESCRIPTORS_RESERVED:
            self._resume(free)

    def _pause(self, free: int) -> None:
        for listener in self._listeners:
            if not listener.is_paused:
                listener.pause()
                log_event(log, logging.ERROR, "too few descriptors: no new connections",
                    endpoint=listener.endpoint, free=free)  # fmt: skip

    def _resume(self, free: int) -> None:
        for listener in self._listeners:
            if listener.is_paused:
                listener.resume()
                log_event(log, logging.INFO, "new connections are taken again",
                    endpoint=listener.endpoint, free=free)  # fmt: skip
