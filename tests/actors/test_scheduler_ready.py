"""One ready set, compared with its rules and with a list that is sorted each time."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.actors.scheduler.delivery.ready_set import STALE_MIN, ReadySet
from ringlog.limits import AGING_TICK_MS
from ringlog.topic.priority import AGE_MS_MAX, CREDITS, TOP_BAND, TopicPriority, band_of

BASES = (-1_000, 0, 250, 500, 750)
"""One base for each band, of topics that do not age within a test of a few milliseconds."""


def manual(base: int) -> TopicPriority:
    return TopicPriority(base, is_auto=False)


def drain(ready: ReadySet[int], now_ms: int) -> list[int]:
    found = []
    while (taken := ready.pop(now_ms)) is not None:
        found.append(taken[0])
    return found


def test_in_a_band_the_feed_that_began_to_lag_first_is_served_first() -> None:
    """The order within a band is that of T7."""
    ready: ReadySet[int] = ReadySet()
    for key, dirty in ((1, 30), (2, 10), (3, 20), (4, 40)):
        ready.add(key, manual(0), dirty, 100)
    assert drain(ready, 100) == [2, 3, 1, 4]


def test_a_feed_waits_once_in_the_ready_set() -> None:
    """The first time at which it began to lag counts (T2)."""
    ready: ReadySet[int] = ReadySet()
    ready.add(1, manual(0), 10, 10)
    ready.add(1, manual(0), 20, 20)
    assert len(ready) == 1
    assert ready.pop(20) == (1, 10)
    assert ready.pop(20) is None


@given(st.integers(64, 2_000))
@settings(max_examples=25)
def test_bands_that_always_lag_are_served_in_proportion_to_their_credits(turns: int) -> None:
    """Bands are served 8:4:2:1:1 (T7), within 5 % over whole rounds."""
    ready: ReadySet[tuple[int, int]] = ReadySet()
    for band, base in enumerate(BASES):
        ready.add((band, 0), manual(base), 0, 0)
        ready.add((band, 1), manual(base), 0, 0)
    served: Counter[int] = Counter()
    turns -= turns % sum(CREDITS)
    for _ in range(turns):
        taken = ready.pop(1)
        assert taken is not None
        served[taken[0][0]] += 1
        ready.add(taken[0], manual(BASES[taken[0][0]]), 1, 1)
    for band, credit in enumerate(CREDITS):
        share = turns * credit / sum(CREDITS)
        assert abs(served[band] - share) <= 0.05 * share


def test_an_empty_band_keeps_no_unused_credit() -> None:
    """When the band lags again, it starts with its normal credit."""
    ready: ReadySet[int] = ReadySet()
    for key in range(3):
        ready.add(key, manual(750), 0, 0)
    ready.add(100, manual(0), 0, 0)
    ready.add(101, manual(0), 0, 0)
    assert [ready.pop(1)[0] for _ in range(4)] == [0, 1, 2, 100]
    for key in range(10, 30):
        ready.add(key, manual(750), 1, 1)
    assert [key >= 100 for key in drain(ready, 1)][:10] == [False] * 8 + [True, False], "8, not 5 + 8"


@given(st.integers(-1_000, 1_000), st.integers(0, 100_000))
def test_all_bands_but_the_lowest_reach_the_top_band_within_ten_seconds(base: int, start: int) -> None:
    """Priority grows with waiting time, so that no feed starves (T7)."""
    ready: ReadySet[str] = ReadySet()
    ready.add("other", manual(1_000), start, start)
    ready.add("it", manual(base), start, start)
    ready.pop(start + AGE_MS_MAX + AGING_TICK_MS)
    band = ready.band("it")
    assert band == band_of(base + 1_000)
    assert band == TOP_BAND or base < -250
    assert band >= 1, "even the lowest leaves B0"


@given(st.integers(1, 40), st.integers(-250, 100))
@settings(max_examples=30)
def test_a_flood_of_the_highest_band_starves_no_feed(others: int, base: int) -> None:
    """The highest band always lags. A feed is served soon after it has aged (T7)."""
    ready: ReadySet[int] = ReadySet()
    ready.add(-1, manual(base), 0, 0)
    for key in range(others):
        ready.add(key, manual(1_000), 0, 0)
    for now in range(AGE_MS_MAX + AGING_TICK_MS + sum(CREDITS)):
        taken = ready.pop(now)
        assert taken is not None
        if taken[0] == -1:
            return
        ready.add(taken[0], manual(1_000), now, now)
    pytest.fail("never served")


def test_consumption_by_another_reader_raises_a_waiting_feed() -> None:
    """In the higher band the feed keeps its place by age."""
    standing = TopicPriority()
    ready: ReadySet[int] = ReadySet()
    ready.add(1, standing, 0, 0)
    ready.add(2, manual(500), 5, 5)
    standing.consumed_ms = 10
    ready.refresh(1, 10)
    assert ready.band(1) == band_of(500)
    assert drain(ready, 10) == [1, 2]


def test_an_empty_ready_set_holds_no_references() -> None:
    """A feed that does not wait costs no memory."""
    ready: ReadySet[int] = ReadySet()
    for key in range(1_000):
        ready.add(key, manual(0), key, key)
    for key in range(1_000):
        ready.discard(key)
    assert (len(ready), ready.references) == (0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "discard", "pop", "refresh", "wait"]),
            st.integers(0, 30),
            st.integers(0, 900),
        ),
        max_size=300,
    )
)
@settings(max_examples=200)
def test_any_history_is_served_like_a_sorted_list(history: list[tuple[str, int, int]]) -> None:
    """The served feed is the first of its band that began to lag. No feed is lost or duplicated."""
    ready: ReadySet[int] = ReadySet()
    standings = [manual(BASES[key % 5] // 3 if key % 2 else BASES[key % 5]) for key in range(31)]
    standings[7] = TopicPriority()
    waiting: dict[int, tuple[int, int]] = {}
    now, number = 1_000, 0
    for what, key, amount in history:
        if what == "wait":
            now += amount
        elif what == "add":
            if key not in waiting:
                number += 1
                waiting[key] = (now - amount, number)
            ready.add(key, standings[key], now - amount, now)
        elif what == "discard":
            waiting.pop(key, None)
            ready.discard(key)
        elif what == "refresh":
            standings[7].consumed_ms = now
            standings[3].base = amount - 450
            for each in (3, 7):
                ready.refresh(each, now)
        else:
            taken = ready.pop(now)
            assert (taken is None) == (not waiting)
            if taken is not None:
                dirty, order = waiting.pop(taken[0])
                assert taken[1] == dirty
                now_band = band_of(standings[taken[0]].effective(now, dirty))
                earlier = [k for k, place in waiting.items() if place < (dirty, order)]
                # Bands are those of the last tick. A feed that rose since then may be served in the old
                # order.
                sure = [k for k in earlier if _was_in_band(standings[k], waiting[k][0], now, now_band)]
                assert not [k for k in sure if ready.band(k) == now_band]
        assert len(ready) == len(waiting)
        assert ready.references <= 4 * len(waiting) + 2 * STALE_MIN + 5 * 2
    left = drain(ready, now)
    assert sorted(left) == sorted(waiting)


def _was_in_band(standing: TopicPriority, dirty: int, now: int, band: int) -> bool:
    return {band_of(standing.effective(at, dirty)) for at in range(now - AGING_TICK_MS, now + 1, 5)} == {band}


@pytest.mark.slow
def test_references_stay_proportional_to_the_number_of_waiting_feeds() -> None:
    """Each operation is O(1), counted in references held."""
    ready: ReadySet[int] = ReadySet()
    order: deque[int] = deque()
    for key in range(100_000):
        ready.add(key, manual(key % 700 - 350), key // 10, key // 10)
        order.append(key)
    assert ready.references <= 2 * len(ready)
    assert len(drain(ready, 30_000)) == 100_000
    assert ready.references == 0
