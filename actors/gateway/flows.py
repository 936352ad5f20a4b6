"""What flows are made of: the request that they answer, what they ask the core for, and what they ask with.

Pure. A flow yields a Resolve or an Enter where the core itself has to look, else an effect for the shell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.gateway import events as ev
from actors.gateway.append_admission import Flow
from actors.gateway.auth import Principal
from ringlog.envelope import messages as m
from ringlog.errors import ShuttingDown

_TOPICS_CACHED_MAX = 10_000


@dataclass(slots=True, eq=False)
class GatewayRequest:
    """One request being answered."""

    client: bytes
    corr: int
    message: Any
    principal: Principal
    data: Any
    flow: Flow | None = None
    deadline_ns: int = 0
    """While it waits for records: when it stops waiting."""

    @property
    def bytes(self) -> int:
        return len(self.data) if self.data is not None else 0


@dataclass(frozen=True, slots=True)
class ResolveTopic:
    """Asked for by flows: who is this topic? Those who ask together are answered in order (G2)."""

    topic: str


@dataclass(frozen=True, slots=True)
class AcquireAppendLane:
    """Asked for by appends: my turn on this way to the shard (G2)."""

    by_socket: bool


class FlowContext:
    """What every flow asks with: the time, tickets, and what is remembered of topics' names."""

    def __init__(self) -> None:
        self.now_ns = self.now_us = 0
        self.is_draining = False
        self._ticket = 0
        self._topics: dict[str, m.TopicInfo] = {}

    def next_ticket(self) -> int:
        """The number under which a completion comes back."""
        self._ticket += 1
        return self._ticket

    def ask(self, shard: int, message: m.Message, attachment: Any = None) -> ev.AskShard:
        """A question to a shard."""
        return ev.AskShard(self.next_ticket(), shard, message, attachment)

    def ask_scheduler(self, message: m.Message) -> ev.AskShard:
        """Schedulers stop with us, and may not answer. Raises ShuttingDown."""
        self.require_schedulers()
        return self.ask(ev.SCHEDULER, message)

    def require_schedulers(self) -> None:
        """Raise ShuttingDown when they stop."""
        if self.is_draining:
            raise ShuttingDown("the engine is stopping")

    def cached_topic(self, topic: str) -> m.TopicInfo | None:
        """What is remembered of a topic."""
        return self._topics.get(topic)

    def cache_topic(self, info: m.TopicInfo) -> None:
        """Keep it; of too many the oldest is forgotten."""
        if len(self._topics) >= _TOPICS_CACHED_MAX:
            self._topics.pop(next(iter(self._topics)))
        self._topics[info.topic] = info

    def evict_topic(self, topic: str) -> None:
        """What is remembered of it may be wrong."""
        self._topics.pop(topic, None)
