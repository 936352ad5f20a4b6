"""Decisions about routers: which range of which source is forwarded next, and to which shards. Pure.

The routers of one source form up to two *flows*. Routers into `fsync` destinations wait for records that are
synced, the others for records that are published. A flow receives grants for its source, like a watch.

A *pass* reads one range of the source, once for all routers of the flow whose cursor is at its start. It
sends each of their shards a forward request. A router is in one pass at a time. If its destination refuses
the copies, the router is retried with exponential backoff. It does not delay other routers.

The scheduler keeps no durable state: the shards keep the cursors, and a successor requests them. Invariants:

- A router is in at most one forward request, a flow has at most one read, and requests in flight are
  bounded (FW1).
- A router that lags is in a forward request, or waits for one or for its retry time (FW2).
- A flow keeps its grant while one of its active routers lags, and no longer. A router that waits for its
  retry time, or whose source does, is not active (FW3).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from msgspec import structs

from ringlog.envelope import messages as m
from ringlog.errors import InvariantViolation
from ringlog.limits import (
    FORWARD_REQUESTS_MAX,
    ROUTE_BYTES_MAX,
    ROUTE_PAUSE_MS_MAX,
    ROUTE_PAUSE_MS_MIN,
    ROUTE_RECORDS_MAX,
    ROUTE_ROWS_MAX,
)
from ringlog.placement import shard_of
from ringlog.topic.routers import RouterFlag, RouterPassOutcome
from ringlog.types import Durability

_MS = 1_000_000
_KEEPS = RouterFlag.PRESERVE_NODE | RouterFlag.PRESERVE_TAG


class SourceFlowKey(NamedTuple):
    """Key of a flow: source topic id, and whether the flow waits for synced records."""

    source_id: int
    is_strong: bool


class CopyTransform(NamedTuple):
    """Changes that a router makes to the records it copies. Routers with equal transforms share one frame."""

    filter: str
    preserve_flags: int
    stamp: str
    """Name of the router if its copies carry a stamp of their origin, else empty."""


class PassSize(NamedTuple):
    """Size of what a router forwards in one pass."""

    records: int
    """Records that were read from the source, also those that a filter leaves out."""
    source_bytes: int
    """Their payloads and metadata in bytes, at the source."""
    copy_bytes: int
    """Payloads and metadata of the copies in bytes, with stamps."""


NO_PASS = PassSize(0, 0, 0)


@dataclass(slots=True)
class ActiveRouter:
    """One router of a flow, with its cursor and its retry state."""

    number: int
    dest_id: int
    shard: int
    transform: CopyTransform
    cursor: int
    facts: m.RouterFacts
    is_in_pass: bool = False
    due_ns: int = 0
    """Time in ns before which it is not retried; 0 = any time."""
    pause_ms: int = 0
    batch_limits: tuple[int, int] = (ROUTE_RECORDS_MAX, ROUTE_BYTES_MAX)
    """Most records and bytes of the source in its next pass. They are lower than the maximum while its
    destination has too little room."""
    pass_size: PassSize = NO_PASS
    """Size of its latest pass."""
    is_dest_full: bool = False
    """Whether its destination was full at the last forward request."""


@dataclass(slots=True)
class SourceFlow:
    """Routers of one source that wait for the same mark of it."""

    key: SourceFlowKey
    source: str
    epoch: int
    routers: dict[int, ActiveRouter] = field(default_factory=dict)
    until: int = 0
    """Seq up to which the flow was granted to read the source."""
    has_grant: bool = False
    is_reading: bool = False
    is_waiting: bool = False
    """It waits in the queue for a free forward request."""
    due_ns: int = 0
    pause_ms: int = 0

    @property
    def is_in_pass(self) -> bool:
        """Whether one of its routers is in a forward request."""
        return any(each.is_in_pass for each in self.routers.values())


# -- effects ----------------------------------------------------------------------------------------------


class FollowSource(NamedTuple):
    """Subscribe to the source of a flow, from seq `after` on."""

    key: SourceFlowKey
    source: str
    after: int


class UnfollowSource(NamedTuple):
    """End the subscription of a flow without routers."""

    key: SourceFlowKey


class ReturnSourceGrant(NamedTuple):
    """Return the flow's grant.

    Records up to `after` are forwarded, or wait for the retry time of a router or of the flow.
    """

    key: SourceFlowKey
    after: int


class ReadForwardBatch(NamedTuple):
    """Read the source after `start` up to `until`, and build one frame of copies for each transform."""

    key: SourceFlowKey
    source: str
    epoch: int
    start: int
    until: int
    records: int
    bytes: int
    transforms: tuple[CopyTransform, ...]
    routers: tuple[int, ...]


class SendRoute(NamedTuple):
    """Send a shard its forward request of a pass."""

    shard: int
    message: m.Route
    frames: tuple[bytes, ...]


Effect = FollowSource | UnfollowSource | ReturnSourceGrant | ReadForwardBatch | SendRoute


class ForwardBatch(NamedTuple):
    """Result of a ReadForwardBatch: the source from its start up to `stop`."""

    stop: int
    lost: int = 0
    """Number of positions that were lost before they were forwarded. If it is not 0, there are no frames."""
    hops: int = 1
    frames: tuple[bytes, ...] = ()
    frame_of: Mapping[CopyTransform, int] = MappingProxyType({})
    """Index into `frames` by transform. A transform whose filter leaves no records is missing."""
    records: int = 0
    """Number of records that were read."""
    source_bytes: int = 0
    """Payloads and metadata of these records in bytes."""
    copy_bytes: tuple[int, ...] = ()
    """Payloads and metadata of the copies in each frame, in bytes."""

    def size_of(self, transform: CopyTransform) -> PassSize:
        """Return the size of a pass with this transform."""
        frame = self.frame_of.get(transform)
        return PassSize(self.records, self.source_bytes, 0 if frame is None else self.copy_bytes[frame])


class CatchUpState(Enum):
    """Progress of the routers into a topic relative to a position of their source."""

    CAUGHT_UP = "there"
    BEHIND = "behind"
    BLOCKED = "held up"
    """The destination is full. The routers continue when there is room again."""


class ForwardingCore:
    """All flows of one scheduler. Methods append to `effects`; the shell takes and performs them."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self.flows: dict[SourceFlowKey, SourceFlow] = {}
        self.effects: list[Effect] = []
        self.parts_in_flight: int = 0
        """Number of forward requests in flight."""
        self.passes: int = 0
        self._flow_of: dict[int, SourceFlowKey] = {}
        self._routers_by_dest: dict[int, set[int]] = {}
        """Numbers of active routers by destination topic id. A destination has only one source."""
        self._queue: deque[SourceFlowKey] = deque()
        self._dues: list[tuple[int, SourceFlowKey]] = []
        self._now_ns = 0

    @property
    def routers(self) -> int:
        """Number of active routers."""
        return len(self._flow_of)

    @property
    def lag(self) -> int:
        """Number of granted positions that are not forwarded yet, summed over all routers."""
        flows = self.flows.values()
        return sum(max(flow.until - each.cursor, 0) for flow in flows for each in flow.routers.values())

    def next_deadline_ns(self) -> int | None:
        """Return the time in ns at which `tick` must be called, or None."""
        return self._dues[0][0] if self._dues else None

    # -- routers and flows ------------------------------------------------------------------------------

    def has_router(self, number: int) -> bool:
        """Return whether this router is active here."""
        return number in self._flow_of

    def put_router(self, facts: m.RouterFacts) -> None:
        """Add or change a router. Its forward request in flight stays valid."""
        key = SourceFlowKey(facts.source_id, facts.durability == Durability.FSYNC)
        old = self._flow_router(facts.router)
        if old is not None and self._flow_of[facts.router] == key:
            old.facts, old.transform = facts, _transform_of(facts)
            return
        if old is not None:
            self.drop_router(facts.router)
        flow_router = ActiveRouter(
            facts.router, facts.dest_id, shard_of(facts.dest_id, self._shards), _transform_of(facts),
            max(facts.cursor, old.cursor if old else 0), facts,
        )  # fmt: skip
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = SourceFlow(key, facts.source, facts.source_epoch)
            self.effects.append(FollowSource(key, flow.source, flow_router.cursor))
        flow.routers[flow_router.number] = flow_router
        self._flow_of[flow_router.number] = key
        self._routers_by_dest.setdefault(flow_router.dest_id, set()).add(flow_router.number)
        self._advance_flow(flow)

    def drop_router(self, number: int) -> None:
        """Remove a router if it is active here."""
        key = self._flow_of.pop(number, None)
        flow = self.flows.get(key) if key is not None else None
        if flow is None:
            return
        dest_id = flow.routers.pop(number).dest_id
        self._routers_by_dest[dest_id].discard(number)
        if not self._routers_by_dest[dest_id]:
            del self._routers_by_dest[dest_id]
        if flow.routers:
            self._advance_flow(flow)
        else:
            del self.flows[flow.key]
            self.effects.append(UnfollowSource(flow.key))

    def flows_to_dest(self, dest_id: int) -> list[SourceFlow]:
        """Return the flows with routers into this topic."""
        return [
            self.flows[key]
            for key in {self._flow_of[number] for number in self._routers_by_dest.get(dest_id, ())}
        ]

    def catch_up_state(self, dest_id: int, until: int) -> CatchUpState:
        """Return whether all routers into a topic have forwarded their source up to `until`."""
        flow_routers = [self._flow_router(number) for number in self._routers_by_dest.get(dest_id, ())]
        behind = [each for each in flow_routers if each is not None and each.cursor < until]
        if not behind:
            return CatchUpState.CAUGHT_UP
        return CatchUpState.BLOCKED if any(each.is_dest_full for each in behind) else CatchUpState.BEHIND

    def _flow_router(self, number: int) -> ActiveRouter | None:
        key = self._flow_of.get(number)
        return None if key is None else self.flows[key].routers[number]

    # -- events -----------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Set the current time and continue the flows whose retry time has come."""
        self._now_ns = now_ns
        while self._dues and self._dues[0][0] <= now_ns:
            _, key = heapq.heappop(self._dues)
            if (flow := self.flows.get(key)) is not None:
                self._advance_flow(flow)

    def grant_received(self, key: SourceFlowKey, until: int) -> None:
        """Record a grant: the source of a flow may be read up to `until`."""
        flow = self.flows.get(key)
        if flow is None:
            return
        flow.until, flow.has_grant = max(flow.until, until), True
        self._advance_flow(flow)

    def batch_read(self, request: ReadForwardBatch, found: ForwardBatch | None) -> None:
        """Process the result of a read; `found` None = the source cannot be read at present."""
        flow = self.flows.get(request.key)
        if flow is None:
            return
        flow.is_reading = False
        flow_routers = [flow.routers[number] for number in request.routers if number in flow.routers]
        flow_routers = [each for each in flow_routers if each.cursor == request.start and not each.is_in_pass]
        if found is None or found.stop <= request.start:
            flow.pause_ms = _next_backoff_ms(flow.pause_ms)
            flow.due_ns = self._wait(flow, flow.pause_ms)
        else:
            flow.pause_ms = flow.due_ns = 0
            # A router that changed during the read has no frame here. The next pass begins at its cursor.
            flow_routers = [each for each in flow_routers if each.transform in request.transforms]
            self.passes += 1
            for send in split_by_shard(flow_routers, request.start, found):
                self.parts_in_flight += 1
                self.effects.append(send)
                for row in send.message.rows:
                    flow_router = flow.routers[row.router]
                    flow_router.is_in_pass = True
                    flow_router.pass_size = found.size_of(flow_router.transform)
        self._advance_flow(flow)

    def route_answered(self, sent: m.Route, rows: Sequence[m.RoutedRow] | None) -> None:
        """Process the reply to a forward request; `rows` None = no reply.

        A later request finds out the outcome.
        """
        self.parts_in_flight -= 1
        flows: dict[SourceFlowKey, SourceFlow] = {}
        for n, row in enumerate(sent.rows):
            flow_router = self._flow_router(row.router)
            if flow_router is None:
                continue
            flow = self.flows[self._flow_of[row.router]]
            flows[flow.key] = flow
            flow_router.is_in_pass = False
            self._apply_result(
                flow, flow_router, rows[n] if rows is not None else m.RoutedRow(RouterPassOutcome.CLOSED)
            )
        for flow in flows.values():
            if flow.key in self.flows:
                self._advance_flow(flow)
        while self._queue and self.parts_in_flight < FORWARD_REQUESTS_MAX:
            waiting = self.flows.get(self._queue.popleft())
            if waiting is not None:
                waiting.is_waiting = False
                self._advance_flow(waiting)

    def _apply_result(self, flow: SourceFlow, flow_router: ActiveRouter, row: m.RoutedRow) -> None:
        if row.fate == RouterPassOutcome.GONE:
            self.drop_router(flow_router.number)
            return
        flow_router.cursor = max(flow_router.cursor, row.cursor)
        if row.durability not in {-1, flow_router.facts.durability}:
            # The class of its destination changed, so the router may belong to another flow.
            self.put_router(structs.replace(flow_router.facts, durability=row.durability))
        flow_router.is_dest_full = row.fate == RouterPassOutcome.FULL
        if row.fate in {RouterPassOutcome.DONE, RouterPassOutcome.ELSEWHERE}:
            flow_router.pause_ms, flow_router.batch_limits = 0, (ROUTE_RECORDS_MAX, ROUTE_BYTES_MAX)
            return
        limits = smaller_limits(flow_router, row) if flow_router.is_dest_full else None
        if limits is not None:
            # The destination may have room for a smaller pass, which is sent at once.
            flow_router.batch_limits, flow_router.is_dest_full = limits, False
            return
        flow_router.batch_limits = (ROUTE_RECORDS_MAX, ROUTE_BYTES_MAX)
        flow_router.pause_ms = _next_backoff_ms(flow_router.pause_ms)
        flow_router.due_ns = self._wait(flow, flow_router.pause_ms)

    def _wait(self, flow: SourceFlow, pause_ms: int) -> int:
        due_ns = self._now_ns + pause_ms * _MS
        heapq.heappush(self._dues, (due_ns, flow.key))
        return due_ns

    # -- the next pass ----------------------------------------------------------------------------------

    def _advance_flow(self, flow: SourceFlow) -> None:
        """Start the next pass of a flow if routers are ready.

        Otherwise return the grant when no pass is in flight.
        """
        if flow.is_reading:
            return
        ready = self._ready_routers(flow)
        if not ready:
            # Also a flow whose source cannot be read returns its grant: others need the credit. It needs none
            # to continue at its retry time.
            if flow.has_grant and not flow.is_in_pass:
                flow.has_grant = False
                self.effects.append(ReturnSourceGrant(flow.key, flow.until))
            return
        if self.parts_in_flight >= FORWARD_REQUESTS_MAX:
            if not flow.is_waiting:
                flow.is_waiting = True
                self._queue.append(flow.key)
            return
        first = min(ready, key=lambda each: each.cursor)
        group = [
            each for each in ready if (each.cursor, each.batch_limits) == (first.cursor, first.batch_limits)
        ]
        flow.is_reading = True
        self.effects.append(
            ReadForwardBatch(
                flow.key, flow.source, flow.epoch, first.cursor, flow.until, *first.batch_limits,
                tuple(dict.fromkeys(each.transform for each in group)), tuple(each.number for each in group),
            )
        )  # fmt: skip

    def _ready_routers(self, flow: SourceFlow) -> list[ActiveRouter]:
        """Return the routers that lag, are in no pass and wait for no retry time, also not for the flow's."""
        if flow.due_ns > self._now_ns:
            return []
        return [
            each for each in flow.routers.values()
            if each.cursor < flow.until and not each.is_in_pass and each.due_ns <= self._now_ns
        ]  # fmt: skip

    def check(self) -> None:
        """Check that lagging routers make progress, that grants are returned, that requests are bounded, and
        that the tables agree.

        Raises:
            InvariantViolation: one of these does not hold.
        """
        for flow in self.flows.values():
            ready = self._ready_routers(flow)
            if ready and not (flow.is_reading or flow.is_waiting):
                raise InvariantViolation("a router lags and its flow makes no progress", routers=len(ready))
            if flow.has_grant and not (ready or flow.is_reading or flow.is_in_pass):
                raise InvariantViolation("a flow keeps a grant that it does not use", source=flow.source)
            if any(self._flow_of.get(number) != flow.key for number in flow.routers) or not flow.routers:
                raise InvariantViolation(
                    "a router is in another flow than recorded, or a flow has no routers", source=flow.source
                )
        if sum(map(len, self._routers_by_dest.values())) != len(self._flow_of):
            raise InvariantViolation(
                "the index by destination has another number of routers", routers=self.routers
            )
        if not 0 <= self.parts_in_flight <= FORWARD_REQUESTS_MAX + self._shards * len(self.flows):
            raise InvariantViolation(
                "number of forward requests in flight is out of bounds", out=self.parts_in_flight
            )


def split_by_shard(flow_routers: Iterable[ActiveRouter], start: int, found: ForwardBatch) -> list[SendRoute]:
    """Return the forward requests of a pass: for each shard its routers, and the frames that they copy."""
    of_shard: dict[int, list[ActiveRouter]] = {}
    for flow_router in flow_routers:
        of_shard.setdefault(flow_router.shard, []).append(flow_router)
    sends = []
    for shard, group in sorted(of_shard.items()):
        for first in range(0, len(group), ROUTE_ROWS_MAX):
            used: dict[int, int] = {}
            rows = []
            for flow_router in group[first : first + ROUTE_ROWS_MAX]:
                frame = found.frame_of.get(flow_router.transform, -1)
                number = used.setdefault(frame, len(used)) if frame >= 0 else -1
                rows.append(
                    m.RouteRow(flow_router.number, flow_router.dest_id, start, found.stop, number, found.lost)
                )
            frames = tuple(found.frames[frame] for frame in used)
            sends.append(SendRoute(shard, m.Route(rows, len(frames), found.hops), frames))
    return sends


def smaller_limits(flow_router: ActiveRouter, row: m.RoutedRow) -> tuple[int, int] | None:
    """Return limits in records and bytes for a smaller pass, after a refusal that states the remaining room.

    Each further pass has fewer records than the one before. None if there is no room, or if one record was
    refused.
    """
    size, (records, bytes_) = flow_router.pass_size, flow_router.batch_limits
    if size.records <= 1 or not row.records or not row.bytes:
        return None
    if row.records < size.records or row.bytes < size.source_bytes:
        return min(row.records, records), min(row.bytes, bytes_)
    # The copies are larger than their source records, because they are stamped. As their sizes differ, this
    # share of the room is an estimate. With half of the records or fewer each time, log2(ROUTE_RECORDS_MAX)
    # passes find out whether one record fits.
    share = size.records * row.bytes // max(size.copy_bytes, 1)
    return max(min(share, size.records // 2), 1), bytes_


def _transform_of(facts: m.RouterFacts) -> CopyTransform:
    is_stamped = facts.flags & RouterFlag.EXACTLY_ONCE
    return CopyTransform(facts.filter, int(facts.flags & _KEEPS), facts.name if is_stamped else "")


def _next_backoff_ms(pause_ms: int) -> int:
    return min(max(2 * pause_ms, ROUTE_PAUSE_MS_MIN), ROUTE_PAUSE_MS_MAX)
