"""Appends, sent by ring or by socket: unchanged (G3), and in the order of their connection (G2). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringlog.access.engine_facts import create_forbidden, needs_admin_to_create, without_create
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.flows import AcquireAppendLane, FlowContext, GatewayRequest, ResolveTopic
from ringlog.actors.gateway.requests.append_admission import AppendAdmission, Flow
from ringlog.actors.gateway.requests.append_validation import SentFrames, check_frames
from ringlog.envelope import messages as m
from ringlog.errors import StaleEpoch, TopicNotFound
from ringlog.placement import home_shard


@dataclass(slots=True)
class AppendLane:
    """Appends of one connection to one topic.

    Appends by ring and by socket must not overtake one another, so one kind waits for the other.
    """

    by_ring: int = 0
    by_socket: int = 0
    parked: deque[tuple[GatewayRequest, bool]] = field(default_factory=deque)

    def admits(self, *, by_socket: bool) -> bool:
        # Only one append by socket at a time: if the shard is not ready it is sent again, after later ones.
        return not self.by_socket and not (by_socket and self.by_ring)


class AppendFlows:
    """Append flows and the lanes that keep them in order. `advance` resumes a parked flow."""

    def __init__(
        self, context: FlowContext, intake: AppendAdmission, shards: int, ring_frame_bytes_max: int,
        advance: Callable[[GatewayRequest, Any], None], bytes_max: int,
    ) -> None:  # fmt: skip
        self._context, self._intake, self._shards = context, intake, shards
        self._ring_frame_bytes_max = ring_frame_bytes_max
        self._advance = advance
        self._bytes_max = bytes_max
        self._lanes: dict[tuple[bytes, str], AppendLane] = {}

    def check(self) -> None:
        """Check that no empty lane is kept."""
        assert all(lane.by_ring + lane.by_socket + len(lane.parked) for lane in self._lanes.values())

    def append(self, request: GatewayRequest) -> Flow:
        """Check the frames, resolve or create the topic, and forward the frames. Raises Refused."""
        message: m.Append = request.message
        sent = check_frames(message, request.data, self._bytes_max)
        if message.create is not False and (sent.topic_id == 0 or message.config is not None):
            return (yield from self._append_creating(request))
        info = yield ResolveTopic(message.topic)
        if sent.topic_id not in {0, info.topic_id}:
            # The cached topic may be older than the client's.
            self._context.evict_topic(message.topic)
            info = yield ResolveTopic(message.topic)
        if sent.topic_id not in {0, info.topic_id}:
            raise StaleEpoch(
                "the frames belong to another topic or an earlier epoch: open the topic again",
                topic=message.topic,
            )  # fmt: skip
        is_keyed = bool(message.idempotency_key or message.ids)
        if is_keyed or not sent.topic_id or sent.largest_bytes > self._ring_frame_bytes_max:
            flow = self._by_socket(request, info.shard, message)
        else:
            flow = self._by_ring(request, info, sent)
        return (yield from self._intake.run_admitted(info.shard, message, request.bytes, flow))

    def _by_ring(self, request: GatewayRequest, info: m.TopicInfo, sent: SentFrames) -> Flow:
        topic = request.message.topic
        yield AcquireAppendLane(by_socket=False)
        try:
            entries = yield ev.PushFrames(
                self._context.next_ticket(), info.shard, topic, request.data, sent.offsets
            )
        finally:
            self._finish_append(request, by_socket=False)
        if sent.has_stale_topic(entries):
            self._context.evict_topic(topic)
        return m.Appended(topic, info.topic_id, info.epoch, False, entries), None

    def _append_creating(self, request: GatewayRequest) -> Flow:
        message: m.Append = request.message
        if needs_admin_to_create(request.principal, message):
            return (yield from self._append_existing(request, without_create(message)))
        try:
            shard = (yield ResolveTopic(message.topic)).shard
        except TopicNotFound:
            shard = home_shard(message.topic, self._shards)
        flow = self._by_socket(request, shard, message)
        return (yield from self._intake.run_admitted(shard, message, request.bytes, flow))

    def _append_existing(self, request: GatewayRequest, message: m.Append) -> Flow:
        """Append for a key that may not create the topic. The cached topic may be deleted already."""
        try:
            shard = (yield ResolveTopic(message.topic)).shard
            flow = self._by_socket(request, shard, message)
            return (yield from self._intake.run_admitted(shard, message, request.bytes, flow))
        except TopicNotFound:
            raise create_forbidden(message.topic) from None

    def _by_socket(self, request: GatewayRequest, shard: int, message: m.Append) -> Flow:
        yield AcquireAppendLane(by_socket=True)
        try:
            answer = yield self._context.ask(shard, message, request.data)
        except (TopicNotFound, StaleEpoch):
            self._context.evict_topic(message.topic)
            raise
        finally:
            self._finish_append(request, by_socket=True)
        return answer, None

    def start_or_park(self, request: GatewayRequest, *, by_socket: bool) -> None:
        """Start an append, or park it after those that it must not overtake."""
        lane = self._lanes.setdefault((request.client, request.message.topic), AppendLane())
        if lane.parked or not lane.admits(by_socket=by_socket):
            lane.parked.append((request, by_socket))
            return
        self._go(lane, request, by_socket=by_socket)

    def _go(self, lane: AppendLane, request: GatewayRequest, *, by_socket: bool) -> None:
        if by_socket:
            lane.by_socket += 1
        else:
            lane.by_ring += 1
        self._advance(request, None)

    def _finish_append(self, request: GatewayRequest, *, by_socket: bool) -> None:
        key = (request.client, request.message.topic)
        lane = self._lanes[key]
        if by_socket:
            lane.by_socket -= 1
        else:
            lane.by_ring -= 1
        while lane.parked and lane.admits(by_socket=lane.parked[0][1]):
            following, is_socket = lane.parked.popleft()
            self._go(lane, following, by_socket=is_socket)
        if not (lane.parked or lane.by_ring or lane.by_socket):
            self._lanes.pop(key, None)
