"""Queries about the leases of a queue or group: its pending records, and its numbers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.leases.consumer_groups import info_of
from ringlog.actors.wal_shard.leases.lease_registry import key_of
from ringlog.actors.wal_shard.leases.lease_requests import ready_of, unclaimed_of
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest
from ringlog.leases.pending_list import list_pending
from ringlog.limits import JOBS_PER_REQUEST_MAX, PENDING_ROWS_MAX
from ringlog.topic.retention import retained_from

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases


class LeaseQueries:
    """Answers queries about leases from memory."""

    def __init__(self, leases: ShardLeases) -> None:
        self._leases, self._registry, self._waiting_claims = leases, leases.registry, leases.waiting_claims
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message | None]
        ] = {m.ListPending: self._list_pending, m.LeaseStats: self._stats}

    def _list_pending(
        self, message: m.ListPending, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group = self._leases.find(message)
        if min(message.idle_ms, message.min_deliveries, message.after, message.limit - 1) < 0:
            raise InvalidRequest(
                "idle_ms, min_deliveries and after must be >= 0, and limit must be >= 1", topic=topic.name
            )
        now_ms, wall_clock_offset_ms = now_us // 1_000, self._registry.wall_clock_offset_ms
        entries, more = list_pending(
            group, now_ms, node=message.node, idle_ms=message.idle_ms, min_deliveries=message.min_deliveries,
            after=message.after, limit=min(message.limit, PENDING_ROWS_MAX),
        )  # fmt: skip
        failures: dict[int, tuple[str, int, int]] = {}
        looked = 0
        for at, each in enumerate(entries if group.failures else ()):
            if looked >= JOBS_PER_REQUEST_MAX:
                entries, more = entries[:at], True
                break
            looked += each.stop - each.first
            for seq in range(each.first, each.stop):
                if failure := group.failures.find(seq):
                    failed_ms = failure.at_ms and failure.at_ms + wall_clock_offset_ms
                    failures[seq] = failure.reason, failed_ms, failure.nacks
        nodes = sorted({each.node for each in entries})
        place = {node: at for at, node in enumerate(nodes)}
        rows = [
            (each.first, each.stop - each.first, each.state, each.deliveries,
            each.begun_ms + wall_clock_offset_ms,
             each.given_ms + wall_clock_offset_ms,
             each.until_ms + wall_clock_offset_ms if each.until_ms else 0, place[each.node],
             each.token)
            for each in entries
        ]  # fmt: skip
        return m.PendingReply(topic.name, rows, nodes, more, now_ms + wall_clock_offset_ms, failures)

    def _stats(
        self, message: m.LeaseStats, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group = self._registry.find_named(message) if message.group else self._leases.find(message)
        now_ms, key = now_us // 1_000, key_of(topic, group)
        group.apply_expirations(now_ms)
        reply = m.LeaseStatsReply(
            info_of(topic, group), topic.head_seq, ready_of(topic, group), group.leased, group.total_delayed,
            group.returned, group.exhausted, unclaimed_of(topic, group), self._waiting_claims.of(key),
        )  # fmt: skip
        if group.is_queue_mode:
            put_ms = self._leases.delivery_attributes.take_put_ms(topic, group)
            reply = msgspec.structs.replace(
                reply, oldest_ready_ms=-1 if put_ms is None else max(now_ms - put_ms, 0),
                wait_p99_ms=group.wait_histogram.p99_ms(now_ms) if group.wait_histogram else 0,
                promoted=group.promoted,
            )  # fmt: skip
        if group.is_default_group:
            return msgspec.structs.replace(reply, dead_lettered=group.dead_lettered)
        group.holders.sweep(now_ms)
        wall_clock_offset_ms = self._registry.wall_clock_offset_ms
        return msgspec.structs.replace(
            reply, members=sorted((each.name, each.seen_ms + wall_clock_offset_ms,
            each.held) for each in group.holders),
            holder=group.reader,
            is_holding=bool(topic.retained_at) and retained_from(topic)[1] == group.config.key,
        )  # fmt: skip
