"""Receives requests of clients by socket and through call rings, and sends the replies. Part of the shell.

Messages about rings are handled here. All other requests wait for the core.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec import structs

from ringlog.actors.wal_shard.core import ShardCore
from ringlog.actors.wal_shard.io.rings import Rings
from ringlog.actors.wal_shard.leases.job_prefetcher import JobPrefetcher
from ringlog.actors.wal_shard.leases.worker_liveness import WorkerLiveness
from ringlog.actors.wal_shard.recovery.baseline import segment_tables
from ringlog.actors.wal_shard.requests.call_rings import CallRings
from ringlog.actors.wal_shard.requests.caller import Caller
from ringlog.actors.wal_shard.requests.poison_requests import PoisonRequests
from ringlog.board.board import ProcessSlot
from ringlog.board.heartbeat import Heartbeat
from ringlog.board.layout import ProcessField
from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.envelope.refusal import error_reply
from ringlog.errors import InvalidRequest, NotReady, Refused, RingError
from ringlog.leases.holders import ProcessId
from ringlog.limits import CALL_BYTES_MAX
from ringlog.runtime.router_socket import RouterSocket
from ringlog.storage.disk import Disk

REQUESTS_PER_PASS = 256


class RequestTransport:
    """The requests of one shard's clients, and the replies to them."""

    def __init__(
        self, boot: ActorBoot, disk: Disk, slot: ProcessSlot, heartbeat: Heartbeat, core: ShardCore,
        socket: RouterSocket, calls: CallRings, rings: Rings, worker_liveness: WorkerLiveness,
        job_prefetcher: JobPrefetcher,
    ) -> None:  # fmt: skip
        self._boot, self._disk, self._slot, self._heartbeat, self._core = boot, disk, slot, heartbeat, core
        self._socket, self._calls, self._rings = socket, calls, rings
        self._worker_liveness, self._job_prefetcher = worker_liveness, job_prefetcher
        self._poison_requests = PoisonRequests(boot.shm_dir, boot.shard)
        self._callable = frozenset(core.requests.leases.handlers)
        """Request types that may arrive through a call ring."""
        self.pending: deque[ControlReceived] = deque()
        """Requests for the core."""

    # -- requests -------------------------------------------------------------------------------------

    def receive(self, *, is_readable: bool) -> None:
        """Receive requests from the socket. `is_readable` is as in RouterSocket.has_input."""
        if not self._socket.has_input(is_readable=is_readable):
            return
        for client, envelope, attachment in self._socket.receive(REQUESTS_PER_PASS - len(self.pending)):
            message = envelope.message
            try:
                if isinstance(message, m.RingAttach):
                    self._attach(client, envelope.corr, message)
                elif isinstance(message, m.RingDetach):
                    self._detach(client, envelope.corr, message)
                elif isinstance(message, m.OpenCalls):
                    name = self._open_calls(client, (message.pid, message.pid_started))
                    self._socket.send(client, m.CallsOpened(name), envelope.corr)
                elif isinstance(message, m.Ping):
                    pong = m.Pong(self._boot.incarnation, self._heartbeat.passes)
                    self._socket.send(client, pong, envelope.corr)
                else:
                    opened = None
                    self._poison_requests.require_not_poison(message, attachment)
                    self._watch_claimer(message)
                    if isinstance(message, m.SegmentsChange):
                        opened = segment_tables(self._disk, self._boot.data_dir, message.added)
                    self.pending.append(ControlReceived(client, envelope.corr, message, attachment, opened))
            except Refused as e:
                self._socket.send(client, error_reply(e), envelope.corr)

    def take_calls(self) -> None:
        """Receive requests from the call rings. Only lease requests are allowed there."""
        found = list(self._calls.take_requests(REQUESTS_PER_PASS - len(self.pending)))
        if not found:
            return
        for caller, envelope in found:
            try:
                if type(envelope.message) not in self._callable:
                    raise InvalidRequest(
                        "this kind of request is not allowed in a call ring: send it by socket",
                        kind=envelope.kind,
                    )
                self._poison_requests.require_not_poison(envelope.message)
                self._watch_claimer(envelope.message)
                self.pending.append(ControlReceived(caller, envelope.corr, envelope.message))
            except Refused as e:
                self._answer(caller, error_reply(e), envelope.corr)

    def record_crash(self) -> None:
        """Record the request that the core handles, because the core crashed."""
        request = self._core.intake.current_request
        if request is not None:
            self._poison_requests.record_crash(request.message, request.attachment)

    def _open_calls(self, client: bytes, process_id: ProcessId) -> str:
        """Create a call ring. Watch the process, because its waiting claims end with it."""
        self._worker_liveness.watch(process_id)
        return self._calls.open(client, process_id)

    def _watch_claimer(self, message: m.Message) -> None:
        """Monitor the local process that sent a claim, because its leases end with it (Q10)."""
        if isinstance(message, m.Claim | m.AckAndClaim | m.Steal) and message.pid:
            self._worker_liveness.watch((message.pid, message.pid_started))

    # -- rings ----------------------------------------------------------------------------------------

    def _attach(self, client: bytes, corr: int, message: m.RingAttach) -> None:
        try:
            self._rings.attach(message.ring, message.bell)
        except RingError as e:
            raise NotReady("ring cannot be attached", ring=message.ring, reason=str(e)) from e
        self._slot.set(ProcessField.RINGS, len(self._rings))
        self._socket.send(client, m.RingAttached(message.ring), corr)

    def _detach(self, client: bytes, corr: int, message: m.RingDetach) -> None:
        if not self._rings.request_detach(message.ring, client, corr):
            self._socket.send(client, m.RingDetached(message.ring, 0), corr)

    def detach_rings(self) -> None:
        """Detach the rings that are empty and whose clients asked for it."""
        for name, settled, requests in self._rings.detach_empty():
            for client, corr in requests:
                self._socket.send(client, m.RingDetached(name, settled), corr)
            self._slot.set(ProcessField.RINGS, len(self._rings))

    # -- replies --------------------------------------------------------------------------------------

    def reply(self, effect: Reply) -> None:
        """Send a reply of the core."""
        message = effect.message
        if type(message) is m.ClaimReply and message.runs:
            self._reply_claimed(effect.client, message, effect.corr)
            return
        elif isinstance(message, m.TopicInfo) and message.slot < 0 and message.shard == self._boot.shard:
            # A topic gets its slot at its first publication, which is after the reply was staged.
            topic = self._core.directory.by_id.get(message.topic_id)
            if topic is not None:
                message = self._core.requests.topics.topic_info(topic, created=message.created)
        self._answer(effect.client, message, effect.corr, effect.attachment)

    def _reply_claimed(self, client: bytes, message: m.ClaimReply, corr: int) -> None:
        """Reply to a claim, and include the jobs if they are in memory or quickly read."""
        topic = self._core.directory.by_id.get(message.topic_id)
        is_same = topic is not None and topic.epoch == message.epoch
        found = self._job_prefetcher.find(topic, message.runs) if topic is not None and is_same else None
        if found is None:
            self._answer(client, message, corr)
            return
        message = structs.replace(message, payloads=found.payloads, stamps=found.stamps, frames=found.frames)
        if found.frames and isinstance(client, Caller) and len(found.data) <= CALL_BYTES_MAX:
            message, found.data = structs.replace(message, data=found.data), b""
        self._answer(client, message, corr, found.data or None)

    def _answer(self, client: bytes, message: m.Message, corr: int, attachment: Any = None) -> None:
        if isinstance(client, Caller):
            if attachment is None and self._calls.answer(client, message, corr):
                return
            client = bytes(client)
        self._socket.send(client, message, corr, attachment)
