"""Lease requests for the queues and consumer groups of one shard, and waiting claims. Pure.

Queues and groups share these handlers. A queue uses the unnamed default group of its topic, and an ack of
this group deletes the job. All other differences are data of the group (ringlog/leases/group.py), which
decides each change. If the changes of a group are logged, the reply waits for the log. Claims of a queue
without durable leases deliver only published records and are answered at once. A retry under the same call
number gets the earlier reply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.hot_tail import HotTail
from ringlog.actors.wal_shard.leases.consumer_groups import ConsumerGroups, info_of
from ringlog.actors.wal_shard.leases.delivery_attributes import DeliveryAttributeLoader
from ringlog.actors.wal_shard.leases.job_deletes import JobDeletes
from ringlog.actors.wal_shard.leases.job_sizes import JobSizes
from ringlog.actors.wal_shard.leases.lease_registry import LeaseRegistry, key_of
from ringlog.actors.wal_shard.leases.lease_requests import (
    checked_node,
    claim_reply,
    entries_in,
    exhausted_reply,
    live_of,
    ready_of,
    reason_of,
    reply_of,
    require_numbers,
    revalidate_claim,
    seqs_to_bytes,
    skipped_of,
    unclaimed_of,
)
from ringlog.actors.wal_shard.leases.queue_fast_path import QueueFastPath
from ringlog.actors.wal_shard.leases.reply_cache import ReplyCache
from ringlog.actors.wal_shard.leases.waiting_claims import WaitingClaims
from ringlog.actors.wal_shard.retention.removal import Removals
from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.errors import GroupNotFound, InvalidRequest, ShuttingDown, TopicNotFound
from ringlog.leases.change import SPAN_ROW, LeaseChange
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.holders import ProcessId
from ringlog.leases.live_seqs import is_alive
from ringlog.leases.pending_list import list_pending
from ringlog.leases.retry_claim import entries_of
from ringlog.leases.types import ClaimRequest, DispatchOrder, LeaseMatch
from ringlog.limits import (
    CLAIM_JOBS_MAX,
    COMMIT_BATCH_BYTES_MAX,
    DURABLE_RETRY_MS,
    GROUP_PENDING_PER_TOPIC_MAX,
    JITTER_CLAIM_JOBS_MAX,
    JOBS_PER_REQUEST_MAX,
    PENDING_ROWS_MAX,
)
from ringlog.topic.config import QUEUE
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.retention import retained_from
from ringlog.topic.state import ShardTopic

_Kept = TypeVar("_Kept", m.ClaimReply, m.AckReply, m.NackReply, m.ExtendReply, m.RejectReply)
CLOCK_STEP_MS = 10
"""Minimum change of the clock offset that counts as a step of the wall clock.
Smaller changes arise because the two clocks are read one after the other."""
_UNBOUNDED = 1 << 62


class ShardLeases:
    """The leases of one shard, and the handlers of requests about them."""

    def __init__(self, incarnation: int, directory: TopicDirectory, removals: Removals) -> None:
        self.registry = LeaseRegistry(incarnation, directory)
        self.removals = removals
        self.replies = ReplyCache()
        self.waiting_claims = WaitingClaims()
        """Waiting claims, by `key_of` their group."""
        self.recent_records, self.sizes = HotTail(), JobSizes()
        self.delivery_attributes = DeliveryAttributeLoader(
            self.registry, removals, self.waiting_claims, self.sizes
        )
        self.deletes = JobDeletes(incarnation, self)
        self.fast_path = QueueFastPath(self)
        self.exhausted_total = 0
        """Number of records exhausted by claims and rejects in this incarnation.
        The scheduler that moves dead letters checks whether it has grown. Exhausted records of groups are
        also found by the metrics samples."""
        removals.removed.subscribe(self.registry.apply_removal)
        self._now_ms = 0
        """Current time on the clock of leases in milliseconds (see Requests.lease_clock_us)."""
        self.wall_us = 0
        """Current wall-clock time in microseconds.
        Commit times and expiry times of records use this clock."""
        self._dead: deque[tuple[int, ProcessId]] = deque()
        """(group key, dead process): leases of the process in a logged group that are to be released."""
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message | None]
        ] = {
            m.Claim: self._claim,
            m.Steal: self._steal,
            m.Ack: self._ack,
            m.AckAndClaim: self._ack_and_claim,
            m.Nack: self._nack,
            m.Extend: self._extend,
            m.Reject: self._reject,
            m.ListPending: self._list_pending,
            m.LeaseStats: self._stats,
            m.ListExhausted: self._list_exhausted,
            m.ConfirmDeadLettered: self._confirm,
            **ConsumerGroups(self).handlers,
        }

    # -- lookup and retries ---------------------------------------------------------------------------

    def _find(self, message: Any) -> tuple[ShardTopic, ConsumerGroup]:
        found = self.registry.find(message)
        self.delivery_attributes.require_undamaged(*found)
        return found

    def _matched(self, message: Any, now_us: int) -> tuple[ShardTopic, ConsumerGroup, LeaseMatch]:
        topic, group = self._find(message)
        node = checked_node(message)
        seqs, tokens = entries_in(message.seqs, message.tokens)
        return topic, group, group.match(seqs, tokens, node, now_us // 1_000)

    def _previous_reply(
        self, topic: ShardTopic, group: ConsumerGroup, call: int, named: bytes = b""
    ) -> m.Message | None:
        """Return the earlier reply to a request with this call number, or None if it is new.

        `named` contains the seqs of the request, 8 bytes each.
        """
        reply = self.replies.get(call) if group.is_default_group else None
        if reply is None and (change := group.recent_calls.find(call)) is not None:
            reply = reply_of(topic, group, change, len(named) // 8)
        return reply

    def remember_reply(self, group: ConsumerGroup, call: int, reply: _Kept) -> _Kept:
        """Count a reply of a queue and remember it for retries.

        Named groups remember their changes themselves.
        """
        if group.is_default_group:
            self.registry.queue_metrics.count_reply(reply)
            if call:
                self.replies.remember_reply(call, reply)
        return reply

    def knows_call(self, call: int) -> bool:
        """Return True if a request about a queue used this call number before."""
        return call in self.replies or self.waiting_claims.has(call)

    # -- claims ---------------------------------------------------------------------------------------

    def _claim(
        self, message: m.Claim, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message | None:
        topic, group = self._find(message)
        _check_claim(topic, message)
        if self.waiting_claims.reattach_claim(event, message.call):
            return None
        reply = self._previous_claim_reply(topic, group, message, now_us)
        if reply is None:
            if group.is_default_group and (jitter_ms := topic.config.claim_jitter_ms):
                self.waiting_claims.park(key_of(topic, group), event, message, jitter_ms)
                return None
            reply = self._answer_claim(topic, group, message, now_us, batch)
        if reply is not None or not message.wait_ms:
            return reply or claim_reply(topic, group, None)
        self.waiting_claims.park(key_of(topic, group), event, message)
        self._note_due(topic, group)
        return None

    def _previous_claim_reply(
        self, topic: ShardTopic, group: ConsumerGroup, message: m.Claim | m.AckAndClaim | m.Steal, now_us: int
    ) -> m.ClaimReply | None:
        """Return the earlier reply to this claim, reduced to the jobs that the worker still holds.

        Return None if there was no reply, its lease has expired, or the claim was undone.
        """
        reply = self._previous_reply(topic, group, message.call)
        if not isinstance(reply, m.ClaimReply):
            return None
        return revalidate_claim(group, reply, checked_node(message), now_us // 1_000)

    def _answer_claim(
        self, topic: ShardTopic, group: ConsumerGroup, message: m.Claim, now_us: int,
        batch: CommitBatch | None,
    ) -> m.ClaimReply | None:  # fmt: skip
        """Lease jobs for this claim. Return None if no job is ready or the node may not hold leases."""
        if not all(self.registry.room_for(group, [message])):
            return None
        (change,) = self._lease_jobs(topic, group, [message], now_us, batch)
        if change is None or not change.rows:
            return None
        return self.remember_reply(group, message.call, claim_reply(topic, group, change))

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
        topic.last_read_us = self.wall_us
        if group.is_default_group:
            if group.exhausted and not self.registry.dead_letters_of(topic, group):
                group.restore_exhausted()
            limit, new_max = self.registry.max_deliveries_of(topic), _UNBOUNDED
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
                    process_id=(one.pid, one.born),
                )
            ]  # fmt: skip
        else:
            requests = [
                ClaimRequest(
                    each.node, _max_jobs(each), each.lease_ms or config.lease_ms, (each.pid, each.born),
                    each.call, each.by_number,
                )
                for each in messages
            ]  # fmt: skip
            changes = group.claim_fair_shares(
                live, requests, JITTER_CLAIM_JOBS_MAX, now_ms, deliveries_max=limit, order=order
            )
        for change in changes:
            self.count_exhausted(change)
            self.registry.log(topic, group, change, batch)
        return changes

    def count_exhausted(self, change: LeaseChange | None) -> None:
        """Add the jobs that a claim exhausted to `exhausted_total`."""
        if change is not None and change.exhausted:
            self.exhausted_total += sum(change.exhausted[1::SPAN_ROW])

    def _steal(self, message: m.Steal, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        topic, group = self._find(message)
        seqs, _ = entries_in(message.seqs, b"")
        _check_claim(topic, message)
        earlier_reply = self._previous_claim_reply(topic, group, message, now_us)
        if earlier_reply is not None:
            return earlier_reply
        if not all(self.registry.room_for(group, [message])):
            return claim_reply(topic, group, None)
        change = group.steal(
            np.unique(seqs), message.node, message.lease_ms or topic.config.lease_ms,
            now_us // 1_000, min_idle_ms=message.min_idle_ms, call=message.call,
            process_id=(message.pid, message.born),
        )  # fmt: skip
        self.registry.log(topic, group, change, batch)
        return self.remember_reply(group, message.call, claim_reply(topic, group, change))

    # -- ack, nack, extend, reject --------------------------------------------------------------------

    def _ack(self, message: m.Ack, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        topic, group = self._find(message)
        reply = self._previous_reply(topic, group, message.call, message.seqs)
        if reply is not None:
            return reply
        if group.is_default_group:
            return self.remember_reply(group, message.call, self.deletes.ack(message, batch, now_us // 1_000))
        topic, group, found = self._matched(message, now_us)
        # A record that no longer exists counts as acked.
        live = live_of(topic)
        is_left = is_alive(live, found.skipped) | (found.skipped > live.head)
        found = LeaseMatch(found.leased, found.gone, found.skipped[is_left])
        self.registry.log(
            topic, group, group.ack(found, message.node, now_us // 1_000, call=message.call), batch
        )
        self.on_capacity_freed(topic, group)
        acked = len(message.seqs) // 8 - len(found.skipped)
        return m.AckReply(
            topic.name, acked, seqs_to_bytes(found.skipped), ready_of(topic, group), group.leased
        )

    def _ack_and_claim(
        self, message: m.AckAndClaim, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message | None:
        """Handle an ack with a claim that did not take the fast path at once.

        For a queue, there are three cases. A retry gets its earlier reply. If only the job sizes were
        missing, the fast path is tried again. Otherwise the reply is NotCombinable, and the client sends two
        requests. For a named group, ack and claim are two changes in one commit batch.
        """
        topic, group, found = self._matched(message, now_us)
        _check_claim(topic, message)
        before = self._previous_reply(topic, group, message.call)
        if isinstance(before, m.ClaimReply) or (before is not None and not group.is_default_group):
            held = self._previous_claim_reply(topic, group, message, now_us)
            return claim_reply(topic, group, None) if held is None else held
        if group.is_default_group:
            is_done = self.fast_path.ack_and_claim(message, event, now_us)
            return None if is_done else m.NotCombinable(topic.name)
        if not message.seqs or len(found.leased) != len(message.seqs) // 8:
            return m.NotCombinable(topic.name)
        acked = group.ack(found, message.node, now_us // 1_000, call=message.call)
        self.registry.log(topic, group, acked, batch)
        self.on_capacity_freed(topic, group)
        claim = m.Claim(
            message.topic, message.node, message.max, message.lease_ms, 0, message.call, message.pid,
            message.born, group=message.group,
        )  # fmt: skip
        return self._answer_claim(topic, group, claim, now_us, batch) or claim_reply(topic, group, None)

    def _undo(
        self,
        topic: ShardTopic,
        group: ConsumerGroup,
        found: LeaseMatch,
        message: m.Nack,
        batch: CommitBatch,
        now_us: int,
    ) -> m.Message:
        """Undo a claim, or return records that no worker has started. The delivery does not count.

        Without seqs, the request undoes the claim with the same call number, whether it waits or was
        answered.
        """
        before, key = self._previous_reply(topic, group, message.call, message.seqs), key_of(topic, group)
        if not message.seqs:
            self.waiting_claims.cancel_claim(key, message.call, claim_reply(topic, group, None))
            if isinstance(before, m.ClaimReply) and before.topic_id == topic.topic_id and before.runs:
                found = group.match(*entries_of(before.runs), message.node, now_us // 1_000)
        elif before is not None and not isinstance(before, m.ClaimReply):
            return before
        change = group.undo(found, message.node, now_us // 1_000, call=message.call)
        self.registry.log(topic, group, change, batch)
        self.waiting_claims.wake(key)
        reply = _nack_reply(topic, group, found)
        if change is not None and message.call and group.is_default_group:
            self.replies.remember_reply(message.call, reply)
        return reply

    def _nack(self, message: m.Nack, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        topic, group, found = self._matched(message, now_us)
        if message.undo:
            return self._undo(topic, group, found, message, batch, now_us)
        before = self._previous_reply(topic, group, message.call, message.seqs)
        if before is not None and not isinstance(before, m.ClaimReply):
            return before  # A claim with the same call number does not count as an earlier nack.
        require_numbers(message)
        node, call, now_ms = message.node, message.call, now_us // 1_000
        reason = reason_of(message.reason) if group.is_default_group or group.config.dead_letter else ""
        if message.has_backoff and group.backoff.base_ms:
            changes: list[LeaseChange | None] = [
                *group.nack_with_backoff(found, node, now_ms, call=call, reason=reason)
            ]
        else:
            changes = [group.nack(found, node, message.delay_ms, now_ms, call=call, reason=reason)]
        for change in changes:
            self.registry.log(topic, group, change, batch)
        self.waiting_claims.wake(key_of(topic, group))
        return self.remember_reply(group, call, _nack_reply(topic, group, found))

    def _extend(
        self, message: m.Extend, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group, found = self._matched(message, now_us)
        if (before := self._previous_reply(topic, group, message.call, message.seqs)) is not None:
            return before
        require_numbers(message)
        lease_ms, now_ms = message.lease_ms or topic.config.lease_ms, now_us // 1_000
        change = group.extend(found, message.node, lease_ms, now_ms, call=message.call)
        self.registry.log(topic, group, change, batch)
        self.waiting_claims.wake(key_of(topic, group))
        reply = m.ExtendReply(
            topic.name, len(found.leased), seqs_to_bytes(skipped_of(found)), now_ms + lease_ms
        )
        return self.remember_reply(group, message.call, reply)

    def _reject(
        self, message: m.Reject, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group, found = self._matched(message, now_us)
        if (before := self._previous_reply(topic, group, message.call, message.seqs)) is not None:
            return before
        if not self.registry.dead_letters_of(topic, group):
            kind = "group" if message.group else "queue"
            which: dict[str, Any] = {"group": message.group} if message.group else {}
            raise InvalidRequest(
                f"this {kind} has no dead-letter topic, or no scheduler runs: set dead_letter",
                topic=topic.name, **which, field="dead_letter",
            )  # fmt: skip
        reason = reason_of(message.reason)
        change = group.reject(found, message.node, reason, now_us // 1_000, call=message.call)
        self.registry.log(topic, group, change, batch)
        self.exhausted_total += len(found.leased)
        reply = m.RejectReply(topic.name, len(found.leased), seqs_to_bytes(skipped_of(found)))
        return self.remember_reply(group, message.call, reply)

    def on_capacity_freed(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """Wake claims of a group that made progress, and request retention that waited for it."""
        self.waiting_claims.wake(key_of(topic, group))
        if topic.retained_at:
            first, _ = retained_from(topic)
            if not first or first > topic.retained_at:
                self.removals.schedule.request(topic)

    # -- queries --------------------------------------------------------------------------------------

    def _list_pending(
        self, message: m.ListPending, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group = self._find(message)
        if min(message.idle_ms, message.min_deliveries, message.after, message.limit - 1) < 0:
            raise InvalidRequest(
                "idle_ms, min_deliveries and after must be >= 0, and limit must be >= 1", topic=topic.name
            )
        now_ms, wall_clock_offset_ms = now_us // 1_000, self.registry.wall_clock_offset_ms
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
        topic, group = self.registry.find_named(message) if message.group else self._find(message)
        now_ms, key = now_us // 1_000, key_of(topic, group)
        group.apply_expirations(now_ms)
        reply = m.LeaseStatsReply(
            info_of(topic, group), topic.head_seq, ready_of(topic, group), group.leased, group.total_delayed,
            group.returned, group.exhausted, unclaimed_of(topic, group), self.waiting_claims.of(key),
        )  # fmt: skip
        if group.is_queue_mode:
            put_ms = self.delivery_attributes.take_put_ms(topic, group)
            reply = msgspec.structs.replace(
                reply, oldest_ready_ms=-1 if put_ms is None else max(now_ms - put_ms, 0),
                wait_p99_ms=group.wait_histogram.p99_ms(now_ms) if group.wait_histogram else 0,
                promoted=group.promoted,
            )  # fmt: skip
        if group.is_default_group:
            return msgspec.structs.replace(reply, dead_lettered=group.dead_lettered)
        group.holders.sweep(now_ms)
        wall_clock_offset_ms = self.registry.wall_clock_offset_ms
        return msgspec.structs.replace(
            reply, members=sorted((each.name, each.seen_ms + wall_clock_offset_ms,
            each.held) for each in group.holders),
            holder=group.reader,
            is_holding=bool(topic.retained_at) and retained_from(topic)[1] == group.config.key,
        )  # fmt: skip

    # -- dead letters ---------------------------------------------------------------------------------

    def _list_exhausted(
        self, message: m.ListExhausted, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        """List exhausted records of the next queue or group, at most JOBS_PER_REQUEST_MAX records."""
        for key in self.registry.with_exhausted(message.after):
            found = self.registry.find_by_key(key)
            if found is None:
                continue
            topic, group = found
            config = topic.config
            dead_letter = (config.dead_letter or "") if group.is_default_group else group.config.dead_letter
            if not dead_letter:
                group.restore_exhausted()
            group.apply_expirations(now_us // 1_000)
            exhausted = exhausted_reply(
                topic,
                group,
                dead_letter,
                keeps_expiry=group.is_default_group and config.dead_letter_keep_expiry,
            )
            if exhausted is not None:
                return exhausted
        return m.ExhaustedReply()

    def _confirm(
        self, message: m.ConfirmDeadLettered, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        """Confirm durable dead letters: delete jobs (Q11), or mark a group's records as done."""
        if not message.number:
            topic = self.registry.queue_of(message)
            self.delivery_attributes.require_undamaged(topic, self.registry.default_group(topic))
            return self.deletes.confirm_dead_lettered(message, batch, now_us // 1_000)
        topic = self.registry.topic_of(message)
        group = topic.groups.get(message.number)
        if topic.topic_id != message.topic_id or group is None:
            raise GroupNotFound("no such group", topic=topic.name, number=message.number)
        seqs, tokens = entries_in(message.seqs, message.tokens)
        if tokens is None and len(seqs):
            raise InvalidRequest(
                "tokens are missing: one lease token is required per seq", topic=topic.name, seqs=len(seqs)
            )
        before = group.exhausted
        if tokens is not None:
            unique, at = np.unique(seqs, return_index=True)
            self.registry.log(
                topic, group, group.confirm_dead_lettered(unique, tokens[at], now_us // 1_000), batch
            )
        self.on_capacity_freed(topic, group)
        return m.ConfirmReply(topic.name, before - group.exhausted)

    # -- waiting claims -------------------------------------------------------------------------------

    def _note_due(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        self.waiting_claims.schedule_wakeup(key_of(topic, group), group.next_due_ms())

    @property
    def has_work(self) -> bool:
        """True if `serve_claims` has anything to do."""
        return bool(self.waiting_claims or self._dead)

    def release_process(self, process_id: ProcessId) -> None:
        """Release the leases of a process that died (Q10), and drop its waiting claims.

        The records are ready at once, or as soon as the release is logged. Their delivery counts are
        unchanged.
        """
        self.waiting_claims.drop_process(process_id)
        for topic, group in self.registry:
            if process_id not in group.processes.by_number.values():
                continue
            if group.is_logged:
                self._dead.append((key_of(topic, group), process_id))
            elif group.release(process_id, self._now_ms):
                self.waiting_claims.wake(key_of(topic, group))

    def _release(self, batch: CommitBatch, now_us: int) -> None:
        """Release leases of dead processes in logged groups, until the commit batch is full."""
        while self._dead and batch.bytes < COMMIT_BATCH_BYTES_MAX:
            key, process_id = self._dead.popleft()
            found = self.registry.find_by_key(key)
            if found is not None:
                for change in found[1].release(process_id, now_us // 1_000):
                    self.registry.log(*found, change, batch)
                self.waiting_claims.wake(key)

    def serve_claims(
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
        waiting = self.waiting_claims
        if batch is not None:
            self._release(batch, now_us)
        if not waiting:
            return []
        replies, waiting.final_replies = waiting.final_replies, []
        held: set[int] = set()
        for key in waiting.take_woken(now_us):
            found = self.registry.find_by_key(key)
            if found is None:
                continue
            topic, group = found
            if self._has_to_wait(topic, group):
                held.add(key)
                waiting.wake(key)
            elif not group.is_logged:
                replies += self._serve(topic, group, now_us, None)
            elif batch is not None and owed is not None and batch.bytes < COMMIT_BATCH_BYTES_MAX:
                owed += self._serve(topic, group, now_us, batch)
            elif is_stuck:
                waiting.schedule_wakeup(key, now_us // 1_000 + DURABLE_RETRY_MS)
            else:
                held.add(key)
                waiting.wake(key)
        for waiting_claim in waiting.take_expired(held):
            found = self.registry.find_by_key(waiting_claim.key)
            if found is not None:
                replies.append(waiting_claim.answer(claim_reply(*found, None)))
        return replies

    def _has_to_wait(self, topic: ShardTopic, group: ConsumerGroup) -> bool:
        """Return True if the group cannot deliver yet: retention or delivery attributes are pending."""
        if 0 < topic.due_us <= self.wall_us:
            self.removals.schedule.request(topic)  # Expired records must be removed first.
            return True
        return self.delivery_attributes.needs_loading(topic, group)

    def _serve(
        self, topic: ShardTopic, group: ConsumerGroup, now_us: int, batch: CommitBatch | None
    ) -> list[Reply]:
        if group.is_default_group and topic.config.claim_jitter_ms:
            return self._serve_together(topic, group, now_us, batch)
        replies, key = list[Reply](), key_of(topic, group)
        while (waiting_claim := self.waiting_claims.first(key)) is not None:
            if batch is not None and batch.bytes >= COMMIT_BATCH_BYTES_MAX:
                self.waiting_claims.wake(key)  # The next commit batch serves the other claims.
                break
            reply = self._answer_claim(topic, group, waiting_claim.message, now_us, batch)
            if reply is None:
                self._note_due(topic, group)
                break
            self.waiting_claims.remove_claim(waiting_claim)
            replies.append(waiting_claim.answer(reply))
        return replies

    def _serve_together(
        self, topic: ShardTopic, group: ConsumerGroup, now_us: int, batch: CommitBatch | None
    ) -> list[Reply]:
        """Serve all waiting claims of a queue together. Each gets an equal share, at most its own maximum."""
        waiting = self.waiting_claims.all_of(key_of(topic, group))
        has_room = self.registry.room_for(group, [waiting_claim.message for waiting_claim in waiting])
        waiting = [waiting_claim for waiting_claim, may in zip(waiting, has_room, strict=True) if may]
        replies, changes = list[Reply](), list[LeaseChange | None]()
        if waiting:
            messages = [waiting_claim.message for waiting_claim in waiting]
            changes = self._lease_jobs(topic, group, messages, now_us, batch)
        for waiting_claim, change in zip(waiting, changes, strict=True):
            if change is not None and change.rows:
                self.waiting_claims.remove_claim(waiting_claim)
                reply = self.remember_reply(
                    group, waiting_claim.message.call, claim_reply(topic, group, change)
                )
                replies.append(waiting_claim.answer(reply))
        if len(replies) < len(has_room):
            self._note_due(topic, group)
        return replies

    def fail_waiting_claims(self) -> None:
        """Fail all waiting claims because the shard stops. Clients retry them with the next incarnation."""
        self.waiting_claims.fail_claims(ShuttingDown("the shard is shutting down, retry later"))

    # -- topics and time ------------------------------------------------------------------------------

    def tick(self, now_us: int, wall_us: int, monotonic_ns: int) -> None:
        """Set the current times: `now_us` is the clock of leases, `wall_us` the wall clock."""
        registry, wall_clock_offset_ms = self.registry, (wall_us - now_us) // 1_000
        if abs(wall_clock_offset_ms - registry.wall_clock_offset_ms) >= CLOCK_STEP_MS:
            # The wall clock was set. Records with a `not_before` may be ready earlier or later than planned.
            registry.wall_clock_offset_ms = wall_clock_offset_ms
            for topic, group in registry:
                group.wall_clock_offset_ms = wall_clock_offset_ms
                self.waiting_claims.wake(key_of(topic, group))
        self._now_ms = registry.now_ms = now_us // 1_000
        self.wall_us = self.delivery_attributes.wall_us = wall_us
        self.waiting_claims.now_ns = monotonic_ns

    def on_publish(self, topic: ShardTopic) -> None:
        """Record the enqueue time of staged records and wake the topic's groups, just before publication."""
        is_more, first = topic.next_seq > topic.head_seq + 1, topic.head_seq + 1
        if is_more and topic.config.type == QUEUE:
            self.registry.default_group(topic).enqueue_times.record_enqueue(first, self._now_ms)
        self.waiting_claims.wake(topic.topic_id)
        for number, group in topic.groups.items():
            if is_more and group.is_queue_mode:
                group.enqueue_times.record_enqueue(first, self._now_ms)
            self.waiting_claims.wake(number)

    def apply_config(self, topic: ShardTopic, batch: CommitBatch, now_us: int) -> None:
        """Apply a changed and logged topic config to the topic's queue."""
        own = self.registry.apply_config(topic, batch, now_us // 1_000)
        if own is not None:
            self._note_due(topic, own)
            self.waiting_claims.wake(topic.topic_id)

    def forget_topic(self, topic: ShardTopic) -> None:
        """Drop the groups and cached data of a deleted topic, and fail its waiting claims."""
        for group in self.registry.forget(topic):
            self.forget_group(topic, group)
        self.delivery_attributes.forget(topic.topic_id)
        self.sizes.forget(topic.topic_id)
        self.recent_records.forget(topic.topic_id)
        self.waiting_claims.fail_claims(TopicNotFound("no such topic", topic=topic.name), topic.topic_id)

    def forget_group(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """Fail the waiting claims of a deleted named group."""
        gone = GroupNotFound("no such group", topic=topic.name, group=group.config.key)
        self.waiting_claims.fail_claims(gone, group.number)
        self.delivery_attributes.forget(group.number)


def _check_claim(topic: ShardTopic, message: m.Claim | m.AckAndClaim | m.Steal) -> None:
    checked_node(message)
    require_numbers(message)
    if min(getattr(message, "max", 0), message.pid, message.born) < 0:
        raise InvalidRequest("max, pid and born must be >= 0", topic=topic.name)


def _max_jobs(message: m.Claim) -> int:
    return min(max(message.max, 1), CLAIM_JOBS_MAX)


def _nack_reply(topic: ShardTopic, group: ConsumerGroup, found: LeaseMatch) -> m.NackReply:
    return m.NackReply(
        topic.name, len(found.leased), seqs_to_bytes(skipped_of(found)), ready_of(topic, group), group.leased
    )
