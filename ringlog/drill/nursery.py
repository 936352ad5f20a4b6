"""Client processes that start fast: a nursery process that has imported everything forks them on request.

To start an interpreter with its imports costs more than all work of a short-lived client. The protocol is one
line per request: a Task as JSON, and the pid of the new client as the reply. On SIGTERM a client finishes its
operation and writes its report; SIGKILL ends it at once. Clients die with the nursery, and the nursery dies
with its parent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from ringlog.drill.tasks import Report, Task
from ringlog.hardening import die_with_parent
from ringlog.testing.children import debug_environ

ROOT = Path(__file__).parent.parent.parent
_MAIN = "import sys; from ringlog.drill.nursery import main; main(sys.argv[1:])"


class ClientProcess:
    """Handle of one client process."""

    def __init__(self, pid: int, task: Task) -> None:
        self.pid: int = pid
        self.task: Task = task
        self._pidfd = os.pidfd_open(pid)

    def ask_to_end(self) -> None:
        """Send SIGTERM; then call `wait`."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the process and wait until it is dead."""
        self._send(signal.SIGKILL)
        self.wait(30.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its exit. Returns False if it is still alive after `timeout_s`."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def report(self) -> Report | None:
        """Return its report, or None if it was killed."""
        try:
            return msgspec.json.decode(self.task.report_path.read_bytes(), type=Report)
        except (OSError, msgspec.DecodeError):
            return None

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self._pidfd)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


class Nursery:
    """Context manager that starts clients. At its end all clients are dead."""

    def __init__(self, work: str) -> None:
        """`work` is the module whose function `perform` a client runs with its task."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environ = {**debug_environ(), "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, str(os.getpid()), work], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=environ,
        )  # fmt: skip
        self._clients: list[ClientProcess] = []

    def start(self, task: Task) -> ClientProcess:
        """Fork a client for a task."""
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        pipes.stdin.write(msgspec.json.encode(task) + b"\n")
        pipes.stdin.flush()
        client = ClientProcess(int(pipes.stdout.readline()), task)
        self._clients.append(client)
        return client

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.kill()
            client.close()
        self._process.communicate(timeout=30.0)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` exits.

    If `parent` has already exited, this process exits at once with status 1.
    """
    if not die_with_parent(parent, signal.SIGKILL):
        os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Serve requests until standard input ends."""
    die_with(int(arguments[0]))
    work = importlib.import_module(arguments[1])

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the children.
    # SIGTERM stays blocked until a client has its handler. A client that is ended at once must still report.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    here = os.getpid()
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            _be_client(work, line, here)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _be_client(work: ModuleType, line: bytes, parent: int) -> None:
    try:
        die_with(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        task = msgspec.json.decode(line, type=Task)
        began = time.monotonic_ns()
        report = work.perform(task)
        report.seconds = (time.monotonic_ns() - began) / 1e9
        draft = task.report_path.with_suffix(".part")
        draft.write_bytes(msgspec.json.encode(report))
        draft.rename(task.report_path)
    except BaseException:  # noqa: BLE001  the harness sees only that there is no report
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
