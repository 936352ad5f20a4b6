"""Queues of one shard: requests about jobs, the claims that wait, and answers kept for who asks again. Pure.

What a queue is, ringlog/leases decides. A claim shows what is published and changes nothing on the disk,
so that it is answered at once; an ack is a deletion, and is decided in two steps like one: the core asks
storage how large the jobs are, and then it is staged and answered with its group (QA-7, QA-8).

Leases are memory, unless the topic asks for more (durable_leases.py): after a restart every live job is
ready. Whoever then sends an ack again, whose deletion
had become durable, finds the job deleted on request: it counts as acked, if the token is one of an earlier
incarnation and its holder first sent it in time, however long the shard was away. Within one incarnation a
request that comes again, under its number, has the answer it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from pyroaring import BitMap64

from actors.wal_shard.durable_leases import DurableLeases, answer_of
from actors.wal_shard.group import Group
from actors.wal_shard.hot_tail import HotTail
from actors.wal_shard.job_requests import (
    Names,
    backoff_of,
    bytes_of,
    claimed_answer,
    damage_of,
    entries,
    held_still,
    levels_of,
    live_of,
    marks_of,
    node_of,
    numbers_of,
    reason_of,
    require_numbers,
    skipped_of,
    spent_jobs,
    was_deleted,
)
from actors.wal_shard.job_sizes import JobSizes
from actors.wal_shard.kept_answers import KeptAnswers
from actors.wal_shard.queue_numbers import DEAD_LETTERED, QueueNumbers, live_count
from actors.wal_shard.quick_jobs import QuickJobs
from actors.wal_shard.removal import Learn, Learned, Question, Removals
from actors.wal_shard.waiting import Waiting
from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.errors import (
    CorruptData,
    Internal,
    InvalidRequest,
    NotAQueue,
    Refused,
    ShuttingDown,
    TopicNotFound,
)
from ringlog.leases.change import SPAN_ROW, Change
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.holders import Life
from ringlog.leases.pending import pending
from ringlog.leases.retry_claim import entries_of
from ringlog.leases.tokens import Tokens, incarnation_of
from ringlog.leases.types import I64, ClaimRequest, Matched, Order
from ringlog.limits import (
    CLAIM_JOBS_MAX,
    COHORT_JOBS_MAX,
    DURABLE_RETRY_MS,
    GROUP_BYTES_MAX,
    JOBS_PER_REQUEST_MAX,
)
from ringlog.topic.config import QUEUE
from ringlog.topic.directory import Directory
from ringlog.topic.retention import Removal, front_of
from ringlog.topic.state import Topic
from ringlog.types import Durability

_Kept = TypeVar("_Kept", m.ClaimReply, m.AckReply, m.NackReply, m.ExtendReply, m.RejectReply)

STEP_MS = 10
"""From so much on the wall clock was set; what is less comes of reading two clocks one after the other."""


@dataclass(slots=True)
class _Decided:
    """A request that deletes jobs and waits for what storage knows of them."""

    message: m.Ack | m.SpentMoved
    topic: Topic
    version: int
    changes: int
    matched: Matched


class Queues:
    """The queues of one shard, each made when it is first asked for."""

    def __init__(self, incarnation: int, directory: Directory, removals: Removals) -> None:
        self._incarnation = incarnation
        self.directory = directory
        self.removals = removals
        self._tokens = Tokens(incarnation)
        self._queues: dict[int, ConsumerGroup] = {}
        self._answers = KeptAnswers()
        self._decided: _Decided | None = None
        self.newest = HotTail()
        self.sizes = JobSizes()
        self._sizes_asked: m.Message | None = None
        """The request for which sizes were asked for, once."""
        self.has_mover = False
        """Is there a scheduler that moves jobs to the dead letters? Without one jobs come back for ever."""
        self.set_aside = 0
        """Jobs set aside in this incarnation: who moves them looks whether it has grown."""
        self.numbers = QueueNumbers()
        self.waiting = Waiting()
        self.quick = QuickJobs(self)
        self.durable = DurableLeases(directory, self._queues)
        removals.removed.subscribe(self._removed)
        removals.learned.subscribe(self._learned)
        self._ahead_ms = 0
        """Of the wall clock, against the time of leases."""
        self._now_us = 0
        """Of leases and waits, as everywhere here: see Requests.steady_us."""
        self.wall_us = 0
        """What records are stamped with, and say of themselves."""
        self._wanted: dict[int, Topic] = {}
        """Queues with claims that wait for what has to be learned first."""
        self._damaged: dict[int, CorruptData] = {}
        """Queues whose marks could not be read: the next request is told."""
        self._put_us: dict[int, tuple[int, int]] = {}
        """Of a queue whose statistics are asked for: (job, when it was put)."""
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, Group, int], m.Message | None]
        ] = {
            m.Claim: self._claim,
            m.Ack: self._ack,
            m.AckAndClaim: self._next,
            m.Nack: self._nack,
            m.Extend: self._extend,
            m.Reject: self._reject,
            m.JobsPending: self._pending,
            m.QueueStats: self._stats,
            m.SpentAsk: self._spent,
            m.SpentMoved: self._spent_moved,
        }

    # -- claims ---------------------------------------------------------------------------------------

    def _claim(self, message: m.Claim, event: ControlReceived, group: Group, now_us: int) -> m.Message | None:
        topic = self._found(message)
        node_of(message)
        require_numbers(message)
        if min(message.max, message.pid, message.born) < 0:
            raise InvalidRequest("a number is negative", topic=topic.name)
        if self.waiting.sent_again(event, message.call):
            return None
        answer = self._claimed_before(topic, message, now_us)
        if answer is None:
            if jitter_ms := topic.config.claim_jitter_ms:
                self.waiting.park(topic.topic_id, event, message, jitter_ms)
                return None
            answer = self._given(topic, message, now_us, group)
        if answer is not None or not message.wait_ms:
            return answer or self.claimed(topic, None)
        self.waiting.park(topic.topic_id, event, message)
        self._note_due(topic)
        return None

    def _next(
        self, message: m.AckAndClaim, event: ControlReceived, group: Group, now_us: int
    ) -> m.Message | None:
        """What did not go the short way at once: it was asked before, goes it now that it is known how large
        jobs are, or is to be asked for apart."""
        topic = self._found(message)
        node_of(message)
        entries(message)
        require_numbers(message)
        if min(message.max, message.pid, message.born) < 0:
            raise InvalidRequest("a number is negative", topic=topic.name)
        answer: Any = self._answers.get(message.call)
        if not isinstance(answer, m.ClaimReply):
            return None if self.quick.next(message, event, now_us) else m.NotCombinable(topic.name)
        held = self._claimed_before(topic, message, now_us)
        return msgspec.structs.replace(answer, runs=[]) if held is None else held

    def _claimed_before(
        self, topic: Topic, message: m.Claim | m.AckAndClaim, now_us: int
    ) -> m.ClaimReply | None:
        """The answer that this claim had before, as far as it is true still: what was given back meanwhile
        may be another one's. None when there is none, or the gateway took it back."""
        answer: Any = self._answers.get(message.call)
        if not isinstance(answer, m.ClaimReply):
            return None
        return held_still(self._queue(topic), answer, node_of(message), now_us // 1_000)

    def _given(self, topic: Topic, message: m.Claim, now_us: int, into: Group | None) -> m.ClaimReply | None:
        """What there is for this claim; None when there is nothing."""
        if not all(self.durable.room_for(topic, [message])):
            return None
        (claimed,) = self._deal(topic, [message], now_us, into)
        if claimed is None or not claimed.rows:
            return None
        return self.keep(message.call, self.claimed(topic, claimed))

    def _deal(
        self, topic: Topic, messages: list[m.Claim], now_us: int, into: Group | None
    ) -> list[Change | None]:
        """What there is for these claims, shared out among them if they are several."""
        config, queue = topic.config, self._queue(topic)
        topic.last_read_us = self.wall_us
        if queue.exhausted and not self._dead_letters_of(topic):
            queue.restore()
        requests = [
            ClaimRequest(
                node_of(each), min(max(each.max, 1), CLAIM_JOBS_MAX),
                each.lease_ms or config.lease_ms, (each.pid, each.born), each.call, each.by_number,
            )
            for each in messages
        ]  # fmt: skip
        limit = self.limit_of(topic)
        order, live, now_ms = Order(queue.levels, config.starvation_ms), live_of(topic), now_us // 1_000
        if len(requests) == 1:
            node, most, lease_ms, life, call, by_number = requests[0]
            order = order._replace(by_number=by_number) if by_number else order
            changes = [
                queue.claim(
                    live,
                    node,
                    most,
                    lease_ms,
                    now_ms,
                    deliveries_max=limit,
                    order=order,
                    call=call,
                    life=life,
                )
            ]
        else:
            changes = queue.deal(live, requests, COHORT_JOBS_MAX, now_ms, deliveries_max=limit, order=order)
        for change in changes:
            self.count_aside(change)
            self.durable.log(topic, change, into)
        return changes

    def count_aside(self, change: Change | None) -> None:
        """A claim may have exhausted jobs."""
        if change is not None and change.aside:
            self.set_aside += sum(change.aside[1::SPAN_ROW])

    def left(self, life: Life) -> None:
        """This process is no more: what it holds is ready at once; deliveries stay counted (CL-10)."""
        self.waiting.left(life)
        self.durable.left(life)
        for topic_id, queue in self._queues.items():
            if not queue.is_logged and queue.release(life, self._now_us // 1_000):
                self.waiting.wake(topic_id)

    def lives(self) -> Iterator[Life]:
        """The processes that claimed, as far as queues know them."""
        for queue in self._queues.values():
            yield from queue.lives.values()

    def claimed(self, topic: Topic, change: Change | None, acked: int = 0) -> m.ClaimReply:
        """What a claim that was given this is answered. `acked`: jobs that are done, and counted still."""
        counts = self._queue(topic).counts(live_count(topic) - acked)
        return claimed_answer(topic, change, counts.ready)

    # -- what becomes of jobs -------------------------------------------------------------------------

    def question_of(self, message: m.Ack | m.SpentMoved, now_us: int) -> list[Question]:
        """What has to be known for a deletion of jobs; nothing when that is there, or when there is none."""
        if self._still_holds(message, now_us):
            return []
        self.refuse()
        self.removals.refuse_delete()
        try:
            topic, matched = self._to_delete(message, now_us)
        except Refused:
            return []  # Its handler says so.
        if not len(matched.leased):
            return []
        numbers = numbers_of(matched.leased)
        removal = self._known_removal(topic, matched.leased, numbers)
        if removal is None and self._sizes_asked is not message:
            self._sizes_asked = message
            span = self.sizes.to_ask_for(matched.leased, topic.head_seq)
            if span is not None and topic.config.durability != Durability.EPHEMERAL:
                learn = Learn(*span, has_sizes=True)
                return self.removals.questions_to_learn([(topic, learn)], self.wall_us)
        changes = self._queue(topic).version
        self._decided = _Decided(message, topic, topic.version, changes, matched)
        if removal is None:
            return [self.removals.question_about(topic, numbers, self.wall_us)]
        self.removals.know_delete(topic, removal)
        return []

    def sizes_for(self, message: m.AckAndClaim) -> list[Question]:
        """What has to be known of jobs that are acked by the short way; asked for once."""
        topic = self.directory.find(message.topic)
        if topic is None or self._sizes_asked is message or topic.topic_id not in self._queues:
            return []
        try:
            seqs, _ = entries(message)
        except Refused:
            return []  # Its handler says so.
        is_there = len(seqs) > 0 and front_of(topic) <= int(seqs.min()) and int(seqs.max()) <= topic.head_seq
        span = self.sizes.to_ask_for(seqs, topic.head_seq) if is_there else None
        if span is None or topic.config.durability == Durability.EPHEMERAL:
            return []
        if self._accounted(topic, seqs) is not None:
            return []
        self._sizes_asked = message
        return self.removals.questions_to_learn([(topic, Learn(*span, has_sizes=True))], self.wall_us)

    def _known_removal(self, topic: Topic, seqs: I64, numbers: BitMap64) -> Removal | None:
        """What storage would answer, if that is known. Of an ephemeral topic it has to say more."""
        if topic.config.durability == Durability.EPHEMERAL or int(seqs[0]) < front_of(topic):
            return None
        if topic.dead is not None and topic.dead.intersect(numbers):
            return None
        accounted = self._accounted(topic, seqs)
        if accounted is None:
            return None
        return Removal(seqs=numbers, records=len(seqs), bytes=accounted)

    def _accounted(self, topic: Topic, seqs: I64) -> int | None:
        """Bytes of these jobs, at least one, ascending; None when one of them is not known."""
        first, count = int(seqs[0]), len(seqs)
        total = None
        if int(seqs[-1]) - first == count - 1:
            total = self.newest.total_of(topic, first, count)
        return self.sizes.total(topic.topic_id, seqs) if total is None else total

    def _to_delete(self, message: m.Ack | m.SpentMoved, now_us: int) -> tuple[Topic, Matched]:
        if isinstance(message, m.SpentMoved):
            return self._moved(message)
        topic, matched = self._matched(message, now_us)
        if message.call in self._answers:
            return topic, Matched(matched.leased[:0], matched.gone[:0], matched.skipped)
        return topic, matched

    def _still_holds(self, message: m.Ack | m.SpentMoved, now_us: int) -> bool:
        """Was this one decided, and has nothing happened to the queue since?"""
        decided = self._decided
        if decided is None or decided.message is not message:
            return False
        queue = self._queue(decided.topic)
        queue.settle(now_us // 1_000)
        return (queue.version, decided.topic.version) == (decided.changes, decided.version)

    def refuse(self) -> None:
        """The ack in hand cannot be logged, or is wrong: everything stays as it is."""
        self._decided = None

    def _ack(self, message: m.Ack, event: ControlReceived, group: Group, now_us: int) -> m.Message:
        decided, self._decided = self._decided, None
        if decided is None:
            topic, matched = self._matched(message, now_us)
            if (answer := self._answers.get(message.call)) is not None:
                return answer
        else:
            topic, matched = decided.topic, decided.matched
        queue = self._queue(topic)
        found = self._found_out(matched)
        queue.end(matched)
        self._delete(topic, found, group)
        skipped = self._unless_gone(topic, message, matched.skipped)
        acked = len(message.seqs) // 8 - len(skipped)
        counts = queue.counts(live_count(topic))
        return self.keep(
            message.call, m.AckReply(topic.name, acked, bytes_of(skipped), counts.ready, counts.in_flight)
        )

    def _found_out(self, matched: Matched) -> Removal | None:
        """What is to leave with these jobs; raises Internal."""
        found = self.removals.take_delete()
        if isinstance(found, CorruptData):
            raise Internal("stored records are damaged, so no job was deleted", reason=str(found))
        if found is None and len(matched.leased):
            raise Internal("a deletion of jobs was not decided")
        return found

    def _delete(self, topic: Topic, found: Removal | None, group: Group) -> None:
        if found is not None:
            is_synced = topic.config.durability == Durability.FSYNC
            self.removals.stage(topic, found, group, sync=is_synced, on_request=True)

    def _unless_gone(self, topic: Topic, message: m.Ack, skipped: I64) -> I64:
        """Without those that an earlier incarnation's holder acked, as far as can be known (see above)."""
        if not message.tokens or not len(skipped) or not message.in_time:
            return skipped
        seqs, tokens = entries(message)
        assert tokens is not None
        token_of = dict(zip(seqs.tolist(), tokens.tolist(), strict=True))
        is_gone = [
            0 < incarnation_of(token_of[seq]) < self._incarnation and was_deleted(topic, seq)
            for seq in skipped.tolist()
        ]
        return skipped[~np.array(is_gone, dtype=np.bool_)]

    def _undo(self, message: m.Nack, group: Group, now_us: int) -> m.Message:
        """Nobody has begun what this claim was given, or these jobs: it is as if it had never been made."""
        topic, matched = self._matched(message, now_us)
        answer: Any = self._answers.get(message.call)
        if not message.seqs:
            self.waiting.call_off(topic.topic_id, message.call, self.claimed(topic, None))
            if isinstance(answer, m.ClaimReply) and answer.topic_id == topic.topic_id and answer.runs:
                given = entries_of(answer.runs)
                matched = self._queue(topic).match(*given, node_of(message), now_us // 1_000)
        elif answer is not None and not isinstance(answer, m.ClaimReply):
            return cast("m.Message", answer)
        queue = self._queue(topic)
        change = queue.undo(matched, message.node, now_us // 1_000, call=message.call)
        self.durable.log(topic, change, group)
        self.waiting.wake(topic.topic_id)
        counts, skipped = queue.counts(live_count(topic)), skipped_of(matched)
        nacked = m.NackReply(
            topic.name, len(matched.leased), bytes_of(skipped), counts.ready, counts.in_flight
        )
        if len(matched.leased) and message.call:
            self._answers.keep(message.call, nacked)
        return nacked

    def _nack(self, message: m.Nack, event: ControlReceived, group: Group, now_us: int) -> m.Message:
        if message.undo:
            return self._undo(message, group, now_us)
        topic, matched = self._matched(message, now_us)
        answer = self._answers.get(message.call)
        if answer is not None and not isinstance(answer, m.ClaimReply):
            return answer  # Else the claim is taken back: it is as if it had never been made.
        require_numbers(message)
        queue, reason, now_ms = self._queue(topic), reason_of(message.reason), now_us // 1_000
        node, call, delay_ms = message.node, message.call, message.delay_ms
        changes: list[Change | None]
        if message.has_backoff and queue.backoff.base_ms:
            changes = [*queue.nack_resting(matched, node, now_ms, call=call, reason=reason)]
        else:
            changes = [queue.nack(matched, node, delay_ms, now_ms, call=call, reason=reason)]
        for change in changes:
            self.durable.log(topic, change, group)
        self.waiting.wake(topic.topic_id)
        counts = queue.counts(live_count(topic))
        skipped = skipped_of(matched)
        return self.keep(
            message.call,
            m.NackReply(topic.name, len(matched.leased), bytes_of(skipped), counts.ready, counts.in_flight),
        )

    def reconfigured(self, topic: Topic) -> None:
        """The topic's config is another one."""
        queue = self._queues.get(topic.topic_id)
        if queue is not None:
            queue.backoff, queue.wall_ahead_ms = backoff_of(topic), self._ahead_ms
            self._note_due(topic)
            self.waiting.wake(topic.topic_id)

    def _extend(self, message: m.Extend, event: ControlReceived, group: Group, now_us: int) -> m.Message:
        topic, matched = self._matched(message, now_us)
        if (answer := self._answers.get(message.call)) is not None:
            return answer
        require_numbers(message)
        lease_ms = message.lease_ms or topic.config.lease_ms
        deadline = now_us // 1_000 + lease_ms
        change = self._queue(topic).extend(
            matched, message.node, lease_ms, now_us // 1_000, call=message.call
        )
        self.durable.log(topic, change, group)
        self.waiting.wake(topic.topic_id)
        return self.keep(
            message.call,
            m.ExtendReply(topic.name, len(matched.leased), bytes_of(skipped_of(matched)), deadline),
        )

    def _reject(self, message: m.Reject, event: ControlReceived, group: Group, now_us: int) -> m.Message:
        topic, matched = self._matched(message, now_us)
        if (answer := self._answers.get(message.call)) is not None:
            return answer
        if not self._dead_letters_of(topic):
            raise InvalidRequest("this queue has no dead letters", topic=topic.name, field="dead_letter")
        reason = reason_of(message.reason)
        change = self._queue(topic).reject(matched, message.node, reason, now_us // 1_000, call=message.call)
        self.durable.log(topic, change, group)
        self.set_aside += len(matched.leased)
        return self.keep(
            message.call,
            m.RejectReply(topic.name, len(matched.leased), bytes_of(skipped_of(matched))),
        )

    def _pending(
        self, message: m.JobsPending, event: ControlReceived, group: Group, now_us: int
    ) -> m.Message:
        topic = self._found(message)
        if message.after < 0 or message.limit < 1:
            raise InvalidRequest("after is a number, limit at least 1", topic=topic.name)
        queue = self._queue(topic)
        queue.settle(now_us // 1_000)
        known, more = pending(queue, message.after, min(message.limit, JOBS_PER_REQUEST_MAX))
        return m.JobsPendingReply(topic.name, [each.on_wall(self._ahead_ms) for each in known], more)

    def _stats(self, message: m.QueueStats, event: ControlReceived, group: Group, now_us: int) -> m.Message:
        topic = self._found(message)
        queue = self._queue(topic)
        queue.settle(now_us // 1_000)
        counts = queue.counts(live_count(topic))
        waiting = self.waiting.of(topic.topic_id)
        put_ms = self._put_ms(topic, queue.oldest_ready(live_of(topic)))
        self._put_us.pop(topic.topic_id, None)
        return m.QueueStatsReply(
            topic.name, counts.ready, counts.in_flight, counts.delayed, queue.dead_lettered, waiting,
            -1 if put_ms is None else max(now_us // 1_000 - put_ms, 0),
            queue.waits.p99_ms(now_us // 1_000) if queue.waits else 0, queue.promoted,
        )  # fmt: skip

    def _put_ms(self, topic: Topic, seq: int | None) -> int | None:
        """When a job was put, as far as it is known; None = it is not, or there is none."""
        if seq is None:
            return None
        known, put_us = self._put_us.get(topic.topic_id, (0, 0))
        return put_us // 1_000 - self._ahead_ms if known == seq else self._queue(topic).ages.put_ms(seq)

    # -- what records say -----------------------------------------------------------------------------

    def ticked(self, now_us: int, wall_us: int, monotonic_ns: int) -> None:
        """Time has come this far."""
        ahead_ms = (wall_us - now_us) // 1_000
        if abs(ahead_ms - self._ahead_ms) >= STEP_MS:
            # The wall clock was set: what is delayed to a time of it may be ready, or is not yet.
            self._ahead_ms = ahead_ms
            for topic_id, queue in self._queues.items():
                queue.wall_ahead_ms = ahead_ms
                self.waiting.wake(topic_id)
        self._now_us, self.wall_us, self.waiting.now_ns = now_us, wall_us, monotonic_ns

    def published(self, topic: Topic) -> None:
        """What is staged of a topic is about to be published."""
        if topic.config.type == QUEUE and topic.next_seq > topic.head_seq + 1:
            self._queue(topic).ages.note(topic.head_seq + 1, self._now_us // 1_000)

    def to_learn_for(self, message: Any) -> list[Question]:
        """What has to be known before this request is looked at: marks that records brought since, or had
        when we began; and when the oldest job was put, where that was before."""
        topic = self.directory.find(message.topic)
        if topic is None or topic.config.type != QUEUE or topic.topic_id in self._damaged:
            return []
        learn = self._unlearned(topic)
        if learn is None and isinstance(message, m.QueueStats):
            queue = self._queue(topic)
            queue.settle(self._now_us // 1_000)
            oldest = queue.oldest_ready(live_of(topic))
            if oldest and topic.topic_id not in self._put_us and queue.ages.put_ms(oldest) is None:
                learn = Learn(1, 0, oldest)
        return [] if learn is None else self.removals.questions_to_learn([(topic, learn)], self.wall_us)

    def to_learn(self) -> list[Question]:
        """The same for claims that wait."""
        if not self._wanted:
            return []
        wanted, self._wanted = self._wanted, {}
        asked = [
            (topic, learn)
            for topic in wanted.values()
            if self.directory.by_id.get(topic.topic_id) is topic
            and (learn := self._unlearned(topic)) is not None
        ]
        return self.removals.questions_to_learn(asked, self.wall_us) if asked else []

    def _unlearned(self, topic: Topic) -> Learn | None:
        queue, levels = self._queue(topic), levels_of(topic)
        if queue.levels != levels:
            queue.unmark(levels)
        if topic.marked_to <= queue.marked_to or topic.head_seq <= queue.marked_to:
            return None
        first = max(queue.marked_to + 1, front_of(topic))
        if not queue.ready_index.is_awaiting:
            first = max(first, queue.cursor)
        if first > min(topic.marked_to, topic.head_seq):
            return None
        return Learn(first, topic.head_seq)

    def _learned(self, question: Question, found: Learned | CorruptData) -> None:
        topic, learn = question.topic, question.learn
        if self.directory.by_id.get(topic.topic_id) is not topic or learn is None:
            return
        if learn.has_sizes:
            # What lies beside damage may be whole: then each ack asks for its own jobs alone.
            if not isinstance(found, CorruptData):
                self.sizes.learn(topic.topic_id, *found.sizes)
        elif isinstance(found, CorruptData):
            self._damaged[topic.topic_id] = found
            self.waiting.dismiss(damage_of(topic, found), topic.topic_id)
        elif learn.put:
            self._put_us[topic.topic_id] = (learn.put, found.put_us)
        else:
            marks = marks_of(found.marks, levels_of(topic))
            self._queue(topic).feed(marks, live_of(topic), learn.last, self._now_us // 1_000)
            self.waiting.wake(topic.topic_id)

    def _matched(self, message: Names, now_us: int) -> tuple[Topic, Matched]:
        topic = self._found(message)
        node = node_of(message)
        seqs, tokens = entries(message)
        return topic, self._queue(topic).match(seqs, tokens, node, now_us // 1_000)

    # -- dead letters ---------------------------------------------------------------------------------

    def _dead_letters_of(self, topic: Topic) -> str | None:
        """Where jobs go that failed too often; nowhere, when nobody is there who moves them."""
        return topic.config.dead_letter if self.has_mover else None

    def _spent(self, message: m.SpentAsk, event: ControlReceived, group: Group, now_us: int) -> m.Message:
        """The jobs of one queue that are to be moved, at most as many as one request names."""
        waiting = [number for number, queue in self._queues.items() if queue.exhausted]
        for topic_id in sorted(number for number in waiting if number > message.after):
            topic = self.directory.by_id[topic_id]
            if not topic.config.dead_letter:
                self._queues[topic_id].restore()
                continue
            found = spent_jobs(
                topic, self._queues[topic_id], topic.config.dead_letter,
                keeps_expiry=topic.config.dead_letter_keep_expiry,
            )  # fmt: skip
            if found is not None:
                return found
        return m.SpentJobs()

    def _moved(self, message: m.SpentMoved) -> tuple[Topic, Matched]:
        topic = self._found(message)
        if topic.topic_id != message.topic_id:
            raise TopicNotFound("no such topic", topic=message.topic)
        if len(message.seqs) & 7:
            raise InvalidRequest("numbers are 8 bytes each", field="seqs", bytes=len(message.seqs))
        seqs = self._queue(topic).still_exhausted(np.unique(np.frombuffer(message.seqs, dtype="<i8")))
        return topic, Matched(seqs, seqs[:0], seqs[:0])

    def _spent_moved(
        self, message: m.SpentMoved, event: ControlReceived, group: Group, now_us: int
    ) -> m.Message:
        """Their copies are durable: the jobs go for good (QD-2)."""
        decided, self._decided = self._decided, None
        topic, matched = (decided.topic, decided.matched) if decided else self._moved(message)
        self._delete(topic, self._found_out(matched), group)
        moved = self._queue(topic).count_moved(len(matched.leased), now_us // 1_000)
        self.durable.log(topic, moved, group)
        self.numbers.done[DEAD_LETTERED] += len(matched.leased)
        return m.SpentGone(topic.name, len(matched.leased))

    # -- claims that wait -----------------------------------------------------------------------------

    def _note_due(self, topic: Topic) -> None:
        self.waiting.note_due(topic.topic_id, self._queue(topic).next_due_ms())

    def serve(
        self, now_us: int, into: Group | None = None, owed: list[Reply] | None = None, *,
        is_stuck: bool = False,
    ) -> list[Reply]:  # fmt: skip
        """Answers to claims that waited: those that are given something, and those whose wait is over.

        Where leases are durable, what they are given is logged with `into`, and the answers in `owed` are due
        when that is durable. Without it they wait on: for the next turn, or for a while when nothing can be
        logged at present.
        """
        waiting = self.waiting
        if into is not None:
            for topic_id in self.durable.release(into, now_us // 1_000):
                waiting.wake(topic_id)
        if not waiting:
            return []
        replies, waiting.dismissed = waiting.dismissed, []
        held: set[int] = set()
        for topic_id in waiting.woken(now_us):
            topic = self.directory.by_id[topic_id]
            if self._has_to_wait(topic):
                held.add(topic_id)
                waiting.wake(topic_id)
            elif not topic.config.logs_leases:
                replies += self._serve(topic, now_us, None)
            elif into is not None and owed is not None and into.bytes < GROUP_BYTES_MAX:
                owed += self._serve(topic, now_us, into)
            elif is_stuck:
                waiting.note_due(topic_id, now_us // 1_000 + DURABLE_RETRY_MS)
            else:
                held.add(topic_id)
                waiting.wake(topic_id)
        for parked in waiting.ended(held):
            topic = self.directory.by_id[parked.topic_id]
            replies.append(parked.answer(self.claimed(topic, None)))
        return replies

    def _has_to_wait(self, topic: Topic) -> bool:
        """Has something to be applied or known before anybody is given jobs of this queue?"""
        if 0 < topic.due_us <= self.wall_us:
            self.removals.want(topic)  # What has expired goes first (QS-1).
            return True
        if self._unlearned(topic) is not None:
            self._wanted[topic.topic_id] = topic
            return True
        return False

    def _serve(self, topic: Topic, now_us: int, into: Group | None) -> list[Reply]:
        if topic.config.claim_jitter_ms:
            return self._serve_together(topic, now_us, into)
        replies: list[Reply] = []
        while (parked := self.waiting.first(topic.topic_id)) is not None:
            if into is not None and into.bytes >= GROUP_BYTES_MAX:
                self.waiting.wake(topic.topic_id)  # With the next group.
                break
            answer = self._given(topic, parked.message, now_us, into)
            if answer is None:
                self._note_due(topic)
                break
            self.waiting.over(parked)
            replies.append(parked.answer(answer))
        return replies

    def _serve_together(self, topic: Topic, now_us: int, into: Group | None) -> list[Reply]:
        """One pass for all who wait: equal shares as far as they want them (QC-12, QC-13)."""
        waiting = self.waiting.all_of(topic.topic_id)
        has_room = self.durable.room_for(topic, [parked.message for parked in waiting])
        waiting = [parked for parked, may in zip(waiting, has_room, strict=True) if may]
        replies: list[Reply] = []
        answers = self._deal(topic, [parked.message for parked in waiting], now_us, into) if waiting else []
        for parked, claimed in zip(waiting, answers, strict=True):
            if claimed is not None and claimed.rows:
                self.waiting.over(parked)
                answer = self.keep(parked.message.call, self.claimed(topic, claimed))
                replies.append(parked.answer(answer))
        if len(replies) < len(has_room):
            self._note_due(topic)
        return replies

    def stopping(self) -> None:
        """No claim waits any longer: it is sent again, to whoever comes after us."""
        self.waiting.dismiss(ShuttingDown("the shard is stopping"))

    # -- topics ---------------------------------------------------------------------------------------

    def recovered(self) -> None:
        """The directory is filled: leases that outlived our predecessor are held, and what was answered about
        them is known."""
        for topic, queue in self.durable.recovered(live_of, self._tokens):
            self._adopt(topic, queue)
            for change in queue.calls:
                if (answer := answer_of(topic, queue, change)) is not None:
                    self._answers.keep(change.call, answer)

    def forget(self, topic: Topic) -> None:
        """The topic is no more."""
        self._queues.pop(topic.topic_id, None)
        self._damaged.pop(topic.topic_id, None)
        self._put_us.pop(topic.topic_id, None)
        self.sizes.forget(topic.topic_id)
        self.newest.forget(topic.topic_id)
        self.numbers.forget(topic.topic_id)
        self.waiting.dismiss(TopicNotFound("no such topic", topic=topic.name), topic.topic_id)

    def _removed(self, topic: Topic, removal: Removal, on_request: bool) -> None:
        queue = self._queues.get(topic.topic_id)
        if queue is not None:
            floor = max(removal.cap_floor, removal.ttl_floor)
            if floor:
                queue.removed(floor, None, on_request=False)
            queue.removed(removal.delete_floor, removal.seqs, on_request=on_request)

    def _found(self, message: Any) -> Topic:
        topic = self.directory.find(message.topic)
        if topic is None:
            raise TopicNotFound("no such topic", topic=message.topic)
        if topic.config.type != QUEUE:
            raise NotAQueue("not a queue", topic=topic.name)
        if getattr(message, "call", 0) < 0:
            raise InvalidRequest("a number is negative", topic=topic.name, field="call")
        if (damage := self._damaged.pop(topic.topic_id, None)) is not None:
            raise damage_of(topic, damage)
        return topic

    def queue_of(self, topic_id: int) -> ConsumerGroup | None:
        """The queue, if it was asked for before."""
        return self._queues.get(topic_id)

    def wants_to_learn(self, topic: Topic) -> bool:
        """Is it not known yet what records of this queue say of their delays? Then it is asked for."""
        is_unknown = topic.topic_id not in self._damaged and self._unlearned(topic) is not None
        if is_unknown:
            self._wanted[topic.topic_id] = topic
        return is_unknown

    @property
    def is_damaged(self) -> bool:
        """Has somebody to be told of damage?"""
        return bool(self._damaged)

    def knows(self, call: int) -> bool:
        """Did a request under this number come before?"""
        return call in self._answers or self.waiting.has(call)

    def limit_of(self, topic: Topic) -> int:
        """How often a job is handed out; 0 = any number of times."""
        return topic.config.max_deliveries if self._dead_letters_of(topic) else 0

    def _queue(self, topic: Topic) -> ConsumerGroup:
        queue = self._queues.get(topic.topic_id)
        return self._adopt(topic, ConsumerGroup(tokens=self._tokens)) if queue is None else queue

    def _adopt(self, topic: Topic, queue: ConsumerGroup) -> ConsumerGroup:
        self._queues[topic.topic_id] = queue
        queue.backoff, queue.wall_ahead_ms = backoff_of(topic), self._ahead_ms
        # Of jobs that were there before it is only known that they are older than this.
        queue.ages.note(topic.head_seq + 1, self._now_us // 1_000)
        self.numbers.made(topic, queue)
        self.durable.adopt(topic, queue)
        return queue

    def keep(self, call: int, answer: _Kept) -> _Kept:
        """Remember an answer, for who asks again."""
        self.numbers.note(answer)
        if call:
            self._answers.keep(call, answer)
        return answer

    def check(self) -> None:
        """Assert what must be true of every queue."""
        for queue in self._queues.values():
            queue.check()
