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

from ringlog.client.core import ProducerCore
from ringlog.client.ending import warn_of_left
from ringlog.client.shell import Shell

log = logging.getLogger("ringlog.client")
DROPPED_CLOSE_S = 10.0
"""Longest that what a dropped client had sent is waited for."""


class _Ending:
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


_ending: set[_Ending] = set()
_parents: list[_Ending] = []
"""Of the process we were forked from: what they hold must neither be used nor freed here."""


def end_with(client: object, shell: Shell) -> None:
    """Once the client is freed, end its shell."""
    weakref.finalize(client, _dropped, shell).atexit = False


def end_shell(shell: Shell, timeout: float) -> tuple[int, int, int]:
    """Send what was gathered, wait up to `timeout` seconds, end. Records that were not sent, records whose
    fate is not known, and open requests."""
    cores: list[ProducerCore] = []
    if not (shell.torn_by or shell.is_patched_late):
        with shell.entry, shell.work as session:
            cores = list(session.cores)
            waits = [core.idle() for core in cores] + list(session.undoing)
        shell.wait_all(waits, timeout)
    with shell.lock:
        left = [core.end() for core in cores]
        requests = shell.session.links.open_requests
    shell.close()
    return sum(unsent for unsent, _ in left), sum(unknown for _, unknown in left), requests


def end_apart(end: Callable[[float], None]) -> None:
    """Have something ended in a thread of its own, within the seconds that it is given. Takes no lock, not
    even to start a Thread: whoever is interrupted by the end of an object may hold any."""
    ending = _Ending(end)
    _ending.add(ending)
    with suppress(RuntimeError):  # The interpreter is ending.
        _thread.start_new_thread(_begin, (ending,))


def end_dropped(timeout: float) -> None:
    """At the end of the process: what is not over yet gets no more than this."""
    for ending in list(_ending):
        ending.run(timeout)


def forget_in_child() -> None:
    """After a fork."""
    _parents.extend(_ending)
    _ending.clear()


def _dropped(shell: Shell) -> None:
    if not shell.is_closed:
        end_apart(partial(_end, shell))


def _begin(ending: _Ending) -> None:
    with suppress(RuntimeError):
        threading.Thread(
            target=ending.run, args=(DROPPED_CLOSE_S,), name="ringlog-client-dropped", daemon=True
        ).start()


def _end(shell: Shell, timeout: float) -> None:
    unsent, unknown, _ = end_shell(shell, timeout)
    warn_of_left(unsent, unknown)
