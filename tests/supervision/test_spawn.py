"""Children are spawned with a clean environment, watched by pidfd, and known to be dead before they are
replaced."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path

import pytest

from ringlog.board.board import Board
from ringlog.supervision import child_process, run_dir
from ringlog.supervision.child_process import (
    ChildProcess,
    actor_command,
    api_keys_environment,
    child_environment,
)

pytestmark = pytest.mark.slow

SLEEP = "import signal; print('up', flush=True); signal.pause()"


def wait_dead(child: ChildProcess, seconds: float = 20.0) -> bool:
    return bool(select.select([child.pidfd], [], [], seconds)[0])


def start(code: str, environ: dict[str, str] | None = None, liveness_fd: int = 0) -> ChildProcess:
    return child_process.spawn_process(
        [sys.executable, "-c", code], environ or child_environment(os.environ), liveness_fd
    )


def run_to_end(code: str, environ: dict[str, str] | None = None) -> int:
    child = start(code, environ)
    assert wait_dead(child)
    return child.reap()


def test_the_pidfd_of_a_child_becomes_readable_when_it_dies() -> None:
    child = start(SLEEP)
    assert not wait_dead(child, 0)
    child.send_signal(signal.SIGKILL)
    assert wait_dead(child)
    assert child.reap() == -signal.SIGKILL
    child.send_signal(signal.SIGTERM)
    child.close()


def test_a_stopped_child_dies_from_sigkill() -> None:
    """The fence also works for a process that does not run (P2)."""
    child = start(SLEEP)
    child.send_signal(signal.SIGSTOP)
    child.send_signal(signal.SIGKILL)
    assert wait_dead(child)
    assert child.reap() == -signal.SIGKILL


def test_reap_returns_the_exit_code() -> None:
    assert run_to_end("raise SystemExit(72)") == 72


def test_a_child_inherits_no_descriptor(tmp_path: Path) -> None:
    """A child does not inherit a lock of the supervisor, even if its descriptor is inheritable."""
    with open(tmp_path / "LOCK", "w") as lock:
        os.set_inheritable(lock.fileno(), True)
        code = (
            "import os, sys\n"
            "held = []\n"
            "for fd in os.listdir('/proc/self/fd'):\n"
            "    path = f'/proc/self/fd/{fd}'\n"
            "    held += [os.readlink(path)] if os.path.exists(path) else []\n"
            "sys.exit(any('LOCK' in path for path in held))"
        )
        assert run_to_end(code) == 0


def test_a_child_is_seen_to_live_from_its_birth_to_its_death(tmp_path: Path) -> None:
    """The liveness lock is held before the child runs any code, and until it has exited (P3)."""
    Board.create(tmp_path).close()
    line = run_dir.open_liveness_lock(str(tmp_path))
    child = start("import os, signal; os.closerange(0, 3); signal.pause()", liveness_fd=line)
    child.send_signal(signal.SIGSTOP)
    os.close(line)
    has_waited_for_cpu = run_dir.orphans_alive(str(tmp_path))
    child.send_signal(signal.SIGKILL)
    assert wait_dead(child)
    child.reap()
    assert has_waited_for_cpu
    assert not run_dir.orphans_alive(str(tmp_path))


def test_a_child_has_a_process_group_of_its_own_and_no_input() -> None:
    code = (
        "import os,sys; sys.exit(os.getpgrp() != os.getpid() or sys.stdin.read() != '' or os.getcwd() != '/')"
    )
    assert run_to_end(code) == 0


def test_secrets_and_settings_do_not_reach_a_child(tmp_path: Path) -> None:
    """A child gets only listed environment variables."""
    secrets = {
        "RINGLOG_API_KEYS": "k", "RINGLOG_KEY": "k", "AWS_SECRET_ACCESS_KEY": "k", "MY_TOKEN": "k",
        "NOTIFY_SOCKET": "/s", "RINGLOG_TEST_STOP_POINTS": "x",
    }  # fmt: skip
    environ = child_environment({**os.environ, **secrets, "LC_ALL": "C.UTF-8", "TZ": "UTC"})
    assert not set(secrets) & set(environ)
    assert (environ["LC_ALL"], environ["TZ"], environ["OPENBLAS_NUM_THREADS"]) == ("C.UTF-8", "UTC", "1")
    path = tmp_path / "environ.json"
    code = f"import json,os; open({str(path)!r}, 'w').write(json.dumps(dict(os.environ)))"
    assert run_to_end(code, environ=environ) == 0
    assert not set(secrets) & set(json.loads(path.read_text()))


def test_bearer_keys_reach_the_http_gateway_only() -> None:
    environ = {"RINGLOG_API_KEYS": "k", "RINGLOG_KEY": "x"}
    assert api_keys_environment(environ) == {"RINGLOG_API_KEYS": "k"}
    assert api_keys_environment({}) == {}


def test_a_child_imports_the_same_code() -> None:
    import ringlog

    code = f"import ringlog, ringlog.actors, sys; sys.exit(ringlog.__file__ != {ringlog.__file__!r})"
    assert run_to_end(code, environ=child_environment({"PATH": os.environ["PATH"]})) == 0


def test_an_actor_is_started_by_its_kind_and_never_from_the_working_directory() -> None:
    assert actor_command("wal_shard", "{}") == [sys.executable, "-P", "-m", "ringlog.actors.wal_shard", "{}"]


def test_the_oom_killer_prefers_a_child_to_its_supervisor():
    """The supervisor raises the child's score, which needs no privilege (RF-17)."""
    child = start("import signal; signal.pause()", dict(os.environ))
    try:
        with open(f"/proc/{child.pid}/oom_score_adj") as theirs, open("/proc/self/oom_score_adj") as ours:
            assert (
                int(theirs.read())
                >= child_process.CHILD_OOM_SCORE
                > max(0, child_process.SUPERVISOR_OOM_SCORE)
            )
            assert int(ours.read()) < child_process.CHILD_OOM_SCORE
    finally:
        child.send_signal(signal.SIGKILL)
        child.reap()
