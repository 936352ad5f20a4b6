"""The engine's status for metrics, asked of the supervisor at most twice a second."""

from __future__ import annotations

import asyncio

from ringlog.aio import Client
from ringlog.client.connection.session import Session
from ringlog.clock import Clock
from ringlog.envelope.messages import EngineStatusReply
from ringlog.errors import RinglogError
from ringlog.limits import HTTP_STATUS_MS_MAX, HTTP_STATUS_REUSE_MS
from ringlog.link.futures import Steps

_NS_PER_MS = 1_000_000


class EngineStatusReader:
    """Asks the supervisor for the engine's status. Requests that arrive together share one answer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._found: EngineStatusReply | None = None
        self._valid_until_ns = 0

    async def read(self, client: Client) -> EngineStatusReply | None:
        """Return the status, at most HTTP_STATUS_REUSE_MS old; None if the supervisor does not answer."""
        async with self._lock:
            if self._clock.monotonic_ns() >= self._valid_until_ns:
                try:
                    self._found = await client.run(_engine_status(client.connection))
                except RinglogError:
                    self._found = None
                self._valid_until_ns = self._clock.monotonic_ns() + HTTP_STATUS_REUSE_MS * _NS_PER_MS
            return self._found


def _engine_status(session: Session) -> Steps[EngineStatusReply]:
    found: EngineStatusReply = yield session.engine_status(HTTP_STATUS_MS_MAX)
    return found
