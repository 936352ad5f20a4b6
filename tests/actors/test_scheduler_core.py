"""The scheduler's core: which grants it sends and when, and any history of events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ringlog.actors.scheduler import events as ev
from ringlog.actors.scheduler.delivery import subscriptions, topic_progress
from ringlog.actors.scheduler.delivery.feeds import ROUTERS
from ringlog.actors.scheduler.delivery.grants import UNTIL_RECHECK
from ringlog.board.layout import VOLATILE_BIT
from ringlog.envelope import messages as m
from ringlog.errors import Status
from ringlog.limits import (
    AGING_TICK_MS,
    CREDIT_MAX,
    FEEDS_PER_MESSAGE_MAX,
    GRANTS_PER_MESSAGE_MAX,
    LINK_SILENCE_MS,
)
from tests.support.scheduler_world import MS, A, B, World, WorldLink, WorldTopic, followed, publish, untils


@pytest.fixture
def world() -> World:
    return World()


def test_new_records_are_granted_at_once_with_their_position(world: World) -> None:
    """The grant names the file and the byte range of the records."""
    topic = world.topic(0, 3)
    answer = world.subscribe(A, 1, [(5, topic, 0)])
    assert answer == m.Subscribed(1, 0, 7)
    publish(world, topic, 4)
    assert world.links[A].turns == [[1, 5, 4, 1, 4, 1, 0, 40]]


def test_existing_records_are_granted_before_the_reply_to_subscribe(world: World) -> None:
    topic = world.topic(0, 3)
    world.append(topic, 4)
    world.shards[0].rows.clear()
    world.subscribe(A, 1, [(5, topic, 1)])
    assert world.links[A].turns == [[1, 5, 4, 0, 0, 0, 0, 0]]


def test_a_feed_has_one_grant_and_gets_the_next_when_it_returns_it_while_lagging(world: World) -> None:
    """A feed holds at most one grant (T2)."""
    topic = followed(world)
    for _ in range(3):
        publish(world, topic)
    assert untils(world) == [(1, 1)]
    world.take(A, (1, 1, 1))
    assert world.links[A].turns[1] == [1, 1, 3, 2, 2, 1, 10, 20]
    world.take(A, (1, 1, 3))
    assert len(world.links[A].turns) == 2


def test_readers_of_a_shard_that_was_given_up_get_one_recheck(world: World) -> None:
    """Each feed gets one, also a later feed. Published records may be read to their end."""
    failed, other = world.topic(0, 0), world.topic(1, 0)
    world.subscribe(A, 1, [(1, failed, 0), (2, other, 0)])
    publish(world, failed, 3)
    world.changed.add((0, 0))
    world.is_shard_down = True
    world.turn(ev.ShardGivenUp(0))
    world.take(A, (1, 1, 2))
    world.take(A, (1, 1, 2))
    world.take(A, (1, 1, 3))
    assert untils(world) == [(1, 3), (1, UNTIL_RECHECK), (1, 3)]
    world.subscribe(B, 1, [(1, failed, 3)])
    world.take(B, (1, 1, 3))
    world.wait(3_000)
    assert untils(world, B) == [(1, UNTIL_RECHECK)]
    assert len(untils(world)) == 3
    publish(world, other)
    assert untils(world)[3:] == [(2, 1)]


def test_a_lagging_reader_gets_no_position_hint(world: World) -> None:
    topic = world.topic(0, 0)
    publish(world, topic, 5)
    world.subscribe(A, 1, [(1, topic, 0)])
    world.take(A, (1, 1, 2))
    publish(world, topic, 5)
    world.take(A, (1, 1, 4))
    assert [row[5] for row in world.links[A].turns] == [0, 0, 0]


def test_without_credit_the_feed_with_the_highest_priority_waits_least(world: World) -> None:
    """The subscription has a credit of 1."""
    plain, valuable = world.topic(0, 0), world.topic(0, 1)
    valuable.base = 800
    other = world.topic(1, 2)
    world.subscribe(A, 1, [(1, plain, 0), (2, valuable, 0), (3, other, 0)], credit=1)
    for topic in (other, plain, valuable):
        publish(world, topic)
        world.now_ms += 1
    assert untils(world) == [(3, 1)]
    world.take(A, (1, 3, 1))
    world.take(A, (1, 2, 1))
    assert untils(world) == [(3, 1), (2, 1), (1, 1)]


def test_a_changed_priority_of_a_waiting_feed_counts_from_the_next_tick(world: World) -> None:
    """The scheduler reads priorities from the topic table."""
    first, second, third = (world.topic(0, slot) for slot in range(3))
    world.subscribe(A, 1, [(1, first, 0), (2, second, 0), (3, third, 0)], credit=1)
    for topic in (first, second, third):
        publish(world, topic)
    third.base = 900
    world.wait(1_100)
    # Another feed joins the ready set, so the slots of its topics are read again.
    world.append(first)
    world.subscribe(B, 1, [(1, third, 0)], credit=0)
    world.wait(2 * AGING_TICK_MS)
    world.take(A, (1, 1, 2))
    assert untils(world)[1] == (3, 1)


def test_consumption_by_one_reader_raises_the_topic_for_all_readers(world: World) -> None:
    """The topic has an automatic priority."""
    blocker, early, late = (world.topic(0, slot) for slot in range(3))
    late.is_auto = True
    world.subscribe(A, 1, [(1, blocker, 0), (2, early, 0), (3, late, 0)], credit=1)
    world.subscribe(B, 1, [(1, late, 0)])
    for topic in (blocker, early, late):
        publish(world, topic)
    world.take(B, (1, 1, 1))
    world.wait(2 * AGING_TICK_MS)
    world.take(A, (1, 1, 1))
    assert untils(world)[1] == (3, 1)


def test_a_grant_returned_without_consumption_raises_no_priority(world: World) -> None:
    """The reader found no record that it wanted."""
    topic = followed(world)
    publish(world, topic)
    world.take(A, (1, 1, 1), is_consumed=False)
    [facts] = world.core.shards[0].topics.values()
    assert facts.priority.consumed_ms is None
    world.take(A, (1, 1, 1))
    assert facts.priority.consumed_ms == world.now_ms


def test_a_strong_subscription_is_granted_only_synced_records(world: World) -> None:
    """Other subscriptions are granted the records at once."""
    topic = world.topic(0, 0)
    publish(world, topic, 2)
    world.subscribe(A, 1, [(1, topic, 0)], strong=True)
    world.subscribe(B, 1, [(1, topic, 2)])
    assert untils(world) == []
    assert world.core.awaits_durable(0)
    world.sync(0)
    world.turn()
    assert untils(world) == [(1, 2)]
    world.take(A, (1, 1, 2))
    publish(world, topic, 3)
    assert (untils(world), untils(world, B)) == ([(1, 2)], [(1, 5)])
    world.sync(0)
    world.turn()
    assert world.links[A].turns[1][2:5] == [5, 3, 5]
    assert not world.core.awaits_durable(0)


def test_a_strong_subscription_is_granted_records_of_a_volatile_log_at_once(world: World) -> None:
    topic = world.topic(0, 0)
    world.subscribe(A, 1, [(1, topic, 0)], strong=True)
    topic.head = topic.durable = 3
    row = [VOLATILE_BIT, topic.topic_id, 1, 1, 3, 1, 0, 30]
    world.turn(ev.NewsRows(0, np.array([row], dtype=np.uint64)))
    assert untils(world) == [(1, 3)]


def test_readers_of_a_deleted_topic_get_one_recheck(world: World) -> None:
    topic = followed(world)
    world.delete(topic)
    world.turn()
    world.turn()
    assert untils(world) == [(1, UNTIL_RECHECK)]
    world.take(A, (1, 1, 0))
    world.wait(200)
    assert len(world.links[A].turns) == 1, "the recheck was already sent"


def test_a_new_reader_of_a_lost_topic_gets_a_recheck_too(world: World) -> None:
    """After a restart of the shard another topic may be in the slot. The new reader does not know that."""
    topic = followed(world)
    world.delete(topic)
    world.turn()
    world.turn()
    world.subscribe(B, 1, [(1, topic, 0)])
    assert untils(world, B) == [(1, UNTIL_RECHECK)]
    world.take(B, (1, 1, 0))
    world.wait(200)
    assert len(world.links[B].turns) == 1


def test_readers_of_a_recreated_topic_get_a_recheck_and_continue(world: World) -> None:
    topic = world.topic(0, 0)
    publish(world, topic, 9)
    world.subscribe(A, 1, [(1, topic, 9)])
    world.remake(topic)
    publish(world, topic)
    assert untils(world) == [(1, UNTIL_RECHECK)]
    world.take(A, (1, 1, 0))
    assert untils(world)[1:] == [(1, 1)]


def test_missed_news_is_found_on_the_board(world: World) -> None:
    """After an overrun the scheduler rescans the topic table."""
    topics = [world.topic(0, slot) for slot in range(5)]
    world.subscribe(A, 1, [(slot, topic, 0) for slot, topic in enumerate(topics)])
    for topic in topics:
        world.append(topic, 2, loses=True)
    world.turn()
    world.wait(AGING_TICK_MS)
    assert untils(world) == [(slot, 2) for slot in range(5)]


def test_topics_of_an_unreachable_shard_are_read_when_it_is_back(world: World) -> None:
    topic = world.topic(0, 0)
    world.append(topic, 2)
    world.shards[0].rows.clear()
    world.is_shard_down = True
    world.subscribe(A, 1, [(1, topic, 0)])
    world.wait(300)
    assert untils(world) == []
    world.is_shard_down = False
    world.wait(AGING_TICK_MS + 1)
    assert untils(world) == [(1, 2)]


def test_a_link_that_accepts_no_message_keeps_its_grants_and_blocks_no_other_link(world: World) -> None:
    """The scheduler retries with a tick, not in each pass."""
    topic = world.topic(0, 0)
    for link in (A, B):
        world.subscribe(link, 1, [(1, topic, 0)])
    world.links[A].is_deaf = True
    publish(world, topic)
    assert (untils(world), untils(world, B)) == ([], [(1, 1)])
    world.links[A].is_deaf = False
    world.turn()
    assert untils(world) == [], "sent before the next tick"
    world.wait(2 * AGING_TICK_MS)
    assert untils(world) == [(1, 1)]


def test_a_disconnected_link_is_forgotten(world: World) -> None:
    topic = followed(world)
    world.links[A].is_gone = True
    publish(world, topic)
    subscriptions = world.core.subscriptions
    assert (subscriptions.links, subscriptions.feed_count, world.core.topics) == ({}, 0, 0)


def test_a_silent_link_is_forgotten_and_must_subscribe_again(world: World) -> None:
    topic = world.topic(0, 0)
    for link in (A, B):
        world.subscribe(link, 1, [(1, topic, 0)])
    for _ in range(3):
        world.wait(LINK_SILENCE_MS // 2)
        world.take(B)
    assert list(world.core.subscriptions.links) == [B]
    world.take(A)
    assert world.links[A].messages[-1] == m.SubscriptionsLost()


def test_ended_feeds_receive_no_grants(world: World) -> None:
    topic, other = world.topic(0, 0), world.topic(1, 0)
    world.subscribe(A, 1, [(1, topic, 0), (2, other, 0)], credit=1)
    world.append(topic)
    publish(world, other)
    assert untils(world) == [(1, 1)]
    assert world.unsubscribe(A, 1, [1]) == m.Unsubscribed(1)
    assert untils(world)[1:] == [(2, 1)], "its credit is free again"
    assert world.unsubscribe(A, 1) == m.Unsubscribed(1)
    publish(world, other)
    assert len(world.links[A].turns) == 2
    assert world.core.topics == 0
    assert world.unsubscribe(b"stranger", 1) == m.Unsubscribed(1)


def test_a_feed_can_be_moved_to_another_position_or_topic(world: World) -> None:
    topic, other = world.topic(0, 0), world.topic(1, 0)
    world.append(topic, 5)
    publish(world, other, 2)
    world.subscribe(A, 1, [(1, topic, 5)])
    world.subscribe(A, 1, [(1, topic, 3)])
    assert untils(world) == [(1, 5)]
    world.take(A, (1, 1, 5))
    world.subscribe(A, 1, [(1, other, 0)])
    assert untils(world)[1:] == [(1, 2)]
    assert world.core.topics == 1


def test_topic_changes_are_sent_once_a_tick_to_subscriptions_that_requested_them(world: World) -> None:
    world.subscribe(A, 1, [], names=True)
    world.subscribe(B, 1, [])
    assert world.core.has_name_watchers
    world.wait(AGING_TICK_MS)
    for _ in range(5):
        world.turn(ev.TopicNamesChanged(0))
    world.wait(2 * AGING_TICK_MS)
    assert world.links[A].messages.count(m.TopicsChanged()) <= 2
    assert m.TopicsChanged() in world.links[A].messages
    assert m.TopicsChanged() not in world.links[B].messages
    world.unsubscribe(A, 1)
    assert not world.core.has_name_watchers


@pytest.mark.slow
def test_grants_of_a_thousand_subscriptions_to_one_topic_are_one_message(world: World) -> None:
    topic = world.topic(0, 0)
    world.is_checked = False
    for number in range(1_000):
        world.subscribe(A, number, [(1, topic, 0)], credit=1)
    effects = []
    perform = world._perform
    world._perform = lambda effect: effects.append(effect) or perform(effect)  # type: ignore[method-assign]
    publish(world, topic)
    assert [len(effect.feeds) for effect in effects] == [1_000]
    world.take(A, *((number, 1, 1) for number in range(1_000)))
    for number in range(1_000, 1_000 + GRANTS_PER_MESSAGE_MAX - 500):
        world.subscribe(A, number, [(1, topic, 1)], credit=1)
    effects.clear()
    publish(world, topic)
    assert [len(effect.feeds) for effect in effects] == [GRANTS_PER_MESSAGE_MAX, 500]
    world.core.check()


def test_a_grant_counts_against_the_credit_after_its_feed_was_moved(world: World) -> None:
    """A subscription never holds more grants than its credit (T1). A topic that is found on another shard is
    subscribed to again while its reader reads."""
    first, second, elsewhere = world.topic(0, 0), world.topic(0, 1), world.topic(1, 0)
    world.subscribe(A, 1, [(1, first, 0), (2, second, 0)], credit=1)
    publish(world, first)
    world.subscribe(A, 1, [(1, elsewhere, 0)], credit=1)
    publish(world, second)
    assert [feed for feed, _ in untils(world)] == [1]
    world.take(A, (1, 1, 0))
    assert [feed for feed, _ in untils(world)] == [1, 2]


def test_the_reader_of_a_topic_on_a_missing_shard_gets_a_recheck() -> None:
    """The engine restarted with fewer shards, and its client does not know the topic's new shard yet."""
    world = World(shards=1)
    other = world.topic(0, 0)
    world.append(other)
    gone = WorldTopic(3, 0, topic_id=9)
    world.changed.add((gone.shard, gone.slot))
    assert isinstance(world.subscribe(A, 1, [(1, gone, 0)]), m.Subscribed)
    world.turn()
    assert untils(world) == [(1, UNTIL_RECHECK)]


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        ("LINKS_PER_SCHEDULER_MAX", 2), ("SUBSCRIPTIONS_PER_LINK_MAX", 2), ("FEEDS_PER_SUBSCRIPTION_MAX", 2),
        ("FEEDS_PER_SCHEDULER_MAX", 2),
    ],
)  # fmt: skip
def test_a_bound_admits_exactly_its_number(monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    """Beyond the bound the reply is `THROTTLED` with the limit and its maximum."""
    monkeypatch.setattr(subscriptions, limit, most)
    world = World()
    topic = world.topic(0, 0)
    ways = {
        "LINKS_PER_SCHEDULER_MAX": lambda n: world.subscribe(bytes([n]), 1, [(1, topic, 0)]),
        "SUBSCRIPTIONS_PER_LINK_MAX": lambda n: world.subscribe(A, n, [(1, topic, 0)]),
        "FEEDS_PER_SUBSCRIPTION_MAX": lambda n: world.subscribe(A, 1, [(n, topic, 0)]),
        "FEEDS_PER_SCHEDULER_MAX": lambda n: world.subscribe(A, n, [(1, topic, 0)]),
    }
    answers = [ways[limit](n) for n in (1, 2, 3, 2)]
    assert [type(answer) for answer in answers] == [m.Subscribed, m.Subscribed, m.ErrorReply, m.Subscribed]
    refused = answers[2]
    assert isinstance(refused, m.ErrorReply)
    assert refused.status == Status.THROTTLED
    names = {name.removesuffix("_MAX").lower(): name for name in ways}
    names["links"] = "LINKS_PER_SCHEDULER_MAX"
    assert names[refused.detail["limit"]] == limit
    assert refused.detail["max"] == most


@pytest.mark.parametrize(
    "message",
    [
        m.Subscribe(-1, [], 1), m.Subscribe(1 << 32, [], 1), m.Subscribe(1, [], -1),
        m.Subscribe(1, [], CREDIT_MAX + 1), m.Subscribe(1, [m.Feed(-1, "t", 1, 0, 0, 0)], 1),
        m.Subscribe(1, [m.Feed(1, "t", 1, -1, 0, 0)], 1),
        m.Subscribe(1, [m.Feed(1, "t", 1, 0, 1 << 40, 0)], 1),
        m.Subscribe(1, [m.Feed(1, "t", 1, 0, 0, -1)], 1), m.Ping(),
        m.Subscribe(1, [m.Feed(n, "t", 1, 0, 0, 0) for n in range(FEEDS_PER_MESSAGE_MAX + 1)], 1),
    ],
)  # fmt: skip
def test_an_invalid_message_is_refused_and_changes_nothing(world: World, message: m.Message) -> None:
    assert isinstance(world.ask(A, message), m.ErrorReply)
    assert (world.core.subscriptions.links, world.core.subscriptions.feed_count, world.core.topics) == (
        {},
        0,
        0,
    )


def test_malformed_rows_of_returned_grants_are_refused(world: World) -> None:
    world.subscribe(A, 1, [])
    world.turn(ev.LinkRequestReceived(A, 0, m.GrantsReturned(1), bytearray(7)))
    assert isinstance(world.links[A].messages[-1], m.ErrorReply)
    rows = bytearray(32 * (GRANTS_PER_MESSAGE_MAX + 1))
    world.turn(ev.LinkRequestReceived(A, 0, m.GrantsReturned(GRANTS_PER_MESSAGE_MAX + 1), rows))
    refusal = world.links[A].messages[-1]
    assert isinstance(refusal, m.ErrorReply)
    assert refusal.detail == {"found": GRANTS_PER_MESSAGE_MAX + 1, "max": GRANTS_PER_MESSAGE_MAX}
    world.take(A, (9, 9, 9))


def test_waits_for_the_durable_mark_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_progress, "DURABLE_WAITS_MAX", 4)
    world = World()
    topics = [world.topic(0, slot) for slot in range(3)]
    world.subscribe(A, 1, [(slot, topic, 0) for slot, topic in enumerate(topics)], strong=True)
    for _ in range(5):
        for topic in topics:
            world.append(topic)
        world.turn()
        world.wait(1)
        assert len(world.core.shards[0].awaiting_durable) <= 4 + 3
    world.sync(0)
    world.wait(2)
    assert sorted(untils(world)) == [(0, 5), (1, 5), (2, 5)]


class AnyHistory(RuleBasedStateMachine):
    """Links, topics and shards act in any order. At the end no lagging feed is forgotten (T4)."""

    links = st.sampled_from([A, B, ROUTERS])
    numbers = st.integers(1, 3)
    slots = st.tuples(st.integers(0, 1), st.integers(0, 2))

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def link(self, id: bytes) -> WorldLink:
        return self.world.links.setdefault(id, WorldLink())

    @rule(
        link=links, subscription=numbers, feed=numbers, slot=slots, back=st.integers(-1, 4),
        credit=st.integers(0, 3),
    )  # fmt: skip
    def subscribe(
        self, link: bytes, subscription: int, feed: int, slot: tuple[int, int], back: int, credit: int
    ) -> None:
        topic = self.world.topic(*slot)
        after = max(topic.head - back, 0)
        if not self.link(link).is_gone:
            self.world.subscribe(
                link, subscription, [(feed, topic, after)], credit=credit, strong=subscription == 3
            )

    @rule(link=links, subscription=numbers, feeds=st.lists(numbers, max_size=2))
    def unsubscribe(self, link: bytes, subscription: int, feeds: list[int]) -> None:
        if not self.link(link).is_gone:
            self.world.unsubscribe(link, subscription, feeds)

    @rule(link=links, many=st.integers(0, 3), short=st.integers(0, 2))
    def take(self, link: bytes, many: int, short: int) -> None:
        known, rows = self.link(link), []
        if known.is_gone:
            return
        for subscription, feed in sorted(known.out)[:many]:
            found = self.world.feeds.get((link, subscription, feed))
            if found is not None:
                rows.append((subscription, feed, max(found[0].head - short, found[1])))
        self.world.take(link, *rows)

    @rule(slot=slots, count=st.integers(1, 3), loses=st.sampled_from([False, False, False, True]))
    def append(self, slot: tuple[int, int], count: int, loses: bool) -> None:
        topic = self.world.topic(*slot)
        if topic.is_live:
            self.world.append(topic, count, loses=loses)

    @rule(slot=slots)
    def delete_or_make(self, slot: tuple[int, int]) -> None:
        topic = self.world.topic(*slot)
        if topic.is_live:
            self.world.delete(topic)
        else:
            self.world.remake(topic)

    @rule(shard=st.integers(0, 1))
    def sync(self, shard: int) -> None:
        self.world.sync(shard)

    @rule(slot=slots, base=st.integers(-1_000, 1_000), is_auto=st.booleans())
    def configure(self, slot: tuple[int, int], base: int, is_auto: bool) -> None:
        topic = self.world.topic(*slot)
        topic.base, topic.is_auto = (0, True) if is_auto else (base, False)

    @rule(ms=st.sampled_from([0, 1, 50, 700]))
    def wait(self, ms: int) -> None:
        self.world.turn()
        self.world.wait(ms)

    @rule(gaps=st.tuples(*[st.sampled_from([0, 3, 20])] * 2), is_shedding=st.booleans())
    def press(self, gaps: tuple[int, int], is_shedding: bool) -> None:
        self.world.turn(ev.DeliveryPressureChanged((gaps[0] * MS, gaps[1] * MS), is_shedding))

    @rule(link=links)
    def deaf_or_not(self, link: bytes) -> None:
        self.link(link).is_deaf ^= True

    @rule()
    def shard_down_or_up(self) -> None:
        self.world.is_shard_down ^= True

    @rule(link=links)
    def leave_and_come_back(self, link: bytes) -> None:
        """Close the connection and open another one."""
        known = self.link(link)
        known.is_gone = True
        self.world.append(self.world.topic(0, 0))
        self.world.turn()
        if link not in self.world.core.subscriptions.links:
            for key in [key for key in self.world.feeds if key[0] == link]:
                del self.world.feeds[key]
            self.world.links[link] = WorldLink()
        else:
            known.is_gone = False

    @invariant()
    def holds(self) -> None:
        self.world.core.check()

    def teardown(self) -> None:
        world = self.world
        world.is_shard_down = False
        for link in world.links.values():
            link.is_deaf = False
        for shard in range(2):
            world.sync(shard)
        # Gaps between wake-ups end without an event. The lowest band may wait until it has aged.
        world.turn(ev.DeliveryPressureChanged((20 * MS, 20 * MS), False))
        world.wait(300)
        for (id, subscription, number), (topic, after, _) in world.feeds.items():
            link = world.links[id]
            out = {feed for sub, feed in link.out if sub == subscription}
            has_credit = len(out) < link.credits[subscription]
            if topic.is_live and after < topic.head and has_credit:
                assert number in out, "a lagging feed is forgotten"


AnyHistory.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnyHistory = AnyHistory.TestCase
