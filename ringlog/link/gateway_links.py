"""GatewayLinks: one client's connection to a gateway, over a local socket or encrypted TCP.

Everything is a request. Frames travel as attachments of Append messages, a bounded number of them
unanswered at a time; the connection keeps their order and so does resending them (see Peer).
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
from ringlog.link.engine_watch import EngineWatch
from ringlog.link.futures import Pending
from ringlog.link.peer import Curve, FdSet, Peer, PeerReply
from ringlog.link.protocol import LinkStats, SchedulerListener, Transport
from ringlog.link.timers import Timers

APPEND_BYTES_MAX = 1 * MIB
"""Frames are gathered into one message up to this size; one frame that is larger goes alone."""
WINDOW_BYTES = 16 * MIB
WINDOW_APPENDS = 128


@dataclass(slots=True)
class _Part:
    """Frames of a run that went in one message."""

    count: int
    answer: Pending[PeerReply] | None = None


class GatewayLinks:
    """One DEALER to a gateway. Implements protocol.Links with transport `ipc` or `tcp`."""

    def __init__(
        self,
        address: Address,
        *,
        clock: Clock,
        timers: Timers,
        fds: FdSet,
        curve: Curve | None = None,
        on_change: Callable[[], None] = lambda: None,
        hears: SchedulerListener | None = None,
    ) -> None:
        self.transport: Transport = "ipc" if address.is_local else "tcp"
        self._address = address
        self._on_change = on_change
        self._scheduler_listener = hears
        self._context: zmq.Context[Any] = zmq.Context()
        self._peer = Peer(
            "the gateway", context=self._context, timers=timers, clock=clock, fds=fds, curve=curve,
            on_change=self._peer_changed, on_push=self._said,
        )  # fmt: skip
        self._watch = EngineWatch(
            address.run_dir, clock=clock, timers=timers, on_engine=self._adopt, on_mismatch=self._not_admitted
        )
        self._connecting: Pending[None] = Pending()
        self._outbox: deque[OutboundFrames] = deque()
        self._parts: dict[OutboundFrames, deque[_Part]] = {}
        """Messages of each run whose answer has not come, or only after that to a later one."""
        self._window_bytes = self._window_appends = 0
        self._is_sending = False

    @property
    def shards(self) -> int:
        """A gateway speaks for all of them."""
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
        """Connections made so far."""
        return self._peer.connections

    @property
    def open_requests(self) -> int:
        """Requests without an answer."""
        return self._peer.open_requests

    @property
    def stats(self) -> LinkStats:
        """Counters."""
        peer = self._peer
        return LinkStats(peer.connections, max(0, peer.connections - 1), 0, peer.resent, peer.last_heard_ns)

    def connect(self) -> Pending[None]:
        """Begin connecting if that was not done; done once the gateway has been met."""
        if not self._connecting.is_done and self._peer.fd < 0:
            if self._address.is_local:
                self._watch.start()
            else:
                self._peer.set_endpoint(self._address.endpoint)
        return self._connecting

    def home_shard(self, topic: str) -> int:
        """The gateway."""
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
        """Ask the gateway; it knows which shard has what."""
        return self._peer.request(message, deadline_ns, attachment, is_patient=is_patient)

    @property
    def schedulers(self) -> int:
        """The gateway speaks for all of them."""
        return self.shards

    def scheduler(self, number: int) -> Peer:
        """The gateway."""
        return self._peer

    def _said(self, _: Peer, said: PeerReply) -> None:
        if self._scheduler_listener is not None:
            self._scheduler_listener.scheduler_message(0, said)

    def request_grants(self, number: int) -> None:
        """They come as messages."""

    def submit(self, shard: int, run: OutboundFrames) -> None:
        """Send frames behind all others."""
        self._outbox.append(run)
        self._send()

    def is_full(self, shard: int) -> bool:
        """The gateway says so itself."""
        return False

    def pump(self) -> bool:
        """Take replies; True when anything happened."""
        return self._peer.pump()

    def on_readable(self, fd: int) -> None:
        """This descriptor became readable."""
        if fd == self._peer.fd:
            self._peer.pump()

    @property
    def frames_in_flight(self) -> int:
        """None in rings."""
        return 0

    def spin_words(self) -> tuple[list[memoryview], list[int]]:
        """A socket is not looked at, it wakes."""
        return [], []

    def arm(self, *, for_settlements: bool = True) -> bool:
        """A socket always wakes; False when something was there already."""
        return not self._peer.pump()

    def disarm(self) -> None:
        """A socket needs no telling that its owner is awake."""

    def close(self, why: RinglogError | None = None) -> list[OutboundFrames]:
        """See Links.close."""
        self._watch.stop()
        left = [run for run in self._outbox if not run.is_abandoned]
        self._outbox.clear()
        self._peer.close(why)
        self._context.destroy(0)
        return left

    def close_after_fork(self) -> None:
        """After a fork, in the child: the socket is the parent's and must not be touched."""

    def _peer_changed(self, peer: Peer) -> None:
        if peer.is_up:
            self._watch.stop()
            self._connecting.resolve(None)
            if self._scheduler_listener is not None:
                self._scheduler_listener.scheduler_connected(0)
        elif peer.is_refused:
            self._not_admitted(AuthFailed("the engine does not admit this key", address=str(self._address)))
        elif self._address.is_local:
            self._watch.start()
        self._on_change()

    def _not_admitted(self, error: RinglogError) -> None:
        """Tell who waits. It is tried again: the key may be made known there, the engine be restarted."""
        if not self._connecting.is_done:
            refused, self._connecting = self._connecting, Pending()
            refused.fail(error)

    def _adopt(self, engine: EngineInfo) -> None:
        if engine.gateway_ipc:
            endpoint = engine.gateway_ipc
            self._peer.set_endpoint(endpoint if "://" in endpoint else f"ipc://{endpoint}")

    # -- frames -------------------------------------------------------------------------------------

    def _send(self) -> None:
        # Asking may answer others, whose owners submit more: one loop is enough.
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
        answer = self._peer.request(request, run.deadline_ns, data, is_patient=False)
        answer.when_done(lambda done: self._answered(run, part, len(data), done))

    def _answered(self, run: OutboundFrames, part: _Part, size: int, answer: Pending[PeerReply]) -> None:
        self._window_bytes -= size
        self._window_appends -= 1
        part.answer = answer
        # A refusal at the door overtakes answers to what went in before; a run takes all in its own order.
        parts = self._parts[run]
        while parts and parts[0].answer is not None:
            first = parts.popleft()
            if not parts:
                del self._parts[run]
            assert first.answer is not None
            self._hand_over(run, first.count, first.answer)
        self._send()

    @staticmethod
    def _hand_over(run: OutboundFrames, count: int, answer: Pending[PeerReply]) -> None:
        if answer.error is None:
            entries = np.frombuffer(answer.result().message.entries, dtype=np.uint64).reshape(-1, WORDS)
            if len(entries) != count:
                raise InvariantViolation(
                    "a reply has another number of entries", sent=count, found=len(entries)
                )
            run.take_entries(entries)
        elif isinstance(answer.error, RinglogError):
            run.fail_next(count, answer.error)
        else:
            raise InvariantViolation("a request failed with a foreign error") from answer.error


def curve_of(server_key: str, secret_key: str) -> Curve:
    """Keys of a connection from the server's public and the client's secret key; a new pair for none."""
    if not server_key:
        raise NotConnected("a TCP address needs the engine's public key: ?server_key=…")
    if secret_key:
        return Curve(server_key, zmq.curve_public(secret_key.encode()).decode(), secret_key)
    public, secret = zmq.curve_keypair()
    return Curve(server_key, public.decode(), secret.decode())
