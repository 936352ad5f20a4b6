"""The other HTTP gateways of the engine, as one of them sees them: requests to them, and the socket for
theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from ringlog.aio import Client
from ringlog.board.board import Board, ProcessSlot
from ringlog.board.layout import ProcessState
from ringlog.board.processes import http_gateway_slot, http_gateway_socket
from ringlog.envelope import messages as m
from ringlog.envelope.refusal import error_reply
from ringlog.envelope.wire import Envelope
from ringlog.errors import Refused, RinglogError, Throttled
from ringlog.limits import HTTP_SIBLING_MS_MAX, HTTP_SIBLING_REQUESTS_MAX
from ringlog.link.futures import Steps
from ringlog.link.local_links import LocalLinks
from ringlog.link.peer import MS, Peer
from ringlog.link.peer_request import PeerReply
from ringlog.runtime.router_socket import RouterSocket

Answer = Callable[[m.Message], Awaitable[PeerReply]]
Take = Callable[[int], m.Message | None]
_REQUESTS_PER_TURN = 64


class Siblings:
    """The other gateways. With one gateway there are none, and no socket."""

    def __init__(self, number: int, processes: int, shm_dir: str, board: Board, client: Client) -> None:
        """`number` is that of this gateway, one of `processes`. `client` has the connections."""
        self.number: int = number
        self.processes: int = processes
        self.pages: dict[int, ProcessSlot] = {
            n: board.process(http_gateway_slot(n)) for n in range(processes) if n != number
        }
        """Page of each other gateway on the board, by its number."""
        self._shm_dir, self._client = shm_dir, client
        self._router: RouterSocket | None = None
        self._is_turn_due = False
        self._tasks: set[asyncio.Task[None]] = set()
        """Requests that are being answered. At most HTTP_SIBLING_REQUESTS_MAX."""
        self._telling: dict[tuple[int, Take], asyncio.Task[None]] = {}

    def is_ready(self, number: int) -> bool:
        """Whether another gateway serves."""
        return self.pages[number].state == ProcessState.READY

    def is_given_up(self, number: int) -> bool:
        """Whether another gateway will not run again before the next start of the engine."""
        return self.pages[number].state == ProcessState.GIVEN_UP

    # -- requests to others ---------------------------------------------------------------------------

    async def ask(self, number: int, message: m.Message) -> PeerReply:
        """Send a request to another gateway and return its reply. It is sent again if the connection ends.

        Raises:
            Refused: The other gateway refuses it, or Throttled: too many have no reply.
            ConnectionTrouble: There is no reply within HTTP_SIBLING_MS_MAX.
        """
        session = self._client.connection
        peer = cast("LocalLinks", session.links).http_gateway(number, self._shm_dir)
        if peer.open_requests >= HTTP_SIBLING_REQUESTS_MAX:
            raise Throttled("the other HTTP gateway is too slow", max=HTTP_SIBLING_REQUESTS_MAX)
        deadline_ns = session.clock.monotonic_ns() + HTTP_SIBLING_MS_MAX * MS
        return await self._client.run(_asked(peer, message, deadline_ns))

    def tell(self, number: int, take: Take) -> None:
        """Send another gateway the notices that `take(number)` returns, until it returns None.

        One notice at most has no reply: what comes meanwhile waits at `take`. If the other gateway does not
        answer, it is dropped.
        """
        if (number, take) not in self._telling:
            self._telling[number, take] = asyncio.ensure_future(self._told(number, take))

    async def _told(self, number: int, take: Take) -> None:
        is_answering = True
        try:
            while (notice := take(number)) is not None:
                is_answering = is_answering and await self._is_answered(number, notice)
        finally:
            del self._telling[number, take]

    async def _is_answered(self, number: int, notice: m.Message) -> bool:
        try:
            await self.ask(number, notice)
        except RinglogError:
            return False
        return True

    # -- requests of others ---------------------------------------------------------------------------

    def serve(self, answer: Answer) -> None:
        """Answer the requests of the others, if there are any, until `close`."""
        if self.pages:
            self._answer, self._loop = answer, asyncio.get_running_loop()
            self._router = RouterSocket(http_gateway_socket(self._shm_dir, self.number))
            self._loop.add_reader(self._router.fileno(), self._receive)
            self._receive()

    def guard(self, now_ns: int) -> None:
        """Accept no connections while descriptors are scarce. Call it now and then."""
        if self._router is not None:
            self._router.guard(now_ns)

    def _receive(self) -> None:
        """Begin to answer requests, each in a task of its own: one that waits delays no other."""
        self._is_turn_due = False
        router = self._router
        if router is None:
            return
        for client, envelope, _ in router.receive(_REQUESTS_PER_TURN):
            if len(self._tasks) >= HTTP_SIBLING_REQUESTS_MAX:
                busy = Throttled("too many requests", max=HTTP_SIBLING_REQUESTS_MAX)
                router.send(client, error_reply(busy), envelope.corr)
                continue
            task = asyncio.ensure_future(self._reply(router, client, envelope))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._look_again(router)

    async def _reply(self, router: RouterSocket, client: bytes, envelope: Envelope) -> None:
        try:
            reply = await self._answer(envelope.message)
        except Refused as e:
            reply = PeerReply(error_reply(e))
        router.send(client, reply.message, envelope.corr, reply.attachment)
        self._look_again(router)

    def _look_again(self, router: RouterSocket) -> None:
        """Continue soon if a request waits. Receiving and sending may have consumed its wake-up."""
        if not self._is_turn_due and router.has_input():
            self._is_turn_due = True
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Answer and tell nothing any more. The client closes its connections itself."""
        for task in (*self._tasks, *self._telling.values()):
            task.cancel()
        if self._router is not None:
            self._loop.remove_reader(self._router.fileno())
            router, self._router = self._router, None
            router.close()


def _asked(peer: Peer, message: m.Message, deadline_ns: int) -> Steps[PeerReply]:
    reply: PeerReply = yield peer.request(message, deadline_ns, is_patient=False)
    return reply
