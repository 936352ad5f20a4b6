"""Background syncs of the log: records of class `disk` and `memory` are synced within the flush interval.

One thread handles one request at a time. If a sync fails, the error is raised in the shard's own thread and
ends the incarnation, as for any other sync.
"""

from __future__ import annotations

import queue
import threading
from collections import deque

from ringlog.actors.wal_shard.events import Flush, Flushed
from ringlog.errors import DiskError, InvariantViolation
from ringlog.ring.doorbell import EventBell
from ringlog.storage.wal import WalWriter


class Flusher:
    """Accepts Flush requests and returns Flushed results. `bell` wakes the shard when a result is ready.

    The thread starts with the shard. At the first flush the process may have reached its limit of threads.
    """

    def __init__(self, writer: WalWriter) -> None:
        self._writer = writer
        self.bell: EventBell = EventBell()
        self._requests: queue.SimpleQueue[Flush | None] = queue.SimpleQueue()
        self._results: deque[Flushed | DiskError | InvariantViolation] = deque()
        self._thread = threading.Thread(target=self._run, name="wal-flusher", daemon=True)
        self._thread.start()

    def request(self, flush: Flush) -> None:
        """Start a sync of all bytes that the file contains now."""
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
        """Return the next result, or None if there is none. Raise the DiskError of a failed sync."""
        if not self._results:
            return None
        self.bell.drain()
        result = self._results.popleft()
        if isinstance(result, Flushed):
            return result
        raise result

    def close(self) -> None:
        """Stop the thread and close the bell."""
        self._requests.put(None)
        self._thread.join()
        self.bell.close()
