"""Subscriptions of remote clients, which the gateway relays to the schedulers."""

from __future__ import annotations

import numpy as np
import pytest

from ringlog.access.key_ring import KeyRing
from ringlog.access.keys import OWNER, Principal
from ringlog.access.permissions import SCOPES
from ringlog.actors.gateway.reads import subscription_relay
from ringlog.actors.gateway.reads.subscription_relay import SubscriptionRelay
from ringlog.envelope import messages as m
from ringlog.errors import Throttled
from ringlog.limits import GRANTS_PER_MESSAGE_MAX, LINK_SILENCE_MS, SUBSCRIPTIONS_PER_LINK_MAX
from ringlog.link.peer_request import PeerReply
from ringlog.link.subscription import UNBOUNDED
from tests.support.fake_scheduler import FakeDeliveryHost, topic

pytestmark = pytest.mark.timeout(30)
ALICE, BOB = b"talice", b"tbob"
ID = "id"
WHO = {client: Principal(name, SCOPES) for client, name in ((ALICE, "alice"), (BOB, "bob"))}


class World:
    """The gateway's relay, a fake scheduler, and the messages that were sent to clients."""

    def __init__(self):
        self.host = FakeDeliveryHost()
        self.said = []
        self.deliveries = SubscriptionRelay(self.host.delivery, lambda *what: self.said.append(what))

    @property
    def scheduler(self):
        return self.host.fake_schedulers[0]

    def follow(self, client, number, *feeds, gone=(), **options):
        asked = m.Subscribe(number, [], **({"credit": 2} | options))
        now = self.host.clock.monotonic_ns()
        following = self.deliveries.subscribe(client, ID, WHO[client], asked, feeds, gone, now)
        told = self.scheduler.answer_all()
        assert following.is_done
        return told

    def rows(self, client):
        """Return the grants of this client, as (subscription, feed, until). Clear all messages."""
        said, self.said = self.said, []
        found = []
        for to, message, data in said:
            if to == client and isinstance(message, m.Grants):
                found += [tuple(row[:3]) for row in np.frombuffer(data, np.uint64).reshape(-1, 8).tolist()]
        return found

    def take(self, client, *rows):
        returned = [[*row, 1] for row in rows]
        self.deliveries.return_grants(client, returned, self.host.clock.monotonic_ns())


@pytest.fixture
def world():
    return World()


def test_grants_carry_the_clients_numbers_and_no_position_hints(world):
    """Remote clients must not learn the names and offsets of log files."""
    (asked,) = world.follow(ALICE, 70, (700, topic(7), 3))
    ours = asked.subscription, asked.feeds[0].feed
    world.host.deliver_grants((*ours, 9, 4, 9, 1, 4096, 8192))
    ((client, message, data),) = world.said
    assert (client, message) == (ALICE, m.Grants(1))
    assert np.frombuffer(data, np.uint64).tolist() == [70, 700, 9, 0, 0, 0, 0, 0]
    world.take(ALICE, (70, 700, 9))
    assert world.scheduler.returned_grants() == [[*ours, 9, 1]]


def test_repeated_rows_of_a_feed_are_one_row_for_the_scheduler(world):
    (asked,) = world.follow(ALICE, 70, (700, topic(7), 3))
    ours = asked.subscription, asked.feeds[0].feed
    world.host.deliver_grants((*ours, 9))
    world.take(ALICE, *[(70, 700, 8)] * (GRANTS_PER_MESSAGE_MAX - 1), (70, 700, 9))
    assert len(world.scheduler.sent_messages) == 1
    assert world.scheduler.returned_grants() == [[*ours, 9, 1]]


def test_two_clients_may_use_the_same_subscription_numbers(world):
    first = world.follow(ALICE, 1, (1, topic(7), 0))[0]
    second = world.follow(BOB, 1, (1, topic(8), 0))[0]
    assert first.subscription != second.subscription
    world.host.deliver_grants((second.subscription, second.feeds[0].feed, 5))
    assert world.rows(BOB) == [(1, 1, 5)]
    world.deliveries.forget_client(BOB)
    world.host.deliver_grants((first.subscription, first.feeds[0].feed, 6))
    assert world.rows(ALICE) == [(1, 1, 6)]


def test_deleted_topics_get_an_unbounded_grant(world):
    """The grant makes the client read, so that it finds the deletion."""
    world.follow(ALICE, 1, gone=[5, 6])
    assert world.rows(ALICE) == [(1, 5, UNBOUNDED), (1, 6, UNBOUNDED)]


def test_an_unknown_client_must_subscribe_again(world):
    world.take(BOB, (1, 1, 1))
    assert world.said == [(BOB, m.SubscriptionsLost(), None)]


def test_a_silent_client_is_forgotten(world):
    world.follow(ALICE, 1, (1, topic(7), 0))
    world.follow(BOB, 1, (1, topic(7), 0))
    world.host.clock.advance(LINK_SILENCE_MS / 2000)
    world.take(BOB)
    world.host.clock.advance(LINK_SILENCE_MS / 2000 + 1)
    world.deliveries.forget_silent_clients(world.host.clock.monotonic_ns())
    assert world.deliveries.subscriptions == 1
    assert [type(asked) for asked in world.scheduler.answer_all()] == [m.Unsubscribe]
    world.take(ALICE)
    assert world.said == [(ALICE, m.SubscriptionsLost(), None)]


def test_unsubscribing_ends_single_feeds_or_the_subscription(world):
    asked = world.follow(ALICE, 1, (1, topic(7), 0), (2, topic(8), 0))[0]
    numbers = {feed.topic_id: feed.feed for feed in asked.feeds}
    world.deliveries.unsubscribe(ALICE, 1, [1])
    world.host.deliver_grants((asked.subscription, numbers[7], 9), (asked.subscription, numbers[8], 9))
    assert world.rows(ALICE) == [(1, 2, 9)]
    world.deliveries.unsubscribe(ALICE, 1, [])
    world.deliveries.unsubscribe(ALICE, 1, [])
    assert world.deliveries.subscriptions == 0


def test_a_feed_with_a_known_number_is_moved(world):
    """A grant for the old position has no effect any more."""
    first = world.follow(ALICE, 1, (1, topic(7), 0))[0]
    again = world.follow(ALICE, 1, (1, topic(7), 8))
    moved = next(asked for asked in again if isinstance(asked, m.Subscribe))
    assert (moved.subscription, moved.feeds[0].after) == (first.subscription, 8)
    for asked in (first, moved):
        world.host.deliver_grants((moved.subscription, asked.feeds[0].feed, 9))
    assert world.rows(ALICE) == [(1, 1, 9)]


def test_repeated_requests_before_the_first_reply_leave_one_feed(world):
    """A client on a new connection sends a Subscribe again that another one has overtaken."""
    now = world.host.clock.monotonic_ns()
    for after in (3, 5):
        world.deliveries.subscribe(
            ALICE, ID, WHO[ALICE], m.Subscribe(1, [], 2), [(1, topic(7), after)], [], now
        )
    first, _, second = world.scheduler.answer_all()
    (old,), (new,) = first.feeds, second.feeds
    for feed in (old.feed, new.feed):
        world.host.deliver_grants((first.subscription, feed, 9))
    assert world.rows(ALICE) == [(1, 1, 9)]
    world.take(ALICE, (1, 1, 9))
    assert world.scheduler.returned_grants() == [[first.subscription, new.feed, 9, 1]]


def test_a_number_that_occurs_twice_in_a_request_leaves_one_feed(world):
    told = world.follow(ALICE, 1, (1, topic(7), 3), (1, topic(7), 5))
    (asked,) = [each for each in told if isinstance(each, m.Subscribe)]
    assert [feed.after for feed in asked.feeds] == [5]


def test_grants_that_precede_the_reply_of_the_scheduler_are_relayed(world):
    now = world.host.clock.monotonic_ns()
    world.deliveries.subscribe(ALICE, ID, WHO[ALICE], m.Subscribe(1, [], 2), [(1, topic(7), 3)], [], now)
    world.host.deliver_grants((1, 1, 9))
    assert world.rows(ALICE) == [(1, 1, 9)]


def refused_limit(world, client, principal, number, *feeds):
    """Return the detail with which the relay refuses a subscription."""
    with pytest.raises(Throttled) as caught:
        world.deliveries.subscribe(client, ID, principal, m.Subscribe(number, [], 1), feeds, [], 0)
    return caught.value.detail


def subscribe_all(world, client, principal, count):
    for number in range(count):
        world.deliveries.subscribe(client, ID, principal, m.Subscribe(number, [], 1), [], [], 0)


def test_one_client_leaves_subscriptions_to_the_others(world):
    """A scheduler serves at most SUBSCRIPTIONS_PER_LINK_MAX subscriptions of the gateway."""
    for connection in range(4):
        client = b"t%d" % connection
        subscribe_all(world, client, WHO[ALICE], 1_024)
        refusal = refused_limit(world, client, WHO[ALICE], -1)
        assert refusal == {"limit": "subscriptions_per_connection", "max": 1_024, "retry_after_ms": 1_000}
    assert refused_limit(world, ALICE, WHO[ALICE], 1) == {
        "limit": "subscriptions_per_key",
        "max": 4_096,
        "retry_after_ms": 1_000,
    }
    assert world.deliveries.subscriptions < SUBSCRIPTIONS_PER_LINK_MAX
    assert world.follow(BOB, 1, (1, topic(7), 0))
    world.deliveries.unsubscribe(b"t0", 0, [])
    world.follow(ALICE, 1, (1, topic(7), 0))


def test_subscriptions_of_all_keys_are_bounded(world, monkeypatch):
    monkeypatch.setattr(subscription_relay, "GATEWAY_SUBSCRIPTIONS_MAX", 3)
    subscribe_all(world, ALICE, WHO[ALICE], 3)
    assert refused_limit(world, BOB, WHO[BOB], 1) == {
        "limit": "subscriptions",
        "max": 3,
        "retry_after_ms": 1_000,
    }
    world.deliveries.forget_client(ALICE)
    world.follow(BOB, 1, (1, topic(7), 0))


def test_feeds_of_a_key_are_bounded(world, monkeypatch):
    """Feeds with a known number replace others. Ended feeds count no more."""
    monkeypatch.setattr(subscription_relay, "GATEWAY_FEEDS_PER_KEY_MAX", 3)
    world.follow(ALICE, 1, (1, topic(7), 0), (2, topic(7), 0))
    world.follow(ALICE, 2, (1, topic(7), 0))
    world.follow(ALICE, 2, (1, topic(7), 5))
    assert refused_limit(world, ALICE, WHO[ALICE], 2, (2, topic(7), 0)) == {
        "limit": "feeds_per_key",
        "max": 3,
        "retry_after_ms": 1_000,
    }
    world.follow(BOB, 1, (1, topic(7), 0))
    world.deliveries.unsubscribe(ALICE, 1, [1])
    world.follow(ALICE, 2, (2, topic(7), 0))
    assert refused_limit(world, ALICE, WHO[ALICE], 3, (1, topic(7), 0))["limit"] == "feeds_per_key"
    world.deliveries.unsubscribe(ALICE, 2, [])
    world.follow(ALICE, 3, (1, topic(7), 0), (2, topic(8), 0))


def test_a_subscription_to_a_pattern_receives_topic_changes(world):
    world.follow(ALICE, 1, (1, topic(7), 0), names=True)
    world.host.delivery.scheduler_message(0, PeerReply(m.TopicsChanged()))
    assert (ALICE, m.TopicsChanged(), None) in world.said


@pytest.mark.parametrize(
    ("keys", "is_kept"),
    [
        (KeyRing([("id", Principal("alice", SCOPES))]), True),
        (KeyRing([("id", Principal("alice", SCOPES, ("a.",)))]), False),
        (KeyRing([("id", Principal("alice", frozenset({"read"})))]), False),
        (KeyRing(), False),
    ],
    ids=["same", "narrower prefixes", "fewer scopes", "revoked"],
)
def test_subscriptions_of_a_changed_key_end_at_once(world, keys, is_kept):
    """The client subscribes again, with the rights that it has now. The engine's owner is not affected."""
    world.follow(ALICE, 1, (1, topic(7), 0))
    world.deliveries.subscribe(BOB, "local", OWNER, m.Subscribe(1, [], 1), [], [], 0)
    world.deliveries.end_changed(keys)
    assert world.said == ([] if is_kept else [(ALICE, m.SubscriptionsLost(), None)])
    assert world.deliveries.subscriptions == 1 + is_kept
