"""Is there room for more descriptors? libzmq ends the process where it meets the limit in its own threads."""

from __future__ import annotations

import os
from contextlib import suppress

CONTEXT_DESCRIPTORS = 8
"""Threads of a context and the first socket of it."""
SOCKET_DESCRIPTORS = 4
"""A socket and its connection."""
READ_DESCRIPTORS = 3
"""A file of a topic, its index, a mapping."""


def has_room(count: int) -> bool:
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


def no_room() -> str:
    """What to say where there is none."""
    import resource  # Not everywhere, and this is said where it is.

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"too many open files: this process has reached its limit of {limit} descriptors; close readers and "
        "clients that are not used, or raise the limit (`ulimit -n`, LimitNOFILE= of systemd)"
    )


def explained(text: str, trouble: str) -> str:
    """That something could not be reached, and why, if that is known or there is no room for a connection."""
    why = trouble or ("" if has_room(CONTEXT_DESCRIPTORS) else no_room())
    return f"{text}: {why}" if why else text
