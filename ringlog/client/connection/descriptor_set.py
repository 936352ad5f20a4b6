"""Descriptors: the epoll set of a client, which belongs to its process."""

from __future__ import annotations

from typing import NoReturn

from ringlog.descriptors import SOCKET_DESCRIPTORS, can_open_descriptors, descriptor_limit_message
from ringlog.errors import NotConnected
from ringlog.link.poll import READABLE, Poll, new_bell, new_poll

_EVENTS_PER_POLL = 64


def not_picklable_error() -> TypeError:
    """Return the error for pickling or copying a client or an object of a client."""
    return TypeError(
        "cannot pickle or copy a client or an object of a client: it belongs to its process. Call "
        "ringlog.connect() in the other process, such as in the initializer of a process pool"
    )


class Descriptors:
    """Descriptors of a session in an epoll set. Threads may sleep on the set while it changes."""

    def __init__(self) -> None:
        if not can_open_descriptors(SOCKET_DESCRIPTORS):
            raise NotConnected(descriptor_limit_message())
        self.epoll: Poll = new_poll()
        self._bell = new_bell()
        self._is_ours = True
        self._is_ending = False
        self.epoll.register(self._bell.fileno(), READABLE)

    def __reduce__(self) -> NoReturn:
        raise not_picklable_error()

    def watch(self, fd: int) -> None:
        """Wake up the sleeping thread when `fd` is readable."""
        if self._is_ours:
            self.epoll.register(fd, READABLE)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`."""
        if self._is_ours:
            self.epoll.unregister(fd)

    def wake(self) -> None:
        """Wake up the sleeping thread, because an earlier deadline exists."""
        if self._is_ours:
            self._bell.ring()

    def sleep(self, seconds: float) -> list[int]:
        """Sleep until a descriptor is readable. Returns the readable descriptors, without this set's own
        bell."""
        ready = [fd for fd, _ in self.epoll.poll(seconds, _EVENTS_PER_POLL)]
        bell = self._bell.fileno()
        if bell in ready:
            ready.remove(bell)
            if not self._is_ending:
                self._bell.drain()
        return ready

    def wake_permanently(self) -> None:
        """Wake up every current and later sleeper: the bell is not drained any more."""
        self._is_ending = True
        self.wake()

    def close_in_child(self) -> None:
        """Close the copies of a forked child. The child must not change the epoll set itself, which the
        parent uses."""
        self._is_ours = False
        self.epoll.close()
        self._bell.close()

    def close(self) -> None:
        """Close the descriptors."""
        if self._is_ours:
            self._is_ours = False
            self.epoll.close()
            self._bell.close()
