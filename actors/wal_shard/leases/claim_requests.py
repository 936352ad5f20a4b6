"""Claims of jobs, answered at once or after they have waited. Pure.

Claims of a queue without durable leases deliver only published records and are answered at once. If the
changes of a group are logged, the reply waits for the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.leases.lease_registry import key_of
from ringlog.actors.wal_shard.leases.lease_requests import (
    check_claim,
    checked_node,
    claim_reply,
    entries_in,
    live_of,
    revalidate_claim,
)
from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.leases.change import LeaseChange
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.holders import ProcessId
from ringlog.leases.types import ClaimRequest, DispatchOrder
from ringlog.limits import (
    CLAIM_JOBS_MAX,
    COMMIT_BATCH_BYTES_MAX,
    DURABLE_RETRY_MS,
    GROUP_PENDING_PER_TOPIC_MAX,
    JITTER_CLAIM_JOBS_MAX,
)
from ringlog.topic.state import ShardTopic

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases

_UNBOUNDED = 1 << 62


class ClaimRequests:
    """Leases jobs for the claims of one shard, and serves the claims that wait."""

    def __init__(self, leases: ShardLeases) -> None:
        self._leases, self._registry, self._waiting_claims = leases, leases.registry, leases.waiting_claims
        self._dead: deque[tuple[int, ProcessId]] = deque()
        """(group key, dead process): leases of the process in a logged group that are to be released."""
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message | None]
        ] = {m.Claim: self._claim, m.Steal: self._steal}

    # -- claims ---------------------------------------------------------------------------------------

    def _claim(
        self, message: m.Claim, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message | None:
        topic, group = self._leases.find(message)
        check_claim(topic, message)
        if self._leases.is_cancelled(group, message):
            return claim_reply(topic, group, None)
        if self._waiting_claims.reattach_claim(event, message.call):
            return None
        reply = self.previous_reply(topic, group, message, now_us)
        if reply is None:
            if group.is_default_group and (jitter_ms := topic.config.claim_jitter_ms):
                self._waiting_claims.park(key_of(topic, group), event, message, jitter_ms)
                return None
            reply = self.lease(topic, group, message, now_us, batch)
        if reply is not None or not message.wait_ms:
            return reply or claim_reply(topic, group, None)
        self._waiting_claims.park(key_of(topic, group), event, message)
        if self._leases.removals.schedule.is_postponed(topic):
            self._waiting_claims.wake(key_of(topic, group))  # `serve` tries it again.
        self._note_due(topic, group)
        return None

    def previous_reply(
        self, topic: ShardTopic, group: ConsumerGroup, message: m.Claim | m.AckAndClaim | m.Steal, now_us: int
    ) -> m.ClaimReply | None:
        """Return the earlier reply to this claim, reduced to the jobs that the worker still holds.

        Return None if there was no reply, or its lease has expired.
        """
        reply = self._leases.previous_reply(topic, group, message.call)
        if not isinstance(reply, m.ClaimReply):
            return None
        return revalidate_claim(group, reply, checked_node(message), now_us // 1_000)

    def lease(
        self, topic: ShardTopic, group: ConsumerGroup, message: m.Claim, now_us: int,
        batch: CommitBatch | None,
    ) -> m.ClaimReply | None:  # fmt: skip
        """Lease jobs for this claim. Return None if no job is ready or the node may not hold leases.

        Also while jobs that have expired cannot be removed.
        """
        is_postponed = self._leases.removals.schedule.is_postponed(topic)
        if is_postponed or not all(self._registry.room_for(group, [message])):
            return None
        (change,) = self._lease_jobs(topic, group, [message], now_us, batch)
        if change is None or not change.rows:
            return None
        return self._leases.remember_reply(group, message.call, claim_reply(topic, group, change))

    def _lease_jobs(
        self,
        topic: ShardTopic,
        group: ConsumerGroup,
        messages: Sequence[m.Claim],
        now_us: int,
        batch: CommitBatch | None,
    ) -> list[LeaseChange | None]:
        """Lease ready jobs for these claims. Several claims get fair shares."""
        config, live, now_ms = topic.config, live_of(topic), now_us // 1_000
        topic.last_read_us = self._leases.wall_us
        if group.is_default_group:
            if group.exhausted and not self._registry.dead_letters_of(topic, group):
                group.restore_exhausted()
            limit, new_max = self._registry.max_deliveries_of(topic), _UNBOUNDED
        else:
            limit = 0
            new_max = GROUP_PENDING_PER_TOPIC_MAX - sum(each.pending for each in topic.groups.values())
        order = DispatchOrder(group.levels, config.starvation_ms)
        if len(messages) == 1:
            one = messages[0]
            changes = [
                group.claim(
                    live, one.node, _max_jobs(one), one.lease_ms or config.lease_ms, now_ms,
                    deliveries_max=limit, order=order._replace(by_number=True) if one.by_number else order,
                    new_max=new_max, min_idle_ms=one.min_idle_ms, call=one.call,
                    process_id=(one.pid, one.pid_started),
                )
            ]  # fmt: skip
        else:
            requests = [
                ClaimRequest(
                    each.node, _max_jobs(each), each.lease_ms or config.lease_ms,
                    (each.pid, each.pid_started), each.call, each.by_number,
                )
                for each in messages
            ]  # fmt: skip
            changes = group.claim_fair_shares(
                live, requests, JITTER_CLAIM_JOBS_MAX, now_ms, deliveries_max=limit, order=order
            )
        for change in changes:
            self._leases.count_exhausted(change)
            self._registry.log(topic, group, change, batch)
        return changes

    def _steal(self, message: m.Steal, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        topic, group = self._leases.find(message)
        seqs, _ = entries_in(message.seqs, b"")
        check_claim(topic, message)
        earlier_reply = self.previous_reply(topic, group, message, now_us)
        if earlier_reply is not None:
            return earlier_reply
        if self._leases.is_cancelled(group, message) or not all(self._registry.room_for(group, [message])):
            return claim_reply(topic, group, None)
        change = group.steal(
            np.unique(seqs), message.node, message.lease_ms or topic.config.lease_ms,
            now_us // 1_000, min_idle_ms=message.min_idle_ms, call=message.call,
            process_id=(message.pid, message.pid_started),
        )  # fmt: skip
        self._registry.log(topic, group, change, batch)
        return self._leases.remember_reply(group, message.call, claim_reply(topic, group, change))

    # -- waiting claims -------------------------------------------------------------------------------

    def _note_due(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        self._waiting_claims.schedule_wakeup(key_of(topic, group), group.next_due_ms())

    @property
    def has_work(self) -> bool:
        """True if `serve` has anything to do."""
        return bool(self._waiting_claims or self._dead)

    def release_process(self, process_id: ProcessId) -> None:
        """Release the leases of a process that died (Q10), and drop its waiting claims.

        The records are ready at once, or as soon as the release is logged. Their delivery counts are
        unchanged.
        """
        self._waiting_claims.drop_process(process_id)
        for topic, group in self._registry:
            if process_id not in group.processes.by_number.values():
                continue
            if group.is_logged:
                self._dead.append((key_of(topic, group), process_id))
            elif group.release(process_id, self._registry.now_ms):
                self._waiting_claims.wake(key_of(topic, group))

    def _release(self, batch: CommitBatch, now_us: int) -> None:
        """Release leases of dead processes in logged groups, until the commit batch is full."""
        while self._dead and batch.bytes < COMMIT_BATCH_BYTES_MAX:
            key, process_id = self._dead.popleft()
            found = self._registry.find_by_key(key)
            if found is not None:
                for change in found[1].release(process_id, now_us // 1_000):
                    self._registry.log(*found, change, batch)
                self._waiting_claims.wake(key)

    def serve(
        self, now_us: int, batch: CommitBatch | None = None, owed: list[Reply] | None = None, *,
        is_stuck: bool = False,
    ) -> list[Reply]:  # fmt: skip
        """Serve waiting claims. Return the replies that may be sent now.

        These are replies to claims that lease jobs without a log record, and to claims whose wait has ended.

        Args:
            now_us: current time on the clock of leases, in microseconds.
            batch: commit batch for groups whose changes are logged. Without it, their claims continue to
                wait.
            owed: receives the replies that are due when `batch` is durable.
            is_stuck: nothing can be logged at present; claims of logged groups are tried again after
                DURABLE_RETRY_MS.
        """
        waiting = self._waiting_claims
        if batch is not None:
            self._release(batch, now_us)
        if not waiting:
            return []
        replies, waiting.final_replies = waiting.final_replies, []
        held: set[int] = set()
        for key in waiting.take_woken(now_us):
            found = self._registry.find_by_key(key)
            if found is None:
                continue
            topic, group = found
            if self._leases.removals.schedule.is_postponed(topic):
                waiting.schedule_wakeup(key, now_us // 1_000 + DURABLE_RETRY_MS)
            elif self._has_to_wait(topic, group):
                held.add(key)
                waiting.wake(key)
            elif not group.is_logged:
                replies += self._serve_group(topic, group, now_us, None)
            elif batch is not None and owed is not None and batch.bytes < COMMIT_BATCH_BYTES_MAX:
                owed += self._serve_group(topic, group, now_us, batch)
            elif is_stuck:
                waiting.schedule_wakeup(key, now_us // 1_000 + DURABLE_RETRY_MS)
            else:
                held.add(key)
                waiting.wake(key)
        for waiting_claim in waiting.take_expired(held):
            found = self._registry.find_by_key(waiting_claim.key)
            if found is not None:
                replies.append(waiting_claim.answer(claim_reply(*found, None)))
        return replies

    def _has_to_wait(self, topic: ShardTopic, group: ConsumerGroup) -> bool:
        """Return True if the group cannot deliver yet: retention or delivery attributes are pending."""
        if 0 < topic.due_us <= self._leases.wall_us:
            self._leases.removals.schedule.request(topic)  # Expired records must be removed first.
            return True
        return self._leases.delivery_attributes.needs_loading(topic, group)

    def _serve_group(
        self, topic: ShardTopic, group: ConsumerGroup, now_us: int, batch: CommitBatch | None
    ) -> list[Reply]:
        if group.is_default_group and topic.config.claim_jitter_ms:
            return self._serve_together(topic, group, now_us, batch)
        replies, key = list[Reply](), key_of(topic, group)
        while (waiting_claim := self._waiting_claims.first(key)) is not None:
            if batch is not None and batch.bytes >= COMMIT_BATCH_BYTES_MAX:
                self._waiting_claims.wake(key)  # The next commit batch serves the other claims.
                break
            reply = self.lease(topic, group, waiting_claim.message, now_us, batch)
            if reply is None:
                self._note_due(topic, group)
                break
            self._waiting_claims.remove_claim(waiting_claim)
            replies.append(waiting_claim.answer(reply))
        return replies

    def _serve_together(
        self, topic: ShardTopic, group: ConsumerGroup, now_us: int, batch: CommitBatch | None
    ) -> list[Reply]:
        """Serve all waiting claims of a queue together. Each gets an equal share, at most its own maximum."""
        waiting = self._waiting_claims.all_of(key_of(topic, group))
        has_room = self._registry.room_for(group, [waiting_claim.message for waiting_claim in waiting])
        waiting = [waiting_claim for waiting_claim, may in zip(waiting, has_room, strict=True) if may]
        replies, changes = list[Reply](), list[LeaseChange | None]()
        if waiting:
            messages = [waiting_claim.message for waiting_claim in waiting]
            changes = self._lease_jobs(topic, group, messages, now_us, batch)
        for waiting_claim, change in zip(waiting, changes, strict=True):
            if change is not None and change.rows:
                self._waiting_claims.remove_claim(waiting_claim)
                reply = self._leases.remember_reply(
                    group, waiting_claim.message.call, claim_reply(topic, group, change)
                )
                replies.append(waiting_claim.answer(reply))
        if len(replies) < len(has_room):
            self._note_due(topic, group)
        return replies


def _max_jobs(message: m.Claim) -> int:
    return min(max(message.max, 1), CLAIM_JOBS_MAX)
