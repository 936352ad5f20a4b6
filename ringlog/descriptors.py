"""Checks of file descriptors: whether more can be opened, and whether the standard three are open.

libzmq aborts the process if its own threads reach the limit, so the client checks before it creates sockets.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

CONTEXT_DESCRIPTORS = 8
"""Descriptors of a ZeroMQ context with its threads and first socket."""
SOCKET_DESCRIPTORS = 4
"""Descriptors of a further socket with its connection and its monitor."""
READ_DESCRIPTORS = 3
"""Descriptors of a read: a log file or segment, its index, and a mapping."""


def can_open_descriptors(count: int) -> bool:
    """Return whether this process can open `count` more descriptors. Opens and closes them to find out."""
    probes: list[int] = []
    try:
        for _ in range(count):
            probes.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401  what was opened has to be closed
    except OSError:
        return False
    finally:
        for fd in probes:
            with suppress(OSError):
                os.close(fd)
    return True


def raise_descriptor_limit(count: int) -> None:
    """Raise the limit of this process to `count` descriptors, as far as its hard limit permits."""
    import resource  # Late: the module does not exist on every platform.

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit_message() -> str:
    """Return the error text for a process at its descriptor limit."""
    import resource  # Late: the module does not exist on every platform.

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"too many open files: this process has reached its limit of {limit} descriptors; close readers and "
        "clients that are not used, or raise the limit (`ulimit -n`, LimitNOFILE= of systemd)"
    )


def explain_unreachable(text: str, trouble: str) -> str:
    """Return `text` with the reason why a peer cannot be reached.

    The reason is `trouble`, or the descriptor limit if that prevents a connection. Without a reason `text` is
    returned unchanged.
    """
    why = trouble or ("" if can_open_descriptors(CONTEXT_DESCRIPTORS) else descriptor_limit_message())
    return f"{text}: {why}" if why else text


def open_standard_descriptors() -> None:
    """Open the closed ones of descriptors 0, 1 and 2 on the null device. Call it first in a program.

    Otherwise the next file or socket would get such a number, and output of libraries would be written to it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115  as long as we live
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
