"""Subscriptions of remote clients, which the gateway relays to the schedulers."""

from __future__ import annotations

import numpy as np
import pytest

from ringlog.actors.gateway.reads.subscription_relay import SubscriptionRelay
from ringlog.envelope import messages as m
from ringlog.errors import Throttled
from ringlog.limits import GRANTS_PER_MESSAGE_MAX, LINK_SILENCE_MS, SUBSCRIPTIONS_PER_LINK_MAX
from ringlog.link.peer_request import PeerReply
from ringlog.link.subscription import UNBOUNDED
from tests.support.fake_scheduler import FakeDeliveryHost, topic

pytestmark = pytest.mark.timeout(30)
ALICE, BOB = b"talice", b"tbob"


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
        following = self.deliveries.subscribe(client, asked, feeds, gone, now)
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
        world.deliveries.subscribe(ALICE, m.Subscribe(1, [], 2), [(1, topic(7), after)], [], now)
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
    world.deliveries.subscribe(ALICE, m.Subscribe(1, [], 2), [(1, topic(7), 3)], [], now)
    world.host.deliver_grants((1, 1, 9))
    assert world.rows(ALICE) == [(1, 1, 9)]


def test_the_number_of_subscriptions_is_bounded(world):
    """At the bound the relay raises `Throttled` with the maximum."""
    for number in range(SUBSCRIPTIONS_PER_LINK_MAX):
        world.deliveries.subscribe(ALICE, m.Subscribe(number, [], 1), [], [], 0)
    with pytest.raises(Throttled) as caught:
        world.deliveries.subscribe(ALICE, m.Subscribe(-1, [], 1), [], [], 0)
    assert caught.value.detail["max"] == SUBSCRIPTIONS_PER_LINK_MAX


def test_a_subscription_to_a_pattern_receives_topic_changes(world):
    world.follow(ALICE, 1, (1, topic(7), 0), names=True)
    world.host.delivery.scheduler_message(0, PeerReply(m.TopicsChanged()))
    assert (ALICE, m.TopicsChanged(), None) in world.said
