"""Deliveries: what remote clients have asked to be told of, and the turns that go back to them.

To the schedulers the gateway is a client like any other (link/delivery.py), with one subscription for each of
a remote client's. Turns go on under the client's own numbers, without the hints, which name files; what the
client then reads it asks for as ever, so nothing here holds records, and a client that does not take its
turns holds up nobody: it has at most its credit of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlog.envelope import messages as m
from ringlog.envelope.messages.delivery import TAKEN_WORDS
from ringlog.errors import RinglogError, Throttled
from ringlog.limits import LINK_SILENCE_MS, LINKS_PER_SCHEDULER_MAX, SUBSCRIPTIONS_PER_LINK_MAX
from ringlog.link.delivery import UNBOUNDED, ClientSubscription, Delivery, ReadGrant
from ringlog.link.futures import Pending
from ringlog.link.peer import MS

SILENCE_NS = LINK_SILENCE_MS * MS

Send = Callable[[bytes, m.Message, Any], None]
"""(client, message, attachment): say something that was not asked for."""


@dataclass(slots=True)
class _RelayedSubscription:
    """One subscription of a client."""

    number: int
    subscription: ClientSubscription
    feeds: dict[int, int] = field(default_factory=dict)
    """The client's number of a feed -> ours."""
    names: dict[int, int] = field(default_factory=dict)
    """Ours -> the client's."""
    turns: dict[int, ReadGrant] = field(default_factory=dict)
    """By our number: with the client."""


@dataclass(slots=True)
class _RelayClient:
    heard_ns: int
    relayed: dict[int, _RelayedSubscription] = field(default_factory=dict)


class SubscriptionRelay:
    """All remote clients' subscriptions."""

    def __init__(self, delivery: Delivery, send: Send) -> None:
        self._delivery = delivery
        self._send = send
        self._clients: dict[bytes, _RelayClient] = {}

    def subscribe(
        self,
        client: bytes,
        asked: m.Subscribe,
        feeds: Sequence[tuple[int, m.TopicInfo, int]],
        gone: Sequence[int],
        now_ns: int,
    ) -> Pending[list[int]]:
        """Add feeds (the client's number, topic, position); `gone` are those of topics there are none of.

        Done once the schedulers know; fails with Throttled at a bound, and as the schedulers refuse.
        """
        relayed = self._relayed(client, asked, now_ns)
        for number, _, _ in feeds:
            self._drop_feed(relayed, number)  # The same number again moves it.
        added = self._delivery.add_feeds(relayed.subscription, [(info, after) for _, info, after in feeds])

        def known(done: Pending[list[int]]) -> None:
            if done.error is None:
                for (number, _, _), feed in zip(feeds, done.result(), strict=True):
                    relayed.feeds[number], relayed.names[feed] = feed, number
                self._relay_grants(client, relayed)

        added.when_done(known)
        if gone:
            rows = [[asked.subscription, number, UNBOUNDED, 0, 0, 0, 0, 0] for number in gone]
            self._send(client, m.Turns(len(rows)), np.array(rows, dtype=np.uint64).tobytes())
        return added

    def unsubscribe(self, client: bytes, number: int, feeds: Sequence[int]) -> None:
        """End a subscription, or some of its feeds. Idempotent."""
        known = self._clients.get(client)
        relayed = known.relayed.get(number) if known is not None else None
        if known is None or relayed is None:
            return
        for feed in feeds:
            self._drop_feed(relayed, feed)
        if not feeds:
            self._delivery.close_subscription(relayed.subscription)
            del known.relayed[number]
            if not known.relayed:
                del self._clients[client]

    def return_grants(self, client: bytes, attachment: Any, now_ns: int) -> None:
        """Give turns back to the schedulers; a client that we know nothing of is told so."""
        known = self._clients.get(client)
        if known is None:
            self._send(client, m.SubscriptionsLost(), None)
            return
        known.heard_ns = now_ns
        if not attachment or len(attachment) % (8 * TAKEN_WORDS):
            return
        rows = np.frombuffer(attachment, dtype=np.uint64).reshape(-1, TAKEN_WORDS).tolist()
        for number, name, after, is_consumed in rows:
            relayed = known.relayed.get(number)
            feed = relayed.feeds.get(name) if relayed is not None else None
            if relayed is None or feed is None:
                continue
            turn = relayed.turns.pop(feed, None) or ReadGrant(feed, 0, None, now_ns, is_self_granted=True)
            self._delivery.return_grant(
                relayed.subscription, turn, min(after, UNBOUNDED), is_consumed=bool(is_consumed)
            )
        self._delivery.send_returns()  # They were said together already.

    def forget_client(self, client: bytes) -> None:
        """Nobody is there to be told."""
        known = self._clients.pop(client, None)
        if known is not None:
            for relayed in known.relayed.values():
                self._delivery.close_subscription(relayed.subscription)

    def forget_silent_clients(self, now_ns: int) -> None:
        """Let go of clients that have not said a word for long."""
        silent = [client for client, known in self._clients.items() if now_ns - known.heard_ns > SILENCE_NS]
        for client in silent:
            self.forget_client(client)

    @property
    def subscriptions(self) -> int:
        """How many there are."""
        return sum(len(known.relayed) for known in self._clients.values())

    # -- inside -----------------------------------------------------------------------------------------

    def _relayed(self, client: bytes, asked: m.Subscribe, now_ns: int) -> _RelayedSubscription:
        known = self._clients.get(client)
        if known is None:
            if len(self._clients) >= LINKS_PER_SCHEDULER_MAX:
                raise Throttled("too many clients watch", limit="links", max=LINKS_PER_SCHEDULER_MAX)
            known = self._clients[client] = _RelayClient(now_ns)
        known.heard_ns = now_ns
        relayed = known.relayed.get(asked.subscription)
        if relayed is not None:
            return relayed
        if len(known.relayed) >= SUBSCRIPTIONS_PER_LINK_MAX:
            raise Throttled(
                "too many subscriptions", limit="subscriptions_per_link", max=SUBSCRIPTIONS_PER_LINK_MAX
            )
        subscription = self._delivery.open_subscription(
            credit=asked.credit, strong=asked.strong, names=asked.names
        )
        relayed = known.relayed[asked.subscription] = _RelayedSubscription(asked.subscription, subscription)
        self._await(client, relayed)
        return relayed

    def _drop_feed(self, relayed: _RelayedSubscription, name: int) -> None:
        feed = relayed.feeds.pop(name, None)
        if feed is not None:
            del relayed.names[feed]
            relayed.turns.pop(feed, None)
            self._delivery.drop_feed(relayed.subscription, feed)

    def _await(self, client: bytes, relayed: _RelayedSubscription) -> None:
        self._delivery.wait_for_work(relayed.subscription).when_done(
            lambda _: self._relay_grants(client, relayed)
        )

    def _relay_grants(self, client: bytes, relayed: _RelayedSubscription) -> None:
        """Send what turns there are, then wait for the next."""
        known = self._clients.get(client)
        if known is None or known.relayed.get(relayed.number) is not relayed:
            return
        subscription = relayed.subscription
        if isinstance(subscription.failure, RinglogError):
            self.unsubscribe(client, relayed.number, ())
            self._send(client, m.SubscriptionsLost(), None)
            return
        rows = []
        unknown = []
        while (turn := self._delivery.take_grant(subscription)) is not None:
            name = relayed.names.get(turn.feed)
            if name is None:
                unknown.append(turn)  # Told before we were told that it is known: it goes with the next.
                continue
            relayed.turns[turn.feed] = turn
            rows.append([relayed.number, name, turn.until, 0, 0, 0, 0, 0])
        if rows:
            self._send(client, m.Turns(len(rows)), np.array(rows, dtype=np.uint64).tobytes())
        if subscription.names_changed:
            subscription.names_changed = False
            self._send(client, m.TopicsChanged(), None)
        subscription.ready.extend(unknown)
        if not unknown:
            self._await(client, relayed)
