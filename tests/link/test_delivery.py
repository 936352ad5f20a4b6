"""What a client keeps with the schedulers: ZC-4, SCH-9 and the protocol page, section Delivery."""

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
from ringlog.link.delivery import OPEN_END, SEEK_AT_ONCE, TAKEN_ROWS_MAX
from ringlog.link.peer import Reply
from ringlog.placement import scheduler_of
from ringlog.testing.played_scheduler import PlayedHost, topic

pytestmark = pytest.mark.timeout(30)


def opened(host, *wanted, **options):
    """A subscription with feeds (topic, position), known to the schedulers."""
    subscription = host.delivery.open(**({"credit": 4, "strong": False, "names": False} | options))
    adding = host.delivery.add(subscription, wanted)
    for played in host.played:
        played.answer()
    return subscription, adding.take()


def test_a_turn_is_given_once_and_given_back_with_the_position():
    host = PlayedHost()
    subscription, (feed,) = opened(host, (topic(7), 5))
    assert host.delivery.take(subscription) is None
    host.turns((subscription.number, feed, 9, 6, 9, 1, 4096, 8192))
    turn = host.delivery.take(subscription)
    assert (turn.feed, turn.until, turn.hint) == (feed, 9, (6, 9, 1, 4096, 8192))
    assert host.delivery.take(subscription) is None
    host.delivery.finished(subscription, turn, 9, is_consumed=True)
    assert host.played[0].taken() == []
    host.delivery.waits(subscription)
    assert host.played[0].taken() == [[subscription.number, feed, 9, 1]]


def test_turns_are_expected_of_a_scheduler_from_the_first_topic_on():
    """A client has a ring for them only while something is told of."""
    host = PlayedHost()
    subscription, _ = opened(host, (topic(7), 0), (topic(8), 0))
    assert host.expected == [0]
    adding = host.delivery.add(subscription, [(topic(9), 0)])
    opened(host, (topic(7), 0))
    assert adding.is_done
    assert host.expected == [0]
    for each in list(host.delivery._subscriptions.values()):
        host.delivery.close(each)
    opened(host, (topic(7), 0))
    assert host.expected == [0, 0]


def test_turns_that_are_over_are_said_together_and_soon():
    """One message for many; who does not wait for more has them given back within a moment."""
    host = PlayedHost()
    subscription, feeds = opened(host, *((topic(n), 0) for n in range(1, TAKEN_ROWS_MAX + 37)), credit=400)
    host.turns(*((subscription.number, feed, 5) for feed in feeds))
    for _ in feeds:
        host.delivery.finished(subscription, host.delivery.take(subscription), 5, is_consumed=False)
    assert len(host.played[0].taken()) == TAKEN_ROWS_MAX
    host.advance(0.005)
    assert len(host.played[0].taken()) == 36


def test_turns_that_end_without_the_lock_are_said_with_the_next_that_are():
    """The first has somebody arrange it; those beside it are looked at then, and none is forgotten."""
    host = PlayedHost()
    subscription, feeds = opened(host, *((topic(n), 0) for n in range(1, TAKEN_ROWS_MAX + 37)), credit=400)
    delivery = host.delivery
    host.turns(*((subscription.number, feed, 5) for feed in feeds))

    def finish():
        return delivery.finish_later(subscription, delivery.take(subscription), 5, is_consumed=True)

    assert not finish(), "nobody has arranged anything yet"
    delivery.collect()
    assert finish()
    assert host.played[0].taken() == []
    host.advance(0.005)
    assert len(host.played[0].taken()) == 2
    assert not finish(), "what was arranged is over"
    delivery.collect()
    assert [finish() for _ in range(TAKEN_ROWS_MAX)] == [True] * (TAKEN_ROWS_MAX - 1) + [False]
    delivery.collect()
    assert len(host.played[0].taken()) == TAKEN_ROWS_MAX + 1
    assert finish() is False
    delivery.waits(subscription)
    assert len(host.played[0].taken()) == 1


def test_a_reader_that_looks_without_waiting_says_himself_what_is_over():
    """Nobody else does soon: a thread of the client that sees to it would disturb the reader's."""
    host = PlayedHost(give_back_ns=50_000_000)
    subscription, feeds = opened(host, *((topic(n), 0) for n in range(1, 4)))
    delivery = host.delivery
    host.turns(*((subscription.number, feed, 5) for feed in feeds))
    assert not delivery.is_late
    for _ in feeds:
        delivery.finished(subscription, delivery.take(subscription), 5, is_consumed=False)
    host.advance(0.004)
    assert not delivery.is_late
    host.advance(0.001)
    assert delivery.is_late
    assert host.played[0].taken() == []
    delivery.give_back()
    assert len(host.played[0].taken()) == 3
    assert not delivery.is_late


def sought(host, subscription, *feeds):
    """The scheduler finds nothing where these feeds were said to be; returns what shards are asked."""
    host.turns(*((subscription.number, feed, OPEN_END) for feed in feeds))
    asked, host.asked = host.asked, []
    return asked


def test_a_topic_that_its_shard_shows_elsewhere_is_followed_there():
    """Slots are a shard's to give: a successor may have given others."""
    host = PlayedHost()
    subscription, (feed, other) = opened(host, (topic(7, slot=3), 5), (topic(9, slot=4), 1))
    ((shard, message, answer),) = sought(host, subscription, feed)
    assert (shard, message) == (0, m.TopicResolve("t7"))
    assert sought(host, subscription, feed) == [], "once"
    answer.resolve(Reply(topic(7, slot=8)))
    (told,) = host.played[0].answer()
    assert told.feeds == [m.Feed(feed, "t7", 7, 0, 8, 5)]
    host.delivery.scheduler_up(0)
    (told,) = host.played[0].answer()
    assert [each.slot for each in told.feeds] == [8, 4]
    assert len(sought(host, subscription, feed, other)) == 1, "it may move again; the other is next"


def test_a_name_whose_home_points_elsewhere_is_asked_for_there():
    """SH-6."""
    host = PlayedHost()
    subscription, (feed,) = opened(host, (topic(7, shard=2, slot=3), 5))
    ((_, _, answer),) = sought(host, subscription, feed)
    answer.resolve(Reply(m.TopicInfo("t7", 0, 0, 2, -1, False, {})))
    ((shard, message, answer),) = host.asked
    assert (shard, message) == (2, m.TopicResolve("t7"))
    answer.resolve(Reply(topic(7, shard=2, slot=5)))
    assert [each.slot for told in host.played[0].answer() for each in told.feeds] == [5]


@pytest.mark.parametrize("found", [topic(7, slot=3), topic(8, slot=5), TopicNotFound("no such topic")])
def test_a_topic_that_is_where_it_was_or_no_more_is_left_to_its_reader(found):
    host = PlayedHost()
    subscription, (feed,) = opened(host, (topic(7, slot=3), 5))
    ((_, _, answer),) = sought(host, subscription, feed)
    answer.fail(found) if isinstance(found, Exception) else answer.resolve(Reply(found))
    assert host.played[0].answer() == []
    assert host.delivery.take(subscription).feed == feed


@pytest.mark.parametrize("error", [NotReady("restarts"), NotConnected("away"), RequestTimeout("no answer")])
def test_a_shard_that_does_not_answer_is_asked_again_where_topics_are(error):
    """The scheduler tells its reader to find out once; a reader that gave up would wait for ever."""
    host = PlayedHost()
    subscription, (feed, gone) = opened(host, (topic(7, slot=3), 5), (topic(9, slot=4), 1))
    for _, _, answer in sought(host, subscription, feed, gone):
        answer.fail(error)
    assert host.asked == []
    host.delivery.drop(subscription, gone)
    host.played[0].answer()
    host.advance(0.2)
    ((_, message, answer),) = host.asked
    assert message == m.TopicResolve("t7")
    answer.resolve(Reply(topic(7, slot=6)))
    assert [each.slot for told in host.played[0].answer() for each in told.feeds] == [6]


def test_many_topics_are_sought_some_at_a_time_and_subscribed_to_together():
    host = PlayedHost()
    subscription, feeds = opened(host, *((topic(n, slot=n), 0) for n in range(1, 101)), credit=200)
    asked = sought(host, subscription, *feeds)
    assert len(asked) == 1, "the first; the others are asked for together"
    asked[0][2].resolve(Reply(topic(1, slot=201)))
    assert len(host.played[0].answer()) == 1
    assert len(host.asked) == SEEK_AT_ONCE
    asked, host.asked = host.asked, []
    for _, message, answer in asked:
        number = int(message.topic[1:])
        answer.resolve(Reply(topic(number, slot=200 + number)))
    (told,) = host.played[0].answer()
    assert [each.slot for each in told.feeds] == [200 + n for n in range(2, 2 + SEEK_AT_ONCE)]
    assert len(host.asked) == 100 - 1 - SEEK_AT_ONCE


def test_who_waits_is_woken_by_the_turn():
    host = PlayedHost()
    subscription, (feed,) = opened(host, (topic(7), 0))
    waiting = host.delivery.waits(subscription)
    assert not waiting.is_done
    host.turns((subscription.number, feed, 1))
    assert waiting.is_done
    assert host.delivery.waits(subscription).is_done, "it was not taken yet"


def test_a_turn_told_twice_is_one():
    """SCH-9: a scheduler that has forgotten tells again; the feed is read once for both."""
    host = PlayedHost()
    subscription, (feed,) = opened(host, (topic(7), 0))
    host.turns((subscription.number, feed, 1))
    host.turns((subscription.number, feed, 3))
    assert host.delivery.take(subscription).until == 3
    assert host.delivery.take(subscription) is None


def test_after_a_new_connection_everything_is_said_again_with_todays_positions():
    """SCH-9, ZC-3."""
    host = PlayedHost()
    subscription, (first, second) = opened(host, (topic(7), 0), (topic(8), 3))
    host.turns((subscription.number, first, 5))
    turn = host.delivery.take(subscription)
    host.delivery.finished(subscription, turn, 5, is_consumed=True)
    host.delivery.scheduler_up(0)
    (asked,) = host.played[0].answer()
    assert [(feed.feed, feed.after) for feed in asked.feeds] == [(first, 5), (second, 3)]


def test_a_scheduler_that_knows_nothing_of_us_is_told_again():
    host = PlayedHost()
    subscription, _ = opened(host, (topic(7), 0))
    host.expected.clear()
    host.delivery.scheduler_said(0, Reply(m.SubscriptionsLost()))
    (asked,) = host.played[0].answer()
    assert asked.subscription == subscription.number
    assert host.expected == [0], "its ring went with them"


def test_feeds_go_to_the_scheduler_of_their_topic():
    host = PlayedHost(schedulers=3)
    subscription = host.delivery.open(credit=1, strong=True, names=True)
    host.delivery.add(subscription, [(topic(n), 0) for n in range(1, 40)])
    for _ in range(3):
        for number, played in enumerate(host.played):
            for asked in played.answer():
                assert (asked.credit, asked.strong, asked.names) == (1, True, number == 0)
                assert {scheduler_of(feed.topic_id, 3) for feed in asked.feeds} == {number}
    assert len(subscription.feeds) == 39


def test_many_feeds_are_said_in_pieces():
    host = PlayedHost()
    subscription = host.delivery.open(credit=1, strong=False, names=False)
    adding = host.delivery.add(subscription, [(topic(n), 0) for n in range(1, FEEDS_PER_MESSAGE_MAX + 11)])
    sizes = []
    while not adding.is_done:
        sizes += [len(asked.feeds) for asked in host.played[0].answer()]
    assert sizes == [FEEDS_PER_MESSAGE_MAX, 10]
    assert len(set(adding.take())) == FEEDS_PER_MESSAGE_MAX + 10


def test_a_refusal_that_passes_is_tried_again_and_another_ends_it():
    """LIM-2."""
    host = PlayedHost()
    subscription = host.delivery.open(credit=1, strong=False, names=False)
    adding = host.delivery.add(subscription, [(topic(7), 0)])
    host.played[0].asked.pop()[1].fail(NotReady("starting"))
    assert not adding.is_done
    host.advance(1)
    host.played[0].asked.pop()[1].fail(Throttled("too many", limit="links", max=1))
    with pytest.raises(Throttled, match="too many"):
        adding.take()
    assert subscription.has_news, "who waits for it has to hear of it"


def test_what_was_dropped_or_closed_gives_nothing_any_more():
    """WSK-9."""
    host = PlayedHost()
    subscription, (first, second) = opened(host, (topic(7), 0), (topic(8), 0))
    host.turns((subscription.number, first, 1), (subscription.number, second, 1))
    host.delivery.drop(subscription, first)
    assert host.delivery.take(subscription).feed == second
    assert host.delivery.take(subscription) is None
    host.delivery.close(subscription)
    host.turns((subscription.number, second, 9))
    assert [type(asked) for asked in host.played[0].answer()] == [m.Unsubscribe, m.Unsubscribe]
    host.delivery.close(subscription)
    assert host.timers.next_ns() is None, "an idle client has nothing to wake up for"


def test_it_says_a_word_of_life_while_there_is_a_subscription():
    host = PlayedHost()
    opened(host, (topic(7), 0))
    host.advance(10)
    assert [(message, bytes(data)) for message, data in host.played[0].told] == [(m.Taken(0), b"")]
    host.advance(10)
    assert len(host.played[0].told) == 2


def test_ones_own_turn_needs_nobody_and_gives_way_to_a_real_one():
    host = PlayedHost()
    subscription, (feed,) = opened(host, (topic(7), 0))
    host.delivery.look(subscription, feed)
    host.delivery.look(subscription, feed)
    host.turns((subscription.number, feed, 4))
    turn = host.delivery.take(subscription)
    assert (turn.is_own, host.delivery.take(subscription)) == (False, None)
    host.delivery.finished(subscription, turn, 0, is_consumed=False)
    host.delivery.look(subscription, feed, after_ns=10**9)
    assert host.delivery.take(subscription) is None
    host.advance(1)
    assert host.delivery.take(subscription).is_own


@pytest.mark.parametrize("credit", [0, -1, CREDIT_MAX + 1])
def test_a_credit_out_of_range_is_refused(credit):
    with pytest.raises(UsageError, match="credit"):
        PlayedHost().delivery.open(credit=credit, strong=False, names=False)


def test_without_schedulers_a_watch_is_an_error_that_says_what_to_do():
    host = PlayedHost(schedulers=0)
    subscription = host.delivery.open(credit=1, strong=False, names=False)
    with pytest.raises(InvalidRequest, match=r"delivery\.schedulers"):
        host.delivery.add(subscription, [(topic(7), 0)]).take()


@pytest.mark.parametrize("data", [b"", b"x" * 63, None])
def test_rows_that_are_none_are_passed_over(data):
    host = PlayedHost()
    subscription, _ = opened(host, (topic(7), 0))
    host.delivery.scheduler_said(0, Reply(m.Turns(1), data))
    assert not subscription.has_news


def test_turns_through_shared_memory_are_turns_like_others():
    host = PlayedHost()
    subscription, (feed,) = opened(host, (topic(7), 5))
    row = [subscription.number, feed, 9, 6, 9, 1, 4096, 8192]
    host.delivery.scheduler_turned(0, [row], is_complete=True)
    assert host.delivery.take(subscription).hint == (6, 9, 1, 4096, 8192)


def test_who_may_have_missed_turns_looks_at_everything_and_says_how_far_he_is():
    """SC-1: a reader that was overrun loses time. A feed that has its turn gets no second one."""
    host = PlayedHost()
    subscription, (first, second) = opened(host, (topic(7), 0), (topic(8), 3))
    host.turns((subscription.number, first, 5))
    host.delivery.scheduler_turned(0, [], is_complete=False)
    taken = [host.delivery.take(subscription) for _ in range(3)]
    assert [turn and (turn.feed, turn.is_own) for turn in taken] == [(first, False), (second, True), None]
    host.delivery.finished(subscription, taken[1], 4, is_consumed=True)
    host.delivery.waits(subscription)
    assert host.played[0].taken() == [[subscription.number, second, 4, 1]]


def test_names_are_asked_of_one_scheduler_also_when_nothing_matches_yet():
    """A pattern without a topic: a subscription without feeds; and again when that scheduler is new."""
    host = PlayedHost(schedulers=2)
    subscription = host.delivery.open(credit=4, strong=False, names=True)
    adding = host.delivery.add(subscription, [])
    assert not adding.is_done
    (asked,) = host.played[0].answer()
    assert (asked.names, asked.feeds) == (True, [])
    assert adding.take() == []
    assert host.expected == [], "there is no feed to be given a turn yet"
    assert host.played[1].answer() == []
    host.delivery.scheduler_said(0, Reply(m.TopicsChanged()))
    assert subscription.has_news
    subscription.names_changed = False
    host.delivery.scheduler_up(1)
    assert not subscription.names_changed
    host.delivery.scheduler_up(0)
    assert not subscription.names_changed, "before the scheduler knows, a later change could be missed"
    (asked,) = host.played[0].answer()
    assert asked.names
    assert subscription.names_changed, "names may have changed while nobody reported it"
    host.advance(10)
    assert (m.Taken(0), b"") in host.played[0].told, "a word of life, although there is no feed"
    host.delivery.close(subscription)
    assert host.played[0].answer() == [m.Unsubscribe(subscription.number)]


def test_a_subscription_is_ended_with_schedulers_whose_feeds_have_all_ended():
    """Else each watch of a deleted topic would count against the client's bound for good."""
    host = PlayedHost(schedulers=2)
    number = scheduler_of(7, 2)
    subscription, (feed,) = opened(host, (topic(7), 0))
    host.delivery.drop(subscription, feed)
    host.played[number].answer()
    host.delivery.close(subscription)
    assert host.played[number].answer() == [m.Unsubscribe(subscription.number)]
