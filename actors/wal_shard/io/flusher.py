"""Syncs beside the work: what `disk` and `memory` records get within the flush interval (D-4).

One thread, one request at a time. A failure is raised in the shard's own thread and ends the
incarnation, like that of any other sync (D-17).
"""

from __future__ import annotations

import queue
import threading
from collections import deque

from actors.wal_shard.events import Flush, Flushed
from ringlog.errors import DiskError, InvariantViolation
from ringlog.ring.doorbell import EventBell
from ringlog.storage.wal import WalWriter


class Flusher:
    """Takes a Flush, answers with a Flushed; `bell` wakes the shard when an answer is there.

    Its thread is there from the start, not from the first flush: by then there may be none left to have.
    """

    def __init__(self, writer: WalWriter) -> None:
        self._writer = writer
        self.bell = EventBell()
        self._requests: queue.SimpleQueue[Flush | None] = queue.SimpleQueue()
        self._results: deque[Flushed | DiskError | InvariantViolation] = deque()
        self._thread = threading.Thread(target=self._run, name="wal-flusher", daemon=True)
        self._thread.start()

    def request(self, flush: Flush) -> None:
        """Begin to sync what the file holds up to now."""
        self._requests.put(flush)

    def _run(self) -> None:
        while (flush := self._requests.get()) is not None:
            try:
                self._writer.sync()
                self._results.append(Flushed(flush.file_id, flush.stop))
            except (DiskError, InvariantViolation) as e:
                self._results.append(e)
            self.bell.ring()

    def take(self) -> Flushed | None:
        """The answer, once there is one. Raises the DiskError of a sync that failed."""
        if not self._results:
            return None
        self.bell.drain()
        result = self._results.popleft()
        if isinstance(result, Flushed):
            return result
        raise result

    def close(self) -> None:
        """End the thread and release the bell."""
        self._requests.put(None)
        self._thread.join()
        self.bell.close()
