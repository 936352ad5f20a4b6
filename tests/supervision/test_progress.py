"""The supervisor judges a child by its progress, not by whether its process exists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.board.layout import ProcessState
from ringlog.limits import STUCK_AFTER_S_MIN
from ringlog.supervision.progress import OBSERVE_GAP_NS_MAX, START_STALL_S_MIN, STARTING_STATES, ChildProgress
from ringlog.supervision.restart import NS_PER_S

HALF_S = NS_PER_S // 2


def test_a_child_whose_counters_do_not_change_is_stuck() -> None:
    progress, now = ChildProgress(0), 0
    progress.observe((1, 1), now)
    for _ in range(3):
        now += HALF_S
        progress.observe((1, 1), now)
        assert not progress.is_stuck(ProcessState.READY, 2.0)
    progress.observe((1, 1), now + HALF_S)
    assert progress.is_stuck(ProcessState.READY, 2.0)


def test_any_changed_counter_is_progress() -> None:
    progress = ChildProgress(0)
    for n in range(100):
        progress.observe((1, n), n * NS_PER_S)
        assert not progress.is_stuck(ProcessState.READY, 1.0)


def test_a_recovering_child_is_given_more_time() -> None:
    progress = ChildProgress(0)
    for n in range(8):
        progress.observe((2,), n * HALF_S)
    assert progress.is_stuck(ProcessState.READY, 1.0)
    assert not progress.is_stuck(ProcessState.RECOVERING, 1.0)


@pytest.mark.parametrize("state", STARTING_STATES)
def test_a_starting_child_has_a_longer_limit_than_a_serving_one(state: ProcessState) -> None:
    """On a loaded host an interpreter needs more time to start than the shortest limit allows."""
    progress, now = ChildProgress(0), 0
    while progress.stalled_ns < (START_STALL_S_MIN - 1) * NS_PER_S:
        progress.observe((2,), now)
        assert not progress.is_stuck(state, STUCK_AFTER_S_MIN)
        now += HALF_S
    assert progress.is_stuck(ProcessState.READY, STUCK_AFTER_S_MIN)
    for _ in range(4):
        progress.observe((2,), now)
        now += HALF_S
    assert progress.is_stuck(state, STUCK_AFTER_S_MIN), "for ever is too long"
    assert not progress.is_stuck(state, 60.0), "patience grows with the limit"


def test_time_without_observations_does_not_count_as_stalled() -> None:
    progress = ChildProgress(0)
    progress.observe((1,), 0)
    progress.observe((1,), 3600 * NS_PER_S)
    assert progress.stalled_ns == OBSERVE_GAP_NS_MAX
    assert not progress.is_stuck(ProcessState.READY, 60.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10 * NS_PER_S)), max_size=60))
def test_stalled_time_never_exceeds_the_time_since_the_last_change(
    steps: list[tuple[int, int]],
) -> None:
    progress, now, changed, last = ChildProgress(0), 0, 0, None
    for fact, later in steps:
        now += later
        progress.observe((fact,), now)
        changed, last = (now, fact) if fact != last else (changed, last)
        assert 0 <= progress.stalled_ns <= now - changed
