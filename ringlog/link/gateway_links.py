"""GatewayLinks: one client's connection to a gateway, over a local socket or encrypted TCP.

Every interaction is a request. Frames are attachments of Append messages, of which a bounded number is
unanswered at a time. The connection keeps their order, and resends keep it as well (see Peer).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from ringlog.clock import Clock
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages import Append, Message
from ringlog.errors import AuthFailed, InvariantViolation, NotConnected, RinglogError
from ringlog.frame.settle_entry import WORDS
from ringlog.limits import MIB
from ringlog.link.address import Address
from ringlog.link.channel.outbound_frames import OutboundFrames
from ringlog.link.dealer_socket import Curve
from ringlog.link.engine_watch import EngineWatch
from ringlog.link.futures import Pending
from ringlog.link.peer import FdSet, Peer
from ringlog.link.peer_request import PeerReply
from ringlog.link.protocol import LinkStats, SchedulerListener, Transport
from ringlog.link.timers import Timers

APPEND_BYTES_MAX = 1 * MIB
"""Frames are combined into messages up to this size. A larger frame is sent on its own."""
WINDOW_BYTES = 16 * MIB
WINDOW_APPENDS = 128


@dataclass(slots=True)
class _Part:
    """Frames of one run that were sent in one message."""

    count: int
    reply: Pending[PeerReply] | None = None


class GatewayLinks:
    """One DEALER socket to a gateway. Implements protocol.Links with transport `ipc` or `tcp`."""

    def __init__(
        self,
        address: Address,
        *,
        clock: Clock,
        timers: Timers,
        fds: FdSet,
        curve: Curve | None = None,
        on_change: Callable[[], None] = lambda: None,
        listener: SchedulerListener | None = None,
    ) -> None:
        self.transport: Transport = "ipc" if address.is_local else "tcp"
        self._address = address
        self._on_change = on_change
        self._scheduler_listener = listener
        self._context: zmq.Context[Any] = zmq.Context()
        self._peer = Peer(
            "the gateway", context=self._context, timers=timers, clock=clock, fds=fds, curve=curve,
            on_change=self._peer_changed, on_push=self._on_push,
        )  # fmt: skip
        self._watch = EngineWatch(
            address.run_dir,
            clock=clock,
            timers=timers,
            on_engine=self._switch_engine,
            on_mismatch=self._fail_connect,
        )
        self._connecting: Pending[None] = Pending()
        self._outbox: deque[OutboundFrames] = deque()
        self._parts: dict[OutboundFrames, deque[_Part]] = {}
        """For each run: messages without a reply, and messages whose reply waits for that of an earlier
        one."""
        self._window_bytes = self._window_appends = 0
        self._is_sending = False

    @property
    def shards(self) -> int:
        """1: the gateway accepts requests for all shards. 0 before the first connection."""
        return 1 if self._connecting.is_done else 0

    @property
    def is_ready(self) -> bool:
        """The socket is connected."""
        return self._peer.is_up

    @property
    def unreachable_reason(self) -> str:
        """Why the gateway cannot be reached, as far as that is known."""
        return self._watch.read_error or self._peer.unreachable_reason

    @property
    def generation(self) -> int:
        """Number of connections made."""
        return self._peer.connections

    @property
    def open_requests(self) -> int:
        """Number of requests without a reply."""
        return self._peer.open_requests

    @property
    def stats(self) -> LinkStats:
        """The counters."""
        peer = self._peer
        return LinkStats(peer.connections, max(0, peer.connections - 1), 0, peer.resent, peer.last_heard_ns)

    def connect(self) -> Pending[None]:
        """Start to connect, unless that was done. The result is done after the first connection."""
        if not self._connecting.is_done and not self._peer.fds:
            if self._address.is_local:
                self._watch.start()
            else:
                self._peer.set_endpoint(self._address.endpoint)
        return self._connecting

    def home_shard(self, topic: str) -> int:
        """Return 0, the gateway."""
        return 0

    def request(
        self,
        shard: int,
        message: Message,
        deadline_ns: int,
        attachment: Any = None,
        *,
        is_patient: bool = True,
        by_ring: bool = False,
    ) -> Pending[PeerReply]:
        """Send a request to the gateway, which finds the shard."""
        return self._peer.request(message, deadline_ns, attachment, is_patient=is_patient)

    @property
    def schedulers(self) -> int:
        """1: the gateway sends the grants of all schedulers. 0 before the first connection."""
        return self.shards

    def scheduler(self, number: int) -> Peer:
        """Return the connection to the gateway."""
        return self._peer

    def _on_push(self, _: Peer, push: PeerReply) -> None:
        if self._scheduler_listener is not None:
            self._scheduler_listener.scheduler_message(0, push)

    def request_grants(self, number: int) -> None:
        """Without effect: grants of a gateway come as messages."""

    def submit(self, shard: int, run: OutboundFrames) -> None:
        """Send frames after all earlier ones."""
        self._outbox.append(run)
        self._send()

    def is_full(self, shard: int) -> bool:
        """Return False: the gateway refuses frames itself if it is full."""
        return False

    def pump(self) -> bool:
        """Process replies. Return True if anything happened."""
        return self._peer.pump()

    def on_readable(self, fd: int) -> None:
        """Process replies if this descriptor is ours."""
        if fd in self._peer.fds:
            self._peer.pump()

    @property
    def frames_in_flight(self) -> int:
        """0: there are no rings."""
        return 0

    def spin_words(self) -> tuple[list[memoryview], list[int]]:
        """Return empty lists: the socket wakes the owner."""
        return [], []

    def arm(self, *, for_settlements: bool = True) -> bool:
        """Return False if a reply is available already. A socket needs no request for wake-ups."""
        return not self._peer.pump()

    def disarm(self) -> None:
        """Without effect for a socket."""

    def close(self, why: RinglogError | None = None) -> list[OutboundFrames]:
        """See Links.close."""
        self._watch.stop()
        left = [run for run in self._outbox if not run.is_abandoned]
        self._outbox.clear()
        try:
            self._peer.close(why)
        finally:
            # This also closes sockets that an interrupted call left half created. An open socket would block
            # the garbage collector when it frees the context.
            self._context.destroy(0)
        return left

    def close_after_fork(self) -> None:
        """Without effect: the socket belongs to the parent, and the child must not use it."""

    def _peer_changed(self, peer: Peer) -> None:
        if peer.is_up:
            self._watch.stop()
            self._connecting.resolve(None)
            if self._scheduler_listener is not None:
                self._scheduler_listener.scheduler_connected(0)
        elif peer.is_refused:
            self._fail_connect(
                AuthFailed(
                    "the engine does not know this public key: add it to the engine's keys file",
                    address=str(self._address),
                )
            )
        elif self._address.is_local:
            self._watch.start()
        self._on_change()

    def _fail_connect(self, error: RinglogError) -> None:
        """Fail the waiting `connect`.

        The client keeps trying: a key may be added, or the engine may be restarted.
        """
        if not self._connecting.is_done:
            refused, self._connecting = self._connecting, Pending()
            refused.fail(error)

    def _switch_engine(self, engine: EngineInfo) -> None:
        if engine.gateway_ipc:
            endpoint = engine.gateway_ipc
            self._peer.set_endpoint(endpoint if "://" in endpoint else f"ipc://{endpoint}")

    # -- frames -------------------------------------------------------------------------------------

    def _send(self) -> None:
        # A request may resolve others, whose owners submit more frames. The outer loop sends these.
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while (
                self._outbox and self._window_appends < WINDOW_APPENDS and self._window_bytes < WINDOW_BYTES
            ):
                run = self._outbox[0]
                if not run.is_abandoned:
                    self._send_part(run)
                if run.is_abandoned or run.pushed >= run.count:
                    self._outbox.popleft()
        finally:
            self._is_sending = False

    def _send_part(self, run: OutboundFrames) -> None:
        start = run.pushed
        limit = int(run.offsets[start]) + APPEND_BYTES_MAX
        stop = max(start + 1, int(np.searchsorted(run.offsets, limit, side="right")) - 1)
        run.pushed = stop
        data = run.view(start, stop)
        self._window_bytes += len(data)
        self._window_appends += 1
        part = _Part(stop - start)
        self._parts.setdefault(run, deque()).append(part)
        request = Append(run.topic, part.count, disable_backpressure=run.disable_backpressure)
        reply = self._peer.request(request, run.deadline_ns, data, is_patient=False)
        reply.when_done(lambda done: self._answered(run, part, len(data), done))

    def _answered(self, run: OutboundFrames, part: _Part, size: int, reply: Pending[PeerReply]) -> None:
        self._window_bytes -= size
        self._window_appends -= 1
        part.reply = reply
        # A refusal by the gateway may overtake replies to earlier messages. A run accepts results only in
        # order.
        parts = self._parts[run]
        while parts and parts[0].reply is not None:
            first = parts.popleft()
            if not parts:
                del self._parts[run]
            assert first.reply is not None
            self._settle_part(run, first.count, first.reply)
        self._send()

    @staticmethod
    def _settle_part(run: OutboundFrames, count: int, reply: Pending[PeerReply]) -> None:
        if reply.error is None:
            entries = np.frombuffer(reply.result().message.entries, dtype=np.uint64).reshape(-1, WORDS)
            if len(entries) != count:
                raise InvariantViolation(
                    f"the reply to an append has {len(entries)} settle entries, expected {count}", sent=count,
                    found=len(entries),
                )  # fmt: skip
            run.take_entries(entries)
        elif isinstance(reply.error, RinglogError):
            run.fail_next(count, reply.error)
        else:
            raise InvariantViolation("a request failed with an error outside RinglogError") from reply.error


def curve_of(server_key: str, secret_key: str) -> Curve:
    """Return the keys of a connection from the server's public key and the client's secret key.

    Without a secret key the client uses a new key pair.
    """
    if not server_key:
        raise NotConnected("a tcp url must contain the engine's public key: append ?server_key=…")
    if secret_key:
        return Curve(server_key, zmq.curve_public(secret_key.encode()).decode(), secret_key)
    public, secret = zmq.curve_keypair()
    return Curve(server_key, public.decode(), secret.decode())
