"""Priority of a topic: manual value, recency, age, and the five bands."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.topic import priority as p

CHECKS = {
    0: 500,
    1: 489,
    5: 445,
    15: 354,
    30: 250,
    45: 177,
    60: 125,
    90: 63,
    120: 31,
    150: 16,
    240: 2,
    300: 0,
}


def test_auto_priority_has_the_documented_values() -> None:
    """At 90 s the exact value is 62.5, which is rounded up to 63."""
    assert {s: p.auto_of(1_000 * s) for s in CHECKS} == CHECKS
    assert p.auto_of(299_999) == 0
    assert p.auto_of(10**12) == 0


def last_ms(value: int) -> int:
    """Return the last millisecond at which 500 * 2**(-ms/30000) is at least value - 1/2, by integer
    arithmetic.

    That is 2**ms <= (1000 / (2 * value - 1))**30000. A power of two is compared by counting bits.
    """
    above, below = 1_000**p.AUTO_HALF_MS, (2 * value - 1) ** p.AUTO_HALF_MS
    ms = above.bit_length() - below.bit_length()
    return ms if below << ms <= above else ms - 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_auto_priority_is_exact_at_every_millisecond() -> None:
    """It falls by one exactly where integer arithmetic says, at each of the 300,000 milliseconds (T8)."""
    found = [p.auto_of(ms) for ms in range(p.AUTO_END_MS)]
    pairs = enumerate(pairwise(found))
    falls = {value: ms for ms, (value, following) in pairs if value != following}
    assert found[0] == p.AUTO_MAX
    assert found[-1] == 0
    assert sorted(falls) == list(range(1, 501)), "one by one"
    assert all(last_ms(value) == ms for value, ms in falls.items())


def test_age_adds_one_point_per_10_ms_up_to_1000() -> None:
    """A negative age counts as 0."""
    assert [p.age_of(ms) for ms in (-5, 0, 9, 10, 9_999, 10_000, 10**9)] == [0, 0, 0, 1, 999, 1_000, 1_000]


@pytest.mark.parametrize(
    ("priority", "band"),
    [(-1_000, 0), (-1, 0), (0, 1), (249, 1), (250, 2), (499, 2), (500, 3), (749, 3), (750, 4), (2_000, 4)],
)
def test_bands_begin_at_the_documented_priorities(priority: int, band: int) -> None:
    """The bands have the numbers 0 to 4, and band 4 has the highest priority."""
    assert p.band_of(priority) == band


def test_a_manual_priority_ignores_recency() -> None:
    """The age still counts."""
    manual = p.TopicPriority(-300, is_auto=False)
    manual.consumed_ms = 0
    assert manual.priority(0) == -300
    assert manual.effective(5_000, 0) == 200
    recent, plain = p.TopicPriority(), p.TopicPriority(is_auto=False)
    assert recent.priority(0) == 0, "never consumed"
    recent.consumed_ms = 1_000
    assert (recent.priority(2_000), plain.priority(2_000)) == (489, 0)


@given(
    st.integers(-1_000, 1_000), st.booleans(), st.integers(0, 400_000), st.integers(0, 12_000),
    st.integers(0, 3_000),
)  # fmt: skip
def test_a_topic_does_not_rise_before_next_rise_ms(
    base: int, is_auto: bool, idle_ms: int, waited_ms: int, step: int
) -> None:
    """A scheduler that checks again at that time misses no rise. Without recency the time is exact."""
    standing = p.TopicPriority(0 if is_auto else base, is_auto=is_auto)
    standing.consumed_ms = 10**6 - idle_ms
    now, dirty = 10**6, 10**6 - waited_ms
    band = p.band_of(standing.effective(now, dirty))
    due = standing.next_rise_ms(now, dirty)
    if due is None:
        assert p.band_of(standing.effective(now + 20_000, dirty)) <= band or band == p.TOP_BAND
        return
    assert due > now
    assert p.band_of(standing.effective(max(due - 1 - step, now), dirty)) <= band
    if not is_auto:
        assert p.band_of(standing.effective(due, dirty)) == band + 1
