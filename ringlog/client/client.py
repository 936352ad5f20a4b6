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
from ringlog.client.connection.descriptor_set import not_picklable_error
from ringlog.client.connection.exit_hooks import (
    EXIT_CLOSE_S,
    call_each,
    register_exit_hook,
    register_with_multiprocessing,
    warn_unsettled,
)
from ringlog.client.connection.finalizer import close_dropped, close_on_finalize, close_shell, forget_in_child
from ringlog.client.connection.green_threads import check_green_threads
from ringlog.client.connection.locked_connection import LockedConnection
from ringlog.client.connection.session import Session, new_client_id
from ringlog.client.connection.shell import ThreadedShell
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
from ringlog.compilation import import_in_thread
from ringlog.errors import UsageError
from ringlog.link.peer import FdSet
from ringlog.link.protocol import Transport
from ringlog.types import Durability

if TYPE_CHECKING:
    from ringlog.client.watch import Watch
    from ringlog.client.write.explicit_sequence_producer import NumberedProducer

T = TypeVar("T")
log: logging.Logger = logging.getLogger("ringlog.client")
log.addHandler(logging.NullHandler())
_live: weakref.WeakSet[Client] = weakref.WeakSet()
_parents: list[Session] = []
"""Sessions of the parent process, kept after a fork. Freeing their sockets in the child would disturb the
parent."""


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
    """Open a client. See `ringlog.connect`."""
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
    """Client of one engine: a thread-safe context manager that reopens itself in a forked child.

    Example:
        with ringlog.connect() as client:
            client.append("orders", b"...")
            page = client.read("orders")
    """

    connection: LockedConnection
    """Connection that readers use. Thread-safe."""

    def __init__(self, options: ClientOptions, *, reconnect: bool = True) -> None:
        self._options = options
        self._reconnect = reconnect
        super().__init__(ThreadedShell(partial(_new_session, options, reconnect)))
        close_on_finalize(self, self._shell)
        self.connection = LockedConnection(self._shell)
        _live.add(self)
        register_with_multiprocessing()

    # -- status -------------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """State of the connection to the engine. Handles received data first, so the value is current."""
        with self._shell.lock:
            return self._shell.poll_session().state

    def health(self) -> ClientHealth:
        """Return a snapshot of the connection for a liveness check."""
        with self._shell.lock:
            return self._shell.poll_session().health()

    def events(self) -> Iterator[ClientEvent]:
        """Return the last 256 connection events, oldest first."""
        with self._shell.lock:
            return iter(list(self._shell.poll_session().events))

    @property
    def client_id(self) -> str:
        """Name of this client in the engine's logs and leases."""
        return self._shell.session.client_id

    @property
    def transport(self) -> Transport:
        """Transport to the engine. With `transport="auto"` it is `ring` until the first connection
        decides."""
        return self._shell.session.transport

    # -- only in the synchronous client -------------------------------------------------------------

    def numbered_producer(
        self, topic: str, producer_id: int, *, durability: Durability | str | None = None
    ) -> NumberedProducer:
        """Open a producer of encoded frames whose producer id and frame numbers the caller chooses.

        A program can resume it after a crash without duplicates. The client never resends a frame under
        another number. See NumberedProducer.

        Args:
            topic: Existing topic.
            producer_id: Id of the producer, 1 to 2**64 - 1.
            durability: Durability class of the frames, if stronger than the topic's.

        Returns:
            The producer.
        """
        import_in_thread("ringlog.client.write.explicit_sequence_producer")
        from ringlog.client.write.explicit_sequence_producer import NumberedProducer

        topic, producer_id = check_str(topic, "topic"), checked_producer_id(producer_id)
        return NumberedProducer(self._shell, topic, producer_id, parse_durability(durability), self)

    def ready_watches(self, watches: Sequence[Watch], timeout: float | None = None) -> list[Watch]:
        """Return the watches for which `next(0)` has work. Lets one thread serve many watches.

        Args:
            watches: Watches of this client.
            timeout: Longest time to wait for a watch with work, in seconds. None waits without a limit.

        Returns:
            The watches with work; an empty list after `timeout`.
        """
        timeout = check_timeout(timeout, "timeout")
        watches = our_watches(watches)
        if self._shell.session.delivery.returns.is_overdue:
            with self._shell.checked_lock, self._shell.guarded_session as session:
                session.delivery.returns.send()
        ready = [watch for watch in watches if watch.has_news]
        if not ready:
            subscriptions = [watch.open().subscription for watch in watches]
            with self._shell.checked_lock, self._shell.guarded_session as session:
                news = session.delivery.wait_for_work(*subscriptions)
            self._shell.wait(news, timeout)
            ready = [watch for watch in watches if watch.has_news]
        return ready

    # -- closing ------------------------------------------------------------------------------------

    def close(self, timeout: float = 10.0) -> CloseReport:
        """Flush buffered records, then close the client. Idempotent.

        Closing also closes the client's readers, tailers, queues and groups and releases their files. Pages
        and batches that they returned stay valid. Unstarted jobs return to their queues.

        Args:
            timeout: Longest time to wait for the return of unstarted jobs, and then for the settlement of
                records, in seconds.

        Returns:
            Counts of the records and requests that were not settled.
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

    # -- internals ----------------------------------------------------------------------------------

    def _restart_in_child(self) -> None:
        _parents.append(self._shell.restart_in_child())
        self._appenders.clear()
        self._shared_reads.restart_in_child()
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
    """Check a sequence of watches. Raises UsageError for anything else."""
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


def _close_at_exit(client: Client) -> None:
    report = client.close(EXIT_CLOSE_S)
    warn_unsettled(report.unsent, report.unknown)


def _close_all() -> None:
    """At process exit, wait up to EXIT_CLOSE_S for records that were sent and not settled."""
    call_each(partial(_close_at_exit, client) for client in list(_live))
    close_dropped(EXIT_CLOSE_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_all_in_child)
register_exit_hook(_close_all)
