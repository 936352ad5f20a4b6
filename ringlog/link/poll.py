"""What a thread of a client sleeps on: an epoll set and an eventfd, or what the host has in their place.

Programs on other systems than Linux are clients by TCP. They have neither, and their sets are small.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
from typing import Protocol

from ringlog.ring.doorbell import EventBell


class Poll(Protocol):
    """The part of `select.epoll` that clients use."""

    def register(self, fd: int, eventmask: int = ..., /) -> None:
        """Watch for `fd` to be readable."""

    def unregister(self, fd: int, /) -> None:
        """Stop that."""

    def poll(self, timeout: float, maxevents: int = ..., /) -> list[tuple[int, int]]:
        """(descriptor, events) of those that are readable, after `timeout` seconds at the latest."""

    def close(self) -> None:
        """Give the set's own descriptor back."""


READABLE = getattr(select, "EPOLLIN", 1)


class SelectorPoll:
    """A Poll where there is no epoll."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def register(self, fd: int, eventmask: int = READABLE, /) -> None:
        """See Poll."""
        self._selector.register(fd, selectors.EVENT_READ)

    def unregister(self, fd: int, /) -> None:
        """See Poll."""
        self._selector.unregister(fd)

    def poll(self, timeout: float, maxevents: int = -1, /) -> list[tuple[int, int]]:
        """See Poll."""
        return [(key.fd, READABLE) for key, _ in self._selector.select(timeout)]

    def close(self) -> None:
        """See Poll."""
        self._selector.close()


def new_poll() -> Poll:
    """A set of descriptors."""
    return select.epoll() if hasattr(select, "epoll") else SelectorPoll()


class SocketBell:
    """An EventBell where there is no eventfd."""

    def __init__(self) -> None:
        self._theirs, self._ours = socket.socketpair()
        self._theirs.setblocking(False)
        self._ours.setblocking(False)

    def fileno(self) -> int:
        """See EventBell."""
        return self._ours.fileno()

    def ring(self) -> None:
        """See EventBell."""
        with contextlib.suppress(BlockingIOError):  # It is full: the sleeper is woken.
            self._theirs.send(b"!")

    def drain(self) -> int:
        """See EventBell."""
        try:
            return len(self._ours.recv(4096))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """See EventBell."""
        self._ours.close()
        self._theirs.close()


def new_bell() -> EventBell | SocketBell:
    """A bell for threads of one process."""
    return EventBell() if hasattr(os, "eventfd") else SocketBell()
