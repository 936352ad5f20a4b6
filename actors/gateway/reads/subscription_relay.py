"""Relays subscriptions of remote clients to schedulers, and grants back to the clients.

To the schedulers the gateway is a normal client (link/delivery.py), with one subscription for each
subscription of a remote client. Grants are relayed under the client's own numbers, without hints, because
hints name files. The client then reads with normal requests, so the relay stores no records. A client that
does not return its grants delays no other client: it has at most as many grants as its credit.

To a scheduler all these subscriptions are of one client. So the limits of a scheduler are divided here among
connections and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlog.access.key_ring import KeyRing
from ringlog.access.keys import Principal
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError, Throttled
from ringlog.limits import (
    GATEWAY_FEEDS_PER_KEY_MAX,
    GATEWAY_SUBSCRIPTIONS_MAX,
    GATEWAY_SUBSCRIPTIONS_PER_CONNECTION_MAX,
    GATEWAY_SUBSCRIPTIONS_PER_KEY_MAX,
    LINK_SILENCE_MS,
)
from ringlog.link.delivery import Delivery
from ringlog.link.futures import Pending
from ringlog.link.peer import MS
from ringlog.link.subscription import UNBOUNDED, ClientSubscription, ReadGrant

SILENCE_NS = LINK_SILENCE_MS * MS
_RETRY_AFTER_MS = 1_000

Send = Callable[[bytes, m.Message, Any], None]
"""(client, message, attachment): send an unsolicited message."""


@dataclass(slots=True)
class _KeyUsage:
    """Subscriptions and feeds of all clients of a key."""

    name: str
    subscriptions: int = 0
    feeds: int = 0


@dataclass(slots=True)
class _RelayedSubscription:
    """One subscription of a client."""

    number: int
    subscription: ClientSubscription
    usage: _KeyUsage
    feeds: dict[int, int] = field(default_factory=dict)
    """The client's feed number -> the gateway's."""
    names: dict[int, int] = field(default_factory=dict)
    """The gateway's feed number -> the client's."""
    grants: dict[int, ReadGrant] = field(default_factory=dict)
    """Grants that the client has, by the gateway's feed number."""


@dataclass(slots=True)
class _RelayClient:
    heard_ns: int
    user_id: str
    principal: Principal
    """Rights of its key when it subscribed."""
    relayed: dict[int, _RelayedSubscription] = field(default_factory=dict)


class SubscriptionRelay:
    """Subscriptions of all remote clients."""

    def __init__(self, delivery: Delivery, send: Send) -> None:
        self._delivery = delivery
        self._send = send
        self._clients: dict[bytes, _RelayClient] = {}
        self._usage: dict[str, _KeyUsage] = {}
        """By the name of the key; only keys with subscriptions."""
        self.subscriptions: int = 0
        """Number of subscriptions of all clients."""

    def subscribe(
        self,
        client: bytes,
        user_id: str,
        principal: Principal,
        request: m.Subscribe,
        feeds: Sequence[tuple[int, m.TopicInfo, int]],
        missing: Sequence[int],
        now_ns: int,
    ) -> Pending[list[int]]:
        """Add feeds (the client's number, topic, position). `missing` are numbers of feeds without a topic.

        The result is done when the schedulers accepted the feeds. It fails with the refusal of a scheduler.
        Raises Throttled if a limit is reached.
        """
        self._require_room(client, principal, request, [number for number, _, _ in feeds])
        known = self._clients.setdefault(client, _RelayClient(now_ns, user_id, principal))
        known.heard_ns = now_ns
        relayed = self._relayed(client, known, request)

        added_feeds: list[tuple[int, int]] = []

        def on_numbered(numbers: list[int]) -> None:
            for (number, _, _), feed in zip(feeds, numbers, strict=True):
                self._drop_feed(relayed, number)  # A number that is used again replaces its feed.
                relayed.feeds[number], relayed.names[feed] = feed, number
                relayed.usage.feeds += 1
                added_feeds.append((number, feed))

        def forget_refused(done: Pending[list[int]]) -> None:
            for number, feed in added_feeds if done.error is not None else ():
                if relayed.feeds.get(number) == feed:
                    self._drop_feed(relayed, number)

        added = self._delivery.add_feeds(
            relayed.subscription, [(info, after) for _, info, after in feeds], on_numbered
        )
        added.when_done(forget_refused)
        if missing:
            rows = [[request.subscription, number, UNBOUNDED, 0, 0, 0, 0, 0] for number in missing]
            self._send(client, m.Grants(len(rows)), np.array(rows, dtype=np.uint64).tobytes())
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
            self._close(known, relayed)
            if not known.relayed:
                del self._clients[client]

    def return_grants(self, client: bytes, rows: Sequence[Sequence[int]], now_ns: int) -> None:
        """Return grants to the schedulers: of several rows for one feed the last one.

        `rows`: [subscription, feed, after, is_consumed]. An unknown client receives SubscriptionsLost.
        """
        known = self._clients.get(client)
        if known is None:
            self._send(client, m.SubscriptionsLost(), None)
            return
        known.heard_ns = now_ns
        latest = {(number, name): (after, is_consumed) for number, name, after, is_consumed in rows}
        if not latest:
            return
        for (number, name), (after, is_consumed) in latest.items():
            relayed = known.relayed.get(number)
            feed = relayed.feeds.get(name) if relayed is not None else None
            if relayed is None or feed is None:
                continue
            grant = relayed.grants.pop(feed, None) or ReadGrant(feed, 0, None, now_ns, is_self_granted=True)
            self._delivery.returns.add(
                relayed.subscription, grant, min(after, UNBOUNDED), is_consumed=bool(is_consumed)
            )
        self._delivery.returns.send()  # Do not delay: the client has already batched them.

    def forget_client(self, client: bytes) -> None:
        """Close all subscriptions of a disconnected client."""
        known = self._clients.pop(client, None)
        if known is not None:
            for relayed in list(known.relayed.values()):
                self._close(known, relayed)

    def end_changed(self, keys: KeyRing) -> None:
        """End the subscriptions of keys that were removed or changed.

        Their clients subscribe again, and get the refusal if there is one.
        """
        for client, known in list(self._clients.items()):
            if not known.principal.is_owner and keys.find(known.user_id) != known.principal:
                self.forget_client(client)
                self._send(client, m.SubscriptionsLost(), None)

    def forget_silent_clients(self, now_ns: int) -> None:
        """Close the subscriptions of clients that sent nothing for LINK_SILENCE_MS."""
        silent = [client for client, known in self._clients.items() if now_ns - known.heard_ns > SILENCE_NS]
        for client in silent:
            self.forget_client(client)

    # -- internals --------------------------------------------------------------------------------------

    def _require_room(
        self, client: bytes, principal: Principal, request: m.Subscribe, feeds: Sequence[int]
    ) -> None:
        """Raise Throttled if a limit would be exceeded. Nothing is changed before."""
        known = self._clients.get(client)
        relayed = known.relayed.get(request.subscription) if known is not None else None
        usage = self._usage.get(principal.name) or _KeyUsage(principal.name)
        new = int(relayed is None)
        new_feeds = len(set(feeds) - (relayed.feeds.keys() if relayed is not None else set()))
        for name, found, most in (
            ("subscriptions_per_connection", (len(known.relayed) if known is not None else 0) + new,
             GATEWAY_SUBSCRIPTIONS_PER_CONNECTION_MAX),
            ("subscriptions_per_key", usage.subscriptions + new, GATEWAY_SUBSCRIPTIONS_PER_KEY_MAX),
            ("subscriptions", self.subscriptions + new, GATEWAY_SUBSCRIPTIONS_MAX),
            ("feeds_per_key", usage.feeds + new_feeds, GATEWAY_FEEDS_PER_KEY_MAX),
        ):  # fmt: skip
            if found > most:
                raise Throttled(
                    "subscription limit reached: end subscriptions first", limit=name, max=most,
                    retry_after_ms=_RETRY_AFTER_MS,
                )  # fmt: skip

    def _relayed(self, client: bytes, known: _RelayClient, request: m.Subscribe) -> _RelayedSubscription:
        relayed = known.relayed.get(request.subscription)
        if relayed is not None:
            return relayed
        subscription = self._delivery.open_subscription(
            credit=request.credit, strong=request.strong, names=request.names
        )
        usage = self._usage.setdefault(known.principal.name, _KeyUsage(known.principal.name))
        relayed = known.relayed[request.subscription] = _RelayedSubscription(
            request.subscription, subscription, usage
        )
        usage.subscriptions += 1
        self.subscriptions += 1
        self._await(client, relayed)
        return relayed

    def _close(self, known: _RelayClient, relayed: _RelayedSubscription) -> None:
        self._delivery.close_subscription(relayed.subscription)
        del known.relayed[relayed.number]
        usage = relayed.usage
        usage.subscriptions -= 1
        usage.feeds -= len(relayed.feeds)
        relayed.feeds.clear()  # Refused feeds may be dropped later.
        self.subscriptions -= 1
        if not usage.subscriptions:
            del self._usage[usage.name]

    def _drop_feed(self, relayed: _RelayedSubscription, name: int) -> None:
        feed = relayed.feeds.pop(name, None)
        if feed is not None:
            relayed.usage.feeds -= 1
            del relayed.names[feed]
            relayed.grants.pop(feed, None)
            self._delivery.drop_feeds(relayed.subscription, [feed])

    def _await(self, client: bytes, relayed: _RelayedSubscription) -> None:
        self._delivery.wait_for_work(relayed.subscription).when_done(
            lambda _: self._relay_grants(client, relayed)
        )

    def _relay_grants(self, client: bytes, relayed: _RelayedSubscription) -> None:
        """Send the available grants to the client, then wait for the next ones."""
        known = self._clients.get(client)
        if known is None or known.relayed.get(relayed.number) is not relayed:
            return
        subscription = relayed.subscription
        if isinstance(subscription.failure, RinglogError):
            self.unsubscribe(client, relayed.number, ())
            self._send(client, m.SubscriptionsLost(), None)
            return
        rows = []
        while (grant := subscription.take_grant()) is not None:
            relayed.grants[grant.feed] = grant
            rows.append([relayed.number, relayed.names[grant.feed], grant.until, 0, 0, 0, 0, 0])
        if rows:
            self._send(client, m.Grants(len(rows)), np.array(rows, dtype=np.uint64).tobytes())
        if subscription.names_changed:
            subscription.names_changed = False
            self._send(client, m.TopicsChanged(), None)
        self._await(client, relayed)
