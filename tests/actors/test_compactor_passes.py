"""A pass stands back for everybody while the compactor keeps up, and no longer."""

from __future__ import annotations

import os
import threading

import pytest

from actors.compactor.passes import BACKLOG_BYTES, run_pass
from ringlog.errors import CorruptData


def how_it_runs() -> tuple[int, int, int]:
    thread = threading.get_native_id()
    return thread, os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, thread)


def test_a_pass_runs_when_nobody_else_wants_the_processor_and_lowers_nobody_else():
    here = how_it_runs()
    thread, policy, nice = run_pass(how_it_runs, 0)
    assert (policy, nice) == (os.SCHED_IDLE, 19)
    assert thread != here[0]
    assert how_it_runs() == here


def test_with_much_log_waiting_it_takes_its_share():
    here = how_it_runs()
    assert run_pass(how_it_runs, BACKLOG_BYTES - 1)[1] == os.SCHED_IDLE
    assert run_pass(how_it_runs, BACKLOG_BYTES)[1:] == here[1:]


def test_what_a_pass_raises_arrives():
    def fail() -> None:
        raise CorruptData("a log file", file="a")

    with pytest.raises(CorruptData, match="a log file"):
        run_pass(fail, 0)
