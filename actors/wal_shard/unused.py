"""Topics that are removed when nobody used them for a while (`expire_unused_ms`; F39). Pure.

Requests and records leave traces in the topic's state: its next number, when it was read, when it was used
otherwise. A look compares them with those of the look before, and asks what uses a topic without leaving
any: claims that wait, jobs that are leased or delayed, routers that lead to it. So nothing is done for a
record, and the period is counted from the first look behind the last use, on the monotonic clock: a topic is
never removed early, however the wall clock is set, and late by a step or two and a pause.

Who reads shared memory is not seen here. Clients that follow such a topic, and schedulers whose routers lead
from it, ask for it every third of its period (ringlog/client/uses.py, actors/scheduler/source_uses.py).
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

from actors.wal_shard.lease_registry import key_of
from ringlog.envelope import messages as m
from ringlog.leases.group import ConsumerGroup
from ringlog.limits import (
    UNUSED_LATE_MS,
    UNUSED_LOOKS_MAX,
    UNUSED_PAUSE_MS,
    UNUSED_STEP_MS_MAX,
    UNUSED_STEP_MS_MIN,
    UNUSED_STEPS,
)
from ringlog.topic.config import QUEUE
from ringlog.topic.directory import Directory
from ringlog.topic.state import Topic

if TYPE_CHECKING:
    from actors.wal_shard.leases import Leases

_MS_NS = 1_000_000
USES: frozenset[type[m.Message]] = frozenset({
    m.TopicPut, m.TopicResolve, m.Append, m.RecordsDelete, m.ProducerState, m.Locate, m.Claim, m.Steal,
    m.Ack, m.AckAndClaim, m.Nack, m.Extend, m.Reject, m.GroupOpen, m.GroupLeave, m.GroupSeek, m.GroupTake,
    m.GroupCommit, m.GroupDelete, m.Redeliver,
})  # fmt: skip
"""Requests that use a topic. Not those that only look at it: what is watched over would never go."""


@dataclass(slots=True)
class _Known:
    topic: Topic
    traces: tuple[int, int, int]
    since_ns: int
    """Nobody has used it from then on, as far as we have looked."""
    due_ns: int
    """When it is looked at again."""
    was_held: bool = False
    """The last look found it in use by something that leaves no trace when it ends."""


class Unused:
    """Those topics of one shard that have the setting."""

    def __init__(self, directory: Directory, leases: Leases) -> None:
        self._directory, self._leases = directory, leases
        self.now_ns = 0
        """Monotonic."""
        self._known: dict[int, _Known] = {}
        self._dues: list[tuple[int, int]] = []
        """Heap of (when, topic_id); an entry counts only while what is known of the topic says the same."""
        self._not_before_ns = 0
        self._gone: dict[int, int] = {}
        """Topics whose removal for this reason is staged, and their periods in milliseconds."""

    def __bool__(self) -> bool:
        """Has any topic the setting?"""
        return bool(self._known)

    # -- which topics ---------------------------------------------------------------------------------

    def note(self, topic: Topic) -> None:
        """A topic was made, or configured: its period begins."""
        if topic.config.expire_unused_ms:
            self._plan(_Known(topic, _traces(topic), self.now_ns, 0))
        else:
            self._known.pop(topic.topic_id, None)

    def recovered(self) -> None:
        """The directory is filled. Nothing says who follows these topics: each has a period from now on."""
        for topic in self._directory.by_id.values():
            if topic.config.expire_unused_ms:
                self.note(topic)

    def forget(self, topic: Topic) -> None:
        """The topic is no more."""
        self._known.pop(topic.topic_id, None)

    def saw(self, message: m.Message, now_us: int) -> None:
        """This request was answered, or waits."""
        if type(message) in USES:
            topic = self._directory.find(getattr(message, "topic", ""))
            if topic is not None:
                topic.used_us = now_us

    def why(self, topic: Topic) -> int:
        """The period in which nobody used this topic, whose removal is durable; 0 = somebody removed it."""
        return self._gone.pop(topic.topic_id, 0) if self._gone else 0

    # -- looking --------------------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        """When some topic is to be looked at; None = none is."""
        return max(self._dues[0][0], self._not_before_ns) if self._dues else None

    def look(self, now_us: int, remove: Callable[[Topic], None]) -> None:
        """Look at topics whose time has come, a bounded number of them; remove those that nobody uses."""
        self._not_before_ns = self.now_ns + UNUSED_PAUSE_MS * _MS_NS
        for _ in range(UNUSED_LOOKS_MAX):
            if not self._dues or self._dues[0][0] > self.now_ns:
                return
            due_ns, topic_id = heapq.heappop(self._dues)
            known = self._known.get(topic_id)
            if known is not None and known.due_ns == due_ns:
                self._look_at(known, now_us, remove)

    def _look_at(self, known: _Known, now_us: int, remove: Callable[[Topic], None]) -> None:
        topic, traces = known.topic, _traces(known.topic)
        late_ns = self.now_ns - known.due_ns
        is_held = self._is_in_use(topic, now_us // 1_000)
        if is_held or known.was_held or traces != known.traces:
            # Whatever ended since the look before, and when: from now on nobody uses it.
            known.traces, known.was_held, known.since_ns = traces, is_held, self.now_ns
        elif late_ns > UNUSED_LATE_MS * _MS_NS:
            known.since_ns += late_ns
        if self.now_ns - known.since_ns < topic.config.expire_unused_ms * _MS_NS:
            self._plan(known)
            return
        self._gone[topic.topic_id] = topic.config.expire_unused_ms
        remove(topic)

    def _plan(self, known: _Known) -> None:
        """Look at it when a part of its period is over, and when all of it is."""
        period_ms = known.topic.config.expire_unused_ms
        step_ms = min(max(period_ms // UNUSED_STEPS, UNUSED_STEP_MS_MIN), UNUSED_STEP_MS_MAX)
        due_ns = min(self.now_ns + step_ms * _MS_NS, known.since_ns + period_ms * _MS_NS)
        known.due_ns = max(due_ns, self.now_ns)
        self._known[known.topic.topic_id] = known
        heapq.heappush(self._dues, (known.due_ns, known.topic.topic_id))

    def _is_in_use(self, topic: Topic, now_ms: int) -> bool:
        """Does anything use it that leaves no trace while it lasts?"""
        if topic.routers:
            return True
        groups = list(topic.groups.values())
        if topic.config.type == QUEUE:
            groups.append(self._leases.registry.own(topic))
        return any(self._is_held(topic, group, now_ms) for group in groups)

    def _is_held(self, topic: Topic, group: ConsumerGroup, now_ms: int) -> bool:
        """Is a claim waiting, or any record leased, delayed or on its way to the dead letters, or may one be
        as far as is known?"""
        if topic.staged_count and self._leases.marks.wants_to_learn(topic, group):
            return True
        group.settle(now_ms)
        is_held = group.leased or group.resting or group.exhausted
        return bool(is_held or self._leases.waiting.of(key_of(topic, group)))


def _traces(topic: Topic) -> tuple[int, int, int]:
    return topic.next_seq, topic.last_read_us, topic.used_us
