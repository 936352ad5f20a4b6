"""Topics that are removed when nobody used them for a while (`expire_unused_ms`; F39). Pure.

Requests and records leave traces in the topic's state: its next number, when it was read, when it was used
otherwise. A look compares them with those of the look before, and asks what uses a topic without leaving
any: claims that wait, jobs that are leased or delayed, routers that lead to it. So nothing is done for a
record, and the period is counted from the first look behind the last use, on the monotonic clock: a topic is
never removed early, however the wall clock is set, and late by a step or two and a pause.

Who reads shared memory is not seen here. Clients that follow such a topic, and schedulers whose routers lead
from it, ask for it every third of its period (ringlog/client/watches/topic_keep_alive.py,
actors/scheduler/forwarding/source_keep_alive.py).
What they have sent lies in front of us when we were held up ourselves: time for which a look is late does not
count.

Uses are not logged. After a restart nobody can tell a topic that nobody used from one that was followed until
a moment ago, by somebody who is about to come back: each has a period from then on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.wal_shard.leases.lease_registry import key_of
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
    from actors.wal_shard.leases.shard_leases import ShardLeases

_MS_NS = 1_000_000
USING_REQUESTS: frozenset[type[m.Message]] = frozenset({
    m.TopicPut, m.TopicResolve, m.Append, m.RecordsDelete, m.ProducerState, m.Locate, m.Claim, m.Steal,
    m.Ack, m.AckAndClaim, m.Nack, m.Extend, m.Reject, m.GroupOpen, m.GroupLeave, m.GroupSeek, m.GroupTake,
    m.GroupCommit, m.GroupDelete, m.Redeliver,
})  # fmt: skip
"""Requests that use a topic. Not those that only look at it: what is watched over would never go."""


@dataclass(slots=True)
class _TopicUse:
    topic: ShardTopic
    traces: tuple[int, int, int]
    since_ns: int
    """Nobody has used it from then on, as far as we have looked."""
    due_ns: int
    """When it is looked at again."""
    was_held: bool = False
    """The last look found it in use by something that leaves no trace when it ends."""


class IdleTopicExpiry:
    """Those topics of one shard that have the setting."""

    def __init__(self, directory: TopicDirectory, leases: ShardLeases) -> None:
        self._directory, self._leases = directory, leases
        self.now_ns = 0
        """Monotonic."""
        self._known: dict[int, _TopicUse] = {}
        self._dues: list[tuple[int, int]] = []
        """Heap of (when, topic_id); an entry counts only while what is known of the topic says the same."""
        self._not_before_ns = 0
        self._gone: dict[int, int] = {}
        """Topics whose removal for this reason is staged, and their periods in milliseconds."""

    def __bool__(self) -> bool:
        """Has any topic the setting?"""
        return bool(self._known)

    # -- which topics ---------------------------------------------------------------------------------

    def start_period(self, topic: ShardTopic) -> None:
        """A topic was made, or configured: its period begins."""
        if topic.config.expire_unused_ms:
            self._plan(_TopicUse(topic, _traces(topic), self.now_ns, 0))
        else:
            self._known.pop(topic.topic_id, None)

    def finish_recovery(self) -> None:
        """The directory is filled. Nothing says who follows these topics: each has a period from now on."""
        for topic in self._directory.by_id.values():
            if topic.config.expire_unused_ms:
                self.start_period(topic)

    def forget(self, topic: ShardTopic) -> None:
        """The topic is no more."""
        self._known.pop(topic.topic_id, None)

    def record_use(self, message: m.Message, now_us: int) -> None:
        """This request was answered, or waits."""
        if type(message) in USING_REQUESTS:
            topic = self._directory.find(getattr(message, "topic", ""))
            if topic is not None:
                topic.used_us = now_us

    def take_expired_period(self, topic: ShardTopic) -> int:
        """The period in which nobody used this topic, whose removal is durable; 0 = somebody removed it."""
        return self._gone.pop(topic.topic_id, 0) if self._gone else 0

    # -- looking --------------------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        """When some topic is to be looked at; None = none is."""
        return max(self._dues[0][0], self._not_before_ns) if self._dues else None

    def expire_idle(self, now_us: int, remove: Callable[[ShardTopic], None]) -> None:
        """Look at topics whose time has come, a bounded number of them; remove those that nobody uses."""
        self._not_before_ns = self.now_ns + IDLE_CHECK_PAUSE_MS * _MS_NS
        for _ in range(IDLE_CHECKS_MAX):
            if not self._dues or self._dues[0][0] > self.now_ns:
                return
            due_ns, topic_id = heapq.heappop(self._dues)
            known = self._known.get(topic_id)
            if known is not None and known.due_ns == due_ns:
                self._look_at(known, now_us, remove)

    def _look_at(self, known: _TopicUse, now_us: int, remove: Callable[[ShardTopic], None]) -> None:
        topic, traces = known.topic, _traces(known.topic)
        late_ns = self.now_ns - known.due_ns
        is_held = self._is_in_use(topic, now_us // 1_000)
        if is_held or known.was_held or traces != known.traces:
            # Whatever ended since the look before, and when: from now on nobody uses it.
            known.traces, known.was_held, known.since_ns = traces, is_held, self.now_ns
        elif late_ns > IDLE_CHECK_LATE_MS * _MS_NS:
            known.since_ns += late_ns
        if self.now_ns - known.since_ns < topic.config.expire_unused_ms * _MS_NS:
            self._plan(known)
            return
        self._gone[topic.topic_id] = topic.config.expire_unused_ms
        remove(topic)

    def _plan(self, known: _TopicUse) -> None:
        """Look at it when a part of its period is over, and when all of it is."""
        period_ms = known.topic.config.expire_unused_ms
        step_ms = min(max(period_ms // IDLE_CHECKS_PER_PERIOD, IDLE_CHECK_MS_MIN), IDLE_CHECK_MS_MAX)
        due_ns = min(self.now_ns + step_ms * _MS_NS, known.since_ns + period_ms * _MS_NS)
        known.due_ns = max(due_ns, self.now_ns)
        self._known[known.topic.topic_id] = known
        heapq.heappush(self._dues, (known.due_ns, known.topic.topic_id))

    def _is_in_use(self, topic: ShardTopic, now_ms: int) -> bool:
        """Does anything use it that leaves no trace while it lasts?"""
        if topic.routers:
            return True
        groups = list(topic.groups.values())
        if topic.config.type == QUEUE:
            groups.append(self._leases.registry.default_group(topic))
        return any(self._is_held(topic, group, now_ms) for group in groups)

    def _is_held(self, topic: ShardTopic, group: ConsumerGroup, now_ms: int) -> bool:
        """Is a claim waiting, or any record leased, delayed or on its way to the dead letters, or may one be
        as far as is known?"""
        if topic.staged_count and self._leases.delivery_attributes.needs_loading_if_readable(topic, group):
            return True
        group.apply_expirations(now_ms)
        is_held = group.leased or group.total_delayed or group.exhausted
        return bool(is_held or self._leases.waiting_claims.of(key_of(topic, group)))


def _traces(topic: ShardTopic) -> tuple[int, int, int]:
    return topic.next_seq, topic.last_read_us, topic.used_us
