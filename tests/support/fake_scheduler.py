"""A host of a Delivery with fake schedulers: they record messages, and the test sends the replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlog.envelope import messages as m
from ringlog.link.delivery import Delivery
from ringlog.link.futures import Pending, resolved
from ringlog.link.grant_returns import RETURN_DELAY_NS
from ringlog.link.peer_request import PeerReply
from ringlog.link.timers import Timers
from ringlog.testing.clock import ManualClock


@dataclass
class FakeScheduler:
    """Messages to one scheduler."""

    is_up: bool = True
    requests: list[tuple[Any, Pending[PeerReply]]] = field(default_factory=list)
    sent_messages: list[tuple[Any, Any]] = field(default_factory=list)

    def request(
        self, message: m.Message, deadline_ns: int, attachment: Any = None, *, is_patient: bool = True
    ) -> Pending[PeerReply]:
        """Record a request; see Peer."""
        pending: Pending[PeerReply] = Pending()
        self.requests.append((message, pending))
        return pending

    def send_oneway(self, message: m.Message, attachment: Any = None) -> None:
        """Record a one-way message; see Peer."""
        self.sent_messages.append((message, attachment))

    def answer_all(self) -> list[Any]:
        """Confirm all unanswered requests; return their messages."""
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
        """Return and clear the rows of grants that were returned so far."""
        rows = [
            row
            for message, data in self.sent_messages
            if isinstance(message, m.GrantsReturned) and data
            for row in np.frombuffer(data, dtype=np.uint64).reshape(-1, 4).tolist()
        ]
        self.sent_messages = []
        return rows


class FakeDeliveryHost:
    """Implements link.protocol.DeliveryHost, and the links that it needs."""

    def __init__(self, schedulers: int = 1, return_delay_ns: int = RETURN_DELAY_NS) -> None:
        self.clock: ManualClock = ManualClock()
        self.timers: Timers = Timers()
        self.expected: list[int] = []
        self.shard_requests: list[tuple[int, Any, Pending[PeerReply]]] = []
        """Requests to shards; the test resolves them."""
        self.fake_schedulers: list[FakeScheduler] = [FakeScheduler() for _ in range(schedulers)]
        self.links: Any = self
        self.schedulers: int = schedulers
        self.shards: int = 4
        self.transport: str = "ring"
        self.delivery: Delivery = Delivery(self, return_delay_ns)

    def scheduler(self, number: int) -> FakeScheduler:
        """Return one of the fake schedulers."""
        return self.fake_schedulers[number]

    def request(
        self, shard: int, message: m.Message, deadline_ns: int, attachment: Any = None, *,
        is_patient: bool = True,
    ) -> Pending[PeerReply]:  # fmt: skip
        """Record a request to a shard; see Links."""
        pending: Pending[PeerReply] = Pending()
        self.shard_requests.append((shard, message, pending))
        return pending

    def request_grants(self, number: int) -> None:
        """Record that the grant ring of a scheduler was requested; see Links."""
        self.expected.append(number)

    def home_shard(self, topic: str) -> int:
        """Return 0; see Links."""
        return 0

    def deadline_ns(self) -> int:
        """Return a deadline 10 s from now; see DeliveryHost."""
        return self.clock.monotonic_ns() + 10**10

    def pause(self, seconds: float) -> Pending[None]:
        """Return a Pending that resolves after a delay; see DeliveryHost."""
        pending: Pending[None] = Pending()
        self.timers.call_at(self.clock.monotonic_ns() + int(seconds * 1e9), lambda: pending.resolve(None))
        return pending

    def wait_connected(self) -> Pending[None]:
        """Return a resolved Pending; see DeliveryHost."""
        return resolved(None)

    def advance(self, seconds: float) -> None:
        """Advance the clock and fire the due timers."""
        self.clock.advance(seconds)
        self.timers.fire(self.clock.monotonic_ns())

    def deliver_grants(self, *rows: tuple[int, ...], scheduler: int = 0) -> None:
        """Deliver grants from a scheduler: rows of (subscription, feed, until), or complete rows."""
        full = [list(row) + [0] * (8 - len(row)) for row in rows]
        data = np.array(full, dtype=np.uint64).tobytes()
        self.delivery.scheduler_message(scheduler, PeerReply(m.Grants(len(full)), memoryview(data)))


def topic(topic_id: int, shard: int = 0, slot: int = 0) -> m.TopicInfo:
    """Return a shard's description of a topic."""
    return m.TopicInfo(f"t{topic_id}", topic_id, 1, shard, slot, False, {})
