"""Creates the next WAL file in a thread, so that no commit batch waits while the file is filled."""

from __future__ import annotations

import queue
import threading
from collections import deque

from ringlog.errors import DiskError
from ringlog.ring.doorbell import EventBell
from ringlog.storage.wal import PreparedFile, WalWriter


class Preparer:
    """Runs one thread with at most one request at a time. `bell` wakes the shard when a result is ready.

    The thread stays alive between requests. Otherwise a running shard could fail at the limit of threads when
    its file is half full.
    """

    def __init__(self, writer: WalWriter) -> None:
        self._writer = writer
        self.bell: EventBell = EventBell()
        self.failure: DiskError | None = None
        """Error of the request that `finish` waited for, or None."""
        self._requests: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
        self._results: deque[PreparedFile | DiskError] = deque()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread: threading.Thread | None = None

    def request(self, at_least: int, *, fill: bool = True) -> None:
        """Start creating a file of at least `at_least` bytes. `take` returns the result."""
        self._is_idle.wait()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="wal-preparer", daemon=True)
            self._thread.start()
        self._is_idle.clear()
        self._requests.put((at_least, fill))

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._results.append(self._writer.prepare(request[0], fill=request[1]))
            except DiskError as e:
                self._results.append(e)
            finally:
                self._is_idle.set()
            self.bell.ring()

    def take(self) -> PreparedFile | DiskError | None:
        """Return the result, or None if there is none yet."""
        if not self._results:
            return None
        self.bell.drain()
        return self._results.popleft()

    def finish(self) -> PreparedFile | None:
        """Wait for a running request and return its file, if it was not taken yet."""
        self._is_idle.wait()
        result = self._results.popleft() if self._results else None
        self.failure = result if isinstance(result, DiskError) else None
        return result if isinstance(result, PreparedFile) else None

    def close(self) -> None:
        """Stop the thread and close the bell."""
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
        self.bell.close()
