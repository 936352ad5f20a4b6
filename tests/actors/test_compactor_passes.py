"""A pass runs at idle priority. An urgent one runs at normal priority."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ringlog import config
from ringlog.actors.compactor import shell as shells
from ringlog.actors.compactor.checkpoint import CheckpointResult
from ringlog.actors.compactor.pass_executor import PassExecutor
from ringlog.actors.compactor.schedule import LOG_BYTES
from ringlog.board.board import Board
from ringlog.board.layout import ProcessField
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import CorruptData, NotReady, ShuttingDown
from ringlog.link.shard_requests import Requester
from ringlog.signals import StopFlag
from ringlog.testing.clock import ManualClock


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
    thread, policy, nice = passes.run(how_it_runs, is_urgent=False)
    assert (policy, nice) == (os.SCHED_IDLE, 19)
    assert thread != here[0]
    assert how_it_runs() == here


def test_an_urgent_pass_runs_at_normal_priority(passes):
    here = how_it_runs()
    assert passes.run(how_it_runs, is_urgent=False)[1] == os.SCHED_IDLE
    assert passes.run(how_it_runs, is_urgent=True)[1:] == here[1:]


def test_an_exception_of_a_pass_reaches_the_caller(passes):
    def fail() -> None:
        raise CorruptData("a log file", file="a")

    with pytest.raises(CorruptData, match="a log file"):
        passes.run(fail, is_urgent=False)


def test_a_pass_that_does_not_end_is_abandoned_at_the_stop(passes, monkeypatch):
    monkeypatch.setattr("ringlog.actors.compactor.pass_executor.PASS_END_S", 0.01)
    may_end = threading.Event()
    try:
        with pytest.raises(ShuttingDown):
            passes.run(may_end.wait, is_urgent=False, is_stopping=lambda: True)
        assert passes.is_abandoned
    finally:
        may_end.set()


@pytest.mark.parametrize("is_urgent", [False, True])
def test_a_pass_starts_no_thread(passes, is_urgent, monkeypatch):
    """At the limit of threads the compactor still compacts the log (RF-20)."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert passes.run(how_it_runs, is_urgent=is_urgent)[0] != threading.get_native_id()


class Shard:
    """A shard with a full log file, until the second pass has absorbed it."""

    number = 0

    def fetch_plan(self, *, roll: bool = False) -> m.CheckpointPlan:
        size = LOG_BYTES if len(Pass.threads) < 2 else 0
        files = [m.Extent("wal/shard-00/wal-1-0.log", 0, 0, 0, size)] if size else []
        return m.CheckpointPlan(0, 1, 1, files, size, 1, [])

    fetch_plan_summary = fetch_plan


class Pass:
    """A pass that notes its thread. In the thread of background passes it takes steps until one raises."""

    threads: list[str]
    has_begun = threading.Event()

    def __init__(self, context: Any, *_: object) -> None:
        self.heartbeat = context.heartbeat

    def run(self) -> CheckpointResult:
        self.threads.append(threading.current_thread().name)
        self.has_begun.set()
        while self.threads[-1].startswith("pass"):
            self.heartbeat()
            select.select([], [], [], 0.001)  # As a real pass, it leaves the interpreter to other threads.
        return CheckpointResult()


@pytest.fixture
def shell(monkeypatch):
    monkeypatch.setattr(shells, "CheckpointTask", Pass)
    monkeypatch.setattr(Pass, "threads", [], raising=False)
    # On a busy host a thread of the lowest priority may not run at all.
    monkeypatch.setattr("ringlog.hardening.set_background_priority", lambda: None)
    Pass.has_begun.clear()
    directory = tempfile.mkdtemp(prefix="rl-compactor-")
    Board.create(directory, 8).close()
    for name in ("meta", "wal"):
        os.mkdir(f"{directory}/{name}")
    boot = ActorBoot(
        kind="compactor", name="compactor", engine_id="e" * 32, incarnation=3, boot_incarnation=1,
        boot_id="b", slot=2, data_dir=directory, shm_dir=directory, supervisor_pid=os.getpid(), shards=1,
    )  # fmt: skip
    made = shells.CompactorShell(boot, config.Config(), clock=ManualClock())
    stop = StopFlag(lambda: None)
    made.on_start(stop)
    made._shards = [Shard()]
    yield made
    made._requests.close()
    made.on_close()
    made._board.close()
    stop.close()
    shutil.rmtree(directory)


def test_a_request_ends_a_background_pass_and_gets_one_at_normal_priority(shell):
    """A host without idle CPU once let backups time out: the pass in progress, or that of the request, made
    almost no progress."""
    requester = Requester("compactor", f"ipc://{shell._boot.shm_dir}/compactor.sock")

    def request() -> list[str]:
        assert Pass.has_begun.wait(30)
        while True:
            with contextlib.suppress(NotReady):  # The connection takes more than a second on a busy host.
                return requester.ask(m.CheckpointNow(), m.CheckpointMade).message.files

    shell._clock.advance(2)
    try:
        with ThreadPoolExecutor(1) as operator:
            answer = operator.submit(request)
            while not answer.done():
                shell.idle(shell.do_work())
    finally:
        requester.close()
    assert answer.result() == ["meta/engine"]
    assert [name.partition("_")[0] for name in Pass.threads] == ["pass", "fair-pass"]
    assert shell._slot.get(ProcessField.FAILURES) == 0, "an early end is no failure"
