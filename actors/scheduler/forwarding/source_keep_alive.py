"""Keeps the sources of routers alive if they have `expire_unused_ms`.

The shard of a source knows neither its routers, which are stored with their destinations, nor the readers of
its files. The scheduler that runs the router therefore resolves such a source several times in each period.
"""

from __future__ import annotations

from collections.abc import Callable

from ringlog.actors.scheduler.forwarding.forwarding_core import SourceFlowKey
from ringlog.actors.scheduler.forwarding.sources import EngineConnection
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError, TopicNotFound
from ringlog.limits import TOPIC_KEEPALIVES_PER_PERIOD
from ringlog.link.futures import Steps, run_steps

_MS = 1_000
_RETRY_S = 0.25


class SourceKeepAlive:
    """Keep-alive of the sources of one scheduler."""

    def __init__(self, connection: EngineConnection, is_followed: Callable[[SourceFlowKey], bool]) -> None:
        self._connection, self._is_followed = connection, is_followed
        self._renewing: set[SourceFlowKey] = set()

    def keep_alive(self, key: SourceFlowKey, info: m.TopicInfo) -> None:
        """Start the keep-alive of a source with `expire_unused_ms`.

        It ends when the source is no longer followed.
        """
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
                return  # The source was deleted. Its reader detects that and deletes the routers.
            except RinglogError:
                pause_s = min(_RETRY_S, pause_s)
                continue
            period_ms = int(info.config.get("expire_unused_ms", 0))
            pause_s = period_ms / TOPIC_KEEPALIVES_PER_PERIOD / _MS
