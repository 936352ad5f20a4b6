"""Signals as something a poll loop can wait for.

A handler only notes that the signal came. The kernel's notice also makes a descriptor readable, so
that a signal which arrives just before the wait begins still ends it.
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
    """Signals that came and were not taken yet, in order. One per process, in its main thread."""

    def __init__(
        self, signals: Iterable[signal.Signals], on_signal: Callable[[signal.Signals], None] = lambda _: None
    ) -> None:
        """`on_signal` is called for each as it comes, in the main thread, whatever that is doing."""
        self._on_signal = on_signal
        self._noted: deque[signal.Signals] = deque(maxlen=_NOTED_MAX)
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in signals}
        # Who started us may have blocked them, and a mask is inherited: they would never come.
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._noted.append(signal.Signals(number))
        self._on_signal(signal.Signals(number))

    def fileno(self) -> int:
        """Descriptor that is readable when a signal may have come; `take` makes it quiet again."""
        return self._reader

    def has_signals(self) -> bool:
        """True when `take` would return something. Costs no system call."""
        return bool(self._noted)

    def take_signals(self) -> list[signal.Signals]:
        """Return and forget what came."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._reader, _DRAIN_BYTES)) == _DRAIN_BYTES:
                continue
        taken = []
        while self._noted:
            taken.append(self._noted.popleft())
        return taken

    def close(self) -> None:
        """Put back the handlers that were there before. Idempotent."""
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
    """Set by SIGTERM and SIGINT, the first of which calls `on_stop` as it comes. SIGHUP calls `on_hangup` at
    the next look of the main thread, and sets nothing. Any thread may ask `is_set`."""

    def __init__(self, on_hangup: Callable[[], None], on_stop: Callable[[], None] = lambda: None) -> None:
        self._on_hangup = on_hangup
        self._on_stop = on_stop
        self._is_set = False
        self._inbox = SignalInbox((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._came)

    def _came(self, number: signal.Signals) -> None:
        # Not when somebody looks: who looks may be another thread, and only this one may change handlers.
        if number != signal.SIGHUP and not self._is_set:
            self._is_set = True
            self._on_stop()

    def is_set(self) -> bool:
        """True from the first SIGTERM or SIGINT on."""
        if self._inbox.has_signals() and current_thread() is main_thread():
            self.drain()
        return self._is_set

    def set(self) -> None:
        """Ask for the stop from inside the process."""
        self._is_set = True

    def fileno(self) -> int:
        """Readable when a signal came; `is_set` makes it quiet again, `drain` after a spurious wake-up."""
        return self._inbox.fileno()

    def drain(self) -> None:
        """Take what came and make the descriptor quiet."""
        for number in self._inbox.take_signals():
            if number == signal.SIGHUP:
                self._on_hangup()

    def close(self) -> None:
        """Put back the handlers that were there before."""
        self._inbox.close()
