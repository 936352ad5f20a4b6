"""Pending results, steps and timers: the parts of the client without I/O."""

from __future__ import annotations

import pytest

from ringlog.errors import NotReady, TopicNotFound
from ringlog.link.futures import Pending, first_result, gather, resolved, run_steps
from ringlog.link.timers import Timers


def test_the_first_result_of_a_pending_counts():
    pending: Pending[int] = Pending()
    seen = []
    pending.when_done(lambda p: seen.append(p.result()))
    pending.resolve(1)
    pending.resolve(2)
    pending.fail(NotReady("late"))
    assert (pending.result(), seen, pending.error) == (1, [1], None)


def test_steps_continue_when_their_pending_is_done():
    first: Pending[int] = Pending()
    second: Pending[int] = Pending()

    def steps():
        a = yield first
        b = yield second
        return a + b

    result = run_steps(steps())
    second.resolve(2)
    assert not result.is_done
    first.resolve(40)
    assert result.result() == 42


def test_a_failure_is_raised_inside_the_steps():
    failing: Pending[int] = Pending()

    def steps():
        try:
            yield failing
        except TopicNotFound:
            return (yield resolved("made"))

    result = run_steps(steps())
    failing.fail(TopicNotFound("no such topic"))
    assert result.result() == "made"


def test_many_finished_pendings_do_not_grow_the_stack():
    def steps():
        total = 0
        for _ in range(100_000):
            total += yield resolved(1)
        return total

    assert run_steps(steps()).result() == 100_000


def test_the_first_result_counts_and_no_failure_before_it():
    pendings = [Pending() for _ in range(3)]
    first = first_result(pendings)
    pendings[2].fail(ValueError("2"))
    assert not first.is_done
    pendings[1].resolve(1)
    assert first.result() == 1
    pendings[0].resolve(0)
    assert first.result() == 1


def test_without_a_result_the_last_failure_counts():
    pendings = [Pending() for _ in range(2)]
    first = first_result(pendings)
    for number in (1, 0):
        pendings[number].fail(ValueError(str(number)))
    with pytest.raises(ValueError, match="0"):
        first.result()


def test_gather_keeps_order_and_fails_with_the_first_failure():
    pendings: list[Pending[int]] = [Pending() for _ in range(3)]
    everything = gather(pendings)
    for value, pending in reversed(list(enumerate(pendings))):
        pending.resolve(value)
    assert everything.result() == [0, 1, 2]
    bad: Pending[int] = Pending()
    bad.fail(NotReady("no"))
    with pytest.raises(NotReady):
        gather([resolved(1), bad]).result()


def test_timers_fire_in_order_of_time_and_only_when_due():
    timers, seen = Timers(), []
    for when in (30, 10, 20):
        timers.call_at(when, lambda when=when: seen.append(when))
    assert timers.next_ns() == 10
    assert timers.fire(20) == 2
    assert (seen, timers.next_ns()) == ([10, 20], 30)


def test_a_timer_cancelled_by_one_that_fires_with_it_does_not_fire():
    timers, seen = Timers(), []
    second = None

    def first():
        second.cancel()

    timers.call_at(1, first)
    second = timers.call_at(2, lambda: seen.append("second"))
    timers.fire(5)
    assert seen == []
    assert timers.next_ns() is None


def test_cancelled_timers_are_removed_from_the_heap():
    timers = Timers()
    for _ in range(50_000):
        timers.call_at(10**15, lambda: None).cancel()
    assert len(timers._heap) < 5_000
    assert timers.next_ns() is None
