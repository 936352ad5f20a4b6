"""Makes the next WAL file in a thread, so that filling it never stands in a group's way."""

from __future__ import annotations

import threading
from collections import deque

from ringlog.errors import DiskError
from ringlog.ring.doorbell import EventBell
from ringlog.storage.wal import PreparedFile, WalWriter


class Preparer:
    """One thread, at most one request at a time. `bell` wakes the shard when a result is there."""

    def __init__(self, writer: WalWriter) -> None:
        self._writer = writer
        self.bell = EventBell.create()
        self.failure: DiskError | None = None
        """Why the request that `finish` waited for made no file."""
        self._results: deque[PreparedFile | DiskError] = deque()
        self._thread: threading.Thread | None = None

    def request(self, at_least: int, *, fill: bool = True) -> None:
        """Begin to make a file of at least this size; the result comes by `take`."""
        if self._thread is not None:
            self._thread.join()
        self._thread = threading.Thread(
            target=self._make, args=(at_least, fill), name="wal-preparer", daemon=True
        )
        self._thread.start()

    def _make(self, at_least: int, fill: bool) -> None:
        try:
            self._results.append(self._writer.prepare(at_least, fill=fill))
        except DiskError as e:
            self._results.append(e)
        self.bell.ring()

    def take(self) -> PreparedFile | DiskError | None:
        """The result, once there is one."""
        if not self._results:
            return None
        self.bell.drain()
        return self._results.popleft()

    def finish(self) -> PreparedFile | None:
        """Wait for a running request and return a file nobody took."""
        if self._thread is not None:
            self._thread.join()
        result = self._results.popleft() if self._results else None
        self.failure = result if isinstance(result, DiskError) else None
        return result if isinstance(result, PreparedFile) else None

    def close(self) -> None:
        """Release the bell."""
        self.bell.close()
