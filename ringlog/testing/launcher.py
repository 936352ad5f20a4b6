"""The launcher: a process that has imported the engine, and is forked for each engine of a test run.

The imports of a supervisor and its actors take more CPU time than the rest of an engine's start and stop. The
launcher does them once, before the first engine. Each engine is a fork that runs as `ringlog serve` does,
with its own settings, environment, working directory and log.

When the parent ends, for example a test run that is killed, the launcher stops its engines in an orderly way.
When the launcher is killed, its engines receive SIGTERM.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ringlog import hardening
from ringlog.board.processes import KINDS
from ringlog.errors import ExitCode

START_S = 60.0
"""Timeout in seconds of the launcher's imports and of a fork."""
LAUNCHERS_MAX = 2
"""Launchers that are kept, for callers that differ, besides those whose engines run. The one that was unused
longest ends first."""
LATE_VARIABLES = ("RINGLOG_", "PYTEST_CURRENT_TEST")
"""Prefixes of variables that are read after the imports. pytest changes its own with each test."""
_INHERITED = ("Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")
"""Fields of /proc/self/status, by prefix, that a process passes on to its children."""
END_S = 5.0
"""Time in seconds that the end of this process waits for its launchers."""
_MESSAGE_BYTES_MAX = 1 << 20
"""Largest request: arguments and environment of an engine."""
_NUMBER_BYTES = 8


class EngineProcess:
    """A running engine: its supervisor. The methods are those of `subprocess.Popen` with the same names."""

    def __init__(self, status_socket: socket.socket, pid: int, pidfd: int) -> None:
        self.pid: int = pid
        self._socket, self._pidfd = status_socket, pidfd
        self._status: int | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, pidfd)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        with contextlib.suppress(TimeoutError):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended; raise TimeoutError after `timeout` seconds."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
        with self._lock:
            if self._status is None:
                with self._socket:
                    message = self._socket.recv(_NUMBER_BYTES)
                # Without a launcher the status is unknown. SIGTERM ended the engine.
                self._status = int.from_bytes(message, "little", signed=True) if message else -signal.SIGTERM
            return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


class _Launcher:
    """The parent's side of one launcher process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environ, pass_fds=[theirs.fileno()]
            )
        self._engines: list[EngineProcess] = []

    def is_usable(self) -> bool:
        """Whether the launcher can fork engines."""
        return self._process.poll() is None

    def is_used(self) -> bool:
        """Whether an engine of this launcher runs."""
        self._engines = [each for each in self._engines if each.poll() is None]
        return bool(self._engines)

    def launch(self, request: bytes, log_fd: int) -> EngineProcess:
        """Fork an engine. Raises OSError, also if the launcher ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.settimeout(START_S)
            with theirs:
                socket.send_fds(self._socket, [request], [theirs.fileno(), log_fd])
            message, pidfds, _, _ = socket.recv_fds(ours, _NUMBER_BYTES, 1)
            if not pidfds:
                raise ConnectionResetError("the launcher of engines ended, or could not fork")
        except OSError:
            ours.close()
            raise
        engine = EngineProcess(ours, int.from_bytes(message, "little", signed=True), pidfds[0])
        self._engines.append(engine)
        return engine

    def end(self) -> None:
        """Let the launcher exit, and wait for it a moment."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)


_launchers: dict[tuple[int, object, object], _Launcher] = {}
_lock = threading.Lock()


def launch(data_dir: str, sets: Sequence[str], environ: Mapping[str, str], log_fd: int) -> EngineProcess:
    """Start an engine.

    Args:
        data_dir: Its data directory.
        sets: Settings, as `section.key=value`.
        environ: Environment of the engine. Engines whose environments differ, except in LATE_VARIABLES, come
            from different launchers: variables may change the interpreter or what is imported. So do engines
            of callers that differ in what a child inherits, such as namespaces and resource limits.
        log_fd: Descriptor for standard output and standard error.

    Returns:
        Its process.

    Raises:
        OSError: The launcher or the process could not be started.
    """
    request = marshal.dumps((data_dir, list(sets), dict(environ), os.getcwd()))
    others = frozenset(item for item in environ.items() if not item[0].startswith(LATE_VARIABLES))
    # A forked child of this process has a launcher of its own.
    key = os.getpid(), others, _inherited()
    with _lock:
        launcher = _launchers.pop(key, None)
        if launcher is not None and not launcher.is_usable():
            launcher.end()
            launcher = None
        _launchers[key] = launcher = launcher or _Launcher(environ)
        unused = [name for name, each in _launchers.items() if each is not launcher and not each.is_used()]
        for old in unused[: max(0, len(_launchers) - LAUNCHERS_MAX)]:
            _launchers.pop(old).end()
        return launcher.launch(request, log_fd)


def _inherited() -> tuple[str, ...]:
    """Return what a child would inherit from this thread: namespaces, limits, priorities and rights.

    A launcher keeps what it inherited when it started.
    """
    here = Path("/proc/thread-self")
    status = (here / "status").read_text().splitlines()
    return (
        *(os.readlink(each) for each in sorted((here / "ns").iterdir())),
        *(os.readlink(here / name) for name in ("root", "exe")),
        *((here / name).read_text() for name in ("limits", "cgroup", "oom_score_adj")),
        *(line for line in status if line.startswith(_INHERITED)),
        f"{os.sched_getscheduler(0)} {os.getpriority(os.PRIO_PROCESS, 0)}",
    )


@atexit.register
def _end_launchers() -> None:
    for (pid, *_), launcher in _launchers.items():
        if pid == os.getpid():
            launcher.end()


# -- in the launcher ------------------------------------------------------------------------------------


def main(requests: socket.socket, parent_pid: int) -> NoReturn:
    """Import the engine and fork one for each request, until the parent ends or closes the socket.

    In each child, run the supervisor: SystemExit.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal reaches each engine by itself.
    parent = os.pidfd_open(parent_pid)
    _import_engine()
    gc.collect()
    gc.freeze()
    children: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(requests, select.POLLIN)
    is_open = os.getppid() == parent_pid
    while is_open or children:
        for fd, _ in poll.poll():
            if fd in children:
                pid, status_socket = children.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                _send_number(status_socket, os.waitstatus_to_exitcode(status))
                status_socket.close()
            elif fd == parent:
                poll.unregister(parent)
                is_open = False
                for pid, _ in children.values():
                    os.kill(pid, signal.SIGTERM)
            elif not _receive(requests, children, poll):
                poll.unregister(requests)
                is_open = False
    os._exit(0)  # The parent waits, and the interpreter's end is slow.


def _import_engine() -> None:
    """Import the supervisor and the actors whose dependencies are installed."""
    importlib.import_module("ringlog.supervision.serve")
    for kind in KINDS:
        with contextlib.suppress(ImportError):  # The HTTP gateway needs the extra `http`.
            importlib.import_module(f"ringlog.actors.{kind}.__main__")


def _receive(
    requests: socket.socket, children: dict[int, tuple[int, socket.socket]], poll: select.poll
) -> bool:
    """Fork an engine for the next request. Returns False when the parent has closed the socket."""
    request, (*descriptors,), _, _ = socket.recv_fds(requests, _MESSAGE_BYTES_MAX, 2)
    if not request:
        return False
    status_fd, log_fd = descriptors
    status_socket = socket.socket(fileno=status_fd)
    launcher_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        status_socket.close()  # The parent reads no pid.
        os.close(log_fd)
        return True
    if not pid:
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        # The engine inherits no other descriptor.
        for inherited in [requests, status_socket, *(each for _, each in children.values())]:
            inherited.detach()
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        _run_supervisor(launcher_pid, *marshal.loads(request))
    os.close(log_fd)
    pidfd = os.pidfd_open(pid)
    children[pidfd] = pid, status_socket
    poll.register(pidfd, select.POLLIN)
    _send_number(status_socket, pid, pidfd)
    return True


def _run_supervisor(
    launcher_pid: int, data_dir: str, sets: list[str], environ: Mapping[str, str], directory: str
) -> NoReturn:
    """Become an engine, as if `ringlog serve` had been started with these settings."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hardening.die_with_parent(launcher_pid):
        sys.exit(ExitCode.ORPHANED)
    # The data directory is on the command line of each of its processes. The title takes the memory of the
    # environment, so it comes first.
    hardening.set_process_title("supervisor", data_dir)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    status = importlib.import_module("ringlog.supervision.serve").serve(sets=sets, data_dir=data_dir)
    sys.stdout.flush()
    os._exit(status)  # The interpreter's end takes a tenth of the CPU time of a start and stop.


def _send_number(to: socket.socket, number: int, *descriptors: int) -> None:
    """Send a number, and descriptors, to the parent, which may have closed its end."""
    message = number.to_bytes(_NUMBER_BYTES, "little", signed=True)
    with contextlib.suppress(OSError):
        socket.send_fds(to, [message], descriptors)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
