"""Requests of one actor to another, one at a time: compactor, reclaimer and relocator to the shards.

For loops that do one thing after the other and may wait for an answer. (Clients and the gateway, which
never wait, use link/peer.py.) A connection is made for the first request and kept. It never reconnects by
itself: when it ends, the request that was open fails with NotReady, and whether it was carried out is
unknown, so that every request sent this way must be harmless when it is sent twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import zmq

from ringlog.board.processes import shard_socket
from ringlog.clock import Clock, SystemClock
from ringlog.envelope.messages import ErrorReply, Message
from ringlog.envelope.wire import EnvelopeInvalid, decode, encode
from ringlog.errors import NotReady, RequestTimeout, ShuttingDown, error_from_status
from ringlog.limits import MESSAGE_BYTES_MAX

TIMEOUT_S = 30.0
CONNECT_S = 1.0
_NS_PER_S = 1_000_000_000
_SLICE_MS = 200
"""How soon the end of a connection, or of the time, is noticed while a request is open."""

M = TypeVar("M", bound=Message)


class RequesterReply(NamedTuple, Generic[M]):
    """A reply and the part attached to it; empty when there was none."""

    message: M
    attachment: memoryview


class StopSignal(Protocol):
    """Whether the loop is to end: signals.StopFlag, or a threading.Event for a loop beside the main one."""

    def is_set(self) -> bool: ...


class Requester:
    """Requests to one process. For one thread."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        *,
        stop: StopSignal | None = None,
        beat: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`name` is for people. A wait calls `beat` and looks at `stop` several times a second."""
        self.name = name
        self._endpoint = endpoint
        self._stop, self._beat = stop, beat
        self._clock = clock or SystemClock()
        self._context = _context_with_threads()
        self._socket: zmq.Socket[bytes] | None = None
        self._corr = random.getrandbits(48) << 8

    def ask(
        self, message: Message, wanted: type[M], *, attachment: Any = None, timeout_s: float = TIMEOUT_S
    ) -> RequesterReply[M]:
        """Send one request and wait for its reply, which must be a `wanted`.

        Raises NotReady when the process is not there, is starting, or ended meanwhile (outcome unknown);
        RequestTimeout; ShuttingDown when our own stop was asked for; the Refused that it answered with;
        EnvelopeInvalid when the reply is something else.
        """
        self._corr += 1
        deadline_ns = self._after(timeout_s)
        try:
            socket = self._connected()
            parts = [encode(message, self._corr)] + ([] if attachment is None else [attachment])
            socket.send_multipart(parts, zmq.NOBLOCK)
            received = self._wait_for_reply(socket, deadline_ns)
        except zmq.Again:
            self._drop()
            raise self._gone() from None
        except (NotReady, RequestTimeout, ShuttingDown):
            # What is still on its way must not be taken for the answer to the next request.
            self._drop()
            raise
        return self._open(received, wanted)

    def close(self) -> None:
        """End the connection for good."""
        self._drop()
        self._context.term()

    def _drop(self) -> None:
        """End the connection; the next request makes a new one."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def _connected(self) -> zmq.Socket[bytes]:
        if self._socket is not None and not self._events(self._socket) & zmq.POLLOUT:
            self._drop()
        if self._socket is None:
            self._connect()
        assert self._socket is not None
        deadline_ns = self._after(CONNECT_S)
        while not self._socket.poll(_SLICE_MS, zmq.POLLOUT):
            self._look_up()
            if self._clock.monotonic_ns() >= deadline_ns:
                raise self._gone()
        return self._socket

    def _connect(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.connect(self._endpoint)
        self._socket = socket

    def _wait_for_reply(self, socket: zmq.Socket[bytes], deadline_ns: int) -> list[zmq.Frame]:
        while True:
            while not socket.poll(_SLICE_MS):
                self._look_up()
                if not self._events(socket) & (zmq.POLLOUT | zmq.POLLIN):
                    raise self._gone()
                if self._clock.monotonic_ns() >= deadline_ns:
                    raise RequestTimeout(f"{self.name} did not answer", outcome="unknown")
            parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if decode(parts[0].buffer, bytes_max=MESSAGE_BYTES_MAX).corr == self._corr:
                return parts

    def _after(self, seconds: float) -> int:
        return self._clock.monotonic_ns() + round(seconds * _NS_PER_S)

    def _look_up(self) -> None:
        if self._beat is not None:
            self._beat()
        if self._stop is not None and self._stop.is_set():
            raise ShuttingDown("told to stop while a request was open", outcome="unknown", to=self.name)

    def _open(self, parts: list[zmq.Frame], wanted: type[M]) -> RequesterReply[M]:
        message = decode(parts[0].buffer, bytes_max=MESSAGE_BYTES_MAX).message
        if isinstance(message, ErrorReply):
            raise error_from_status(message.status, message.message, message.detail)
        if not isinstance(message, wanted):
            raise EnvelopeInvalid("unexpected reply", kind=type(message).__name__, wanted=wanted.__name__)
        return RequesterReply(message, parts[1].buffer if len(parts) > 1 else memoryview(b""))

    def _gone(self) -> NotReady:
        return NotReady(f"{self.name} is not there", outcome="unknown", endpoint=self._endpoint)

    @staticmethod
    def _events(socket: zmq.Socket[bytes]) -> int:
        return cast(int, socket.getsockopt(zmq.EVENTS))


def _context_with_threads() -> zmq.Context[zmq.Socket[bytes]]:
    """A context that has its threads.

    They are made with its first socket, and libzmq (4.3.5) ends the process when it can make none. Who starts
    may end of that; who has long been at work may not, for a lost connection.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.socket(zmq.DEALER).close(0)
    return context


class ShardRequests:
    """One Requester a shard of an engine."""

    def __init__(
        self,
        shm_dir: str,
        shards: int,
        *,
        stop: StopSignal | None = None,
        beat: Callable[[], None] | None = None,
    ) -> None:
        self._requesters = [
            Requester(f"shard {shard}", shard_socket(shm_dir, shard), stop=stop, beat=beat)
            for shard in range(shards)
        ]

    def ask(
        self,
        shard: int,
        message: Message,
        wanted: type[M],
        *,
        attachment: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> RequesterReply[M]:
        """Ask one shard; see Requester.ask."""
        return self._requesters[shard].ask(message, wanted, attachment=attachment, timeout_s=timeout_s)

    def close(self) -> None:
        """End every connection."""
        for requester in self._requesters:
            requester.close()
