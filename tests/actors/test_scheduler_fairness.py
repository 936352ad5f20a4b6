"""Links, subscriptions and feeds that always lag get fair shares of the grants."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from ringlog.actors.scheduler import events as ev
from ringlog.envelope import messages as m
from tests.support.scheduler_world import MS, World, publish

ROUNDS = 200


class Orderly(World):
    """Record the order in which links receive grants."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bytes] = []

    def _perform(self, effect: Any) -> Any:
        if isinstance(effect, ev.SendToLink) and isinstance(effect.message, m.Grants):
            self.told.append(effect.link)
        return super()._perform(effect)

    def give_back(self, link: bytes, turns: list[list[int]]) -> None:
        """Return grants, each one record further. With many published records the feeds keep lagging."""
        rows = [(number, feed, self.feeds[link, number, feed][1] + 1) for number, feed, *_ in turns]
        self.take(link, *rows)


@pytest.mark.parametrize("gap_ms", [0, 20])
def test_links_that_always_lag_have_equal_shares(gap_ms: int) -> None:
    """Links return their grants in random order. Some grants come in bursts, as from a CPU-starved link."""
    world, rng = Orderly(), random.Random(7)
    links = [b"link %d" % number for number in range(24)]
    topics = [world.topic(0, slot) for slot in range(6)]
    for number, link in enumerate(links):
        feeds = [(feed, topic, 0) for feed, topic in enumerate(topics)]
        world.subscribe(link, 1, feeds, credit=1 + number % 3)
    world.turn(ev.DeliveryPressureChanged((gap_ms * MS,) * 2, False))
    for topic in topics:
        world.append(topic, 100 * ROUNDS)
    world.turn()
    given: Counter[tuple[bytes, int]] = Counter()
    for number in range(ROUNDS):
        world.now_ms += 1
        world.is_checked = not number % 20
        for link in rng.sample(links, len(links)):
            turns, world.links[link].turns = world.links[link].turns[:1], world.links[link].turns[1:]
            assert turns, "a lagging link must have a grant"
            given.update((link, turn[1]) for turn in turns)
            world.give_back(link, turns)
    by_link = Counter[bytes]()
    for (link, _), many in given.items():
        by_link[link] += many
    assert set(by_link.values()) == {ROUNDS}
    for link in links:
        shares = [given[link, feed] for feed in range(len(topics))]
        assert max(shares) - min(shares) <= 2, "topics of equal priority must have equal shares"


def test_a_feed_that_begins_to_lag_waits_only_for_feeds_that_lagged_before() -> None:
    world = Orderly()
    many = 50
    busy = [(slot, world.topic(0, slot), 0) for slot in range(many)]
    late = world.topic(0, many)
    world.subscribe(b"a", 1, [*busy, (many, late, 0)], credit=2)
    for _, topic, _ in busy:
        world.append(topic, 1_000)
    world.turn()
    publish(world, late)
    turns = 0
    while not any(turn[1] == many for turn in world.links[b"a"].turns):
        first, world.links[b"a"].turns = world.links[b"a"].turns[:1], world.links[b"a"].turns[1:]
        world.give_back(b"a", first)
        world.now_ms += 1
        turns += 1
        assert turns <= many, "feeds that were served since must come after the late feed"


def test_every_link_is_equally_often_the_first_to_receive_grants() -> None:
    world = Orderly()
    links = [b"link %d" % number for number in range(5)]
    topic = world.topic(0, 0)
    for link in links:
        world.subscribe(link, 1, [(1, topic, 0)])
    first = Counter[bytes]()
    for _ in range(10 * len(links)):
        world.told.clear()
        publish(world, topic)
        assert sorted(world.told) == links
        first[world.told[0]] += 1
        # The same link is always the fastest. The first return of grants must not be rewarded.
        for link in links:
            world.take(link, (1, 1, topic.head))
    assert set(first.values()) == {10}
