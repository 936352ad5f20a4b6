"""The supervisor forks children from a process that imported all modules, and spawns them if that process is
missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ringlog.errors import ExitCode
from ringlog.supervision.child_process import child_environment
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import engine_fixture

pytestmark = pytest.mark.slow

WAIT_S = 30.0

engine = engine_fixture()


def forkserver(engine: TestEngine) -> psutil.Process | None:
    """Return the engine's fork server, or None."""
    for child in psutil.Process(engine.pid).children():
        if child.name() == "forkserver":
            return child
    return None


def wait_forkserver(engine: TestEngine, but: int = 0) -> psutil.Process:
    """Wait for a fork server other than `but` that has reported ready: such a process sleeps."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        process = forkserver(engine)
        if process is not None and process.pid != but and process.status() == psutil.STATUS_SLEEPING:
            found.append(process)
        return bool(found)

    wait_until(is_there, WAIT_S, "a fork server")
    return found[0]


def is_forked(engine: TestEngine, pid: int) -> bool:
    """Return True if the process was forked.

    A forked process has the command line of its first parent at the same address.
    """
    server = forkserver(engine)
    assert server is not None
    return place(pid) == place(server.pid)


def place(of: int) -> str:
    return Path(f"/proc/{of}/stat").read_text().rpartition(")")[2].split()[45]  # arg_start


def test_a_forked_actor_equals_a_spawned_one(engine: TestEngine) -> None:
    """Parent, process group, directory, environment and descriptors are the same. `ps` shows the actor's
    name."""
    shard = psutil.Process(engine.pid_of("wal_shard"))
    assert is_forked(engine, shard.pid)
    assert place(shard.pid) == place(engine.pid), "the first server was forked from the supervisor"
    assert shard.ppid() == engine.pid
    assert os.getpgid(shard.pid) == shard.pid
    assert (shard.name(), shard.cwd()) == ("wal_shard-00", "/")
    title = Path(f"/proc/{shard.pid}/cmdline").read_bytes().rstrip(b"\0")
    assert title == f"ringlog: wal_shard-00 {engine.data_dir}".encode()
    held = {os.readlink(f"/proc/{shard.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{shard.pid}/fd")}
    assert f"{engine.data_dir}/LOCK" not in held
    server = forkserver(engine)
    assert server is not None
    line = {os.readlink(f"/proc/{server.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{server.pid}/fd")}
    sockets = {path for path in line if path.startswith("socket:")}
    assert sockets
    assert not sockets & held


def test_a_module_in_the_working_directory_is_not_imported_as_an_actor(tmp_path: Path) -> None:
    (tmp_path / "actors.py").write_text("raise SystemExit('from the working directory')")
    root = str(Path(__file__).parent.parent.parent)
    command = [sys.executable, "-m", "supervisor", "--data-dir", str(tmp_path / "data")]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOG_")}
    with subprocess.Popen(
        [*command, "--set", "run.allow_root=true"], cwd=tmp_path, env={**clean, "PYTHONPATH": root},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "is ready" in process.stdout.readline()
        shards = [each for each in psutil.Process(process.pid).children() if each.name() == "wal_shard-00"]
        assert [place(shard.pid) for shard in shards] == [place(process.pid)]
        process.terminate()
        _, log = process.communicate(timeout=WAIT_S)
    assert (process.returncode, "fork server failed" in log) == (0, False), log


def test_children_are_spawned_while_the_fork_server_is_missing(engine: TestEngine) -> None:
    """The death of the fork server delays no child."""
    old = wait_forkserver(engine)
    shard = engine.pid_of("wal_shard")
    # The supervisor is stopped meanwhile, so that it detects both deaths at the same time.
    os.kill(engine.pid, signal.SIGSTOP)
    old.kill()
    os.kill(shard, signal.SIGKILL)
    os.kill(engine.pid, signal.SIGCONT)
    wait_other(engine, shard)
    spawned = engine.pid_of("wal_shard")
    new = wait_forkserver(engine, but=old.pid)
    assert not is_forked(engine, spawned)
    wait_until(lambda: restart(engine) and is_forked(engine, engine.pid_of("wal_shard")), WAIT_S, "a fork")
    assert new.is_running()
    assert engine.stop() == 0


def test_a_stopped_fork_server_is_replaced(engine: TestEngine) -> None:
    """The supervisor waits only until it detects that the fork server does not reply."""
    server = wait_forkserver(engine)
    server.suspend()
    restart(engine)
    assert not server.is_running()
    assert engine.stop() == 0


def test_the_fork_server_dies_with_the_supervisor(engine: TestEngine) -> None:
    """The same holds for a stopped fork server (P3)."""
    server = wait_forkserver(engine)
    server.suspend()
    engine.kill("supervisor")
    wait_until(lambda: not server.is_running(), WAIT_S, "the fork server to end")
    engine.start()
    assert engine.stop() == 0


def wait_other(engine: TestEngine, shard: int) -> None:
    """Wait until another process serves as the shard."""

    def is_there() -> bool:
        [found] = engine.status().processes
        return found.pid != shard and found.state == "ready"

    wait_until(is_there, WAIT_S, "the successor")


def restart(engine: TestEngine) -> bool:
    """Kill the shard and wait for its successor."""
    wait_other(engine, engine.kill("wal_shard"))
    return True


NOBODY_ASKS = """
import os, signal, socket, subprocess, sys
from ringlog import hardening

hardening.become_subreaper()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server = subprocess.Popen(
    [sys.executable, "-P", "-m", "ringlog.actors", str(theirs.fileno()), "scheduler"],
    pass_fds=[theirs.fileno()],
)
theirs.close()
assert ours.recv(1) == b"r"
told, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
socket.send_fds(ours, [b"f"], [its.fileno()])
its.close()
pid = int(told.recv(16))
told.close()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
ours.close()
print(server.wait())
"""


def test_a_child_that_nobody_tells_what_to_be_ends() -> None:
    """The supervisor gave up such a child and may already run another one in its place (P5)."""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", NOBODY_ASKS], capture_output=True, text=True, timeout=60, check=True, cwd=root,
        env=child_environment(os.environ),
    )  # fmt: skip
    assert done.stdout.split() == [str(int(ExitCode.ORPHANED)), "0"]


def test_a_supervisor_without_free_descriptors_works_without_a_fork_server() -> None:
    """The test runs in its own process, because it adopts orphans and lowers the descriptor limit."""
    program = """
import os, resource
from ringlog.clock import SystemClock
from ringlog.supervision.forkserver import ForkServer

server = ForkServer(("wal_shard",), environ=dict(os.environ), clock=SystemClock())
server._liveness_fd = 0
for room in (0, 1, 2):
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, 4096))
    server._start()
    assert not server.is_starting and server.fileno() == -1, room
    assert server._start_at_ns is not None, "and it is tried again"
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 64, 4096))
    assert len(os.listdir("/proc/self/fd")) - 1 == used, room
print("goes on")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment(os.environ),
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.stdout == "goes on\n", done.stderr
