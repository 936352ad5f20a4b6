"""connect() and Client for asyncio."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

from ringlog.aio.operations import Operations
from ringlog.aio.shell import LoopShell
from ringlog.client.connection.client_options import ClientOptions
from ringlog.client.connection.descriptor_set import not_picklable_error
from ringlog.client.connection.exit_hooks import (
    EXIT_CLOSE_S,
    call_each,
    register_exit_hook,
    register_with_multiprocessing,
)
from ringlog.client.connection.session import Session, new_client_id
from ringlog.client.requests.results import ClientEvent, ClientHealth, ClientState, CloseReport
from ringlog.client.requests.validation import (
    check_bool,
    check_close_timeout,
)
from ringlog.client.write.producer_core import ProducerCore
from ringlog.link.futures import gather
from ringlog.link.peer import FdSet
from ringlog.link.protocol import Transport

T = TypeVar("T")
_live: weakref.WeakSet[Client] = weakref.WeakSet()
_shells: weakref.WeakSet[LoopShell] = weakref.WeakSet()
"""Shells of all clients. A shell stays here after its client was dropped, until the garbage collector frees
it."""
_parents: list[Session] = []
"""Sessions of the parent process, kept after a fork. Freeing their sockets in the child would disturb the
parent."""


def connect(
    url: str | None = None,
    *,
    client_id: str | None = None,
    key: str | None = None,
    timeout_ms: int | None = None,
    wait: float | None = None,
    reconnect: bool = True,
    transport: Literal["auto", "ring", "ipc", "tcp"] = "auto",
) -> Client:
    """Create a client of one engine for the running event loop.

    `async with connect(…)` and `await connect(…)` wait for the engine if `wait` is set. Without either, the
    client connects at its first call.

    Args:
        url: `ringlog:///run/dir` on this host, or `ringlog://host:port?server_key=…`. Default: RINGLOG_URL,
            else ./ringlog-data/run.
        client_id: Name of this client in the engine's logs and leases. Default: a random name.
        key: Secret key of a TCP connection. Default: the content of the file RINGLOG_KEY_FILE, or
            RINGLOG_KEY.
        timeout_ms: Timeout of every request and ticket, in milliseconds. Default: RINGLOG_TIMEOUT_MS, or
            10,000.
        wait: Seconds to wait until the engine answers. Default: do not wait.
        reconnect: False closes the client when its engine goes away. Waiting calls then raise NotConnected.
        transport: Connection to the engine. `auto` uses shared-memory rings on the engine's host.

    Returns:
        The client. It is an awaitable and an async context manager.

    Raises:
        UsageError: An option is invalid.
        NotConnected: On entering or awaiting: the engine did not answer within `wait` seconds.

    Example:
        async with ringlog.aio.connect(wait=5.0) as client:
            await client.append("orders", b"...")
    """
    options = ClientOptions(url, client_id, key, timeout_ms, transport)
    wait = None if wait is None else check_close_timeout(wait, "wait")
    return Client(options, wait=wait, reconnect=check_bool(reconnect, "reconnect"))


class Client(Operations):
    """Asyncio client of one engine, for one event loop.

    Example:
        async with connect() as client:
            await client.append("orders", b"...")
            page = await client.read("orders")
    """

    def __init__(self, options: ClientOptions, *, wait: float | None, reconnect: bool) -> None:
        self._options = options
        self._wait = wait
        self._reconnect = reconnect
        self._node = options.client_id or new_client_id()
        super().__init__(LoopShell(partial(_new_session, options, self._node, reconnect)))
        _live.add(self)
        _shells.add(self._shell)
        register_with_multiprocessing()

    # -- status -------------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """State of the connection to the engine."""
        if self._shell.is_closed:
            return ClientState.CLOSED
        session = self._shell.session_or_none
        return session.state if session is not None else ClientState.CONNECTING

    def health(self) -> ClientHealth:
        """Return a snapshot of the connection for a liveness check."""
        return self._shell.session.health()

    def events(self) -> Iterator[ClientEvent]:
        """Return the last 256 connection events, oldest first."""
        session = self._shell.session_or_none
        return iter(list(session.events) if session is not None else [])

    @property
    def transport(self) -> Transport:
        """Transport to the engine. With `transport="auto"` it is `ring` until the first connection
        decides."""
        session = self._shell.session_or_none
        if session is not None:
            return session.transport
        return "ring" if self._options.transport == "auto" else self._options.transport

    @property
    def client_id(self) -> str:
        """Name of this client in the engine's logs and leases."""
        return self._node

    @property
    def connection(self) -> Session:
        """Session that readers use. Raises WrongLoop in any other event loop than the client's own."""
        return self._shell.session

    # -- closing ------------------------------------------------------------------------------------

    async def close(self, timeout: float = 10.0) -> CloseReport:
        """Flush buffered records, then close the client. Idempotent.

        Closing also closes the client's readers, tailers, queues and groups and releases their files. Pages
        and batches that they returned stay valid. Unstarted jobs return to their queues.

        Args:
            timeout: Longest time to wait for each of these steps, in seconds: the return of unstarted jobs,
                the settlement of records, the cancellation of claims.

        Returns:
            Counts of the records and requests that were not settled.
        """
        shell, timeout = self._shell, check_close_timeout(timeout)
        if shell.is_closed:
            return CloseReport(0, 0, 0)
        session = shell.session_or_none
        if session is None:
            shell.close()
            return CloseReport(0, 0, 0)
        for queue in list(self._queues):
            await queue.close(timeout)
        cores: list[ProducerCore] = list(shell.session.producer_cores)
        try:
            await shell.result(gather([core.wait_settled() for core in cores]), timeout)
        except TimeoutError:
            session.record_event("close_timeout", timeout_s=timeout)
        await shell.wait_claims_cancelled(timeout)
        left = [core.fail_unsettled() for core in cores]
        requests = session.links.open_requests
        shell.close()
        for reader in list(self._readers):
            reader.close()
        _live.discard(self)
        return CloseReport(sum(unsent for unsent, _ in left), sum(unknown for _, unknown in left), requests)

    def __reduce__(self) -> NoReturn:
        raise not_picklable_error()

    def __await__(self) -> Generator[Any, None, Client]:
        return self._begin().__await__()

    async def __aenter__(self) -> Client:
        return await self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _begin(self) -> Client:
        if self._wait is not None:
            try:
                await self.wait_ready(self._wait)
            except BaseException:
                await self.close(0)
                raise
        return self

    # -- internals ----------------------------------------------------------------------------------

    def _restart_in_child(self) -> None:
        self._node = self._options.client_id or new_client_id()
        parents = self._shell.restart_in_child(
            partial(_new_session, self._options, self._node, self._reconnect)
        )
        if parents is not None:
            _parents.append(parents)
        self._appenders.clear()
        self._shared_reads.restart_in_child()
        for producer in list(self._producers):
            producer.restart_in_child()
        for queue in list(self._queues):
            queue.restart_in_child()


def _new_session(options: ClientOptions, node: str, reconnect: bool, fds: FdSet) -> Session:
    # A session must not reference its client, so that a dropped client can be garbage collected.
    return Session(
        options.address, client_id=node, timeout_ms=options.timeout_ms,
        fds=fds, transport=options.transport, secret_key=options.secret_key, reconnect=reconnect,
    )  # fmt: skip


def _restart_all_in_child() -> None:
    for client in list(_live):
        client._restart_in_child()
    for shell in list(_shells):
        parents = shell.restart_in_child()  # Only shells of dropped clients still have a parent session.
        if parents is not None:
            _parents.append(parents)


def _finish_all() -> None:
    """At process exit, settle what clients sent that were not closed in their loop."""
    # A loop that is not closed may still run in another thread.
    orphaned = [shell for shell in list(_shells) if shell.is_orphaned]
    call_each(partial(shell.close_orphaned, EXIT_CLOSE_S) for shell in orphaned)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_all_in_child)
register_exit_hook(_finish_all)
