"""The process that actors are forked from: it imports what they need, and waits.

The first one is itself forked, from a supervisor that has done nothing yet but import modules and read its
settings: these pages are shared, and the interpreter starts once. Those that replace it are spawned, as
`python -m actors …`: by then the supervisor has locks and threads. It belongs to the supervisor
(ringlog.supervision.forkserver says why it is there) and dies with it. For each request it makes a grandchild
and lets the child between them end, so that the grandchild becomes the supervisor's own. That one says who it
is, is told what to be, and becomes an actor as one that was spawned would: from `actors.<kind>.__main__` and
a boot message on.

There is one thread here and no library that has any: what a fork copies is whole. The supervisor sends `l`,
what to be called, and the descriptor that says that its children live; then `f` and a socket for each child.
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
"""A letter, and at most a path."""
ADOPTED_S = 5.0
"""A child whose first parent does not end within this ends itself."""
_LOOK_S = 0.000_2


def fork_forkserver(kinds: Sequence[str], environ: Mapping[str, str], root: str) -> tuple[int, socket.socket]:
    """Fork one from this process, which has neither locks nor threads yet: (its pid, our end of its line).

    It has this environment, and looks for modules in `root`, if that is named, and where we do, but not in
    the working directory. Raises OSError when the system cannot, or there are threads.
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


def _close_inherited_descriptors(line: int) -> None:
    """Have no descriptor but this one and the standard three, and a process group of one's own, as a process
    that was spawned."""
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # Whatever a library prints goes with the log; standard output is the operator's.
    os.dup2(2, 1)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != line:
            with contextlib.suppress(OSError):
                os.close(fd)


def run(line: socket.socket, kinds: Sequence[str], supervisor: int) -> None:
    """Serve until the supervisor is gone or does not want us any more; does not return in a child."""
    hardening.harden(may_profile=False)
    hardening.set_process_title(NAME)
    if not hardening.die_with_parent(supervisor, signal.SIGKILL):
        return
    with line:
        order = serve(line, kinds)
    if order is not None:
        run_actor(order)


def serve(line: socket.socket, kinds: Sequence[str]) -> ForkRequest | None:
    """Import the actors of these kinds, say so on `line`, and make a child for each request.

    Returns None in this process, when the supervisor ends it; in each child what it is to be.
    """
    for kind in kinds:
        _module(kind)
    if _has_threads():
        # A fork would copy what another thread is in the middle of.
        return None
    # What is here stays here: the collector must not write into pages that all of them share.
    gc.collect()
    gc.freeze()
    line.sendall(b"r")
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, _MESSAGE_BYTES_MAX, 1)
        if not message:
            return None
        if message[:1] == b"l":
            hardening.set_process_title(NAME, os.fsdecode(message[1:]))
            continue  # What came with it stays open: in each child as well.
        if not descriptors:
            continue  # There was none left for it; the supervisor sees the end of what it sent.
        with socket.socket(fileno=descriptors[0]) as told:
            try:
                pid = os.fork()
            except OSError:
                continue  # The supervisor sees the end of what we were given.
            if not pid:
                line.close()
                return _double_fork(told)
        os.waitpid(pid, 0)


def run_actor(order: ForkRequest) -> NoReturn:
    """Be the actor that was ordered."""
    os.setpgid(0, 0)
    _use_environment(order.environ)
    module = _module(order.kind)
    sys.argv[:] = [str(module.__file__), order.boot]
    main(module.build)


def _use_environment(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


def _has_threads() -> bool:
    return len(os.listdir("/proc/self/task")) > 1


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"actors.{kind}.__main__")


def _double_fork(told: socket.socket) -> ForkRequest:
    """In the child: make the grandchild and end. In that: wait to be the supervisor's, and ask."""
    parent, clock = os.getpid(), SystemClock()
    try:
        if os.fork():
            os._exit(0)
        deadline = clock.monotonic_ns() + round(ADOPTED_S * 1e9)
        while os.getppid() == parent:
            if clock.monotonic_ns() > deadline:
                os._exit(ExitCode.ORPHANED)
            clock.sleep(_LOOK_S)
        told.sendall(str(os.getpid()).encode())
        order = told.recv(FORK_REQUEST_BYTES_MAX)
    except OSError:
        os._exit(ExitCode.ORPHANED)
    if not order:
        # Nobody waits for us any more: another one may be what we were meant to be.
        os._exit(ExitCode.ORPHANED)
    return msgspec.msgpack.decode(order, type=ForkRequest)
