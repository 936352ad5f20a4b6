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
from ringlog.client.connection.exit_hooks import (
    EXIT_CLOSE_S,
    register_exit_hook,
    register_with_multiprocessing,
)
from ringlog.client.connection.session import Session, new_client_id
from ringlog.client.connection.shell import not_picklable_error
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
"""They outlive their clients where those were dropped, until the collector finds them."""
_parents: list[Session] = []
"""Sessions of the process we were forked from: freeing their sockets here would disturb it."""


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
    """Make a client; options as in ringlog.connect. `await` it or enter it to have `wait` respected."""
    options = ClientOptions(url, client_id, key, timeout_ms, transport)
    wait = None if wait is None else check_close_timeout(wait, "wait")
    return Client(options, wait=wait, reconnect=check_bool(reconnect, "reconnect"))


class Client(Operations):
    """One connection to one engine, for one loop. `async with connect(…) as client`."""

    def __init__(self, options: ClientOptions, *, wait: float | None, reconnect: bool) -> None:
        self._options = options
        self._wait = wait
        self._reconnect = reconnect
        self._node = options.client_id or new_client_id()
        super().__init__(LoopShell(partial(_new_session, options, self._node, reconnect)))
        _live.add(self)
        _shells.add(self._shell)
        register_with_multiprocessing()

    # -- how it is ----------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """How this client and its engine stand."""
        if self._shell.is_closed:
            return ClientState.CLOSED
        session = self._shell.session_or_none
        return session.state if session is not None else ClientState.CONNECTING

    def health(self) -> ClientHealth:
        """Everything a liveness check may ask."""
        return self._shell.session.health()

    def events(self) -> Iterator[ClientEvent]:
        """What happened to the connection, oldest first; the last 256."""
        session = self._shell.session_or_none
        return iter(list(session.events) if session is not None else [])

    @property
    def transport(self) -> Transport:
        """How it talks to the engine; `ring` where that is not decided before the engine was met."""
        session = self._shell.session_or_none
        if session is not None:
            return session.transport
        return "ring" if self._options.transport == "auto" else self._options.transport

    @property
    def client_id(self) -> str:
        """This client's name as the engine knows it."""
        return self._node

    @property
    def connection(self) -> Session:
        """What readers need."""
        return self._shell.session

    # -- the end ------------------------------------------------------------------------------------

    async def close(self, timeout: float = 10.0) -> CloseReport:
        """Send what was gathered, wait up to `timeout` seconds, end. Says what was not delivered.

        Readers and tailers end with it and let go of their files; what they handed out stays valid.
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

    # -- inside -------------------------------------------------------------------------------------

    def _restart_in_child(self) -> None:
        self._node = self._options.client_id or new_client_id()
        parents = self._shell.restart_in_child(
            partial(_new_session, self._options, self._node, self._reconnect)
        )
        if parents is not None:
            _parents.append(parents)
        self._appenders.clear()
        for producer in list(self._producers):
            producer.restart_in_child()
        for queue in list(self._queues):
            queue.restart_in_child()


def _new_session(options: ClientOptions, node: str, reconnect: bool, fds: FdSet) -> Session:
    # It knows nothing of the client: that ends when nobody has it any more.
    return Session(
        options.address, client_id=node, timeout_ms=options.timeout_ms,
        fds=fds, transport=options.transport, secret_key=options.secret_key, reconnect=reconnect,
    )  # fmt: skip


def _restart_all_in_child() -> None:
    for client in list(_live):
        client._restart_in_child()
    for shell in list(_shells):
        parents = shell.restart_in_child()  # Of a client that was dropped; of the others there is none.
        if parents is not None:
            _parents.append(parents)


def _finish_all() -> None:
    """At the end of the process: what was sent by clients that were not closed in their loop."""
    for shell in list(_shells):
        # A loop that is not closed may run in another thread, until the very end.
        if shell.is_orphaned:
            shell.close_orphaned(EXIT_CLOSE_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_all_in_child)
register_exit_hook(_finish_all)
