"""Makes the next WAL file in a thread, so that filling it never stands in a group's way."""

from __future__ import annotations

import queue
import threading
from collections import deque

from ringlog.errors import DiskError
from ringlog.ring.doorbell import EventBell
from ringlog.storage.wal import PreparedFile, WalWriter


class Preparer:
    """One thread, at most one request at a time. `bell` wakes the shard when a result is there.

    The thread is kept: where a process can have no more of them, a shard that serves must not end for want of
    one when its file is half full.
    """

    def __init__(self, writer: WalWriter) -> None:
        self._writer = writer
        self.bell = EventBell()
        self.failure: DiskError | None = None
        """Why the request that `finish` waited for made no file."""
        self._requests: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
        self._results: deque[PreparedFile | DiskError] = deque()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread: threading.Thread | None = None

    def request(self, at_least: int, *, fill: bool = True) -> None:
        """Begin to make a file of at least this size; the result comes by `take`."""
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
        """The result, once there is one."""
        if not self._results:
            return None
        self.bell.drain()
        return self._results.popleft()

    def finish(self) -> PreparedFile | None:
        """Wait for a running request and return a file nobody took."""
        self._is_idle.wait()
        result = self._results.popleft() if self._results else None
        self.failure = result if isinstance(result, DiskError) else None
        return result if isinstance(result, PreparedFile) else None

    def close(self) -> None:
        """End the thread and release the bell."""
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
        self.bell.close()
