"""Deletion of topics that were idle for a configured time (`expire_unused_ms`, X8). Pure.

Requests and records leave traces in the state of a topic: its next seq, the time of the last read, and the
time of the last other use. A periodic check compares these traces with those of the previous check. It also
looks for uses without trace: waiting claims, leased or delayed jobs, and routers into the topic. Records
therefore cause no extra work.

The idle time starts at the first check after the last use, on the monotonic clock. Steps of the wall clock
have no effect. A topic is never deleted early, and at most a few check intervals late.

The shard does not see readers of shared memory. Clients that follow such a topic, and schedulers with a
router from it, therefore send a request every third of its period
(ringlog/client/watches/topic_keep_alive.py, actors/scheduler/forwarding/source_keep_alive.py). If the shard
itself was delayed, these requests may still be queued. Time by which a check is late therefore does not count
as idle time.

Uses are not logged. After a restart, the shard cannot distinguish an idle topic from one whose followers are
about to reconnect. Every topic therefore gets a complete new period.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringlog.actors.wal_shard.leases.lease_registry import key_of
from ringlog.envelope import messages as m
from ringlog.leases.group import ConsumerGroup
from ringlog.limits import (
    IDLE_CHECK_LATE_MS,
    IDLE_CHECK_MS_MAX,
    IDLE_CHECK_MS_MIN,
    IDLE_CHECK_PAUSE_MS,
    IDLE_CHECKS_MAX,
    IDLE_CHECKS_PER_PERIOD,
)
from ringlog.topic.config import QUEUE
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.state import ShardTopic

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases

_MS_NS = 1_000_000
USING_REQUESTS: frozenset[type[m.Message]] = frozenset({
    m.TopicPut, m.TopicResolve, m.Append, m.RecordsDelete, m.ProducerState, m.Locate, m.Claim, m.Steal,
    m.Ack, m.AckAndClaim, m.Nack, m.Extend, m.Reject, m.GroupOpen, m.GroupLeave, m.GroupSeek, m.GroupTakeOver,
    m.GroupCommit, m.GroupDelete, m.Redeliver,
})  # fmt: skip
"""Requests that count as use of a topic.
Monitoring requests do not, or a monitored topic would never expire."""


@dataclass(slots=True)
class _TopicUse:
    topic: ShardTopic
    traces: tuple[int, int, int]
    since_ns: int
    """Start of the idle time: monotonic time of the first check after the last use."""
    due_ns: int
    """Monotonic time of the next check."""
    was_held: bool = False
    """True if the last check found a use without trace, such as a waiting claim."""


class IdleTopicExpiry:
    """Deletes the idle topics of one shard that have `expire_unused_ms`."""

    def __init__(self, directory: TopicDirectory, leases: ShardLeases) -> None:
        self._directory, self._leases = directory, leases
        self.now_ns = 0
        """Current monotonic time in nanoseconds."""
        self._known: dict[int, _TopicUse] = {}
        self._dues: list[tuple[int, int]] = []
        """Heap of (check time, topic_id). An entry is valid only if it equals the topic's `due_ns`."""
        self._not_before_ns = 0
        self._gone: dict[int, int] = {}
        """Topic id -> period in milliseconds of idle topics whose deletion is staged."""

    def __bool__(self) -> bool:
        """Return True if a topic has the setting."""
        return bool(self._known)

    # -- topics ---------------------------------------------------------------------------------------

    def start_period(self, topic: ShardTopic) -> None:
        """Start the period of a topic that was created or configured."""
        if topic.config.expire_unused_ms:
            self._plan(_TopicUse(topic, _traces(topic), self.now_ns, 0))
        else:
            self._known.pop(topic.topic_id, None)

    def finish_recovery(self) -> None:
        """Start a new period for every recovered topic with the setting."""
        for topic in self._directory.by_id.values():
            if topic.config.expire_unused_ms:
                self.start_period(topic)

    def forget(self, topic: ShardTopic) -> None:
        """Stop checking a deleted topic."""
        self._known.pop(topic.topic_id, None)

    def record_use(self, message: m.Message, now_us: int) -> None:
        """Record the use of a topic by a request that was answered or that waits."""
        if type(message) in USING_REQUESTS:
            topic = self._directory.find(getattr(message, "topic", ""))
            if topic is not None:
                topic.used_us = now_us

    def take_expired_period(self, topic: ShardTopic) -> int:
        """Return the idle period of a topic whose deletion is durable; 0 if it was deleted on request."""
        return self._gone.pop(topic.topic_id, 0) if self._gone else 0

    # -- checks ---------------------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        """Return the monotonic time of the next check, or None if no topic has the setting."""
        return max(self._dues[0][0], self._not_before_ns) if self._dues else None

    def expire_idle(self, now_us: int, remove: Callable[[ShardTopic], None]) -> None:
        """Check the topics that are due, at most IDLE_CHECKS_MAX. Remove those whose idle time has ended."""
        self._not_before_ns = self.now_ns + IDLE_CHECK_PAUSE_MS * _MS_NS
        for _ in range(IDLE_CHECKS_MAX):
            if not self._dues or self._dues[0][0] > self.now_ns:
                return
            due_ns, topic_id = heapq.heappop(self._dues)
            known = self._known.get(topic_id)
            if known is not None and known.due_ns == due_ns:
                self._check_topic(known, now_us, remove)

    def _check_topic(self, known: _TopicUse, now_us: int, remove: Callable[[ShardTopic], None]) -> None:
        topic, traces = known.topic, _traces(known.topic)
        late_ns = self.now_ns - known.due_ns
        is_held = self._is_in_use(topic, now_us // 1_000)
        if is_held or known.was_held or traces != known.traces:
            # A use ended at an unknown time since the previous check, so the idle time starts now.
            known.traces, known.was_held, known.since_ns = traces, is_held, self.now_ns
        elif late_ns > IDLE_CHECK_LATE_MS * _MS_NS:
            known.since_ns += late_ns
        if self.now_ns - known.since_ns < topic.config.expire_unused_ms * _MS_NS:
            self._plan(known)
            return
        self._gone[topic.topic_id] = topic.config.expire_unused_ms
        remove(topic)

    def _plan(self, known: _TopicUse) -> None:
        """Schedule the next check after a part of the period, and at the latest when the period ends."""
        period_ms = known.topic.config.expire_unused_ms
        step_ms = min(max(period_ms // IDLE_CHECKS_PER_PERIOD, IDLE_CHECK_MS_MIN), IDLE_CHECK_MS_MAX)
        due_ns = min(self.now_ns + step_ms * _MS_NS, known.since_ns + period_ms * _MS_NS)
        known.due_ns = max(due_ns, self.now_ns)
        self._known[known.topic.topic_id] = known
        heapq.heappush(self._dues, (known.due_ns, known.topic.topic_id))

    def _is_in_use(self, topic: ShardTopic, now_ms: int) -> bool:
        """Return True if something uses the topic without leaving a trace."""
        if topic.routers:
            return True
        groups = list(topic.groups.values())
        if topic.config.type == QUEUE:
            groups.append(self._leases.registry.default_group(topic))
        return any(self._is_held(topic, group, now_ms) for group in groups)

    def _is_held(self, topic: ShardTopic, group: ConsumerGroup, now_ms: int) -> bool:
        """Return True if a group has waiting claims, or leased, delayed or exhausted records.

        Also return True while delivery attributes are not loaded, because records may be delayed.
        """
        if topic.staged_count and self._leases.delivery_attributes.needs_loading_if_readable(topic, group):
            return True
        group.apply_expirations(now_ms)
        is_held = group.leased or group.total_delayed or group.exhausted
        return bool(is_held or self._leases.waiting_claims.of(key_of(topic, group)))


def _traces(topic: ShardTopic) -> tuple[int, int, int]:
    return topic.next_seq, topic.last_read_us, topic.used_us
