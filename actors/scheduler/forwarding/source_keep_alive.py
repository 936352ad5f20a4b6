"""Keeps the sources of routers in use, where they go when nobody uses them (F39).

The shard of a source does not hear of a router, which lies with its destination, nor of who reads its files.
So the scheduler that runs the router asks for such a source several times in each of its periods.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.scheduler.forwarding.forwarding_core import SourceFlowKey
from actors.scheduler.forwarding.sources import EngineConnection
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError, TopicNotFound
from ringlog.limits import TOPIC_KEEPALIVES_PER_PERIOD
from ringlog.link.futures import Steps, run_steps

_MS = 1_000
_RETRY_S = 0.25


class SourceKeepAlive:
    """Those of one scheduler."""

    def __init__(self, connection: EngineConnection, is_followed: Callable[[SourceFlowKey], bool]) -> None:
        self._connection, self._is_followed = connection, is_followed
        self._renewing: set[SourceFlowKey] = set()

    def keep_alive(self, key: SourceFlowKey, info: m.TopicInfo) -> None:
        """This source was found; it is kept in use, if it needs that, as long as it is followed."""
        period_ms = int(info.config.get("expire_unused_ms", 0))
        if period_ms and key not in self._renewing:
            self._renewing.add(key)
            run_steps(self._renew(key, info.topic, period_ms)).when_done(
                lambda _: self._renewing.discard(key)
            )

    def _renew(self, key: SourceFlowKey, source: str, period_ms: int) -> Steps[None]:
        pause_s = period_ms / TOPIC_KEEPALIVES_PER_PERIOD / _MS
        while period_ms:
            yield self._connection.pause(pause_s)
            if not self._is_followed(key):
                return
            try:
                info: m.TopicInfo = yield self._connection.for_topic(key.source_id).resolve(source)
            except TopicNotFound:
                return  # Who reads it finds out, and what follows from it.
            except RinglogError:
                pause_s = min(_RETRY_S, pause_s)
                continue
            period_ms = int(info.config.get("expire_unused_ms", 0))
            pause_s = period_ms / TOPIC_KEEPALIVES_PER_PERIOD / _MS
