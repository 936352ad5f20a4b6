"""Acks, nacks, extensions and rejects of leased records. Pure.

An ack of a queue deletes the job. A retry under the same call number gets the earlier reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.leases.lease_registry import key_of
from ringlog.actors.wal_shard.leases.lease_requests import (
    check_claim,
    claim_reply,
    live_of,
    ready_of,
    reason_of,
    require_numbers,
    seqs_to_bytes,
    skipped_of,
)
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest
from ringlog.leases.change import LeaseChange
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.live_seqs import is_alive
from ringlog.leases.retry_claim import entries_of
from ringlog.leases.types import LeaseMatch
from ringlog.topic.state import ShardTopic

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases


class LeaseUpdates:
    """Handles the requests that end or change leases."""

    def __init__(self, leases: ShardLeases) -> None:
        self._leases, self._registry, self._waiting_claims = leases, leases.registry, leases.waiting_claims
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message | None]
        ] = {
            m.Ack: self._ack,
            m.AckAndClaim: self._ack_and_claim,
            m.Nack: self._nack,
            m.Extend: self._extend,
            m.Reject: self._reject,
        }

    def _ack(self, message: m.Ack, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        topic, group = self._leases.find(message)
        reply = self._leases.previous_reply(topic, group, message.call, message.seqs)
        if reply is not None:
            return reply
        if group.is_default_group:
            return self._leases.remember_reply(
                group, message.call, self._leases.deletes.ack(message, batch, now_us // 1_000)
            )
        topic, group, found = self._leases.matched(message, now_us)
        # A record that no longer exists counts as acked.
        live = live_of(topic)
        is_left = is_alive(live, found.skipped) | (found.skipped > live.head)
        found = LeaseMatch(found.leased, found.gone, found.skipped[is_left])
        self._registry.log(
            topic, group, group.ack(found, message.node, now_us // 1_000, call=message.call), batch
        )
        self._leases.on_capacity_freed(topic, group)
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
        topic, group, found = self._leases.matched(message, now_us)
        check_claim(topic, message)
        before = self._leases.previous_reply(topic, group, message.call)
        is_cancelled = self._leases.is_cancelled(group, message)
        if is_cancelled:
            before = None  # If the undo arrived before the request, nothing has been acked.
        if isinstance(before, m.ClaimReply) or (before is not None and not group.is_default_group):
            held = self._leases.claims.previous_reply(topic, group, message, now_us)
            return claim_reply(topic, group, None) if held is None else held
        if group.is_default_group:
            is_done = self._leases.fast_path.ack_and_claim(message, event, now_us)
            return None if is_done else m.NotCombinable(topic.name)
        if not message.seqs or len(found.leased) != len(message.seqs) // 8:
            return m.NotCombinable(topic.name)
        acked = group.ack(found, message.node, now_us // 1_000, call=message.call)
        self._registry.log(topic, group, acked, batch)
        self._leases.on_capacity_freed(topic, group)
        if is_cancelled:
            return claim_reply(topic, group, None)
        claim = m.Claim(
            message.topic, message.node, message.max, message.lease_ms, 0, message.call, message.pid,
            message.pid_started, group=message.group,
        )  # fmt: skip
        return self._leases.claims.lease(topic, group, claim, now_us, batch) or claim_reply(
            topic, group, None
        )

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

        Without seqs, the request undoes the claim with the same call number, whether it waits, was answered
        or has not arrived yet. A claim that is cancelled leases nothing from then on.
        """
        before, key = (
            self._leases.previous_reply(topic, group, message.call, message.seqs),
            key_of(topic, group),
        )
        if not message.seqs:
            if message.call:
                self._leases.cancelled_claims.remember_claim(message.call, message.node)
            self._waiting_claims.cancel_claim(key, message.call, claim_reply(topic, group, None))
            if isinstance(before, m.ClaimReply) and before.topic_id == topic.topic_id and before.runs:
                found = group.match(*entries_of(before.runs), message.node, now_us // 1_000)
        elif before is not None and not isinstance(before, m.ClaimReply):
            return before
        change = group.undo(found, message.node, now_us // 1_000, call=message.call)
        self._registry.log(topic, group, change, batch)
        self._waiting_claims.wake(key)
        reply = _nack_reply(topic, group, found)
        if change is not None and message.call and group.is_default_group:
            self._leases.replies.remember_reply(message.call, reply)
        return reply

    def _nack(self, message: m.Nack, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        topic, group, found = self._leases.matched(message, now_us)
        if message.undo:
            return self._undo(topic, group, found, message, batch, now_us)
        before = self._leases.previous_reply(topic, group, message.call, message.seqs)
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
            self._registry.log(topic, group, change, batch)
        self._waiting_claims.wake(key_of(topic, group))
        return self._leases.remember_reply(group, call, _nack_reply(topic, group, found))

    def _extend(
        self, message: m.Extend, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group, found = self._leases.matched(message, now_us)
        if (before := self._leases.previous_reply(topic, group, message.call, message.seqs)) is not None:
            return before
        require_numbers(message)
        lease_ms, now_ms = message.lease_ms or topic.config.lease_ms, now_us // 1_000
        change = group.extend(found, message.node, lease_ms, now_ms, call=message.call)
        self._registry.log(topic, group, change, batch)
        self._waiting_claims.wake(key_of(topic, group))
        reply = m.ExtendReply(
            topic.name, len(found.leased), seqs_to_bytes(skipped_of(found)),
            now_ms + lease_ms + group.wall_clock_offset_ms,
        )  # fmt: skip
        return self._leases.remember_reply(group, message.call, reply)

    def _reject(
        self, message: m.Reject, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group, found = self._leases.matched(message, now_us)
        if (before := self._leases.previous_reply(topic, group, message.call, message.seqs)) is not None:
            return before
        if not self._registry.dead_letters_of(topic, group):
            kind = "group" if message.group else "queue"
            which: dict[str, Any] = {"group": message.group} if message.group else {}
            raise InvalidRequest(
                f"this {kind} has no dead-letter topic, or no scheduler runs: set dead_letter",
                topic=topic.name, **which, field="dead_letter",
            )  # fmt: skip
        reason = reason_of(message.reason)
        change = group.reject(found, message.node, reason, now_us // 1_000, call=message.call)
        self._registry.log(topic, group, change, batch)
        self._leases.exhausted_total += len(found.leased)
        reply = m.RejectReply(topic.name, len(found.leased), seqs_to_bytes(skipped_of(found)))
        return self._leases.remember_reply(group, message.call, reply)


def _nack_reply(topic: ShardTopic, group: ConsumerGroup, found: LeaseMatch) -> m.NackReply:
    return m.NackReply(
        topic.name, len(found.leased), seqs_to_bytes(skipped_of(found)), ready_of(topic, group), group.leased
    )
