"""The client's side of the delivery protocol with schedulers.

See the section Delivery of docs/reference/protocol.md.
"""

from __future__ import annotations

import pytest

from ringlog.envelope import messages as m
from ringlog.errors import (
    InvalidRequest,
    NotConnected,
    NotReady,
    RequestTimeout,
    Throttled,
    TopicNotFound,
    UsageError,
)
from ringlog.limits import CREDIT_MAX, FEEDS_PER_MESSAGE_MAX
from ringlog.link.delivery import THROTTLED_NS_MAX
from ringlog.link.feed_relocation import RELOCATIONS_AT_ONCE
from ringlog.link.futures import Pending
from ringlog.link.grant_returns import RETURNS_PER_MESSAGE_MAX
from ringlog.link.peer_request import PeerReply
from ringlog.link.subscription import UNBOUNDED
from ringlog.placement import scheduler_of
from tests.support.fake_scheduler import FakeDeliveryHost, topic

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def host() -> FakeDeliveryHost:
    return FakeDeliveryHost()


def opened(host, *wanted, **options):
    """Return a subscription that the schedulers know, and its feeds.

    `wanted` has items `(topic, position)`.
    """
    subscription = host.delivery.open_subscription(
        **({"credit": 4, "strong": False, "names": False} | options)
    )
    adding = host.delivery.add_feeds(subscription, wanted)
    for played in host.fake_schedulers:
        played.answer_all()
    return subscription, adding.result()


def test_a_grant_is_taken_once_and_returned_with_the_position(host):
    subscription, (feed,) = opened(host, (topic(7), 5))
    assert subscription.take_grant() is None
    host.deliver_grants((subscription.number, feed, 9, 6, 9, 1, 4096, 8192))
    turn = subscription.take_grant()
    assert (turn.feed, turn.until, turn.hint) == (feed, 9, (6, 9, 1, 4096, 8192))
    assert subscription.take_grant() is None
    host.delivery.returns.add(subscription, turn, 9, is_consumed=True)
    assert host.fake_schedulers[0].returned_grants() == []
    host.delivery.wait_for_work(subscription)
    assert host.fake_schedulers[0].returned_grants() == [[subscription.number, feed, 9, 1]]


def test_grants_are_expected_from_a_scheduler_after_its_first_feed(host):
    """A client has a grant ring only while it has feeds."""
    subscription, _ = opened(host, (topic(7), 0), (topic(8), 0))
    assert host.expected == [0]
    adding = host.delivery.add_feeds(subscription, [(topic(9), 0)])
    opened(host, (topic(7), 0))
    assert adding.is_done
    assert host.expected == [0]
    for each in list(host.delivery._subscriptions.values()):
        host.delivery.close_subscription(each)
    opened(host, (topic(7), 0))
    assert host.expected == [0, 0]


def test_returned_grants_are_sent_together_and_soon(host):
    """One message contains many. If the client does not wait for more grants, it sends them within 5 ms."""
    subscription, feeds = opened(
        host, *((topic(n), 0) for n in range(1, RETURNS_PER_MESSAGE_MAX + 37)), credit=400
    )
    host.deliver_grants(*((subscription.number, feed, 5) for feed in feeds))
    for _ in feeds:
        host.delivery.returns.add(subscription, subscription.take_grant(), 5, is_consumed=False)
    assert len(host.fake_schedulers[0].returned_grants()) == RETURNS_PER_MESSAGE_MAX
    host.advance(0.005)
    assert len(host.fake_schedulers[0].returned_grants()) == 36


def test_grants_returned_without_the_lock_are_sent_together(host):
    """The first return asks its caller to schedule the collection. The collection includes later returns."""
    subscription, feeds = opened(
        host, *((topic(n), 0) for n in range(1, RETURNS_PER_MESSAGE_MAX + 37)), credit=400
    )
    delivery = host.delivery
    host.deliver_grants(*((subscription.number, feed, 5) for feed in feeds))

    def finish():
        return delivery.returns.add_unlocked(subscription, subscription.take_grant(), 5, is_consumed=True)

    assert not finish(), "nobody has arranged anything yet"
    delivery.returns.collect()
    assert finish()
    assert host.fake_schedulers[0].returned_grants() == []
    host.advance(0.005)
    assert len(host.fake_schedulers[0].returned_grants()) == 2
    assert not finish(), "what was arranged is over"
    delivery.returns.collect()
    assert [finish() for _ in range(RETURNS_PER_MESSAGE_MAX)] == [True] * (RETURNS_PER_MESSAGE_MAX - 1) + [
        False
    ]
    delivery.returns.collect()
    assert len(host.fake_schedulers[0].returned_grants()) == RETURNS_PER_MESSAGE_MAX + 1
    assert finish() is False
    delivery.wait_for_work(subscription)
    assert len(host.fake_schedulers[0].returned_grants()) == 1


def test_a_polling_reader_sends_overdue_returns_itself():
    """Otherwise another thread of the client would have to send them and would disturb the reader."""
    host = FakeDeliveryHost(return_delay_ns=50_000_000)
    subscription, feeds = opened(host, *((topic(n), 0) for n in range(1, 4)))
    delivery = host.delivery
    host.deliver_grants(*((subscription.number, feed, 5) for feed in feeds))
    assert not delivery.returns.is_overdue
    for _ in feeds:
        delivery.returns.add(subscription, subscription.take_grant(), 5, is_consumed=False)
    host.advance(0.004)
    assert not delivery.returns.is_overdue
    host.advance(0.001)
    assert delivery.returns.is_overdue
    assert host.fake_schedulers[0].returned_grants() == []
    delivery.returns.send()
    assert len(host.fake_schedulers[0].returned_grants()) == 3
    assert not delivery.returns.is_overdue


def sought(host, subscription, *feeds):
    """Grant feeds without a position, since the scheduler found no topic in their slots.

    Return the resulting requests.
    """
    host.deliver_grants(*((subscription.number, feed, UNBOUNDED) for feed in feeds))
    asked, host.shard_requests = host.shard_requests, []
    return asked


def test_a_topic_is_followed_to_the_slot_that_its_shard_reports(host):
    """The shard assigns slots, and its successor may assign others."""
    subscription, (feed, other) = opened(host, (topic(7, slot=3), 5), (topic(9, slot=4), 1))
    ((shard, message, answer),) = sought(host, subscription, feed)
    assert (shard, message) == (0, m.TopicResolve("t7"))
    answer.resolve(PeerReply(topic(7, slot=8)))
    (told,) = host.fake_schedulers[0].answer_all()
    assert told.feeds == [m.Feed(feed, "t7", 7, 0, 8, 5)]
    host.delivery.scheduler_connected(0)
    (told,) = host.fake_schedulers[0].answer_all()
    assert [each.slot for each in told.feeds] == [8, 4]
    assert len(sought(host, subscription, feed, other)) == 1, "it may move again; the other is next"


def test_a_topic_that_moves_again_during_the_lookup_is_looked_up_again(host):
    """Two restarts in a row: the first lookup may return the slot of the first successor."""
    subscription, (feed,) = opened(host, (topic(7, slot=3), 5))
    ((_, _, answer),) = sought(host, subscription, feed)
    assert sought(host, subscription, feed) == []
    answer.resolve(PeerReply(topic(7, slot=3)))
    host.advance(0.2)
    ((_, _, answer),) = host.shard_requests
    answer.resolve(PeerReply(topic(7, slot=8)))
    assert [each.slot for told in host.fake_schedulers[0].answer_all() for each in told.feeds] == [8]
    host.advance(0.2)
    assert len(host.shard_requests) == 1, "it did not move during this lookup"


def test_a_topic_is_followed_to_the_shard_that_its_home_reports(host):
    """The home shard of the name returns a reference to the owner."""
    subscription, (feed,) = opened(host, (topic(7, shard=2, slot=3), 5))
    ((_, _, answer),) = sought(host, subscription, feed)
    answer.resolve(PeerReply(m.TopicInfo("t7", 0, 0, 2, -1, False, {})))
    ((shard, message, answer),) = host.shard_requests
    assert (shard, message) == (2, m.TopicResolve("t7"))
    answer.resolve(PeerReply(topic(7, shard=2, slot=5)))
    assert [each.slot for told in host.fake_schedulers[0].answer_all() for each in told.feeds] == [5]


@pytest.mark.parametrize("found", [topic(7, slot=3), topic(8, slot=5), TopicNotFound("no such topic")])
def test_a_topic_that_did_not_move_or_does_not_exist_is_left_to_its_reader(host, found):
    subscription, (feed,) = opened(host, (topic(7, slot=3), 5))
    ((_, _, answer),) = sought(host, subscription, feed)
    answer.fail(found) if isinstance(found, Exception) else answer.resolve(PeerReply(found))
    assert host.fake_schedulers[0].answer_all() == []
    assert subscription.take_grant().feed == feed


@pytest.mark.parametrize("error", [NotReady("restarts"), NotConnected("away"), RequestTimeout("no answer")])
def test_the_lookup_of_a_moved_topic_is_retried(host, error):
    """The scheduler sends its notice only once. Without the retry the reader would wait forever."""
    subscription, (feed, gone) = opened(host, (topic(7, slot=3), 5), (topic(9, slot=4), 1))
    for _, _, answer in sought(host, subscription, feed, gone):
        answer.fail(error)
    assert host.shard_requests == []
    host.delivery.drop_feeds(subscription, [gone])
    host.fake_schedulers[0].answer_all()
    host.advance(0.2)
    ((_, message, answer),) = host.shard_requests
    assert message == m.TopicResolve("t7")
    answer.resolve(PeerReply(topic(7, slot=6)))
    assert [each.slot for told in host.fake_schedulers[0].answer_all() for each in told.feeds] == [6]


def test_lookups_of_many_topics_are_bounded_and_subscribed_together(host):
    subscription, feeds = opened(host, *((topic(n, slot=n), 0) for n in range(1, 101)), credit=200)
    asked = sought(host, subscription, *feeds)
    assert len(asked) == 1, "the first; the others are asked for together"
    asked[0][2].resolve(PeerReply(topic(1, slot=201)))
    assert len(host.fake_schedulers[0].answer_all()) == 1
    assert len(host.shard_requests) == RELOCATIONS_AT_ONCE
    asked, host.shard_requests = host.shard_requests, []
    for _, message, answer in asked:
        number = int(message.topic[1:])
        answer.resolve(PeerReply(topic(number, slot=200 + number)))
    (told,) = host.fake_schedulers[0].answer_all()
    assert [each.slot for each in told.feeds] == [200 + n for n in range(2, 2 + RELOCATIONS_AT_ONCE)]
    assert len(host.shard_requests) == 100 - 1 - RELOCATIONS_AT_ONCE


def test_a_grant_wakes_up_the_waiting_reader(host):
    subscription, (feed,) = opened(host, (topic(7), 0))
    waiting = host.delivery.wait_for_work(subscription)
    assert not waiting.is_done
    host.deliver_grants((subscription.number, feed, 1))
    assert waiting.is_done
    assert host.delivery.wait_for_work(subscription).is_done, "it was not taken yet"


def test_two_grants_of_one_feed_are_merged(host):
    """A restarted scheduler repeats its grants. The feed is read once."""
    subscription, (feed,) = opened(host, (topic(7), 0))
    host.deliver_grants((subscription.number, feed, 1))
    host.deliver_grants((subscription.number, feed, 3))
    assert subscription.take_grant().until == 3
    assert subscription.take_grant() is None


def test_a_new_connection_gets_all_feeds_with_current_positions(host):
    """A new scheduler knows no subscription."""
    subscription, (first, second) = opened(host, (topic(7), 0), (topic(8), 3))
    host.deliver_grants((subscription.number, first, 5))
    turn = subscription.take_grant()
    host.delivery.returns.add(subscription, turn, 5, is_consumed=True)
    host.delivery.scheduler_connected(0)
    (asked,) = host.fake_schedulers[0].answer_all()
    assert [(feed.feed, feed.after) for feed in asked.feeds] == [(first, 5), (second, 3)]


def test_a_scheduler_that_lost_the_subscription_gets_it_again(host):
    subscription, _ = opened(host, (topic(7), 0))
    host.expected.clear()
    host.delivery.scheduler_message(0, PeerReply(m.SubscriptionsLost()))
    (asked,) = host.fake_schedulers[0].answer_all()
    assert asked.subscription == subscription.number
    assert host.expected == [0], "its ring went with them"


def test_feeds_are_assigned_to_the_scheduler_of_their_topic():
    host = FakeDeliveryHost(schedulers=3)
    subscription = host.delivery.open_subscription(credit=1, strong=True, names=True)
    host.delivery.add_feeds(subscription, [(topic(n), 0) for n in range(1, 40)])
    for _ in range(3):
        for number, played in enumerate(host.fake_schedulers):
            for asked in played.answer_all():
                assert (asked.credit, asked.strong, asked.names) == (1, True, number == 0)
                assert {scheduler_of(feed.topic_id, 3) for feed in asked.feeds} == {number}
    assert len(subscription.feeds) == 39


def test_many_feeds_are_sent_in_several_messages(host):
    subscription = host.delivery.open_subscription(credit=1, strong=False, names=False)
    adding = host.delivery.add_feeds(
        subscription, [(topic(n), 0) for n in range(1, FEEDS_PER_MESSAGE_MAX + 11)]
    )
    sizes = []
    while not adding.is_done:
        sizes += [len(asked.feeds) for asked in host.fake_schedulers[0].answer_all()]
    assert sizes == [FEEDS_PER_MESSAGE_MAX, 10]
    assert len(set(adding.result())) == FEEDS_PER_MESSAGE_MAX + 10


def test_a_temporary_refusal_is_retried_and_another_error_is_raised(host):
    """`NotReady` is temporary; `Throttled` for the limit of links is not."""
    subscription = host.delivery.open_subscription(credit=1, strong=False, names=False)
    adding = host.delivery.add_feeds(subscription, [(topic(7), 0)])
    host.fake_schedulers[0].requests.pop()[1].fail(NotReady("starting"))
    assert not adding.is_done
    host.advance(1)
    host.fake_schedulers[0].requests.pop()[1].fail(Throttled("too many", limit="links", max=1))
    with pytest.raises(Throttled, match="too many"):
        adding.result()
    assert not subscription.feeds


def test_refused_feeds_leave_the_others_of_their_subscription_alone():
    """Also those that one scheduler has accepted are removed there if another one refuses the rest."""
    host = FakeDeliveryHost(schedulers=2)
    subscription, (feed,) = opened(host, (topic(7), 0))
    wanted = [(topic(n), 0) for n in range(8, 20)]
    adding = host.delivery.add_feeds(subscription, wanted)
    (first,) = [each for each in host.fake_schedulers if each.requests]
    accepted = {each.feed for each in first.answer_all()[0].feeds}
    (second,) = [each for each in host.fake_schedulers if each.requests]
    asked, request = second.requests.pop()
    request.fail(Throttled("too many feeds", limit="feeds_per_scheduler", max=1))
    with pytest.raises(Throttled, match="too many feeds"):
        adding.result()
    assert set(subscription.feeds) == {feed}
    removed = [each for scheduler in (first, second) for each in scheduler.answer_all()]
    assert {number for each in removed for number in each.feeds} == accepted | {
        each.feed for each in asked.feeds
    }
    host.deliver_grants((subscription.number, feed, 1))
    assert subscription.take_grant().feed == feed


@pytest.mark.parametrize("error", [RequestTimeout("no reply"), Throttled("too many", limit="links", max=1)])
def test_a_subscription_whose_first_request_failed_is_ended_at_the_scheduler(host, error):
    """The scheduler may have accepted it. Otherwise it would count there until the client ends."""
    opened(host, (topic(9), 0))
    subscription = host.delivery.open_subscription(credit=4, strong=False, names=True)
    adding = host.delivery.add_feeds(subscription, [(topic(7), 0)])
    host.fake_schedulers[0].requests.pop()[1].fail(error)
    with pytest.raises(type(error)):
        adding.result()
    host.delivery.close_subscription(subscription)
    assert m.Unsubscribe(subscription.number) in host.fake_schedulers[0].answer_all()


def test_a_feed_or_subscription_that_a_scheduler_should_not_have_is_ended_there(host):
    """A gateway may perform an Unsubscribe before an earlier Subscribe, and then holds back a grant."""
    subscription, (first, second) = opened(host, (topic(7), 0), (topic(8), 0))
    host.delivery.drop_feeds(subscription, [first])
    host.fake_schedulers[0].answer_all()
    host.deliver_grants((subscription.number, first, 1), (subscription.number, second, 1), (99, 5, 1))
    assert host.fake_schedulers[0].answer_all() == [
        m.Unsubscribe(subscription.number, [first]), m.Unsubscribe(99),
    ]  # fmt: skip
    assert subscription.take_grant().feed == second


def test_names_are_requested_again_after_they_were_refused(host):
    subscription = host.delivery.open_subscription(credit=4, strong=False, names=True)
    for _ in range(2):
        adding = host.delivery.add_feeds(subscription, [])
        asked, request = host.fake_schedulers[0].requests.pop()
        assert asked.names
        request.fail(Throttled("too many", limit="links", max=1))
        with pytest.raises(Throttled):
            adding.result()


def test_a_subscription_that_was_served_survives_limits_after_a_new_connection(host):
    """Many clients connect at the same time. A limit that does not end is an error."""
    subscription, _ = opened(host, (topic(7), 0))
    scheduler = host.fake_schedulers[0]

    def refuse():
        scheduler.requests.pop()[1].fail(Throttled("too many requests", retry_after_ms=500))

    host.delivery.scheduler_connected(0)
    refuse()
    host.advance(0.4)
    assert not scheduler.requests
    host.advance(0.1)
    (asked,) = scheduler.answer_all()
    assert [each.topic for each in asked.feeds] == ["t7"]
    assert subscription.failure is None

    host.delivery.scheduler_connected(0)
    began_ns = host.clock.monotonic_ns()
    while subscription.failure is None:
        refuse()
        host.advance(0.5)
    assert host.clock.monotonic_ns() - began_ns >= THROTTLED_NS_MAX
    assert subscription.has_work, "its reader has to hear of it"


def test_dropped_feeds_and_closed_subscriptions_deliver_no_grants(host):
    """Closing also stops all timers."""
    subscription, (first, second) = opened(host, (topic(7), 0), (topic(8), 0))
    host.deliver_grants((subscription.number, first, 1), (subscription.number, second, 1))
    host.delivery.drop_feeds(subscription, [first])
    assert subscription.take_grant().feed == second
    assert subscription.take_grant() is None
    host.delivery.close_subscription(subscription)
    host.deliver_grants((subscription.number, second, 9))
    assert [type(asked) for asked in host.fake_schedulers[0].answer_all()] == [m.Unsubscribe] * 3
    host.delivery.close_subscription(subscription)
    assert host.timers.next_ns() is None, "an idle client has nothing to wake up for"


def test_a_client_sends_keep_alives_while_it_has_a_subscription(host):
    opened(host, (topic(7), 0))
    host.advance(10)
    assert [(message, bytes(data)) for message, data in host.fake_schedulers[0].sent_messages] == [
        (m.GrantsReturned(0), b"")
    ]
    host.advance(10)
    assert len(host.fake_schedulers[0].sent_messages) == 2


def test_a_self_grant_is_replaced_by_a_grant_of_the_scheduler(host):
    subscription, (feed,) = opened(host, (topic(7), 0))
    host.delivery.self_grant(subscription, feed)
    host.delivery.self_grant(subscription, feed)
    host.deliver_grants((subscription.number, feed, 4))
    turn = subscription.take_grant()
    assert (turn.is_self_granted, subscription.take_grant()) == (False, None)
    host.delivery.returns.add(subscription, turn, 0, is_consumed=False)
    host.delivery.self_grant(subscription, feed, after_ns=10**9)
    assert subscription.take_grant() is None
    host.advance(1)
    assert subscription.take_grant().is_self_granted


@pytest.mark.parametrize("credit", [0, -1, CREDIT_MAX + 1])
def test_a_credit_out_of_range_is_refused(credit):
    with pytest.raises(UsageError, match="credit"):
        FakeDeliveryHost().delivery.open_subscription(credit=credit, strong=False, names=False)


def test_a_subscription_without_schedulers_fails_with_a_remedy():
    host = FakeDeliveryHost(schedulers=0)
    subscription = host.delivery.open_subscription(credit=1, strong=False, names=False)
    with pytest.raises(InvalidRequest, match=r"delivery\.schedulers"):
        host.delivery.add_feeds(subscription, [(topic(7), 0)]).result()


@pytest.mark.parametrize("data", [b"", b"x" * 63, None])
def test_malformed_grant_rows_are_ignored(host, data):
    subscription, _ = opened(host, (topic(7), 0))
    host.delivery.scheduler_message(0, PeerReply(m.Grants(1), data))
    assert not subscription.has_work


def test_grants_through_shared_memory_equal_other_grants(host):
    subscription, (feed,) = opened(host, (topic(7), 5))
    row = [subscription.number, feed, 9, 6, 9, 1, 4096, 8192]
    host.delivery.scheduler_grants(0, [row], is_complete=True)
    assert subscription.take_grant().hint == (6, 9, 1, 4096, 8192)


def test_an_overrun_of_the_grant_ring_leads_to_self_grants_for_all_feeds(host):
    """The client loses time and no record. A feed with a grant gets no second one."""
    subscription, (first, second) = opened(host, (topic(7), 0), (topic(8), 3))
    host.deliver_grants((subscription.number, first, 5))
    host.delivery.scheduler_grants(0, [], is_complete=False)
    taken = [subscription.take_grant() for _ in range(3)]
    assert [turn and (turn.feed, turn.is_self_granted) for turn in taken] == [
        (first, False),
        (second, True),
        None,
    ]
    host.delivery.returns.add(subscription, taken[1], 4, is_consumed=True)
    host.delivery.wait_for_work(subscription)
    assert host.fake_schedulers[0].returned_grants() == [[subscription.number, second, 4, 1]]


def test_changes_of_names_are_requested_without_any_feed():
    """A pattern without matching topics needs a subscription without feeds.

    It is sent again to a restarted scheduler.
    """
    host = FakeDeliveryHost(schedulers=2)
    subscription = host.delivery.open_subscription(credit=4, strong=False, names=True)
    adding = host.delivery.add_feeds(subscription, [])
    assert not adding.is_done
    (asked,) = host.fake_schedulers[0].answer_all()
    assert (asked.names, asked.feeds) == (True, [])
    assert adding.result() == []
    assert host.expected == [], "there is no feed to be given a turn yet"
    assert host.fake_schedulers[1].answer_all() == []
    host.delivery.scheduler_message(0, PeerReply(m.TopicsChanged()))
    assert subscription.has_work
    subscription.names_changed = False
    host.delivery.scheduler_connected(1)
    assert not subscription.names_changed
    host.delivery.scheduler_connected(0)
    assert not subscription.names_changed, "before the scheduler knows, a later change could be missed"
    (asked,) = host.fake_schedulers[0].answer_all()
    assert asked.names
    assert subscription.names_changed, "names may have changed while nobody reported it"
    host.advance(10)
    assert (m.GrantsReturned(0), b"") in host.fake_schedulers[0].sent_messages, (
        "a word of life, although there is no feed"
    )
    host.delivery.close_subscription(subscription)
    assert host.fake_schedulers[0].answer_all() == [m.Unsubscribe(subscription.number)]


def test_a_subscription_is_closed_at_schedulers_without_remaining_feeds():
    """Otherwise each watch of a deleted topic would count towards the client's limit permanently."""
    host = FakeDeliveryHost(schedulers=2)
    number = scheduler_of(7, 2)
    subscription, (feed,) = opened(host, (topic(7), 0))
    host.delivery.drop_feeds(subscription, [feed])
    host.fake_schedulers[number].answer_all()
    host.delivery.close_subscription(subscription)
    assert host.fake_schedulers[number].answer_all() == [m.Unsubscribe(subscription.number)]


def test_a_subscription_closed_before_the_first_connection_is_not_sent(host):
    """Otherwise it would count at the scheduler until the client ends."""
    connecting = Pending()
    host.wait_connected = lambda: connecting
    subscription = host.delivery.open_subscription(credit=4, strong=False, names=True)
    host.delivery.add_feeds(subscription, [(topic(7), 0)])
    host.delivery.close_subscription(subscription)
    connecting.resolve(None)
    assert host.fake_schedulers[0].requests == []
