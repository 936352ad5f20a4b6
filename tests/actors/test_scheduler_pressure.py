"""Delivery under pressure: coalesced wake-ups, and the lowest band without credit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.actors.scheduler import events as ev
from ringlog.actors.scheduler.delivery.feeds import ROUTERS
from ringlog.actors.scheduler.delivery.ready_set import ReadySet
from ringlog.limits import BANDS, COALESCE_MS_MAX
from ringlog.topic.priority import AGE_MS_MAX, TopicPriority
from tests.support.scheduler_world import MS, A, B, World, WorldTopic, followed, publish, untils

GAP = COALESCE_MS_MAX


@pytest.fixture
def world() -> World:
    return World()


def press(world: World, *gaps_ms: int, is_shedding: bool = False) -> None:
    gaps = gaps_ms or (0, 0)
    world.turn(ev.DeliveryPressureChanged(tuple(gap * MS for gap in gaps), is_shedding))


# -- coalesced wake-ups -------------------------------------------------------------------------------------


def test_the_first_wakeup_is_immediate_and_the_next_one_follows_after_the_gap(world: World) -> None:
    """The first wake-up of a quiet topic is never delayed, whatever the pressure."""
    topic = followed(world)
    press(world, GAP, GAP)
    publish(world, topic)
    assert untils(world) == [(1, 1)]
    world.take(A, (1, 1, 1))
    for _ in range(5):
        world.wait(2)
        publish(world, topic)
    assert untils(world) == [(1, 1)]
    world.wait(GAP - 2 * 5 - 1)
    assert untils(world) == [(1, 1)]
    world.wait(1)
    assert untils(world) == [(1, 1), (1, 6)]
    assert world.core.grants.coalesced_ns == (GAP - 2) * MS
    world.take(A, (1, 1, 6))
    world.wait(GAP)
    publish(world, topic)
    assert untils(world)[2:] == [(1, 7)]


def test_without_pressure_every_wakeup_is_immediate(world: World) -> None:
    topic = followed(world)
    for n in range(1, 4):
        publish(world, topic)
        world.take(A, (1, 1, n))
    assert untils(world) == [(1, 1), (1, 2), (1, 3)]
    assert world.core.grants.coalesced_ns == 0


def test_a_reader_that_read_everything_granted_waits_for_the_next_wakeup(world: World) -> None:
    topic = followed(world)
    press(world, GAP, GAP)
    publish(world, topic)
    publish(world, topic)
    world.take(A, (1, 1, 1))
    assert untils(world) == [(1, 1)]
    world.wait(GAP)
    assert untils(world) == [(1, 1), (1, 2)]


def test_a_reader_that_did_not_read_everything_granted_continues_at_once(world: World) -> None:
    """Pressure coalesces wake-ups. It does not slow down a reader that catches up."""
    topic = world.topic(0, 0)
    publish(world, topic, 5)
    press(world, GAP, GAP)
    world.subscribe(A, 1, [(1, topic, 0)])
    publish(world, topic)
    publish(world, topic)
    world.take(A, (1, 1, 2))
    assert untils(world)[-1] == (1, 7)
    assert len(untils(world)) == 2


def test_pressure_of_one_shard_delays_no_wakeup_of_another(world: World) -> None:
    """Each shard has its own gap."""
    pressed, free = world.topic(0, 0), world.topic(1, 0)
    world.subscribe(A, 1, [(1, pressed, 0), (2, free, 0)])
    press(world, GAP, 0)
    for n in range(1, 4):
        for topic in (pressed, free):
            publish(world, topic)
        world.take(A, *[(1, feed, n) for feed, until in untils(world) if until == n])
    assert [until for feed, until in untils(world) if feed == 1] == [1]
    assert [until for feed, until in untils(world) if feed == 2] == [1, 2, 3]


def test_records_that_wait_when_the_pressure_ends_are_granted_with_the_next_wakeup(world: World) -> None:
    topic = followed(world)
    press(world, GAP, GAP)
    publish(world, topic)
    world.take(A, (1, 1, 1))
    publish(world, topic)
    press(world)
    publish(world, topic)
    assert untils(world) == [(1, 1), (1, 3)]


def test_the_recheck_of_a_deleted_topic_is_not_delayed(world: World) -> None:
    topic = followed(world)
    press(world, GAP, GAP)
    publish(world, topic)
    world.take(A, (1, 1, 1))
    publish(world, topic)
    world.delete(topic)
    for _ in range(2):
        world.turn()
    assert len(untils(world)) == 2
    world.unsubscribe(A, 1)
    world.wait(2 * GAP)
    assert len(untils(world)) == 2


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(0, GAP)), max_size=60))
@settings(max_examples=60)
def test_no_wakeup_is_delayed_longer_than_the_longest_gap(steps: list[tuple[int, int, int]]) -> None:
    """No wake-up is dropped (L3)."""
    world = World()
    topics = [world.topic(0, slot) for slot in range(3)]
    world.subscribe(A, 1, [(n, topic, 0) for n, topic in enumerate(topics)])
    since: dict[int, int] = {}

    def take() -> None:
        for _, feed in sorted(world.links[A].out):
            since.pop(feed, None)
            world.take(A, (1, feed, topics[feed].head))

    for wait, which, gap in steps:
        press(world, gap, gap)
        publish(world, topics[which])
        since.setdefault(which, world.now_ms)
        take()
        for _ in range(wait):
            world.wait(1)
            take()
            assert all(world.now_ms - first <= GAP for first in since.values())
    world.wait(GAP)
    told = dict(untils(world))
    assert {feed: topic.head for feed, topic in enumerate(topics) if topic.head} == told


# -- the lowest band gets no credit -------------------------------------------------------------------------


def two(world: World, credit: int = 32) -> tuple[WorldTopic, WorldTopic]:
    """Return a topic of the lowest band and one of the next band, watched by A as feeds 1 and 2."""
    low, plain = world.topic(0, 0), world.topic(0, 1)
    low.base = -1_000
    world.subscribe(A, 1, [(1, low, 0), (2, plain, 0)], credit=credit)
    return low, plain


def test_while_shedding_only_the_lowest_band_waits_despite_credit(world: World) -> None:
    """Under pressure the lowest band is shed (T3)."""
    low, plain = two(world)
    press(world, 0, 0, is_shedding=True)
    publish(world, low)
    assert untils(world) == []
    publish(world, plain)
    publish(world, low)
    assert untils(world) == [(2, 1)]
    world.take(A, (1, 2, 1))
    publish(world, plain)
    assert untils(world) == [(2, 1), (2, 2)]
    assert world.core.grants.ready_by_band == [1, 0, 0, 0, 0]
    press(world)
    assert untils(world) == [(2, 1), (2, 2), (1, 2)]
    assert world.core.grants.ready_by_band == [0] * BANDS


def test_routers_run_one_band_lower_while_it_sheds(world: World) -> None:
    """A router waits where a watch of its topic is served. In higher bands neither waits (T3)."""
    plain, high = world.topic(0, 0), world.topic(0, 1)
    high.base = 1_000
    for link in (A, ROUTERS):
        world.subscribe(link, 1, [(1, plain, 0), (2, high, 0)])
    press(world, 0, 0, is_shedding=True)
    for topic in (plain, high):
        publish(world, topic)
    assert untils(world) == [(1, 1), (2, 1)]
    assert untils(world, ROUTERS) == [(2, 1)]
    press(world)
    assert untils(world, ROUTERS) == [(2, 1), (1, 1)]


def test_a_feed_that_waited_for_credit_is_shed_when_credit_returns(world: World) -> None:
    low, plain = two(world, credit=1)
    publish(world, plain)
    publish(world, low)
    press(world, 0, 0, is_shedding=True)
    world.take(A, (1, 2, 1))
    assert untils(world) == [(2, 1)]
    press(world)
    assert untils(world) == [(2, 1), (1, 1)]


def test_no_feed_starves_while_the_lowest_band_is_shed(world: World) -> None:
    """A feed that waited long enough has left the lowest band."""
    world.is_checked = False
    low, _ = two(world)
    press(world, 0, 0, is_shedding=True)
    publish(world, low)
    world.wait(AGE_MS_MAX // 2)
    assert untils(world) == []
    world.wait(AGE_MS_MAX // 2 + 100)
    assert untils(world) == [(1, 1)]


def test_counts_by_band_cover_all_subscriptions(world: World) -> None:
    valuable = world.topic(1, 0)
    valuable.base = 800
    for link in (A, B):
        world.subscribe(link, 1, [(1, valuable, 0), (2, world.topic(0, 1), 0)], credit=0)
    world.append(valuable)
    publish(world, world.topic(0, 1))
    assert world.core.grants.ready_by_band == [0, 2, 0, 0, 2]
    world.unsubscribe(B, 1)
    assert world.core.grants.ready_by_band == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("lowest", range(BANDS))
def test_a_ready_set_serves_no_band_below_the_given_one(lowest: int) -> None:
    ready: ReadySet[int] = ReadySet()
    for band, base in enumerate((-1_000, 0, 250, 500, 750)):
        ready.add(band, TopicPriority(base, is_auto=False), 10 + band, 100)
    assert ready.oldest_ms == 10
    found = []
    while (taken := ready.pop(100, lowest)) is not None:
        found.append(taken[0])
    assert sorted(found) == list(range(lowest, BANDS))
    assert len(ready) == lowest
    assert ready.oldest_ms == (10 if lowest else None)
