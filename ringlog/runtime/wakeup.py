"""A descriptor that threads make readable, so that the main loop's wait ends."""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """An eventfd. `wake` may be called from any thread, as often as you like."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For poll."""
        return self._fd

    def wake(self) -> None:
        """Make it readable."""
        # A full counter is readable already; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it quiet again; look for what came after this, not before."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Let go. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
