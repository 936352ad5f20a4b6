"""Signals as an event that a poll loop can wait for.

A handler only records the signal. The signal also makes a descriptor readable, so that a signal that arrives
just before the poll still ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable
from threading import current_thread, main_thread
from types import FrameType

_NOTED_MAX = 64
_DRAIN_BYTES = 4_096


class SignalInbox:
    """Signals that arrived and were not taken yet, in order. One per process, created in its main thread."""

    def __init__(
        self, signals: Iterable[signal.Signals], on_signal: Callable[[signal.Signals], None] = lambda _: None
    ) -> None:
        """`on_signal` is called for each signal on arrival, in the main thread, at any point of its code."""
        self._on_signal = on_signal
        self._noted: deque[signal.Signals] = deque(maxlen=_NOTED_MAX)
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in signals}
        # The parent may have blocked the signals. The mask is inherited, and they would never arrive.
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._noted.append(signal.Signals(number))
        self._on_signal(signal.Signals(number))

    def fileno(self) -> int:
        """Return the descriptor that is readable while signals may wait. `take_signals` clears it."""
        return self._reader

    def has_signals(self) -> bool:
        """Return whether signals wait. Costs no system call."""
        return bool(self._noted)

    def take_signals(self) -> list[signal.Signals]:
        """Return the waiting signals and remove them."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._reader, _DRAIN_BYTES)) == _DRAIN_BYTES:
                continue
        taken = []
        while self._noted:
            taken.append(self._noted.popleft())
        return taken

    def close(self) -> None:
        """Restore the previous handlers and the signal mask. Idempotent."""
        if self._reader < 0:
            return
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)
        self._reader = self._writer = -1


class StopFlag:
    """A flag that SIGTERM and SIGINT set. Any thread may call `is_set`.

    The first of these signals calls `on_stop` on arrival. SIGHUP does not set the flag. It calls `on_hangup`
    at the next `is_set` of the main thread, or at the next `drain`.
    """

    def __init__(self, on_hangup: Callable[[], None], on_stop: Callable[[], None] = lambda: None) -> None:
        self._on_hangup: list[Callable[[], object]] = [on_hangup]
        self._on_stop = on_stop
        self._is_set = False
        self._inbox = SignalInbox((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._came)

    def _came(self, number: signal.Signals) -> None:
        # Handle it on arrival: `is_set` may run in another thread, and only this one may change handlers.
        if number != signal.SIGHUP and not self._is_set:
            self._is_set = True
            self._on_stop()

    def is_set(self) -> bool:
        """Return whether a stop was requested. In the main thread, also handles waiting signals."""
        if self._inbox.has_signals() and current_thread() is main_thread():
            self.drain()
        return self._is_set

    def call_on_hangup(self, callback: Callable[[], object]) -> None:
        """Also call this for SIGHUP, where `on_hangup` is called."""
        self._on_hangup.append(callback)

    def set(self) -> None:
        """Request the stop from inside the process."""
        self._is_set = True

    def fileno(self) -> int:
        """Return the descriptor that a signal makes readable. `is_set` clears it, or `drain` if that is not
        called."""
        return self._inbox.fileno()

    def drain(self) -> None:
        """Handle the waiting signals and clear the descriptor."""
        for number in self._inbox.take_signals():
            if number == signal.SIGHUP:
                for callback in self._on_hangup:
                    callback()

    def close(self) -> None:
        """Restore the previous handlers."""
        self._inbox.close()
