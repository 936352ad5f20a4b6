"""Requests from one actor to another, one at a time: from compactor, reclaimer and relocator to the shards.

For loops that do one step at a time and may block. (Clients and the gateway never block and use
link/peer.py.) The first request makes the connection, which then stays open and never reconnects by itself.
When it ends, the open request fails with NotReady and its outcome is unknown. Every request that is sent this
way must therefore be idempotent.
"""

from __future__ import annotations

import random
import select
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import zmq

from ringlog.board.processes import shard_socket
from ringlog.clock import Clock, SystemClock
from ringlog.envelope.messages import ErrorReply, Message
from ringlog.envelope.wire import EnvelopeInvalid, decode, encode
from ringlog.errors import NotReady, RequestTimeout, ShuttingDown, error_from_status
from ringlog.limits import MESSAGE_BYTES_MAX
from ringlog.link.dealer_socket import DealerSocket

TIMEOUT_S = 30.0
CONNECT_S = 1.0
_NS_PER_S = 1_000_000_000
_SLICE_MS = 200
"""Interval in which a waiting request checks the connection, the deadline and the stop signal."""

M = TypeVar("M", bound=Message)


class RequesterReply(NamedTuple, Generic[M]):
    """A reply and its attachment, which is empty if there was none."""

    message: M
    attachment: memoryview


class StopSignal(Protocol):
    """Tells the loop to end: signals.StopFlag, or a threading.Event for a loop outside the main thread."""

    def is_set(self) -> bool: ...


class Requester:
    """Requests to one process, from one thread."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        *,
        stop: StopSignal | None = None,
        beat: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`name` is used in error texts. A waiting request calls `beat` and checks `stop` every 200 ms."""
        self.name = name
        self._endpoint = endpoint
        self._stop, self._beat = stop, beat
        self._clock = clock or SystemClock()
        self._context = _context_with_threads()
        self._socket: DealerSocket | None = None
        self._poll = select.poll()
        self._corr = random.getrandbits(48) << 8

    def ask(
        self, message: Message, wanted: type[M], *, attachment: Any = None, timeout_s: float = TIMEOUT_S
    ) -> RequesterReply[M]:
        """Send one request and wait for its reply, which must be a `wanted`.

        Raises NotReady if the process does not run, starts, or exited (outcome unknown); RequestTimeout;
        ShuttingDown if `stop` was set; the Refused of the reply; EnvelopeInvalid if the reply has another
        type.
        """
        self._corr += 1
        deadline_ns = self._after(timeout_s)
        try:
            socket = self._connected()
            if not socket.send(encode(message, self._corr), attachment):
                raise self._unavailable_error()
            received = self._wait_for_reply(socket, deadline_ns)
        except (NotReady, RequestTimeout, ShuttingDown):
            # A late reply must not be mistaken for the reply to the next request.
            self._drop()
            raise
        return self._open(*received, wanted)

    def close(self) -> None:
        """Close the connection. The Requester cannot be used any more."""
        self._drop()
        self._context.term()

    def _drop(self) -> None:
        """Close the connection. The next request makes a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> DealerSocket:
        if self._socket is not None and self._socket.state() != "up":
            self._drop()
        if self._socket is None:
            self._socket = DealerSocket(self._context, self._endpoint, None)
            self._poll = select.poll()
            for fd in self._socket.fds:
                self._poll.register(fd, select.POLLIN)
        deadline_ns = self._after(CONNECT_S)
        while self._socket.state() != "up":
            if self._clock.monotonic_ns() >= deadline_ns:
                raise self._unavailable_error()
            # Nothing can arrive yet. This consumes wake-ups of the socket itself, which would end each sleep.
            self._socket.receive()
            self._sleep()
        return self._socket

    def _wait_for_reply(self, socket: DealerSocket, deadline_ns: int) -> tuple[bytes, memoryview | None]:
        while True:
            state = socket.state()
            while (received := socket.receive()) is not None:
                if decode(received[0], bytes_max=MESSAGE_BYTES_MAX).corr == self._corr:
                    return received
            if state != "up":
                raise self._unavailable_error()
            if self._clock.monotonic_ns() >= deadline_ns:
                raise RequestTimeout(f"{self.name} did not answer", outcome="unknown")
            self._sleep()

    def _sleep(self) -> None:
        """Wait until something arrives, for one slice at most."""
        if not self._poll.poll(_SLICE_MS):
            self._check_stop()

    def _after(self, seconds: float) -> int:
        return self._clock.monotonic_ns() + round(seconds * _NS_PER_S)

    def _check_stop(self) -> None:
        if self._beat is not None:
            self._beat()
        if self._stop is not None and self._stop.is_set():
            raise ShuttingDown(
                f"stopped while a request to {self.name} was open", outcome="unknown", to=self.name
            )

    def _open(self, data: bytes, attachment: memoryview | None, wanted: type[M]) -> RequesterReply[M]:
        message = decode(data, bytes_max=MESSAGE_BYTES_MAX).message
        if isinstance(message, ErrorReply):
            raise error_from_status(message.status, message.message, message.detail)
        if not isinstance(message, wanted):
            raise EnvelopeInvalid(
                f"reply must be {wanted.__name__}, got {type(message).__name__}", kind=type(message).__name__,
                wanted=wanted.__name__,
            )  # fmt: skip
        return RequesterReply(message, memoryview(b"") if attachment is None else attachment)

    def _unavailable_error(self) -> NotReady:
        return NotReady(
            f"{self.name} does not run or is restarting", outcome="unknown", endpoint=self._endpoint
        )


def _context_with_threads() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context whose threads are running.

    libzmq creates them with the first socket and aborts the process if that fails (4.3.5). A process may
    abort at its start, but not later because a connection was lost.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.socket(zmq.DEALER).close(0)
    return context


class ShardRequests:
    """One Requester for each shard of an engine."""

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
        """Send a request to one shard; see Requester.ask."""
        return self._requesters[shard].ask(message, wanted, attachment=attachment, timeout_s=timeout_s)

    def close(self) -> None:
        """Close every connection."""
        for requester in self._requesters:
            requester.close()
