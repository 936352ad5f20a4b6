"""A pass runs at idle priority while the compactor keeps up, and at normal priority with a backlog."""

from __future__ import annotations

import os
import threading

import pytest

from ringlog.actors.compactor.pass_executor import BACKLOG_BYTES, PassExecutor
from ringlog.errors import CorruptData, ShuttingDown


@pytest.fixture
def passes():
    made = PassExecutor()
    yield made
    made.close()


def how_it_runs() -> tuple[int, int, int]:
    thread = threading.get_native_id()
    return thread, os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, thread)


def test_a_pass_lowers_the_priority_of_its_own_thread_only(passes):
    here = how_it_runs()
    thread, policy, nice = passes.run(how_it_runs, 0)
    assert (policy, nice) == (os.SCHED_IDLE, 19)
    assert thread != here[0]
    assert how_it_runs() == here


def test_a_pass_runs_at_normal_priority_with_a_large_backlog(passes):
    here = how_it_runs()
    assert passes.run(how_it_runs, BACKLOG_BYTES - 1)[1] == os.SCHED_IDLE
    assert passes.run(how_it_runs, BACKLOG_BYTES)[1:] == here[1:]


def test_an_exception_of_a_pass_reaches_the_caller(passes):
    def fail() -> None:
        raise CorruptData("a log file", file="a")

    with pytest.raises(CorruptData, match="a log file"):
        passes.run(fail, 0)


def test_a_pass_that_does_not_end_is_abandoned_at_the_stop(passes, monkeypatch):
    monkeypatch.setattr("ringlog.actors.compactor.pass_executor.PASS_END_S", 0.01)
    may_end = threading.Event()
    try:
        with pytest.raises(ShuttingDown):
            passes.run(may_end.wait, 0, lambda: True)
        assert passes.is_abandoned
    finally:
        may_end.set()


@pytest.mark.parametrize("waiting", [0, BACKLOG_BYTES])
def test_a_pass_starts_no_thread(passes, waiting, monkeypatch):
    """At the limit of threads the compactor still compacts the log (RF-20)."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert passes.run(how_it_runs, waiting)[0] != threading.get_native_id()
