"""Listeners that pause in time: a process without free descriptors must not accept another connection.

libzmq 4.3.5 aborts the process if `accept` on a local socket fails with EMFILE. A process therefore accepts
connections only while enough descriptors are free. Open connections stay open, and new ones are retried by
their clients until the listener resumes. A burst of more than DESCRIPTORS_RESERVED connections between two
checks still causes the abort.
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

log: logging.Logger = logging.getLogger("ringlog.runtime")

_NS_PER_MS = 1_000_000
_IPC = "ipc://"
_PAUSED = ".paused"
_PLENTY = 16 * DESCRIPTORS_RESERVED
CHECK_MS_RARE = 1_000
_NS_PER_USED = 30_000
"""Time (ns) between two checks for each open descriptor. A check takes about a twentieth of it, so checks use
at most 5 % of the time."""


def count_descriptors() -> tuple[int, int]:
    """Return (descriptors that the process may still open, open descriptors).

    Returns (0, 0) if no descriptor is free for the check itself.
    """
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
        self.endpoint: str = cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        """The bound endpoint, with the port that the system chose."""
        self.is_paused: bool = False
        self._path = self.endpoint[len(_IPC) :] if self.endpoint.startswith(_IPC) else ""

    def pause(self) -> None:
        """Accept no more local connections. Open connections stay open.

        The socket file is renamed, not unbound: if libzmq unbinds a listener, it closes all its connections.
        TCP listeners need no action: libzmq waits by itself until descriptors are free.
        """
        if self._path:
            with contextlib.suppress(OSError):
                os.rename(self._path, self._path + _PAUSED)
        self.is_paused = True

    def resume(self) -> None:
        """Accept connections again."""
        if self._path:
            with contextlib.suppress(OSError):
                os.rename(self._path + _PAUSED, self._path)
        self.is_paused = False


class AcceptGuard:
    """Pauses listeners when fewer than DESCRIPTORS_RESERVED descriptors are free, until twice as many are."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners
        self._look_at_ns = 0

    def check_descriptors(self, now_ns: int) -> None:
        """Check the free descriptors, if a check is due.

        The interval is CHECK_MS_RARE while many are free, else DESCRIPTORS_CHECK_MS. `now_ns` is monotonic.
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
                log_event(log, logging.ERROR, "new connections paused: too few file descriptors",
                    endpoint=listener.endpoint, free=free)  # fmt: skip

    def _resume(self, free: int) -> None:
        for listener in self._listeners:
            if listener.is_paused:
                listener.resume()
                log_event(log, logging.INFO, "new connections resumed",
                    endpoint=listener.endpoint, free=free)  # fmt: skip
