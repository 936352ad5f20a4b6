"""An actor's control socket: the replies that are the same for every actor, and the wait for requests."""

from __future__ import annotations

import select
from collections.abc import Iterator

from ringlog import __version__
from ringlog.board.board import ProcessSlot
from ringlog.board.heartbeat import Heartbeat
from ringlog.board.layout import ProcessField
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.envelope.refusal import error_reply
from ringlog.envelope.wire import PROTOCOL, Envelope
from ringlog.errors import InvalidRequest
from ringlog.limits import HEARTBEAT_INTERVAL_MS
from ringlog.runtime.router_socket import RouterSocket


class ActorControlSocket(RouterSocket):
    """A RouterSocket that answers Ping and Hello itself and counts requests on the process slot."""

    def __init__(self, endpoint: str, boot: ActorBoot, slot: ProcessSlot) -> None:
        super().__init__(endpoint)
        self._boot, self._slot = boot, slot
        self._heartbeat = Heartbeat(slot)

    def beat(self, now_ns: int) -> None:
        """Update the heartbeat after a pass, and accept connections only while descriptors are free.

        `now_ns` is monotonic.
        """
        self._heartbeat.beat(now_ns)
        self.guard(now_ns)

    @property
    def passes(self) -> int:
        """Number of passes so far."""
        return self._heartbeat.passes

    def receive_requests(self, most: int) -> Iterator[tuple[bytes, Envelope, bytearray | None]]:
        """Yield requests like `receive`, except the requests that are answered here."""
        for client, envelope, attachment in self.receive(most):
            self._slot.add(ProcessField.REQUESTS, 1)
            answer = self._answer(envelope.message)
            if answer is None:
                yield client, envelope, attachment
            else:
                self.send(client, answer, envelope.corr)

    def _answer(self, message: m.Message) -> m.Message | None:
        boot = self._boot
        if isinstance(message, m.Ping):
            return m.Pong(boot.incarnation, self.passes)
        if isinstance(message, m.Hello):
            return m.Welcome(PROTOCOL, __version__, boot.engine_id, boot.shards, -1, boot.incarnation)
        return None

    def refuse(self, client: bytes, envelope: Envelope) -> None:
        """Refuse a request that this actor does not handle."""
        error = InvalidRequest(
            f"the {self._boot.kind} does not handle this kind of request", kind=envelope.kind
        )
        self.send(client, error_reply(error), envelope.corr)


class Sleeper:
    """Waits until a descriptor becomes readable, at most one heartbeat interval."""

    def __init__(self, *fds: int) -> None:
        self._poll = select.poll()
        for fd in fds:
            self._poll.register(fd, select.POLLIN)

    def sleep(self, now_ns: int, due_ns: int | None = None) -> None:
        """Sleep until a descriptor is readable or the monotonic time `due_ns` is reached."""
        wait_ms = HEARTBEAT_INTERVAL_MS
        if due_ns is not None:
            wait_ms = max(0, min(wait_ms, (due_ns - now_ns) // 1_000_000 + 1))
        self._poll.poll(wait_ms)
