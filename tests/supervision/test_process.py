"""The bootstrap of every actor, and how its end is reported."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringlog import config, config_sources
from ringlog.board.board import Board, ProcessField, ProcessState
from ringlog.envelope.boot import ActorBoot, dump_boot
from ringlog.errors import (
    ConfigError,
    CorruptData,
    DiskError,
    ExitCode,
    InvariantViolation,
    RingError,
    StartRefused,
)
from ringlog.runtime.process import exit_code_for
from ringlog.supervision.run_dir import open_liveness_lock, orphans_alive

pytestmark = pytest.mark.slow

SLOT = 3
PROGRAM = """
import os, select, signal, sys, threading, time
from ringlog import errors
from ringlog.runtime.process import main

what = sys.argv.pop(2)

class Actor:
    def __init__(self, boot):
        self.exit_code = None

    def on_start(self, stop):
        self.stop = stop
        if what == "recover":
            print("up", flush=True)
            while True:
                time.sleep(0.01)

    def do_work(self):
        if what == "raise":
            raise errors.InvariantViolation("W2 is false", story=["first", "second"], seq=7)
        if what == "facts":
            import resource
            status = dict(line.split(":", 1) for line in open("/proc/self/status"))
            mask = os.umask(0o777)
            print(status["NoNewPrivs"].strip(), resource.getrlimit(resource.RLIMIT_CORE)[0], oct(mask),
                  status["Name"].strip(), flush=True)
            self.drain()
            return 1
        if what == "linger":
            import logging
            logging.shutdown = lambda: (print("ends", flush=True), signal.pause())
        if what == "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM})
            print("up", flush=True)
            while True:
                signal.pause()
        print("up", flush=True)
        if what == "thread":
            # As a pass of the compactor: another thread looks first, and the main one waits for it.
            seen = []
            def look():
                while not self.stop.is_set():
                    time.sleep(0.001)
                seen.append(self.stop.is_set())
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            self.exit_code = errors.ExitCode.OK if seen == [True] else errors.ExitCode.CRASH
        return 0

    def idle(self, work):
        while not self.stop.is_set():
            select.select([self.stop.fileno()], [], [])

    def drain(self):
        self.exit_code = errors.ExitCode.OK
        return True

    def on_close(self):
        pass

def build(boot):
    if what == "refuse":
        raise errors.StartRefused("not here")
    if what == "typo":
        raise NameError("x")
    return Actor(boot)

main(build)
"""

PARENT = """
import os, subprocess, sys
boot = sys.argv[2].replace('"supervisor_pid":-1', f'"supervisor_pid":{os.getpid()}')
subprocess.run([sys.executable, "-c", sys.argv[1], boot, "deaf"], check=False)
"""


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    Board.create(tmp_path).close()
    return tmp_path


def boot_for(shm: Path, **changes: object) -> str:
    plain = config.to_plain(config_sources.load_config({"log.format": "json"}, {}, str(shm)).config)
    facts: dict[str, object] = {
        "kind": "wal_shard", "name": "wal_shard-00", "engine_id": "0" * 32, "incarnation": 9,
        "boot_incarnation": 8, "boot_id": "0" * 32, "slot": SLOT, "data_dir": str(shm), "shm_dir": str(shm),
        "supervisor_pid": os.getpid(), "config": plain,
    }  # fmt: skip
    return dump_boot(ActorBoot(**{**facts, **changes}))


def start(
    shm: Path, what: str, *, pass_fds: tuple[int, ...] = (), **changes: object
) -> subprocess.Popen[str]:
    boot = boot_for(shm, **changes)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, boot, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )


def started(shm: Path, what: str) -> subprocess.Popen[str]:
    """Start an actor and wait until it is up."""
    process = start(shm, what)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str, list[dict[str, object]]]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, [json.loads(line) for line in err.splitlines() if line.startswith("{")]


def page(shm: Path) -> tuple[ProcessState, int, int]:
    board = Board.open(shm, writable=False)
    try:
        slot = board.process(SLOT)
        return slot.state, slot.get(ProcessField.PID), slot.get(ProcessField.INCARNATION)
    finally:
        board.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_wait_and_the_actor_exits_with_0(shm: Path, number: signal.Signals) -> None:
    process = started(shm, "wait")
    assert page(shm) == (ProcessState.READY, process.pid, 9)
    process.send_signal(number)
    code, _, _ = finish(process)
    assert (code, page(shm)[0]) == (ExitCode.OK, ProcessState.STOPPED)


def test_any_thread_may_be_the_first_to_check_the_stop_flag(shm: Path) -> None:
    """`signal only works in main thread` once ended a compactor that received a stop during a pass."""
    process = started(shm, "thread")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == ExitCode.OK


def test_an_actor_that_still_recovers_exits_at_once_with_0(shm: Path) -> None:
    """A recovery has no time limit and can be repeated from any point."""
    process = started(shm, "recover")
    process.send_signal(signal.SIGTERM)
    assert (finish(process)[0], page(shm)[0]) == (ExitCode.OK, ProcessState.STOPPED)


def test_an_expendable_actor_dies_with_its_supervisor(shm: Path) -> None:
    """It does not drain as an orphan, because the next engine would wait for it. This actor blocks all other
    signals."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, PROGRAM, boot_for(shm, is_expendable=True, supervisor_pid=-1)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    pidfd = os.pidfd_open(page(shm)[1])
    try:
        parent.kill()
        parent.communicate(timeout=30)
        assert select.select([pidfd], [], [], 30.0)[0], "it is dead"
    finally:
        os.close(pidfd)


def test_hangup_and_quit_do_not_end_an_actor(shm: Path) -> None:
    process = started(shm, "wait")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGQUIT)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (ExitCode.OK, "")
    assert "most recent call first" in err, "SIGQUIT dumps the stacks"


def test_the_next_supervisor_detects_an_actor_until_it_exited(shm: Path) -> None:
    """The actor keeps its liveness lock while it ends (P3)."""
    line = open_liveness_lock(str(shm))
    process = start(shm, "linger", pass_fds=(line,))
    os.close(line)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "ends\n"
    assert orphans_alive(str(shm))
    process.kill()
    finish(process)
    assert not orphans_alive(str(shm))


def test_an_invariant_violation_logs_the_last_events_and_has_its_own_exit_code(shm: Path) -> None:
    code, _, lines = finish(start(shm, "raise"))
    assert (code, page(shm)[0]) == (ExitCode.INVARIANT, ProcessState.FAILED)
    failed = next(line for line in lines if line["event"] == "actor failed")
    assert (failed["reason"], failed["detail"]) == ("W2 is false", {"seq": 7})
    assert (failed["actor"], failed["incarnation"], failed["level"]) == ("wal_shard-00", 9, "critical")
    assert [line["told"] for line in lines if line["event"] == "last event"] == ["'first'", "'second'"]
    assert any("InvariantViolation" in str(line.get("traceback")) for line in lines)


@pytest.mark.parametrize("what", ["refuse", "typo"])
def test_an_actor_that_cannot_be_built_exits_with_cannot_boot(shm: Path, what: str) -> None:
    assert finish(start(shm, what))[0] == ExitCode.CANNOT_BOOT


def test_an_actor_sets_no_new_privs_core_limit_and_umask_first(shm: Path) -> None:
    """Core dumps are disabled, the umask is 0o077, and the process has the actor's name."""
    code, out, _ = finish(start(shm, "facts"))
    assert (code, out.split()) == (ExitCode.OK, ["1", "0", "0o77", "wal_shard-00"])


def test_a_malformed_boot_message_exits_with_cannot_boot(shm: Path) -> None:
    for arguments in (["{}"], ["nonsense"], []):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.replace("sys.argv.pop(2)", "''"), *arguments],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == ExitCode.CANNOT_BOOT
        assert done.stderr.startswith("cannot boot: ")


def test_an_actor_with_another_parent_exits_as_an_orphan(shm: Path) -> None:
    """The supervisor may have died before the actor requested its parent-death signal."""
    assert finish(start(shm, "wait", supervisor_pid=1))[0] == ExitCode.ORPHANED


def test_an_actor_without_its_board_cannot_boot(shm: Path, tmp_path: Path) -> None:
    assert finish(start(shm, "wait", shm_dir=str(tmp_path / "gone")))[0] == ExitCode.CANNOT_BOOT


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvariantViolation("x"), ExitCode.INVARIANT),
        (DiskError("x", errno=5), ExitCode.DISK_FAILED),
        (DiskError("x", errno=11, holder="pid 3"), ExitCode.FENCED),
        (CorruptData("x"), ExitCode.CORRUPT),
        (StartRefused("x"), ExitCode.CANNOT_BOOT),
        (ConfigError("x"), ExitCode.CANNOT_BOOT),
        (RingError("x"), ExitCode.CRASH),
        (MemoryError(), ExitCode.CRASH),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error: Exception, code: ExitCode) -> None:
    assert exit_code_for(error, is_built=True) == code


def test_an_error_before_the_actor_is_built_means_cannot_boot() -> None:
    assert exit_code_for(RuntimeError(), is_built=False) == ExitCode.CANNOT_BOOT
    assert exit_code_for(DiskError("x"), is_built=False) == ExitCode.DISK_FAILED
