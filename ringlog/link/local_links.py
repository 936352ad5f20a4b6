"""LocalLinks: the connections of one client to all shards of an engine on the same host.

The file `engine.json` identifies the engine. The socket to the supervisor stays open and detects the end of
the engine. Then the client polls the run directory for the next start, and opens board, sockets and rings
again. Open requests and unsettled frames move to the new start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import zmq

from ringlog.board.layout import ProcessField
from ringlog.board.processes import (
    RELOCATOR,
    SUPERVISOR,
    http_gateway_socket,
    shard_slot,
    shard_socket,
    socket_of,
)
from ringlog.clock import Clock
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages import Message
from ringlog.errors import (
    ColdUnavailable,
    NotConnected,
    RinglogError,
    ShardsChanged,
    VersionMismatch,
)
from ringlog.link.address import is_shared_memory_unreachable
from ringlog.link.channel.client_ring import RingLocation
from ringlog.link.channel.outbound_frames import OutboundFrames
from ringlog.link.engine_board import EngineBoard, no_engine_found_error
from ringlog.link.engine_watch import EngineWatch
from ringlog.link.futures import Pending
from ringlog.link.peer import MS, FdSet, Peer
from ringlog.link.peer_request import PeerReply, PendingRequest
from ringlog.link.protocol import LinkStats, SchedulerListener, Transport
from ringlog.link.scheduler_links import SchedulerLinks
from ringlog.link.shard_link import ShardLink
from ringlog.link.timers import Timers
from ringlog.placement import home_shard

OPEN_BOARD_RETRY_NS = 20 * MS


SPIN_FRAMES_MAX = 2
"""With at most this many frames and requests in flight, the client spins for each result."""


class LocalLinks:
    """Rings and sockets to every shard. Implements protocol.Links with transport `ring`."""

    transport: Transport = "ring"

    def __init__(
        self,
        run_dir: str,
        *,
        client_id: str,
        clock: Clock,
        timers: Timers,
        fds: FdSet,
        on_displaced: Callable[[OutboundFrames], None] | None = None,
        on_change: Callable[[], None] = lambda: None,
        listener: SchedulerListener | None = None,
        on_shm_unreachable: Callable[[EngineInfo], None] | None = None,
    ) -> None:
        self._client_id = client_id
        self._clock, self._timers, self._fds = clock, timers, fds
        self._on_displaced = on_displaced
        self._on_change = on_change
        self._on_shm_unreachable = on_shm_unreachable
        """Called with the first engine found, if this process cannot see its shared memory."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._supervisor = self._peer("the supervisor", self._supervisor_changed)
        self._relocator = self._peer("the relocator")
        self._http_gateways: dict[int, Peer] = {}
        self._watch = EngineWatch(
            run_dir, clock=clock, timers=timers, on_engine=self._switch_engine, on_mismatch=self._mismatched
        )
        self.board: EngineBoard = EngineBoard()
        self._links: list[ShardLink] = []
        self._scheduler_links = SchedulerLinks(
            context=self._context, clock=clock, timers=timers, fds=fds, board=self.board, listener=listener
        )
        self._connecting: Pending[None] = Pending()
        self._shards = 0
        """Number of shards of the engine that is in use."""

    # -- facts --------------------------------------------------------------------------------------

    @property
    def shards(self) -> int:
        """Number of shards of the engine; 0 before the first engine was found."""
        return self._watch.engine.shards if self._watch.engine else 0

    @property
    def is_ready(self) -> bool:
        """The supervisor's socket is connected and the board is open."""
        return self._supervisor.is_up and self.board.is_open

    @property
    def unreachable_reason(self) -> str:
        """Why the engine cannot be reached, as far as that is known."""
        return self._watch.read_error or self.board.open_error or self._supervisor.unreachable_reason

    @property
    def generation(self) -> int:
        """Number of starts of the engine that were seen."""
        return self._watch.starts_seen

    @property
    def engine(self) -> EngineInfo:
        """The engine that was found last. Raises NotConnected before the first."""
        if self._watch.engine is None:
            raise no_engine_found_error()
        return self._watch.engine

    @property
    def open_requests(self) -> int:
        """Number of requests without a reply."""
        return self._supervisor.open_requests + sum(link.control.open_requests for link in self._links)

    @property
    def stats(self) -> LinkStats:
        """The counters."""
        peers = [self._supervisor, *(link.control for link in self._links)]
        return LinkStats(
            connections=sum(peer.connections for peer in peers),
            reconnections=max(0, self._supervisor.connections - 1),
            frames_resent=sum(link.channel.frames_resent for link in self._links),
            requests_resent=sum(peer.resent for peer in peers),
            last_heard_ns=max(peer.last_heard_ns for peer in peers),
        )

    # -- work ---------------------------------------------------------------------------------------

    def connect(self) -> Pending[None]:
        """Start to connect, unless that was done. The result is done after the first connection."""
        if not self._connecting.is_done and not self._supervisor.is_up:
            self._watch.start()
        return self._connecting

    def join_engine(self, engine: EngineInfo) -> None:
        """Use this engine, of which the caller is a part. The engine works before it writes engine.json."""
        self._watch.engine = engine
        self._watch.starts_seen += 1
        self._switch_engine(engine)

    def home_shard(self, topic: str) -> int:
        """Return the shard that resolves this name."""
        return home_shard(topic, self.shards)

    def request(
        self,
        shard: int,
        message: Message,
        deadline_ns: int,
        attachment: Any = None,
        *,
        is_patient: bool = True,
        by_ring: bool = False,
        is_awaited: bool = False,
    ) -> PendingRequest:
        """Send a request to a shard. Raises ShardsChanged if the engine has fewer shards now.

        `is_awaited`: see Peer.request.
        """
        if shard >= self._shards:
            raise ShardsChanged(
                "the engine was restarted with a different number of shards: repeat the request", shard=shard,
                shards=self._shards,
            )  # fmt: skip
        link = self._link(shard)
        control = link.control
        if not control.fds and self.board.is_open:
            control.set_endpoint(shard_socket(self.engine.shm_dir, shard))
        if by_ring and control.fast_path is None and self.board.is_open:
            page = self.board.process(shard_slot(shard))
            link.calls.request_ring(control, self.engine.shm_dir, lambda: bool(page.get(ProcessField.ASLEEP)))
        return control.request(
            message,
            deadline_ns,
            attachment,
            is_patient=is_patient,
            by_fast_path=by_ring,
            is_awaited=is_awaited,
        )

    def ask_relocator(self, message: Message, deadline_ns: int) -> Pending[PeerReply]:
        """Send a request to the relocator, which reads cold segments. The first request connects to it.

        Fails at once with ColdUnavailable if the engine runs no relocator, because no cold tier is
        configured.
        """
        if not self._relocator.fds and self.board.is_open:
            endpoint = socket_of(self.engine.shm_dir, RELOCATOR)
            if not os.path.exists(endpoint.removeprefix("ipc://")):
                absent: Pending[PeerReply] = Pending()
                absent.fail(cold_unavailable("the engine runs no relocator"))
                return absent
            self._relocator.set_endpoint(endpoint)
        return self._relocator.request(message, deadline_ns, is_patient=False)

    def ask_supervisor(self, message: Message, deadline_ns: int) -> Pending[PeerReply]:
        """Send a request to the supervisor. Fails with NotConnected while it is not reachable."""
        return self._supervisor.request(message, deadline_ns, is_patient=False)

    @property
    def schedulers(self) -> int:
        """Number of schedulers; 0 before the first engine was found."""
        return self._watch.engine.schedulers if self._watch.engine else 0

    def scheduler(self, number: int) -> Peer:
        """Return the connection to one scheduler. The first call creates it."""
        return self._scheduler_links.peer(number)

    def request_grants(self, number: int) -> None:
        """Request a grant ring of this scheduler, before the first subscription at it."""
        self._scheduler_links.request_grants(number)

    def http_gateway(self, number: int, shm_dir: str) -> Peer:
        """Return the connection to another HTTP gateway of the engine of which the caller is a part.

        The first call creates it, possibly before engine.json exists. It does not move to another engine."""
        peer = self._http_gateways.get(number)
        if peer is None:
            peer = self._http_gateways[number] = self._peer(f"HTTP gateway {number}")
            peer.set_endpoint(http_gateway_socket(shm_dir, number))
        return peer

    def submit(self, shard: int, run: OutboundFrames) -> None:
        """Push frames into the shard's ring, or queue them until there is space."""
        self._link(shard).channel.submit(run)

    def is_full(self, shard: int) -> bool:
        """Return True if frames for this shard wait for space in its ring."""
        return shard < len(self._links) and self._links[shard].channel.is_full

    def published_since(
        self, shard: int, marks: Callable[[], Any], seen: Any, deadline_ns: int
    ) -> Pending[bool]:
        """Wait until the shard publishes; `marks` reads its current marks."""
        return self._link(shard).publication.wait(marks, seen, deadline_ns)

    def pump(self) -> bool:
        """Process settlements, replies and grants of all rings, and push frames that fit.

        Return True if anything happened.
        """
        happened = False
        for link in self._links:
            happened |= link.pump()
        return self._scheduler_links.pump() or happened

    def on_readable(self, fd: int) -> None:
        """Handle a readable descriptor."""
        for link in self._links:
            if link.on_readable(fd):
                return
        if self._scheduler_links.on_readable(fd):
            return
        for peer in (self._supervisor, self._relocator, *self._http_gateways.values()):
            if fd in peer.fds:
                peer.pump()
                return

    @property
    def frames_in_flight(self) -> int:
        """Number of frames in all rings that are not settled."""
        # Called for every operation; a generator would cost more than the rest of the function.
        count = 0
        for link in self._links:
            count += link.channel.in_flight
        return count

    def spin_words(self) -> tuple[list[memoryview], list[int]]:
        """Return the words to spin on, and their values now, for every ring with a pending result.

        Both lists are empty if more than SPIN_FRAMES_MAX frames and requests are in flight: throughput
        matters then."""
        words: list[memoryview] = []
        seen: list[int] = []
        count = 0
        for link in self._links:
            count += link.add_spin_words(words, seen)
        return (words, seen) if count <= SPIN_FRAMES_MAX else ([], [])

    def arm(self, *, for_settlements: bool = True) -> bool:
        """Request wake-ups for replies and, with `for_settlements`, settlements.

        Return False if some were available already.
        """
        for link in self._links:
            link.arm(for_settlements=for_settlements)
        return not self.pump()

    def disarm(self) -> None:
        """Cancel the request for wake-ups, because the owner is awake."""
        for link in self._links:
            link.disarm()

    def close(self, why: RinglogError | None = None) -> list[OutboundFrames]:
        """See Links.close."""
        left: list[OutboundFrames] = []
        try:
            self._watch.stop()
            for link in self._links:
                left += link.close(why)
            self._supervisor.close(why)
            self._relocator.close(why)
            for peer in list(self._http_gateways.values()):
                peer.close(why)
            self._scheduler_links.close(why)
        finally:
            # This also closes sockets that an interrupted call left half created, to which there is no other
            # reference.
            self._context.destroy(0)
        self.board.close()
        return left

    def close_after_fork(self) -> None:
        """Close the copies of rings and bells in the child after a fork. The sockets belong to the parent."""
        for link in self._links:
            link.close_after_fork()
        self._scheduler_links.close_after_fork()

    # -- start and end of the engine -------------------------------------------------------------------

    def _peer(self, name: str, on_change: Callable[[Peer], None] | None = None) -> Peer:
        return Peer(
            name,
            context=self._context,
            timers=self._timers,
            clock=self._clock,
            fds=self._fds,
            on_change=on_change,
        )

    def _link(self, shard: int) -> ShardLink:
        if not 0 <= shard < len(self._links):
            raise NotConnected(
                f"shard {shard} does not exist, the engine has {len(self._links)} shards", shard=shard,
                shards=len(self._links),
            )  # fmt: skip
        return self._links[shard]

    def _supervisor_changed(self, supervisor: Peer) -> None:
        if supervisor.is_up:
            self._watch.stop()
            self._connecting.resolve(None)
        else:
            self._watch.start()
        self._on_change()

    def _mismatched(self, error: VersionMismatch) -> None:
        """Fail the waiting `connect`. The client keeps polling for another engine."""
        if not self._connecting.is_done:
            refused, self._connecting = self._connecting, Pending()
            refused.fail(error)

    def _switch_engine(self, engine: EngineInfo) -> None:
        """Move all connections to a new start of the engine."""
        # The number of shards decides which shard has a topic. Open requests may belong to other shards now.
        withdrawn = [] if engine.shards == self._shards else self._withdraw_requests()
        self._shards = engine.shards
        before = self.board.switch(engine.shm_dir)
        is_there = self.board.is_open
        if not is_there:
            # The board does not exist yet, or the engine has exited already and a new engine.json may follow.
            self._timers.call_at(
                self._clock.monotonic_ns() + OPEN_BOARD_RETRY_NS, lambda: self._retry_switch(engine)
            )
        self._move(engine, is_there=is_there)
        if before is not None:
            before.close()  # Only now: the connections read its words until they were moved.
        self._on_change()
        for pending in withdrawn:
            pending.fail_with(
                ShardsChanged(
                    "the engine was restarted with a different number of shards: repeat the request",
                    request=pending.kind, shards=engine.shards,
                    outcome="unknown" if pending.was_sent else "not_applied",
                )
            )  # fmt: skip

    def _withdraw_requests(self) -> list[PendingRequest]:
        """Remove and return all open requests to shards."""
        return [pending for link in self._links for pending in link.control.withdraw_requests()]

    def _move(self, engine: EngineInfo, *, is_there: bool) -> None:
        # Create them first: the supervisor may reply at once, and its caller may then send a request to a
        # shard.
        while len(self._links) < engine.shards:
            self._links.append(
                ShardLink(
                    len(self._links), self._client_id, context=self._context, clock=self._clock,
                    timers=self._timers, fds=self._fds, on_displaced=self._on_displaced,
                )
            )  # fmt: skip
        self._supervisor.set_endpoint(socket_of(engine.shm_dir, SUPERVISOR) if is_there else "")
        is_needed = self._relocator.open_requests and is_there
        self._relocator.set_endpoint(socket_of(engine.shm_dir, RELOCATOR) if is_needed else "")
        self._scheduler_links.move(engine.schedulers, is_there=is_there)
        for shard, link in enumerate(self._links):
            location = self._ring_location(engine, shard) if is_there and shard < engine.shards else None
            link.move(location)

    def _retry_switch(self, engine: EngineInfo) -> None:
        if self._watch.engine is not engine or self.board.is_open:
            return
        is_first = not self._connecting.is_done
        if is_first and self._on_shm_unreachable is not None and is_shared_memory_unreachable(engine):
            self._on_shm_unreachable(engine)
        else:
            self._switch_engine(engine)

    def _ring_location(self, engine: EngineInfo, shard: int) -> RingLocation:
        process = self.board.process(shard_slot(shard))
        return RingLocation(
            engine.shm_dir,
            engine.engine_id,
            self._supervisor,
            shard,
            lambda: bool(process.get(ProcessField.ASLEEP)),
        )


def cold_unavailable(why: str) -> ColdUnavailable:
    """Return the error of a cold read without a reply. No data is lost; the caller can retry later."""
    return ColdUnavailable(
        "these records are in the cold tier, which does not respond: check that its store is reachable and"
        " that the engine has the setting cold.dir or cold.url", cause=why,
    )  # fmt: skip
