"""Durable leases: what a shard's queues log, and what they are after a restart. Pure.

A queue with `leases_durable` is like any other; beside it lies with its topic what its log says
(ringlog/leases/durable.py), in its row of a snapshot too: it goes wherever the topic goes. Each claim,
extension, release and rejection is one frame of the log, as durable as the topic's class asks before anybody
is answered (QL-16). Acks are deletions, and logged as such.

Other queues come here with one look at their config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from actors.wal_shard.group import Group
from actors.wal_shard.job_requests import backoff_of
from actors.wal_shard.queue_numbers import live_count
from actors.wal_shard.records import frame_of
from ringlog.envelope import messages as m
from ringlog.errors import Throttled
from ringlog.leases.durable import Durable
from ringlog.leases.holders import Life
from ringlog.leases.live_seqs import Live
from ringlog.leases.queue import Queue
from ringlog.leases.queue_change import CLAIM_ROW, JobsChange, JobsOp
from ringlog.leases.tokens import Tokens
from ringlog.leases.types import I64, Claimed, ClaimRequest, Matched
from ringlog.limits import (
    DEAD_LETTER_REASON_BYTES_MAX,
    DURABLE_CHANGE_BYTES_MAX,
    DURABLE_LEASE_BYTES,
    DURABLE_LEASES_MAX,
    JOBS_PER_REQUEST_MAX,
    NODE_BYTES_MAX,
    PRESSURE_RETRY_MS,
)
from ringlog.topic.config import QUEUE, TopicConfig
from ringlog.topic.directory import Directory
from ringlog.topic.state import Topic
from ringlog.types import Durability

LOGGED = (m.JobsClaim, m.JobsNack, m.JobsExtend, m.JobsReject)
"""Requests that add to the log where leases are durable; acks do anyway."""
_RUN_BYTES = DURABLE_LEASE_BYTES + NODE_BYTES_MAX + 32
"""Most bytes of a run that is written when leases become durable."""
_FAILURE_BYTES = DEAD_LETTER_REASON_BYTES_MAX + 32
"""The same of why a job failed."""


class DurableLeases:
    """The log's side of one shard's queues."""

    def __init__(
        self, directory: Directory, queues: Mapping[int, Queue], links: Mapping[Life, int],
        queue_of: Callable[[Topic], Queue],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._queues = queues
        self.links = links
        """Processes that claimed."""
        self._queue_of = queue_of
        self._left: list[int] = []
        """Links of processes that died: what they held is to be released. As many as were watched."""

    @property
    def has_left(self) -> bool:
        """Is there something to `release`?"""
        return bool(self._left)

    # -- room -----------------------------------------------------------------------------------------

    def logs(self, message: Any) -> bool:
        """May this request about jobs add to the log?"""
        if not isinstance(message, LOGGED):
            return False
        topic = self._directory.find(message.topic)
        return topic is not None and topic.config.logs_leases

    def bytes_of(self, message: Any) -> int:
        """Most bytes that a request adds to the log for the sake of leases."""
        if isinstance(message, LOGGED):
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
        if not topic.config.logs_leases:
            return [True] * len(messages)
        return self._of(topic).room_for(each.node for each in messages)

    # -- what is logged -------------------------------------------------------------------------------

    def claimed(
        self, topic: Topic, messages: Sequence[m.JobsClaim], requests: Sequence[ClaimRequest],
        answers: Sequence[Claimed], into: Group | None, now_ms: int,
    ) -> None:  # fmt: skip
        """These claims were given these, or set jobs aside: one record each."""
        if not topic.config.logs_leases:
            return
        assert into is not None, "claims of such a queue wait until something can be logged"
        durable = self._of(topic)
        for message, request, given in zip(messages, requests, answers, strict=True):
            if given.runs or given.aside:
                life = message.pid, message.born
                change = durable.claimed(
                    given, message.node, now_ms, call=message.call, link=request.link, life=life
                )
                _log(topic, change, into)

    def released(
        self, topic: Topic, message: m.JobsNack, matched: Matched, delay_ms: int, reason: str, into: Group,
        now_ms: int,
    ) -> None:  # fmt: skip
        """These jobs were given back."""
        if len(matched.leased) and topic.config.logs_leases:
            skipped = _skipped(matched)
            change = self._of(topic).released(
                matched.leased, delay_ms, now_ms, call=message.call, skipped=skipped, reason=reason
            )
            _log(topic, change, into)

    def undone(self, topic: Topic, call: int, matched: Matched, into: Group, now_ms: int) -> None:
        """These jobs were given back, and nobody had begun them."""
        if len(matched.leased) and topic.config.logs_leases:
            change = self._of(topic).undone(matched.leased, now_ms, call=call, skipped=_skipped(matched))
            _log(topic, change, into)

    def extended(
        self, topic: Topic, message: m.JobsExtend, matched: Matched, until_ms: int, into: Group, now_ms: int
    ) -> None:
        """These leases end at another instant."""
        if len(matched.leased) and topic.config.logs_leases:
            skipped = _skipped(matched)
            change = self._of(topic).extended(
                matched.leased, until_ms, now_ms, call=message.call, skipped=skipped
            )
            _log(topic, change, into)

    def rejected(
        self, topic: Topic, message: m.JobsReject, matched: Matched, reason: str, into: Group, now_ms: int
    ) -> None:
        """These jobs were set aside."""
        if len(matched.leased) and topic.config.logs_leases:
            skipped = _skipped(matched)
            change = self._of(topic).rejected(
                matched.leased, reason, now_ms, call=message.call, skipped=skipped
            )
            _log(topic, change, into)

    def moved(self, topic: Topic, into: Group, now_ms: int) -> None:
        """Jobs were moved to the dead letters (QD-8)."""
        if topic.config.logs_leases:
            _log(topic, self._of(topic).moved(now_ms), into)

    def _of(self, topic: Topic) -> Durable:
        if topic.leases is None:
            topic.leases = Durable(self._queue_of(topic))
        return topic.leases

    # -- processes that die ---------------------------------------------------------------------------

    def left(self, link: int) -> None:
        """Who claimed through this one is gone; see `release`."""
        self._left.append(link)

    def release(self, into: Group, now_ms: int) -> list[int]:
        """What processes held that died is ready; returns of which topics."""
        left, self._left = self._left, []
        freed = []
        for topic_id, queue in self._queues.items() if left else ():
            durable = self._directory.by_id[topic_id].leases
            if durable is None:
                continue
            queue.settle(now_ms)
            for link in left:
                seqs = _numbers_of(queue, queue.runs.leased_through(link))
                queue.release(link, now_ms)
                for at in range(0, len(seqs), JOBS_PER_REQUEST_MAX):
                    change = durable.released(seqs[at : at + JOBS_PER_REQUEST_MAX], 0, now_ms)
                    _log(self._directory.by_id[topic_id], change, into)
                if len(seqs):
                    freed.append(topic_id)
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
            durable = topic.leases = Durable(queue)
            durable.learn(self.links)
            for change in durable.written(now_ms):
                _log(topic, change, into)
        elif not topic.config.logs_leases and topic.leases is not None:
            topic.leases.queue.known_max = 0
            topic.leases = None

    # -- replay ---------------------------------------------------------------------------------------

    def recovered(
        self, live_of: Callable[[Topic], Live], tokens: Tokens, link_of: Callable[[Life], int]
    ) -> Iterator[tuple[Topic, Durable]]:
        """The directory is filled: the queues that the log speaks of, without what left their topics."""
        for topic in self._directory.by_id.values():
            if topic.leases is not None:
                if topic.config.logs_leases and topic.config.type == QUEUE:
                    topic.leases.recovered(live_of(topic), tokens, link_of)
                    yield topic, topic.leases
                else:
                    topic.leases = None


def replay_jobs(topic: Topic, change: JobsChange) -> None:
    """Apply what the log says of a queue's leases, unless the topic's state has it already."""
    if topic.leases is None:
        topic.leases = Durable()
    topic.leases.queue.backoff = backoff_of(topic)
    topic.leases.apply(change)


def replay_config(topic: Topic) -> None:
    """The config is another one: once leases are not durable any more, the log says nothing of them. It says
    all there is anew when they are again."""
    if not topic.config.logs_leases:
        topic.leases = None


def answer_of(topic: Topic, durable: Durable, change: JobsChange) -> m.Message | None:
    """What the request that made this change was answered, for who asks again."""
    counts = durable.queue.counts(live_count(topic))
    rows, skipped = change.rows, np.array(change.skipped, dtype="<i8").tobytes()
    if change.op == JobsOp.CLAIMED:
        runs = [
            (first, count, deliveries, token)
            for first, count, deliveries, token in zip(*(rows[n::CLAIM_ROW] for n in range(4)), strict=True)
        ]
        return m.JobsClaimed(
            topic.name, topic.topic_id, topic.epoch, change.until_ms, counts.ready, runs,
            lease_ms=change.until_ms - change.at_ms,
        )  # fmt: skip
    done = sum(rows[1::2])
    if change.op in {JobsOp.RELEASED, JobsOp.UNDONE}:
        return m.JobsNacked(topic.name, done, skipped, counts.ready, counts.in_flight)
    if change.op == JobsOp.EXTENDED:
        return m.JobsExtended(topic.name, done, skipped, change.until_ms)
    return m.JobsRejected(topic.name, done, skipped) if change.op == JobsOp.REJECTED else None


def _log(topic: Topic, change: JobsChange, into: Group) -> None:
    is_synced = topic.config.durability == Durability.FSYNC or change.op == JobsOp.WRITTEN
    into.add_control(frame_of(change, topic.topic_id, topic.epoch), topic, sync=is_synced)


def _skipped(matched: Matched) -> list[int]:
    """Of a nack or an extend: jobs that were deleted are not held either."""
    skipped: list[int] = np.concatenate((matched.skipped, matched.gone)).tolist()
    return skipped


def _numbers_of(queue: Queue, rows: list[int]) -> I64:
    runs = queue.runs
    parts = [np.arange(runs.first[row], runs.stop[row], dtype=np.int64) for row in rows]
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
