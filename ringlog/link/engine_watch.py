"""EngineWatch: find the engine that runs in a run directory, and detect a new start of it."""

from __future__ import annotations

from collections.abc import Callable

from ringlog.clock import Clock
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.wire import PROTOCOL, version_mismatch_message
from ringlog.errors import UsageError, VersionMismatch
from ringlog.link.address import read_engine_file
from ringlog.link.peer import MS
from ringlog.link.timers import Timer, Timers

POLL_NS_MIN = 20 * MS
POLL_NS_MAX = 250 * MS


class EngineWatch:
    """Polls the run directory between `start` and `stop`, every 20 ms at first and every 250 ms later."""

    def __init__(
        self, run_dir: str, *, clock: Clock, timers: Timers, on_engine: Callable[[EngineInfo], None],
        on_mismatch: Callable[[VersionMismatch], None],
    ) -> None:  # fmt: skip
        """`on_mismatch` is called at each poll at which the engine has another protocol version."""
        self.engine: EngineInfo | None = None
        self.starts_seen: int = 0
        self.read_error: str = ""
        """Reason why the last poll could not use the run directory; "" = it could."""
        self._run_dir = run_dir
        self._clock, self._timers, self._on_engine = clock, timers, on_engine
        self._on_mismatch = on_mismatch
        self._timer: Timer | None = None
        self._pause_ns = POLL_NS_MIN

    def start(self) -> None:
        """Poll now and continue until `stop`."""
        if self._timer is None:
            self._pause_ns = POLL_NS_MIN
            self._poll()

    def stop(self) -> None:
        """Stop polling, because the engine is connected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll(self) -> None:
        self._timer = self._timers.call_at(self._clock.monotonic_ns() + self._pause_ns, self._poll)
        self._pause_ns = min(self._pause_ns * 2, POLL_NS_MAX)
        try:
            found = read_engine_file(self._run_dir)
        except UsageError as e:
            self.read_error = e.message
            return  # Not readable now. Waiting callers fail with NotConnected at their deadlines.
        self.read_error = ""
        if found is not None and found.protocol != PROTOCOL:
            # Polling continues: the next start may have our version.
            self.read_error = version_mismatch_message(found.protocol)
            self._on_mismatch(VersionMismatch(self.read_error, engine=found.version))
            return
        if found is not None and (self.engine is None or found.start_id != self.engine.start_id):
            self.engine = found
            self.starts_seen += 1
            self._pause_ns = POLL_NS_MIN
            self._on_engine(found)
