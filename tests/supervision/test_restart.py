"""Restart decisions: every row of the table, and properties for any sequence of deaths."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.errors import ExitCode
from ringlog.limits import RESTART_BACKOFF_MS_MAX, RESTART_BACKOFF_MS_MIN
from ringlog.supervision.restart import (
    NS_PER_MS,
    NS_PER_S,
    ChildExit,
    DeathHistory,
    GiveUp,
    RestartAt,
    RestartNow,
    backoff_ms,
    decide,
    describe_exit,
)
from ringlog.supervision.tree import ChildSpec

SIGKILLED = ChildExit(-signal.SIGKILL, was_ready=True)
NEVER_READY = ChildExit(ExitCode.CANNOT_BOOT, was_ready=False)


def spec(restart_max: int = 5, window_s: float = 60.0) -> ChildSpec:
    return ChildSpec("wal_shard", "wal_shard-00", 1, 1, restart_max, window_s, 60.0, 0)


def die(child: ChildSpec, *deaths: tuple[ChildExit, int]) -> list[object]:
    """Return the decisions for a sequence of (exit, monotonic ns)."""
    history, decisions = DeathHistory(), []
    for exit, now in deaths:
        history = history.with_death(child, exit, now)
        decisions.append(decide(child, history, exit, now))
    return decisions


@pytest.mark.parametrize(
    "status",
    [
        ExitCode.OK, ExitCode.CRASH, ExitCode.INVARIANT, ExitCode.DISK_FAILED, ExitCode.ORPHANED,
        ExitCode.CANNOT_BOOT, 3, -signal.SIGKILL, -signal.SIGSEGV,
    ],
)  # fmt: skip
def test_the_first_death_is_followed_by_an_immediate_restart(status: int) -> None:
    assert die(spec(), (ChildExit(status, was_ready=True), 7)) == [RestartNow()]


@pytest.mark.parametrize(("status", "word"), [(ExitCode.FENCED, "fenced"), (ExitCode.CORRUPT, "damaged")])
def test_fenced_and_corrupt_children_are_given_up_at_once_with_the_reason(status: int, word: str) -> None:
    [decision] = die(spec(), (ChildExit(status, was_ready=True), 7))
    assert isinstance(decision, GiveUp)
    assert word in decision.reason


def test_two_failed_boots_in_a_row_give_up_the_child() -> None:
    first, second = die(spec(), (NEVER_READY, 0), (NEVER_READY, 1))
    assert first == RestartNow()
    assert isinstance(second, GiveUp)
    assert "cannot boot" in second.reason


def test_an_exit_before_the_board_is_reached_is_a_failed_boot() -> None:
    """An interpreter that cannot import the actor exits with status 1, like any crash."""
    early, late = (ChildExit(ExitCode.CRASH, False, "", has_booted) for has_booted in (False, True))
    assert isinstance(die(spec(), (early, 0), (early, 1))[1], GiveUp)
    assert isinstance(die(spec(), (late, 0), (late, 1))[1], RestartAt)


def test_a_successful_boot_resets_the_count_of_failed_boots() -> None:
    decisions = die(spec(), (NEVER_READY, 0), (SIGKILLED, NS_PER_S), (NEVER_READY, 2 * NS_PER_S))
    assert not any(isinstance(decision, GiveUp) for decision in decisions)


def test_the_delay_doubles_with_every_death_in_the_window() -> None:
    decisions = die(spec(restart_max=4), *((SIGKILLED, n) for n in range(4)))
    waits = [
        decision.until_ns - n if isinstance(decision, RestartAt) else 0
        for n, decision in enumerate(decisions)
    ]
    assert waits == [0, *(RESTART_BACKOFF_MS_MIN * NS_PER_MS << n for n in range(3))]


def test_more_deaths_than_allowed_in_the_window_are_given_up() -> None:
    """The child is given up at the death after `restart_max` restarts, not earlier."""
    decisions = die(spec(restart_max=3), *((SIGKILLED, n * NS_PER_S) for n in range(4)))
    assert [isinstance(decision, GiveUp) for decision in decisions] == [False, False, False, True]
    assert "died 4 times in 60 s" in str(decisions[-1])


def test_deaths_older_than_the_window_do_not_count() -> None:
    apart = 61 * NS_PER_S
    assert die(spec(restart_max=1), *((SIGKILLED, n * apart) for n in range(50))) == [RestartNow()] * 50


def test_a_child_that_may_not_restart_is_given_up_at_its_first_death() -> None:
    assert isinstance(die(spec(restart_max=0), (SIGKILLED, 0))[0], GiveUp)


exits = st.builds(
    ChildExit,
    st.sampled_from([*ExitCode, -signal.SIGKILL, -signal.SIGTERM, 3]),
    st.booleans(),
)
deaths = st.lists(st.tuples(exits, st.integers(0, 120 * NS_PER_S)), min_size=1, max_size=60)


@given(deaths, st.integers(0, 8), st.sampled_from([1.0, 10.0, 60.0]))
def test_no_sequence_of_deaths_exceeds_restart_max_in_the_window(
    steps: list[tuple[ChildExit, int]], restart_max: int, window_s: float
) -> None:
    """At no time are there more than `restart_max` restarts for deaths within one window."""
    child, now, history, restarted = spec(restart_max, window_s), 0, DeathHistory(), []
    for exit, later in steps:
        now += later
        history = history.with_death(child, exit, now)
        assert len(history.deaths_ns) <= restart_max + 1
        decision = decide(child, history, exit, now)
        if isinstance(decision, GiveUp):
            break
        restarted.append(now)
        recent = [at for at in restarted if now - at < window_s * NS_PER_S]
        assert len(recent) <= restart_max
        if isinstance(decision, RestartAt):
            assert decision.until_ns - now >= NS_PER_MS * RESTART_BACKOFF_MS_MIN
            assert decision.until_ns - now <= NS_PER_MS * RESTART_BACKOFF_MS_MAX


@given(st.integers(0, 10_000))
def test_the_delay_grows_and_is_bounded(deaths: int) -> None:
    assert backoff_ms(deaths) <= backoff_ms(deaths + 1) <= RESTART_BACKOFF_MS_MAX


def test_an_exit_has_a_text_and_a_board_code() -> None:
    assert (SIGKILLED.board_code, str(SIGKILLED)) == (256 + 9, "SIGKILL")
    assert str(ChildExit(ExitCode.INVARIANT, True, "no progress")) == "invariant (no progress)"
    assert describe_exit(3) == "exit 3"
    assert describe_exit(256 + 200) == "signal 200"
    assert ChildExit(ExitCode.OK, True).is_orderly
    assert not SIGKILLED.is_orderly


def test_deaths_seconds_apart_cause_no_restart_delay() -> None:
    """Clients then wait only for the recovery."""
    apart = 6 * NS_PER_S
    assert die(spec(restart_max=50), *((SIGKILLED, n * apart) for n in range(8))) == [RestartNow()] * 8
