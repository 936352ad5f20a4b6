"""The other HTTP gateways of the engine, as one of them sees them."""

from __future__ import annotations

import asyncio

from ringlog import shm
from ringlog.actors.http_gateway.siblings.connections import Answer, Hear, SiblingAnswers, SiblingLink
from ringlog.actors.http_gateway.siblings.messages import SiblingNotice, SiblingReply, SiblingRequest
from ringlog.board.board import Board, ProcessSlot
from ringlog.board.layout import ProcessState
from ringlog.board.processes import http_gateway_slot, http_gateway_socket


class Siblings:
    """Requests and notices to the other gateways, and the socket for theirs. With one gateway there is
    none."""

    def __init__(self, number: int, processes: int, shm_dir: str, board: Board) -> None:
        """`number` is that of this gateway, one of `processes`."""
        self.number: int = number
        self.processes: int = processes
        self.pages: dict[int, ProcessSlot] = {
            n: board.process(http_gateway_slot(n)) for n in range(processes) if n != number
        }
        """Page of each other gateway on the board, by its number."""
        self._shm_dir = shm_dir
        self._links = {n: self._new_link(n) for n in self.pages}
        self._server: asyncio.AbstractServer | None = None
        self._opened: set[SiblingAnswers] = set()

    def _new_link(self, number: int) -> SiblingLink:
        page = self.pages[number]
        return SiblingLink(
            http_gateway_socket(self._shm_dir, number), lambda: page.state == ProcessState.GIVEN_UP
        )

    def is_ready(self, number: int) -> bool:
        """Whether another gateway serves."""
        return self.pages[number].state == ProcessState.READY

    def is_given_up(self, number: int) -> bool:
        """Whether another gateway will not run again before the next start of the engine."""
        return self.pages[number].state == ProcessState.GIVEN_UP

    async def serve(self, answer: Answer, hear: Hear) -> None:
        """Answer the requests and hear the notices of the others, if there are any. Raises OSError."""
        if not self.pages:
            return
        path = http_gateway_socket(self._shm_dir, self.number)
        shm.remove_file(path)  # That of a predecessor which was killed.
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: SiblingAnswers(answer, hear, self._opened), path)

    async def ask(self, number: int, request: SiblingRequest) -> SiblingReply:
        """Send a request to another gateway; see SiblingLink.ask. Raises OSError."""
        return await self._links[number].ask(request)

    def tell(self, number: int, notice: SiblingNotice) -> None:
        """Send a notice to another gateway. It may be lost."""
        self._links[number].tell(notice)

    def close(self) -> None:
        """End all connections, and accept none any more."""
        if self._server is not None:
            self._server.close()
        for opened in tuple(self._opened):
            opened.close()
        for link in self._links.values():
            link.close()
