"""Checks whether a client can work with the green threads of gevent or eventlet.

A client works if both `threading` and `select` are patched, or neither. With only one of them patched, the
daemon thread would die silently or block every green thread of the program. Such a process is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

from ringlog.errors import UsageError

_EVENTLET_READERS = "eventlet.debug.hub_prevent_multiple_readers(False)"


def check_green_threads() -> None:
    """Raise UsageError, with the remedy, if a client would not work in this process. Imports no module."""
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None:
        _check_whole("gevent", monkey.is_module_patched("threading"), monkey.is_module_patched("select"))
    patcher: Any = sys.modules.get("eventlet.patcher")
    if patcher is not None:
        is_patched: Callable[[str], bool] = patcher.is_monkey_patched
        _check_whole("eventlet", is_patched("thread"), is_patched("select"))
        hub: Any = sys.modules.get("eventlet.hubs.hub")
        if is_patched("select") and getattr(hub, "g_prevent_multiple_readers", True):
            raise UsageError(
                "eventlet allows only one green thread per descriptor, and the threads of a client share "
                f"theirs: call {_EVENTLET_READERS} before connect(), or use the client in another process"
            )


def _check_whole(library: str, threads: bool, select: bool) -> None:
    if bool(threads) != bool(select):
        patched, unpatched = ("thread", "select") if threads else ("select", "thread")
        raise UsageError(
            f"{library} patched `{patched}` but not `{unpatched}`: patch both, as monkey.patch_all() does, "
            "or neither",
        )


def are_green() -> bool:
    """Return True if the threads of this process are green. They share one OS thread, so spinning in one
    blocks all."""
    return not isinstance(threading.get_ident, BuiltinFunctionType)


def patched_late_error() -> UsageError:
    """Return the error of a client that was created before threads were patched: its locks do not block green
    threads."""
    return UsageError(
        "threads were monkey-patched after this client was created: call connect() after "
        "monkey.patch_all(); in a server that forks (gunicorn --preload), call it in each worker"
    )
