"""A host of a Delivery whose schedulers are played by the test: what it says is kept, the test answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlog.envelope import messages as m
from ringlog.link.delivery import RETURN_DELAY_NS, Delivery
from ringlog.link.futures import Pending, resolved
from ringlog.link.peer import PeerReply
from ringlog.link.timers import Timers
from ringlog.testing.clock import ManualClock


@dataclass
class FakeScheduler:
    """What was said to one scheduler."""

    is_up: bool = True
    requests: list[tuple[Any, Pending[PeerReply]]] = field(default_factory=list)
    sent_messages: list[tuple[Any, Any]] = field(default_factory=list)

    def request(
        self, message: m.Message, deadline_ns: int, attachment: Any = None, *, is_patient: bool = True
    ) -> Pending[PeerReply]:
        """See Peer."""
        pending: Pending[PeerReply] = Pending()
        self.requests.append((message, pending))
        return pending

    def send_oneway(self, message: m.Message, attachment: Any = None) -> bool:
        """See Peer."""
        self.sent_messages.append((message, attachment))
        return self.is_up

    def answer_all(self) -> list[Any]:
        """Say yes to all that was asked and not answered; returns what that was."""
        asked, self.requests = self.requests, []
        for message, pending in asked:
            reply: m.Message = (
                m.Subscribed(message.subscription, 0, 1)
                if isinstance(message, m.Subscribe)
                else m.Unsubscribed(message.subscription)
            )
            pending.resolve(PeerReply(reply))
        return [message for message, _ in asked]

    def returned_grants(self) -> list[list[int]]:
        """Rows given back so far."""
        rows = [
            row
            for message, data in self.sent_messages
            if isinstance(message, m.Taken) and data
            for row in np.frombuffer(data, dtype=np.uint64).reshape(-1, 4).tolist()
        ]
        self.sent_messages = []
        return rows


class FakeDeliveryHost:
    """Implements link.delivery.Host, and the links it needs."""

    def __init__(self, schedulers: int = 1, give_back_ns: int = RETURN_DELAY_NS) -> None:
        self.clock, self.timers = ManualClock(), Timers()
        self.expected: list[int] = []
        self.shard_requests: list[tuple[int, Any, Pending[PeerReply]]] = []
        """Requests to shards, which the test answers."""
        self.fake_schedulers = [FakeScheduler() for _ in range(schedulers)]
        self.links: Any = self
        self.schedulers, self.shards, self.transport = schedulers, 4, "ring"
        self.delivery = Delivery(self, give_back_ns)

    def scheduler(self, number: int) -> FakeScheduler:
        """One of those that are played."""
        return self.fake_schedulers[number]

    def request(
        self, shard: int, message: m.Message, deadline_ns: int, attachment: Any = None, *,
        is_patient: bool = True,
    ) -> Pending[PeerReply]:  # fmt: skip
        """See Links."""
        pending: Pending[PeerReply] = Pending()
        self.shard_requests.append((shard, message, pending))
        return pending

    def request_grants(self, number: int) -> None:
        """See Links."""
        self.expected.append(number)

    def home_shard(self, topic: str) -> int:
        """See Links."""
        return 0

    def deadline_ns(self) -> int:
        """See Host."""
        return self.clock.monotonic_ns() + 10**10

    def pause(self, seconds: float) -> Pending[None]:
        """See Host."""
        pending: Pending[None] = Pending()
        self.timers.call_at(self.clock.monotonic_ns() + int(seconds * 1e9), lambda: pending.resolve(None))
        return pending

    def wait_connected(self) -> Pending[None]:
        """See Host."""
        return resolved(None)

    def advance(self, seconds: float) -> None:
        """Let time pass and do what is due."""
        self.clock.advance(seconds)
        self.timers.fire(self.clock.monotonic_ns())

    def give_grants(self, *rows: tuple[int, ...], scheduler: int = 0) -> None:
        """A scheduler gives turns: (subscription, feed, until) or whole rows."""
        full = [list(row) + [0] * (8 - len(row)) for row in rows]
        data = np.array(full, dtype=np.uint64).tobytes()
        self.delivery.scheduler_message(scheduler, PeerReply(m.Turns(len(full)), memoryview(data)))


def topic(topic_id: int, shard: int = 0, slot: int = 0) -> m.TopicInfo:
    """What a shard says of a topic."""
    return m.TopicInfo(f"t{topic_id}", topic_id, 1, shard, slot, False, {})
