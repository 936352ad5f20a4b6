"""Close clients that a program dropped without `close()`.

A client's thread and sockets keep its shell alive, so the shell cannot notice that it became unreachable. The
Client can: every object that needs the client references it. Records that were sent before still get time to
settle. A separate thread waits for them, since an object may be freed at any moment in any thread. This
module is not compiled, because weak references to Client are made.
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

log: logging.Logger = logging.getLogger("ringlog.client")
DROPPED_CLOSE_S = 10.0
"""Longest time in seconds that the records of a dropped client may take to settle."""


class _DroppedClient:
    """Remains of a dropped client until they are closed."""

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
            log.exception("closing a dropped client failed")
        finally:
            _ending.discard(self)
            self._lock.release()


_ending: set[_DroppedClient] = set()
_parents: list[_DroppedClient] = []
"""Dropped clients of the parent process. The child must neither use nor free their resources."""


def close_on_finalize(client: object, shell: ThreadedShell) -> None:
    """Close `shell` once `client` is garbage collected."""
    weakref.finalize(client, _on_finalize, shell).atexit = False


def close_shell(shell: ThreadedShell, timeout: float) -> tuple[int, int, int]:
    """Flush, wait up to `timeout` seconds, then close the shell.

    Returns the number of unsent records, of records with an unknown outcome, and of open requests.
    """
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
    """Call `end(seconds)` in a new thread.

    Takes no lock, not even to start a Thread: a finalizer may interrupt code that holds any lock.
    """
    ending = _DroppedClient(end)
    _ending.add(ending)
    with suppress(RuntimeError):  # The interpreter is ending.
        _thread.start_new_thread(_start_thread, (ending,))


def close_dropped(timeout: float) -> None:
    """At process exit, close the remaining dropped clients within `timeout` seconds each."""
    for ending in list(_ending):
        ending.run(timeout)


def forget_in_child() -> None:
    """Forget the parent's dropped clients after a fork."""
    _parents.extend(_ending)
    _ending.clear()


def _on_finalize(shell: ThreadedShell) -> None:
    if not shell.is_closed:
        close_in_thread(partial(_close_dropped_shell, shell))


def _start_thread(ending: _DroppedClient) -> None:
    with suppress(RuntimeError):
        threading.Thread(
            target=ending.run, args=(DROPPED_CLOSE_S,), name="ringlog-client-dropped", daemon=True
        ).start()


def _close_dropped_shell(shell: ThreadedShell, timeout: float) -> None:
    unsent, unknown, _ = close_shell(shell, timeout)
    warn_unsettled(unsent, unknown)
