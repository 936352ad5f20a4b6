"""Peer: requests to one process, over one connection at a time.

A DEALER socket here never reconnects by itself. One socket is one connection: messages arrive in order, or
the connection ends and the Peer detects it. The Peer then creates a new socket and sends every unanswered
request again, in the old order and under the old number.

This keeps resends safe: on every connection the frames of a producer arrive in order, from the first
unanswered one on. A shard never receives a later frame before an earlier one that was lost. (A socket that
reconnects by itself may lose one request and deliver the next.)

A request ends with its reply or its deadline. If it `is_patient`, `not_ready` and `shutting_down` are no
final replies: the Peer sends it again after a pause. Every other reply goes to the caller.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from ringlog.clock import Clock
from ringlog.descriptors import (
    CONTEXT_DESCRIPTORS,
    SOCKET_DESCRIPTORS,
    can_open_descriptors,
    descriptor_limit_message,
    explain_unreachable,
)
from ringlog.envelope.messages import ErrorReply, Message
from ringlog.envelope.wire import EnvelopeInvalid, decode, encode, version_mismatch_message
from ringlog.errors import (
    NotConnected,
    RequestTimeout,
    RinglogError,
    VersionMismatch,
)
from ringlog.link.dealer_socket import Curve, DealerSocket
from ringlog.link.peer_request import FastPath, PeerReply, PendingRequest
from ringlog.link.timers import Timer, Timers

MS = 1_000_000
CONNECT_NS_MIN = 20 * MS
CONNECT_NS_MAX = 500 * MS
HANDSHAKE_NS_MAX = 5_000 * MS
"""Time limit of the key exchange of a TCP connection, which takes several round trips; the gateway uses the
same limit. A connection that is not established yet is retried sooner."""
RETRY_MS = 50
SILENCE_NS = 5_000 * MS
"""If requests are open and nothing arrives for this time, the Peer replaces the connection."""
LINE_BYTES_PER_S = 128 << 10
"""Lowest supported bandwidth, about 1 Mbit/s. Larger requests get more time accordingly."""


class FdSet(Protocol):
    """Watches descriptors for readability. The client's shell implements it."""

    def watch(self, fd: int) -> None:
        """Wake the owner when `fd` is readable."""
        ...

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; called before `fd` is closed."""
        ...


class Peer:
    """Requests to one process. Not thread-safe."""

    def __init__(
        self,
        name: str,
        *,
        context: zmq.Context[Any],
        timers: Timers,
        clock: Clock,
        fds: FdSet,
        curve: Curve | None = None,
        on_change: Callable[[Peer], None] | None = None,
        on_push: Callable[[Peer, PeerReply], None] | None = None,
    ) -> None:
        """`on_change` is called when the connection came up, ended or was refused.

        `on_push` is called with each unsolicited message."""
        self.name = name
        self.is_up: bool = False
        self.is_refused: bool = False
        """The other side did not admit the key of the last connection attempt."""
        self.unreachable_reason: str = ""
        """Why the Peer does not try to connect at present; "" = it tries."""
        self.last_heard_ns: int = 0
        self.connections: int = 0
        self.resent: int = 0
        self.fds: tuple[int, ...] = ()
        """Descriptors of the connection. The owner calls `pump` when one is readable."""
        self.fast_path: FastPath | None = None
        """Used for requests with `by_fast_path`."""
        self.fast_path_requests: int = 0
        """Number of requests that were sent through it and have no reply."""
        self._context, self._timers, self._clock, self._watched = context, timers, clock, fds
        self._curve = curve
        self._on_change = on_change
        self._on_push = on_push
        self._endpoint = ""
        self._socket: DealerSocket | None = None
        self._requests: dict[int, PendingRequest] = {}
        self._corr = random.getrandbits(48) << 8
        self._connect_ns = CONNECT_NS_MIN
        self._check: Timer | None = None
        self._connect_by_ns = 0
        self._is_receiving = False

    @property
    def open_requests(self) -> int:
        """Number of requests without a reply."""
        return len(self._requests)

    def set_endpoint(self, endpoint: str) -> None:
        """Connect to this endpoint; "" = disconnect. Open requests wait and are sent to it in order."""
        self._endpoint = endpoint
        self._drop()
        if endpoint:
            self._connect_ns = CONNECT_NS_MIN
            self._connect()

    def request(
        self,
        message: Message,
        deadline_ns: int,
        attachment: Any = None,
        *,
        is_patient: bool = True,
        by_fast_path: bool = False,
        is_awaited: bool = False,
    ) -> PendingRequest:
        """Send a request.

        The result is a PeerReply; it fails with a Refused, RequestTimeout or NotConnected.

        With `by_fast_path` it goes through the fast path, if there is one, and may overtake requests on the
        socket. With `is_awaited` the caller spins for the reply and calls `start_timer` before it sleeps.
        Until then the request has no timeout."""
        self._corr += 1
        corr = self._corr
        pending = PendingRequest(
            self, corr, type(message).__name__, encode(message, corr), attachment, is_patient, by_fast_path,
            deadline_ns,
        )  # fmt: skip
        self._requests[corr] = pending
        if not is_awaited:
            pending.timer = self._timers.call_at(deadline_ns, lambda: self._expire(corr))
        if self.is_up and not self._send(pending):
            self.pump()
        return pending

    def start_request_timer(self, pending: PendingRequest) -> None:
        """Start the timeout of this request."""
        corr = pending.corr
        if corr in self._requests:
            pending.timer = self._timers.call_at(pending.deadline_ns, lambda: self._expire(corr))
            if self.is_up and pending.was_sent:
                self._watch_for_silence()

    def close_fast_path(self, *, is_up: bool) -> None:
        """Stop using the fast path.

        If the connection `is_up`, its unanswered requests are sent through the socket.
        """
        self.fast_path, self.fast_path_requests = None, 0
        for pending in list(self._requests.values()):
            if not pending.is_on_fast_path:
                continue
            pending.is_on_fast_path = False
            if is_up and pending.retry is None:
                self.resent += 1
                pending.is_repeat = True
                self._send(pending)
        if is_up:
            self.pump()

    def send_oneway(self, message: Message, attachment: Any = None) -> None:
        """Send a message without a reply, if there is a connection. The message may be lost."""
        if self.is_up and self._socket is not None:
            self._socket.send(encode(message, 0), attachment)
            # Sending may have consumed the wake-up of a message.
            self.pump()

    def pump(self) -> bool:
        """Process what arrived and send what can be sent. Return True if anything happened."""
        socket = self._socket
        # A reply may cause a new request, which calls this function again. The outer call continues instead.
        if socket is None or self._is_receiving:
            return False
        is_up = socket.state() == "up"
        happened = self._receive()
        if self._socket is not socket:
            return True
        if is_up and not self.is_up:
            self._came_up()
            return True
        if self.is_up and not is_up:
            self._went_down()
            return True
        return happened

    def withdraw_requests(self, kind: str = "") -> list[PendingRequest]:
        """Remove and return all open requests, or those of one kind.

        The caller fails them (PendingRequest.fail_with).
        """
        withdrawn = [pending for pending in self._requests.values() if not kind or pending.kind == kind]
        for pending in withdrawn:
            del self._requests[pending.corr]
            self._finish(pending)
        return withdrawn

    def close(self, why: RinglogError | None = None) -> None:
        """Close the connection. Open requests fail, with `why` if it is given."""
        self._endpoint = ""
        self._drop()
        requests, self._requests = self._requests, {}
        for pending in requests.values():
            self._finish(pending)
            pending.fail(why or self._no_answer(pending))

    # -- the connection -----------------------------------------------------------------------------

    def _connect(self) -> None:
        if not can_open_descriptors(SOCKET_DESCRIPTORS if self.connections else CONTEXT_DESCRIPTORS):
            self.unreachable_reason = descriptor_limit_message()
            at_ns = self._clock.monotonic_ns() + self._connect_ns
            self._check = self._timers.call_at(at_ns, self._check_connection)
            return
        self.unreachable_reason = ""
        self._socket = DealerSocket(self._context, self._endpoint, self._curve)
        for fd in self._socket.fds:
            self._watched.watch(fd)
            self.fds += (fd,)
        now = self._clock.monotonic_ns()
        self._connect_by_ns = now + HANDSHAKE_NS_MAX
        self._check = self._timers.call_at(now + self._connect_ns, self._check_connection)
        self.pump()

    def _drop(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if self._socket is not None:
            socket, fds = self._socket, self.fds
            self._socket, self.fds = None, ()
            try:
                for fd in fds:
                    self._watched.unwatch(fd)
            finally:
                socket.close()
        self.is_up = False

    def _check_connection(self) -> None:
        """Runs while connecting, and while requests are open and nothing arrives."""
        self._check = None
        self.pump()
        now = self._clock.monotonic_ns()
        if not self.is_up and self._endpoint and now < self._connect_by_ns and self._is_in_handshake():
            self._check = self._timers.call_at(now + CONNECT_NS_MAX, self._check_connection)
        elif not self.is_up and self._endpoint:
            self._connect_ns = min(self._connect_ns * 2, CONNECT_NS_MAX)
            self._drop()
            self._connect()
        elif (
            self._requests
            and now - self.last_heard_ns >= self._silence_limit_ns()
            and self._may_replace_connection()
        ):
            self._went_down()
        elif self.is_up and self._requests:
            self._watch_for_silence()

    def _is_in_handshake(self) -> bool:
        """Return True while a connection exists whose handshake is not complete."""
        state = self._socket.state() if self._socket is not None else "ended"
        if state in {"ended", "refused"}:
            self.is_refused = state == "refused"
            if self.is_refused and self._on_change is not None:
                self._on_change(self)
        return state == "handshake"

    def _watch_for_silence(self) -> None:
        if self._check is None:
            self._check = self._timers.call_at(
                self._clock.monotonic_ns() + SILENCE_NS, self._check_connection
            )

    def _silence_limit_ns(self) -> int:
        """Return the silence after which nothing can be in flight any more, even at the lowest bandwidth."""
        sent = sum(
            len(pending.attachment) for pending in self._requests.values() if pending.attachment is not None
        )
        return SILENCE_NS + sent * 1_000 * MS // LINE_BYTES_PER_S

    def _may_replace_connection(self) -> bool:
        # Two copies of a delete on two connections could straddle the creation of a new topic of the same
        # name. A waiting read is silent by design. Both wait for the end of the connection.
        return not any(pending.kind in {"TopicDelete", "Read"} for pending in self._requests.values())

    def _came_up(self) -> None:
        self.is_up, self.is_refused = True, False
        self.connections += 1
        self.last_heard_ns = self._clock.monotonic_ns()
        self._connect_ns = CONNECT_NS_MIN
        if self._check is not None:
            self._check.cancel()
            self._check = None
        for pending in list(self._requests.values()):
            if pending.retry is None:
                self.resent += pending.was_sent
                pending.is_repeat |= pending.was_sent
                self._send(pending)
        if self._on_change is not None:
            self._on_change(self)
        # Sending may have consumed the wake-up of a reply, or of an immediate end of the connection.
        self.pump()

    def _went_down(self) -> None:
        self._drop()
        if self._on_change is not None:
            self._on_change(self)
        if self._socket is None and self._endpoint:
            self._connect()

    # -- requests -----------------------------------------------------------------------------------

    def _send(self, pending: PendingRequest) -> bool:
        """Send a request.

        Return True if it went through the fast path, so that the caller need not pump the socket.
        """
        assert self._socket is not None
        if pending.by_fast_path and self.fast_path is not None and self.fast_path.send(pending.data):
            pending.was_sent = True
            if not pending.is_on_fast_path:
                pending.is_on_fast_path = True
                self.fast_path_requests += 1
            if pending.timer is not None:
                self._watch_for_silence()
            return True
        if not self._socket.send(pending.data, pending.attachment):
            # The connection has just ended. `pump` detects it, and the next connection sends the request.
            return False
        pending.was_sent = True
        self._watch_for_silence()
        return False

    def _receive(self) -> bool:
        happened = False
        self._is_receiving = True
        try:
            while self._socket is not None:
                received = self._socket.receive()
                if received is None:
                    break
                happened = True
                self.on_message(*received)
        finally:
            self._is_receiving = False
        return happened

    def on_message(self, data: bytes, attachment: Any) -> None:
        """Handle a reply or an unsolicited message."""
        self.last_heard_ns = self._clock.monotonic_ns()
        try:
            envelope = decode(data)
        except EnvelopeInvalid as e:
            if e.version:
                self._fail_all(VersionMismatch(version_mismatch_message(e.version), outcome="not_applied"))
            return  # Otherwise it is no reply, and the deadline ends the request.
        if not envelope.corr and self._on_push is not None:
            self._on_push(self, PeerReply(envelope.message, attachment))
            return
        pending = self._requests.get(envelope.corr)
        if pending is None:
            return  # The request has its reply already, or was given up.
        message = envelope.message
        if isinstance(message, ErrorReply):
            if pending.is_patient_with(message):
                pending.is_repeat |= message.outcome == "unknown"
                self._retry_later(envelope.corr, pending, message)
                return
            del self._requests[envelope.corr]
            self._finish(pending)
            pending.refuse(message)
            return
        del self._requests[envelope.corr]
        self._finish(pending)
        pending.resolve(PeerReply(message, attachment))

    def _retry_later(self, corr: int, pending: PendingRequest, message: ErrorReply) -> None:
        wait_ms = int(message.detail.get("retry_after_ms", RETRY_MS)) or RETRY_MS
        wait_ns = int(min(wait_ms, 1_000) * MS * random.uniform(0.5, 1.0))

        def resend() -> None:
            pending.retry = None
            if corr in self._requests and self.is_up and not self._send(pending):
                self.pump()

        pending.retry = self._timers.call_at(self._clock.monotonic_ns() + wait_ns, resend)

    def _fail_all(self, error: RinglogError) -> None:
        all_pending, self._requests = self._requests, {}
        for pending in all_pending.values():
            self._finish(pending)
            pending.fail_with(error)

    def _expire(self, corr: int) -> None:
        pending = self._requests.pop(corr, None)
        if pending is not None:
            self._finish(pending)
            pending.fail(self._no_answer(pending))

    def _finish(self, pending: PendingRequest) -> None:
        if pending.is_on_fast_path:
            pending.is_on_fast_path = False
            self.fast_path_requests -= 1
        if pending.timer is not None:
            pending.timer.cancel()
        if pending.retry is not None:
            pending.retry.cancel()
        if not self._requests and self.is_up and self._check is not None:
            # No request is open: without a timer an idle client sleeps without wake-ups.
            self._check.cancel()
            self._check = None

    def _no_answer(self, pending: PendingRequest) -> RinglogError:
        if pending.was_sent:
            return RequestTimeout(f"{self.name} did not answer", outcome="unknown", request=pending.kind)
        return NotConnected(
            explain_unreachable(f"{self.name} could not be reached", self.unreachable_reason),
            request=pending.kind,
        )
