"""Clients that a program dropped without `close()`: what they hold ends with them.

A client's thread and sockets keep its shell alive, so the shell cannot notice that nobody can use it any
more. The Client does: every object that needs it refers to it. What was sent before still gets its time, in a
thread of its own, since objects may be freed at any moment of any thread. Not compiled: weak references are
made to Client.
"""

from __future__ import annotations

import _thread
import logging
import threading
import weakref
from contextlib import suppress

from ringlog.client.core import ProducerCore
from ringlog.client.session import Session
from ringlog.client.shell import Shell

log = logging.getLogger("ringlog.client")
DROPPED_CLOSE_S = 10.0
"""Longest that what a dropped client had sent is waited for."""
_ending: set[Shell] = set()
"""Of dropped clients, until they have ended."""


def end_with(client: object, shell: Shell) -> None:
    """Once the client is freed, end its shell."""
    weakref.finalize(client, _dropped, shell).atexit = False


def end_shell(shell: Shell, timeout: float) -> tuple[int, int, int]:
    """Send what was gathered, wait up to `timeout` seconds, end. Records that were not sent, records whose
    fate is not known, and open requests."""
    cores: list[ProducerCore] = []
    if not shell.torn_by:
        with shell.locked() as session:
            cores = list(session.cores)
            waits = [core.idle() for core in cores]
        shell.wait_all(waits, timeout)
    with shell.lock:
        left = [core.end() for core in cores]
        requests = shell.session.links.open_requests
    shell.close()
    return sum(unsent for unsent, _ in left), sum(unknown for _, unknown in left), requests


def end_dropped(timeout: float) -> None:
    """At the end of the program: what is not over yet gets no more than this."""
    for shell in list(_ending):
        _end(shell, timeout)


def forget_in_child() -> list[Session]:
    """After a fork: they are the parent's; their sessions, which must neither be used nor freed."""
    parents = [shell.restart_in_child() for shell in _ending if not shell.is_closed]
    _ending.clear()
    return parents


def _dropped(shell: Shell) -> None:
    if shell.is_closed:
        return
    _ending.add(shell)
    # No lock is taken here, not even to start a Thread: whoever is interrupted by this may hold any.
    with suppress(RuntimeError):  # The interpreter is ending.
        _thread.start_new_thread(_begin_to_end, (shell,))


def _begin_to_end(shell: Shell) -> None:
    with suppress(RuntimeError):
        threading.Thread(
            target=_end, args=(shell, DROPPED_CLOSE_S), name="ringlog-client-dropped", daemon=True
        ).start()


def _end(shell: Shell, timeout: float) -> None:
    try:
        unsent, unknown, _ = end_shell(shell, timeout)
        if unsent or unknown:
            log.error("a client was dropped without close(): unsent=%d unknown=%d", unsent, unknown)
    except Exception:
        log.exception("ending a client that was dropped")
    finally:
        _ending.discard(shell)
