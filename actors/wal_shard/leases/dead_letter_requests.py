"""Requests of the scheduler that moves exhausted records to dead-letter topics. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.leases.lease_requests import entries_in, exhausted_reply
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import GroupNotFound, InvalidRequest

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases


class DeadLetterRequests:
    """Lists exhausted records, and confirms their dead letters."""

    def __init__(self, leases: ShardLeases) -> None:
        self._leases, self._registry = leases, leases.registry
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message | None]
        ] = {m.ListExhausted: self._list_exhausted, m.ConfirmDeadLettered: self._confirm}

    def _list_exhausted(
        self, message: m.ListExhausted, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        """List exhausted records of the next queue or group, at most JOBS_PER_REQUEST_MAX records."""
        for key in self._registry.with_exhausted(message.after):
            found = self._registry.find_by_key(key)
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
            topic = self._registry.queue_of(message)
            self._leases.delivery_attributes.require_undamaged(topic, self._registry.default_group(topic))
            return self._leases.deletes.confirm_dead_lettered(message, batch, now_us // 1_000)
        topic = self._registry.topic_of(message)
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
            self._registry.log(
                topic, group, group.confirm_dead_lettered(unique, tokens[at], now_us // 1_000), batch
            )
        self._leases.on_capacity_freed(topic, group)
        return m.ConfirmReply(topic.name, before - group.exhausted)
