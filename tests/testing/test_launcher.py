"""Engines that a launcher forks behave like engines of their own interpreters."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ringlog
from ringlog.errors import StartRefused
from ringlog.testing.launcher import LAUNCHERS_MAX
from ringlog.testing.real_engine import engine, wait_until

pytestmark = pytest.mark.slow

UNKNOWN = {"RINGLOG_WAL_SHARD": "2"}

PARENT = """
import pathlib, sys, time
from ringlog.testing import engine
with engine(directory=sys.argv[1]) as running:
    print(running.pid, running.pid_of("wal_shard"), running.info.shm_dir, flush=True)
    sys.stdin.read()
"""


PROGRAM = """
from ringlog.testing import engine
with engine() as running, open(f"/proc/{running.pid}/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("PPid:")))
"""


def test_the_engines_of_a_killed_test_run_stop_in_order(tmp_path):
    root = tmp_path / "engine"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        supervisor, shard, shm_dir = parent.stdout.readline().split()
        launcher_pid = parent_of(int(supervisor))
        assert parent_of(launcher_pid) == parent.pid
    finally:
        parent.kill()
        parent.communicate()
    for pid in (int(supervisor), int(shard), launcher_pid):
        wait_until(lambda pid=pid: not exists(pid), 30, f"process {pid} to end")
    assert not Path(shm_dir).exists()
    assert '"orderly":true' in (root / "engine.log").read_text()


def test_a_test_run_that_ends_leaves_no_launcher():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50)
    assert done.stderr == ""
    pid = int(done.stdout)
    wait_until(lambda: not exists(pid), 10, "the launcher to end")


def test_engines_of_one_environment_share_a_launcher_and_others_have_their_own():
    later = UNKNOWN | {"COLOUR": "red", "PYTEST_CURRENT_TEST": "the next test"}
    with engine(environ={"COLOUR": "red"}) as first, engine(environ=later) as second:
        launchers = [parent_of(first.pid)]
        assert parent_of(second.pid) == launchers[0]
        assert "engine starts" in first.log_path.read_text()
        assert "setting ignored" not in first.log_path.read_text()
        assert "setting ignored" in second.log_path.read_text()
        for number in range(LAUNCHERS_MAX):
            with engine(environ={"COLOUR": str(number)}) as other:
                launchers.append(parent_of(other.pid))
        assert len(set(launchers)) == 1 + LAUNCHERS_MAX
        assert parent_of(launchers[0]) == os.getpid(), "it is kept while its engines run"
    with engine(environ={"COLOUR": "0"}):
        assert not exists(launchers[0]), "the one that was unused longest"


def test_an_engine_inherits_what_has_changed_since_the_first_engine():
    soft, hard = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
    with engine() as first:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (soft - 1, hard))
        try:
            with engine() as second:
                assert resource.prlimit(first.pid, resource.RLIMIT_MSGQUEUE) == (soft, hard)
                assert resource.prlimit(second.pid, resource.RLIMIT_MSGQUEUE) == (soft - 1, hard)
        finally:
            resource.setrlimit(resource.RLIMIT_MSGQUEUE, (soft, hard))


def test_a_killed_launcher_stops_its_engine_and_has_a_successor():
    # A variable of its own: the launcher of other tests lives on.
    with engine(environ={"KILLED": "yes"}) as running:
        running_process = running._process
        os.kill(parent_of(running.pid), signal.SIGKILL)
        assert running_process.wait(20) == -signal.SIGTERM
        assert running_process.poll() == -signal.SIGTERM
        assert '"orderly":true' in running.log_path.read_text()
        running.start()
        with ringlog.connect(running.url, wait=10) as client:
            assert client.append("t", b"x").first_seq == 1


def test_the_exit_status_is_that_of_the_supervisor():
    with engine() as running:
        process = running._process
        assert process.poll() is None
        with pytest.raises(TimeoutError, match=f"process {running.pid} did not end within 0 s"):
            process.wait(0)
        assert running.stop() == 0
        running.start()
        process = running._process
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
        process.send_signal(signal.SIGTERM)  # It has ended: no effect, no error.
        running.crash()
    with pytest.raises(StartRefused, match="ended while starting") as refused, engine(wal={"shards": -1}):
        pass
    assert "wal.shards" in str(refused.value)


def test_an_engine_has_the_environment_directory_and_descriptors_of_its_own(monkeypatch):
    with tempfile.TemporaryDirectory() as directory, engine() as before:
        monkeypatch.chdir(directory)
        with engine(environ=UNKNOWN) as running:
            assert os.readlink(f"/proc/{running.pid}/cwd") == directory
            fds = f"/proc/{running.pid}/fd"
            files = {os.readlink(f"{fds}/{fd}") for fd in os.listdir(fds)}
            assert str(running.log_path) in files
            assert not [path for path in files if before.data_dir in path]
            assert "setting ignored" in running.log_path.read_text(), "a variable of its environment"
            monkeypatch.undo()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False
