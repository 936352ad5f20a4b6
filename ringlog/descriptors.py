"""Is there room for more descriptors? libzmq ends the process where it meets the limit in its own threads.
And are the standard three what they should be?
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

CONTEXT_DESCRIPTORS = 8
"""Threads of a context and the first socket of it."""
SOCKET_DESCRIPTORS = 4
"""A socket and its connection."""
READ_DESCRIPTORS = 3
"""A file of a topic, its index, a mapping."""


def can_open_descriptors(count: int) -> bool:
    """May this process open so many more?"""
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


def descriptor_limit_message() -> str:
    """What to say where there is none."""
    import resource  # Not everywhere, and this is said where it is.

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"too many open files: this process has reached its limit of {limit} descriptors; close readers and "
        "clients that are not used, or raise the limit (`ulimit -n`, LimitNOFILE= of systemd)"
    )


def explain_unreachable(text: str, trouble: str) -> str:
    """That something could not be reached, and why, if that is known or there is no room for a connection."""
    why = trouble or ("" if can_open_descriptors(CONTEXT_DESCRIPTORS) else descriptor_limit_message())
    return f"{text}: {why}" if why else text


def open_standard_descriptors() -> None:
    """Point those of descriptors 0, 1 and 2 that are closed to the null device. The first act of a program.

    Else the next file or socket would get such a number, and what a library prints would be written there.
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
