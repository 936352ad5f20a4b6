"""Client: the synchronous client."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from ringlog.client.connection.client_options import ClientOptions
from ringlog.client.connection.exit_hooks import (
    EXIT_CLOSE_S,
    register_exit_hook,
    register_with_multiprocessing,
    warn_unsettled,
)
from ringlog.client.connection.finalizer import close_dropped, close_on_finalize, close_shell, forget_in_child
from ringlog.client.connection.green_threads import check_green_threads
from ringlog.client.connection.locked_connection import LockedConnection
from ringlog.client.connection.session import Session, new_client_id
from ringlog.client.connection.shell import ThreadedShell, not_picklable_error
from ringlog.client.operations import Operations
from ringlog.client.requests.results import ClientEvent, ClientHealth, ClientState, CloseReport
from ringlog.client.requests.validation import (
    check_bool,
    check_close_timeout,
    check_sequence,
    check_str,
    check_timeout,
)
from ringlog.client.requests.validation import producer_id as checked_producer_id
from ringlog.client.write.producer_options import parse_durability
from ringlog.cores import import_in_thread
from ringlog.errors import UsageError
from ringlog.link.peer import FdSet
from ringlog.link.protocol import Transport
from ringlog.types import Durability

if TYPE_CHECKING:
    from ringlog.client.watch import Watch
    from ringlog.client.write.explicit_sequence_producer import NumberedProducer

T = TypeVar("T")
log = logging.getLogger("ringlog.client")
log.addHandler(logging.NullHandler())
_live: weakref.WeakSet[Client] = weakref.WeakSet()
_parents: list[Session] = []
"""Sessions of the process we were forked from: freeing their sockets here would disturb it."""


def open_client(
    url: str | None,
    *,
    client_id: str | None,
    key: str | None,
    timeout_ms: int | None,
    wait: float | None,
    reconnect: bool,
    transport: Transport | Literal["auto"],
) -> Client:
    """Open a client: see `ringlog.connect`."""
    check_green_threads()
    options = ClientOptions(url, client_id, key, timeout_ms, transport)
    wait = None if wait is None else check_close_timeout(wait, "wait")
    client = Client(options, reconnect=check_bool(reconnect, "reconnect"))
    if wait is not None:
        try:
            client.wait_ready(wait)
        except BaseException:
            client.close(0)
            raise
    return client


class Client(Operations):
    """One connection to one engine. Context manager, thread-safe, reopens itself after fork()."""

    connection: LockedConnection
    """What readers need."""

    def __init__(self, options: ClientOptions, *, reconnect: bool = True) -> None:
        self._options = options
        self._reconnect = reconnect
        super().__init__(ThreadedShell(partial(_new_session, options, reconnect)))
        close_on_finalize(self, self._shell)
        self.connection = LockedConnection(self._shell)
        _live.add(self)
        register_with_multiprocessing()

    # -- how it is ----------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """How this client and its engine stand, looked at now."""
        with self._shell.lock:
            return self._shell.poll_session().state

    def health(self) -> ClientHealth:
        """Everything a liveness check may ask."""
        with self._shell.lock:
            return self._shell.poll_session().health()

    def events(self) -> Iterator[ClientEvent]:
        """What happened to the connection, oldest first; the last 256."""
        with self._shell.lock:
            return iter(list(self._shell.poll_session().events))

    @property
    def client_id(self) -> str:
        """This client's name as the engine knows it."""
        return self._shell.session.client_id

    @property
    def transport(self) -> Transport:
        """How it talks to the engine; `ring` where that is not decided before the engine was met."""
        return self._shell.session.transport

    # -- what threads alone have --------------------------------------------------------------------

    def numbered_producer(
        self, topic: str, producer_id: int, *, durability: Durability | str | None = None
    ) -> NumberedProducer:
        """Send encoded frames under a producer id and numbers of the caller's, who may resume after a crash.

        The topic has to exist. Nothing is ever tried again under another number: see NumberedProducer.
        """
        import_in_thread("ringlog.client.write.explicit_sequence_producer")
        from ringlog.client.write.explicit_sequence_producer import NumberedProducer

        topic, producer_id = check_str(topic, "topic"), checked_producer_id(producer_id)
        return NumberedProducer(self._shell, topic, producer_id, parse_durability(durability), self)

    def ready_watches(self, watches: Sequence[Watch], timeout: float | None = None) -> list[Watch]:
        """Those of this client's watches whose `next(0)` has something to look at, for one thread with many.

        Waits until there is one; an empty list after `timeout` seconds.
        """
        timeout = check_timeout(timeout, "timeout")
        watches = our_watches(watches)
        if self._shell.session.delivery.is_return_overdue:
            with self._shell.checked_lock, self._shell.guarded_session as session:
                session.delivery.send_returns()
        ready = [watch for watch in watches if watch.has_news]
        if not ready:
            subscriptions = [watch.open().subscription for watch in watches]
            with self._shell.checked_lock, self._shell.guarded_session as session:
                news = session.delivery.wait_for_work(*subscriptions)
            self._shell.wait(news, timeout)
            ready = [watch for watch in watches if watch.has_news]
        return ready

    # -- the end ------------------------------------------------------------------------------------

    def close(self, timeout: float = 10.0) -> CloseReport:
        """Send what was gathered, wait up to `timeout` seconds, end. Says what was not delivered.

        Readers and tailers end with it and let go of their files; what they handed out stays valid. Jobs that
        were claimed and not begun are given back.
        """
        shell, timeout = self._shell, check_close_timeout(timeout)
        if shell.is_closed:
            return CloseReport(0, 0, 0)
        if not shell.interrupted_by:
            for queue in list(self._queues):
                queue.close(timeout)
        report = CloseReport(*close_shell(shell, timeout))
        for reader in list(self._readers):
            reader.close()
        _live.discard(self)
        return report

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise not_picklable_error()

    def __repr__(self) -> str:
        return f"<Client {self._options.address} {self._shell.session.state.value}>"

    # -- inside -------------------------------------------------------------------------------------

    def _restart_in_child(self) -> None:
        _parents.append(self._shell.restart_in_child())
        self._appenders.clear()
        session = self._shell.session
        session.record_event("forked", pid=os.getpid())
        for producer in list(self._producers):
            producer.restart_in_child(session)
        for queue in list(self._queues):
            queue.restart_in_child()


def _new_session(options: ClientOptions, reconnect: bool, fds: FdSet) -> Session:
    return Session(
        options.address, client_id=options.client_id or new_client_id(), timeout_ms=options.timeout_ms,
        fds=fds, transport=options.transport, secret_key=options.secret_key, reconnect=reconnect,
    )  # fmt: skip


def our_watches(watches: Any) -> list[Watch]:
    """Watches that were given; raises UsageError for anything else."""
    from ringlog.client.watch import Watch

    found = list(check_sequence(watches, "watches"))
    for watch in found:
        if not isinstance(watch, Watch):
            raise UsageError(f"watches must be watches of this client, got {type(watch).__name__}")
    return found


def _restart_all_in_child() -> None:
    forget_in_child()
    for client in list(_live):
        client._restart_in_child()


def _close_all() -> None:
    """At the end of the process: what was sent and not flushed still gets a moment."""
    for client in list(_live):
        report = client.close(EXIT_CLOSE_S)
        warn_unsettled(report.unsent, report.unknown)
    close_dropped(EXIT_CLOSE_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_all_in_child)
register_exit_hook(_close_all)
