"""Polling in a thread of a client: an epoll set and an eventfd on Linux, substitutes on other systems.

On other systems programs connect by TCP only, and their sets are small.
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
        """Watch `fd` until it is readable."""

    def unregister(self, fd: int, /) -> None:
        """Stop watching `fd`."""

    def poll(self, timeout: float, maxevents: int = ..., /) -> list[tuple[int, int]]:
        """Return (descriptor, events) of the readable descriptors; wait at most `timeout` seconds."""

    def close(self) -> None:
        """Close the descriptor of the set."""


READABLE = getattr(select, "EPOLLIN", 1)


class SelectorPoll:
    """A Poll for systems without epoll."""

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
    """Return an empty set of descriptors."""
    return select.epoll() if hasattr(select, "epoll") else SelectorPoll()


class SocketBell:
    """An EventBell for systems without eventfd."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)

    def fileno(self) -> int:
        """See EventBell."""
        return self._receiver.fileno()

    def ring(self) -> None:
        """See EventBell."""
        with contextlib.suppress(BlockingIOError):  # The socket is full: the receiver is woken anyway.
            self._sender.send(b"!")

    def drain(self) -> int:
        """See EventBell."""
        try:
            return len(self._receiver.recv(4096))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """See EventBell."""
        self._receiver.close()
        self._sender.close()


def new_bell() -> EventBell | SocketBell:
    """Return a new bell between threads of one process."""
    return EventBell() if hasattr(os, "eventfd") else SocketBell()
