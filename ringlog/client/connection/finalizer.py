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
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ringlog.client.connection.exit_hooks import warn_unsettled
from ringlog.client.connection.shell import ThreadedShell
from ringlog.client.write.producer_core import ProducerCore

log = logging.getLogger("ringlog.client")
DROPPED_CLOSE_S = 10.0
"""Longest that what a dropped client had sent is waited for."""


class _DroppedClient:
    """What a dropped client left, until it has ended."""

    def __init__(self, end: Callable[[float], None]) -> None:
        self._end = end
        self._lock = threading.Lock()

    def run(self, timeout: float) -> None:
        if not self._lock.acquire(timeout=timeout):
            return
        try:
            if self in _ending:
                self._end(timeout)
        except Exception:
            log.exception("ending a client that was dropped")
        finally:
            _ending.discard(self)
            self._lock.release()


_ending: set[_DroppedClient] = set()
_parents: list[_DroppedClient] = []
"""Of the process we were forked from: what they hold must neither be used nor freed here."""


def close_on_finalize(client: object, shell: ThreadedShell) -> None:
    """Once the client is freed, end its shell."""
    weakref.finalize(client, _dropped, shell).atexit = False


def close_shell(shell: ThreadedShell, timeout: float) -> tuple[int, int, int]:
    """Send what was gathered, wait up to `timeout` seconds, end. Records that were not sent, records whose
    fate is not known, and open requests."""
    cores: list[ProducerCore] = []
    if not (shell.interrupted_by or shell.is_monkey_patched_late):
        with shell.checked_lock, shell.guarded_session as session:
            cores = list(session.producer_cores)
            waits = [core.wait_settled() for core in cores] + list(session.cancelling_claims)
        shell.wait_all(waits, timeout)
    with shell.lock:
        left = [core.fail_unsettled() for core in cores]
        requests = shell.session.links.open_requests
    shell.close()
    return sum(unsent for unsent, _ in left), sum(unknown for _, unknown in left), requests


def close_in_thread(end: Callable[[float], None]) -> None:
    """Have something ended in a thread of its own, within the seconds that it is given. Takes no lock, not
    even to start a Thread: whoever is interrupted by the end of an object may hold any."""
    ending = _DroppedClient(end)
    _ending.add(ending)
    with suppress(RuntimeError):  # The interpreter is ending.
        _thread.start_new_thread(_begin, (ending,))


def close_dropped(timeout: float) -> None:
    """At the end of the process: what is not over yet gets no more than this."""
    for ending in list(_ending):
        ending.run(timeout)


def forget_in_child() -> None:
    """After a fork."""
    _parents.extend(_ending)
    _ending.clear()


def _dropped(shell: ThreadedShell) -> None:
    if not shell.is_closed:
        close_in_thread(partial(_end, shell))


def _begin(ending: _DroppedClient) -> None:
    with suppress(RuntimeError):
        threading.Thread(
            target=ending.run, args=(DROPPED_CLOSE_S,), name="ringlog-client-dropped", daemon=True
        ).start()


def _end(shell: ThreadedShell, timeout: float) -> None:
    unsent, unknown, _ = close_shell(shell, timeout)
    warn_unsettled(unsent, unknown)
