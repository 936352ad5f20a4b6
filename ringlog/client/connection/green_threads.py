"""Green threads: can a client work where gevent or eventlet has replaced the standard library's threads?

It can where both its threads and what they sleep on are replaced. Where only one of them is, its daemon
thread dies or blocks every green thread of the program, without a word: that is refused.
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
    """Raise UsageError, which says what to do, where a client would not work. Imports nothing."""
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
                "eventlet lets one green thread alone wait for a descriptor, and those of a client share "
                f"theirs: call {_EVENTLET_READERS} before connect(), or use the client in another process"
            )


def _check_whole(library: str, threads: bool, select: bool) -> None:
    if bool(threads) != bool(select):
        patched, unpatched = ("thread", "select") if threads else ("select", "thread")
        raise UsageError(
            f"{library} has patched `{patched}` and not `{unpatched}`, with which a client cannot work: "
            "patch both, as monkey.patch_all() does, or neither",
        )


def are_green() -> bool:
    """Are the threads of this process green? They share one: who looks on in it holds up all others."""
    return not isinstance(threading.get_ident, BuiltinFunctionType)


def patched_late_error() -> UsageError:
    """What a client is told that was made before threads were replaced: its locks know no green threads."""
    return UsageError(
        "threads were replaced by green threads after this client was made: call connect() after "
        "monkey.patch_all(); in a server that forks (gunicorn --preload), call it in each worker"
    )
