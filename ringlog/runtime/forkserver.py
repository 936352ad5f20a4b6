"""The fork server: the process that imports the actors' modules and is forked for each of them.

The first fork server is forked from a supervisor that has only imported modules and read its settings. Its
pages are shared, and the interpreter starts once. Later fork servers are spawned as
`python -m ringlog.actors …`, because the supervisor then has locks and threads. The fork server belongs to
the supervisor
(ringlog.supervision.forkserver has the reasons) and dies with it.

For each request the fork server forks twice, and the process in between exits. The grandchild thus becomes a
child of the supervisor. It sends its pid, receives its fork request, and becomes an actor like a spawned one:
it runs `ringlog.actors.<kind>.__main__` with a boot message.

The fork server has one thread and uses no library with threads, so a fork copies a consistent process. The
supervisor sends `l` with the name for the process title and the liveness lock's descriptor. After that it
sends `f` and a socket for each child.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NoReturn

import msgspec

from ringlog import hardening
from ringlog.clock import SystemClock
from ringlog.envelope.boot import FORK_REQUEST_BYTES_MAX, ForkRequest
from ringlog.errors import ExitCode
from ringlog.runtime.process import main

NAME = "forkserver"
_MESSAGE_BYTES_MAX = 4_097
"""Largest message of the supervisor: one letter, and at most a path."""
ADOPTION_TIMEOUT_S = 5.0
"""Time (s) after which a child exits if its first parent has not exited."""
_POLL_S = 0.000_2


def fork_forkserver(kinds: Sequence[str], environ: Mapping[str, str], root: str) -> tuple[int, socket.socket]:
    """Fork the first fork server from this process. Returns (its pid, this process's end of the socket).

    This process must have no locks and no threads. The child gets `environ`. It searches modules in `root`,
    if that is not empty, and in this process's `sys.path`, but not in the working directory. Raises OSError
    if the fork fails or this process has threads.
    """
    if _has_threads():
        raise OSError("this process has threads")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor = os.getpid()
    gc.collect()
    gc.freeze()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid:
        theirs.close()
        return pid, ours
    try:
        _close_inherited_descriptors(theirs.fileno())
        hardening.locate_process_title()
        _use_environment(environ)
        here = {"", os.getcwd(), root}
        sys.path[:] = [*filter(None, [root]), *(path for path in sys.path if path not in here)]
        os.chdir("/")
        run(theirs, kinds, supervisor)
    finally:
        os._exit(ExitCode.OK)


def _close_inherited_descriptors(supervisor_fd: int) -> None:
    """Close all descriptors except `supervisor_fd` and the standard three, and enter a new process group.

    The process then looks like a spawned one.
    """
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # The output of libraries belongs to the log. Standard output belongs to the operator.
    os.dup2(2, 1)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != supervisor_fd:
            with contextlib.suppress(OSError):
                os.close(fd)


def run(supervisor_socket: socket.socket, kinds: Sequence[str], supervisor: int) -> None:
    """Serve until the supervisor exits or closes the socket. In a forked child, run the actor: no return."""
    hardening.harden(may_profile=False)
    hardening.set_process_title(NAME)
    if not hardening.die_with_parent(supervisor, signal.SIGKILL):
        return
    with supervisor_socket:
        request = serve(supervisor_socket, kinds)
    if request is not None:
        run_actor(request)


def serve(supervisor_socket: socket.socket, kinds: Sequence[str]) -> ForkRequest | None:
    """Import the actors of these kinds, report readiness, and fork a child for each request.

    Returns None in the fork server, when the supervisor closes the socket. Returns the fork request in each
    child.
    """
    for kind in kinds:
        _module(kind)
    if _has_threads():
        # A fork would copy the unfinished work of the other thread, for example its locks.
        return None
    # Exempt all objects from garbage collection: the collector must not write into shared pages.
    gc.collect()
    gc.freeze()
    supervisor_socket.sendall(b"r")
    while True:
        message, descriptors, _, _ = socket.recv_fds(supervisor_socket, _MESSAGE_BYTES_MAX, 1)
        if not message:
            return None
        if message[:1] == b"l":
            hardening.set_process_title(NAME, os.fsdecode(message[1:]))
            continue  # The received descriptor stays open, in each child as well.
        if not descriptors:
            continue  # This process has no free descriptor. The supervisor sees its end of the socket closed.
        with socket.socket(fileno=descriptors[0]) as child_socket:
            try:
                pid = os.fork()
            except OSError:
                continue  # The supervisor sees its end of the socket closed.
            if not pid:
                supervisor_socket.close()
                return _double_fork(child_socket)
        os.waitpid(pid, 0)


def run_actor(request: ForkRequest) -> NoReturn:
    """Run the actor of this fork request. Never returns."""
    os.setpgid(0, 0)
    _use_environment(request.environ)
    module = _module(request.kind)
    sys.argv[:] = [str(module.__file__), request.boot]
    main(module.build)


def _use_environment(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


def _has_threads() -> bool:
    return len(os.listdir("/proc/self/task")) > 1


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"ringlog.actors.{kind}.__main__")


def _double_fork(child_socket: socket.socket) -> ForkRequest:
    """In the child: fork the grandchild and exit. In the grandchild: wait for adoption, then get a request.

    The grandchild exits with ORPHANED if no request arrives.
    """
    parent, clock = os.getpid(), SystemClock()
    try:
        if os.fork():
            os._exit(0)
        deadline = clock.monotonic_ns() + round(ADOPTION_TIMEOUT_S * 1e9)
        while os.getppid() == parent:
            if clock.monotonic_ns() > deadline:
                os._exit(ExitCode.ORPHANED)
            clock.sleep(_POLL_S)
        child_socket.sendall(str(os.getpid()).encode())
        request = child_socket.recv(FORK_REQUEST_BYTES_MAX)
    except OSError:
        os._exit(ExitCode.ORPHANED)
    if not request:
        # The supervisor gave this child up, and may have started its replacement.
        os._exit(ExitCode.ORPHANED)
    return msgspec.msgpack.decode(request, type=ForkRequest)
