"""Reads: where a topic's records are, their frames, and the wait for records that do not exist yet. Pure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.flows import FlowContext, GatewayRequest, ResolveTopic
from ringlog.actors.gateway.replies import is_client_copy_current, plan_for_read, read_reply
from ringlog.actors.gateway.requests.append_admission import Flow
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, NotReady, TopicNotFound
from ringlog.limits import (
    READ_BYTES_DEFAULT,
    READ_BYTES_MAX,
    READ_LIMIT_DEFAULT,
    READ_LIMIT_MAX,
    WAIT_MS_MAX,
)
from ringlog.topic.tombstone import ReadPlan

_MS = 1_000_000
_COLD_READS_MAX = 8
"""Most relocator requests for one reply. The length of a frame is known only after its start was read."""


class ReadFlows:
    """Read flows. `wait_until` sets the time (ns) at which a request stops waiting for a completion."""

    def __init__(
        self,
        context: FlowContext,
        wait_until: Callable[[GatewayRequest, int, int], None],
        limit: int = READ_LIMIT_MAX,
    ) -> None:
        """`limit` is the largest number of records in one reply, whatever the client requests."""
        self._context, self._wait_until, self._limit = context, wait_until, limit

    def read(self, request: GatewayRequest) -> Flow:
        """Locate and read records. If there are none, wait for the topic to change and read once more."""
        message: m.Read = request.message
        if message.after < 0 or message.epoch < 0 or message.limit < 0 or message.max_bytes < 0:
            raise InvalidRequest("after, epoch, limit and max_bytes must be >= 0", topic=message.topic)
        limit = min(message.limit or READ_LIMIT_DEFAULT, self._limit)
        deadline_ns = self._context.now_ns + max(0, min(message.wait_ms, WAIT_MS_MAX)) * _MS
        has_waited = False
        while True:
            # The time before the request to the shard: records that expired by then are covered by its reply.
            requested_us = self._context.now_us
            located = yield from self.locate(message, message.after, message.epoch)
            plan = plan_for_read(message, located)
            if is_client_copy_current(message, located, plan):
                return read_reply(located, plan, ev.FramesRead(0, 0, 0, 0, message.held)), None
            read = yield from self.read_files(message, located, plan, requested_us, limit)
            reply = read_reply(located, plan, read)
            is_news = read.frames or plan.gap is not None or not reply.caught_up
            if is_news or has_waited or self._context.is_draining or deadline_ns <= self._context.now_ns:
                return reply, read.data
            # When the watch starts, the shell compares with the board. So no publication is missed.
            watch = ev.WatchTopic(
                self._context.next_ticket(), located.shard, located.slot, located.topic_id, located.epoch,
                located.head_seq,
            )  # fmt: skip
            self._wait_until(request, deadline_ns, watch.ticket)
            if not (yield watch):
                return reply, read.data
            has_waited = True

    def read_files(
        self, message: m.Read, located: m.Located, plan: ReadPlan, now_us: int, limit: int
    ) -> Generator[Any, Any, ev.FramesRead]:
        """Read frames; the relocator reads cold records. An error of the relocator is the reply."""
        cold, data = None, None
        for _ in range(_COLD_READS_MAX):
            read: ev.FramesRead = yield ev.ReadFiles(
                self._context.next_ticket(), located, plan.after, plan.stop,
                limit,
                min(message.max_bytes, READ_BYTES_MAX) or READ_BYTES_DEFAULT,
                now_us, cold, data,
            )  # fmt: skip
            if read.cold is None:
                return read
            self._context.require_no_drain()
            arrived: ev.ColdReadCompleted = yield ev.ReadCold(self._context.next_ticket(), read.cold)
            cold, data = read.cold, arrived.data
        raise NotReady(
            f"cold records could not be read within {_COLD_READS_MAX} attempts, retry later",
            topic=message.topic, reason="cold_unavailable",
        )  # fmt: skip

    def seek_time(self, message: m.SeekTime) -> Flow:
        """Find the position of a time from the commit times of stored records."""
        located = yield from self.locate(message, 0, 0)
        after = yield ev.FindTime(self._context.next_ticket(), located, message.ts)
        return m.SeekTimeReply(message.topic, located.epoch, after), None

    def locate(self, message: m.Read | m.SeekTime, after: int, epoch: int) -> Generator[Any, Any, m.Located]:
        """Request the places of the records after `after` from the shard. Raises TopicNotFound."""
        info = yield ResolveTopic(message.topic)
        try:
            located: m.Located = yield self._context.ask(info.shard, m.Locate(message.topic, after, epoch))
        except TopicNotFound:
            self._context.evict_topic(message.topic)
            raise
        return located
