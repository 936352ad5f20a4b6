"""The process that actors are forked from: it imports what they need, and waits. `python -m actors …`

It belongs to the supervisor (ringlog.supervision.forkserver says why it is there) and dies with it. For each
request it makes a grandchild and lets the child between them end, so that the grandchild becomes the
supervisor's own. That one says who it is, is told what to be, and becomes an actor as one that was spawned
would: from `actors.<kind>.__main__` and a boot message on.

There is one thread here and no library that has any: what a fork copies is whole.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import msgspec

from ringlog import hardening
from ringlog.clock import SystemClock
from ringlog.envelope.boot import ORDER_BYTES_MAX, ForkOrder
from ringlog.errors import ExitCode
from ringlog.runtime.process import main

ADOPTED_S = 5.0
"""A child whose first parent does not end within this ends itself."""
_LOOK_S = 0.000_2


def serve(line: socket.socket, kinds: Sequence[str]) -> ForkOrder | None:
    """Import the actors of these kinds, say so on `line`, and make a child for each request.

    Returns None in this process, when the supervisor ends it; in each child what it is to be.
    """
    for kind in kinds:
        _module(kind)
    if len(os.listdir("/proc/self/task")) > 1:
        # A fork would copy what another thread is in the middle of.
        return None
    # What is here stays here: the collector must not write into pages that all of them share.
    gc.collect()
    gc.freeze()
    line.sendall(b"r")
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, 1, 1)
        if not message:
            return None
        if not descriptors:
            continue  # There was none left for it; the supervisor sees the end of what it sent.
        with socket.socket(fileno=descriptors[0]) as told:
            try:
                pid = os.fork()
            except OSError:
                continue  # The supervisor sees the end of what we were given.
            if not pid:
                line.close()
                return _grow_up(told)
        os.waitpid(pid, 0)


def become(order: ForkOrder) -> NoReturn:
    """Be the actor that was ordered."""
    os.setpgid(0, 0)
    for name in set(os.environ) - set(order.environ):
        del os.environ[name]
    os.environ.update(order.environ)
    module = _module(order.kind)
    hardening.show_command([sys.executable, "-P", "-m", f"actors.{order.kind}", order.boot])
    sys.argv[:] = [str(module.__file__), order.boot]
    main(module.build)


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"actors.{kind}.__main__")


def _grow_up(told: socket.socket) -> ForkOrder:
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
        order = told.recv(ORDER_BYTES_MAX)
    except OSError:
        os._exit(ExitCode.ORPHANED)
    if not order:
        # Nobody waits for us any more: another one may be what we were meant to be.
        os._exit(ExitCode.ORPHANED)
    return msgspec.msgpack.decode(order, type=ForkOrder)
