"""Durable leases: what a shard's queues log, and what they are after a restart. Pure.

A queue with `leases_durable` is like any other; beside it lies with its topic what its log says
(the group itself), in its row of a snapshot too: it goes wherever the topic goes. Each claim,
extension, release and rejection is one frame of the log, as durable as the topic's class asks before anybody
is answered (QL-16). Acks are deletions, and logged as such.

Other queues come here with one look at their config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from actors.wal_shard.group import Group
from actors.wal_shard.job_requests import backoff_of, claimed_answer
from actors.wal_shard.queue_numbers import live_count
from actors.wal_shard.records import frame_of
from ringlog.envelope import messages as m
from ringlog.errors import Throttled
from ringlog.leases.change import Change, Op
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.holders import Life
from ringlog.leases.live_seqs import Live
from ringlog.leases.snapshot import replayed_own
from ringlog.leases.tokens import Tokens
from ringlog.limits import (
    DEAD_LETTER_REASON_BYTES_MAX,
    DURABLE_CHANGE_BYTES_MAX,
    DURABLE_LEASE_BYTES,
    DURABLE_LEASES_MAX,
    NODE_BYTES_MAX,
    PRESSURE_RETRY_MS,
)
from ringlog.topic.config import QUEUE, TopicConfig
from ringlog.topic.directory import Directory
from ringlog.topic.state import Topic
from ringlog.types import Durability

LOGGED = (m.Claim, m.Nack, m.Extend, m.Reject)
"""Requests that add to the log where leases are durable; acks do anyway."""
_RUN_BYTES = DURABLE_LEASE_BYTES + NODE_BYTES_MAX + 32
"""Most bytes of a run that is written when leases become durable."""
_FAILURE_BYTES = DEAD_LETTER_REASON_BYTES_MAX + 32
"""The same of why a job failed."""


class DurableLeases:
    """The log's side of one shard's queues."""

    def __init__(self, directory: Directory, queues: Mapping[int, ConsumerGroup]) -> None:
        self._directory = directory
        self._queues = queues
        self._left: list[Life] = []
        """Processes that died: what they held is to be released. As many as were watched."""

    @property
    def has_left(self) -> bool:
        """Is there something to `release`?"""
        return bool(self._left)

    # -- room -----------------------------------------------------------------------------------------

    def logs(self, message: Any) -> bool:
        """May this request about jobs add to the log?"""
        if not isinstance(message, LOGGED) or message.group:
            return False
        topic = self._directory.find(message.topic)
        return topic is not None and topic.config.logs_leases

    def bytes_of(self, message: Any) -> int:
        """Most bytes that a request adds to the log for the sake of leases."""
        if isinstance(message, LOGGED) and not message.group:
            return DURABLE_CHANGE_BYTES_MAX
        if not isinstance(message, m.TopicPut):
            return 0
        topic = self._directory.find(message.topic)
        queue = self._queues.get(topic.topic_id) if topic is not None else None
        if topic is None or queue is None or topic.config.logs_leases:
            return 0
        known = min(queue.runs.jobs, DURABLE_LEASES_MAX)
        return len(queue.runs) * _RUN_BYTES + min(len(queue.failures), known) * _FAILURE_BYTES

    def room_for(self, topic: Topic, messages: Sequence[Any]) -> list[bool]:
        """Which of these claims may be given something, for the number of those who hold something?"""
        queue = self._queues.get(topic.topic_id)
        if queue is None or not queue.is_logged:
            return [True] * len(messages)
        return queue.room_for(each.node for each in messages)

    # -- what is logged -------------------------------------------------------------------------------

    def log(self, topic: Topic, change: Change | None, into: Group | None) -> None:
        """Log what a call did to the leases of a queue, where they are durable."""
        if change is None or not topic.config.logs_leases:
            return
        assert into is not None, "claims of such a queue wait until something can be logged"
        is_synced = topic.config.durability == Durability.FSYNC or change.op == Op.WRITTEN
        into.add_control(frame_of(change, topic.topic_id, topic.epoch), topic, sync=is_synced)

    def adopt(self, topic: Topic, queue: ConsumerGroup) -> None:
        """The queue is asked for something for the first time."""
        if topic.config.logs_leases and topic.leases is None:
            queue.begin_log()
            topic.leases = queue

    # -- processes that die ---------------------------------------------------------------------------

    def left(self, life: Life) -> None:
        """This process is gone; see `release`."""
        self._left.append(life)

    def release(self, into: Group, now_ms: int) -> list[int]:
        """What processes held that died is ready; returns of which topics."""
        left, self._left = self._left, []
        freed = []
        for topic_id, queue in self._queues.items() if left else ():
            for life in left if queue.is_logged else ():
                changes = queue.release(life, now_ms)
                for change in changes:
                    self.log(self._directory.by_id[topic_id], change, into)
                freed += [topic_id] if changes else []
        return freed

    # -- switching ------------------------------------------------------------------------------------

    def require_room(self, topic: Topic, config: TopicConfig) -> None:
        """Raise Throttled when leases are to become durable and too many jobs are handed out."""
        queue = self._queues.get(topic.topic_id)
        if queue is None or topic.config.logs_leases or not config.logs_leases:
            return
        if queue.runs.jobs > DURABLE_LEASES_MAX:
            raise Throttled(
                "too many jobs are handed out to make their leases durable", limit="durable_leases",
                jobs=queue.runs.jobs, max=DURABLE_LEASES_MAX, retry_after_ms=PRESSURE_RETRY_MS,
            )  # fmt: skip

    def reconfigured(self, topic: Topic, into: Group, now_ms: int) -> None:
        """The topic's config is another one, and logged: what is known follows, when leases became durable
        (QL-21); when they are no more, they stay as they are, in memory."""
        queue = self._queues.get(topic.topic_id)
        if topic.config.logs_leases and topic.leases is None and queue is not None:
            queue.settle(now_ms)
            self.adopt(topic, queue)
            for change in queue.written(now_ms):
                self.log(topic, change, into)
        elif not topic.config.logs_leases and topic.leases is not None:
            topic.leases.end_log()
            topic.leases = None

    # -- replay ---------------------------------------------------------------------------------------

    def recovered(
        self, live_of: Callable[[Topic], Live], tokens: Tokens
    ) -> Iterator[tuple[Topic, ConsumerGroup]]:
        """The directory is filled: the queues that the log speaks of, without what left their topics."""
        for topic in self._directory.by_id.values():
            if topic.leases is not None:
                if topic.config.logs_leases and topic.config.type == QUEUE:
                    topic.leases.recovered(live_of(topic), tokens)
                    yield topic, topic.leases
                else:
                    topic.leases = None


def replay_jobs(topic: Topic, change: Change) -> None:
    """Apply what the log says of a queue's leases, unless the topic's state has it already."""
    if topic.leases is None:
        topic.leases = replayed_own()
    topic.leases.backoff = backoff_of(topic)
    topic.leases.replay(change)


def replay_config(topic: Topic) -> None:
    """The config is another one: once leases are not durable any more, the log says nothing of them. It says
    all there is anew when they are again."""
    if not topic.config.logs_leases:
        topic.leases = None


def answer_of(topic: Topic, queue: ConsumerGroup, change: Change) -> m.Message | None:
    """What the request that made this change was answered, for who asks again."""
    counts, op = queue.counts(live_count(topic)), change.op
    skipped = np.array(change.skipped, dtype="<i8").tobytes()
    if op == Op.CLAIMED:
        return claimed_answer(topic, change, counts.ready)
    if op in {Op.RELEASED, Op.UNDONE}:
        return m.NackReply(topic.name, change.count, skipped, counts.ready, counts.in_flight)
    if op == Op.EXTENDED:
        return m.ExtendReply(topic.name, change.count, skipped, change.until_ms)
    return m.RejectReply(topic.name, change.count, skipped) if op == Op.REJECTED else None
