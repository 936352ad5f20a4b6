"""Keeps the sources of routers in use, where they go when nobody uses them (F39).

The shard of a source does not hear of a router, which lies with its destination, nor of who reads its files.
So the scheduler that runs the router asks for such a source several times in each of its periods.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.scheduler.routing import FlowKey
from actors.scheduler.sources import EngineConnection
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError, TopicNotFound
from ringlog.limits import UNUSED_RENEWALS
from ringlog.link.pending import Steps, start

_MS = 1_000
_RETRY_S = 0.25


class SourceUses:
    """Those of one scheduler."""

    def __init__(self, connection: EngineConnection, is_followed: Callable[[FlowKey], bool]) -> None:
        self._connection, self._is_followed = connection, is_followed
        self._kept: set[FlowKey] = set()

    def keep(self, key: FlowKey, info: m.TopicInfo) -> None:
        """This source was found; it is kept in use, if it needs that, as long as it is followed."""
        period_ms = int(info.config.get("expire_unused_ms", 0))
        if period_ms and key not in self._kept:
            self._kept.add(key)
            start(self._keep(key, info.topic, period_ms)).when_done(lambda _: self._kept.discard(key))

    def _keep(self, key: FlowKey, source: str, period_ms: int) -> Steps[None]:
        pause_s = period_ms / UNUSED_RENEWALS / _MS
        while period_ms:
            yield self._connection.pause(pause_s)
            if not self._is_followed(key):
                return
            try:
                info: m.TopicInfo = yield self._connection.of(key.source_id).resolve(source)
            except TopicNotFound:
                return  # Who reads it finds out, and what follows from it.
            except RinglogError:
                pause_s = min(_RETRY_S, pause_s)
                continue
            period_ms = int(info.config.get("expire_unused_ms", 0))
            pause_s = period_ms / UNUSED_RENEWALS / _MS
