"""Common parts of flows: the request, the effects that the core itself performs, and the flow context. Pure.

A flow yields ResolveTopic or AcquireAppendLane, which the core performs, or an effect for the shell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringlog.access.keys import Principal
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.requests.append_admission import Flow
from ringlog.envelope import messages as m
from ringlog.errors import Refused, ShuttingDown

_TOPICS_CACHED_MAX = 10_000


@dataclass(slots=True, eq=False)
class GatewayRequest:
    """One request without a reply yet."""

    client: bytes
    corr: int
    message: Any
    user_id: str
    principal: Principal
    data: Any
    flow: Flow | None = None
    deadline_ns: int = 0
    """Time at which it stops waiting for records; 0 = it waits for none."""
    is_cold_read: bool = False
    """It waits for the relocator."""
    refusal: Refused | None = None
    """Why the key may no longer get what it requested: it was revoked or changed since."""

    @property
    def bytes(self) -> int:
        return len(self.data) if self.data is not None else 0


@dataclass(frozen=True, slots=True)
class ResolveTopic:
    """Yielded by flows: resolve a topic. Flows that wait for one topic are resumed in order (G2)."""

    topic: str


@dataclass(frozen=True, slots=True)
class AcquireAppendLane:
    """Yielded by append flows: wait until the append may be sent on this way to the shard (G2)."""

    by_socket: bool


class FlowContext:
    """State that all flows share: the time, tickets, and the cache of topics by name."""

    def __init__(self) -> None:
        self.now_ns = self.now_us = 0
        self.is_draining = False
        self._ticket = 0
        self._topics: dict[str, m.TopicInfo] = {}

    def next_ticket(self) -> int:
        """Return a new ticket, which identifies the completion of an effect."""
        self._ticket += 1
        return self._ticket

    def ask(self, shard: int, message: m.Message, attachment: Any = None) -> ev.AskShard:
        """Return the effect that sends a request to a shard."""
        return ev.AskShard(self.next_ticket(), shard, message, attachment)

    def ask_scheduler(self, message: m.Message) -> ev.AskShard:
        """Return the effect that sends a request to scheduler 0. Raises ShuttingDown during a drain."""
        self.require_no_drain()
        return self.ask(ev.SCHEDULER, message)

    def require_no_drain(self) -> None:
        """Raise ShuttingDown during a drain: schedulers and relocator stop at the same time and may not
        reply."""
        if self.is_draining:
            raise ShuttingDown("the engine is stopping")

    def cached_topic(self, topic: str) -> m.TopicInfo | None:
        """Return the cached facts of a topic, or None."""
        return self._topics.get(topic)

    def cache_topic(self, info: m.TopicInfo) -> None:
        """Cache the facts of a topic. A full cache drops its oldest entry."""
        if len(self._topics) >= _TOPICS_CACHED_MAX:
            self._topics.pop(next(iter(self._topics)))
        self._topics[info.topic] = info

    def evict_topic(self, topic: str) -> None:
        """Drop the cached facts of a topic, which may be out of date."""
        self._topics.pop(topic, None)
