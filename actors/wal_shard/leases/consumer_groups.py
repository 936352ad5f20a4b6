"""Administration of the consumer groups of one shard's topics, and redelivery of dead letters. Pure.

The lease requests of groups and queues share their handlers (claim_requests.py, lease_updates.py). Every
change of a group is one frame of the log. The reply follows when the frame is as durable as the topic's class
requires (CG3). Groups and their leases therefore survive a restart of the shard. A group belongs to its
topic: it is stored in the topic's snapshot row and moves with the topic to another shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.leases.lease_registry import find_group
from ringlog.actors.wal_shard.leases.lease_requests import checked_node, entries_in, live_of, seqs_to_bytes
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import (
    BatchTooLarge,
    GroupIncompatible,
    GroupNotFound,
    InvalidRequest,
    NotReady,
    StaleEpoch,
    Throttled,
)
from ringlog.leases.change import GroupConfig, LeaseChange, Mode
from ringlog.leases.group import ConsumerGroup, create_group, created
from ringlog.leases.live_seqs import is_alive
from ringlog.limits import (
    GROUP_DEAD_LETTERS_PER_MOVE,
    GROUP_NAME_BYTES_MAX,
    GROUPS_PER_TOPIC_MAX,
    TAG_BYTES_MAX,
)
from ringlog.names import is_topic_name
from ringlog.settings import GROUP_SETTINGS, check_settings
from ringlog.tags import parse_stored_match
from ringlog.topic.state import ShardTopic

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases

REDELIVER_RETRY_MS = 50
"""Retry time in milliseconds for a redrive that meets a record whose dead letter is not confirmed yet."""


class ConsumerGroups:
    """Handles requests about the named groups of one shard."""

    def __init__(self, leases: ShardLeases) -> None:
        self._leases, self._registry = leases, leases.registry
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message | None]
        ] = {
            m.GroupOpen: self._open,
            m.Redeliver: self._redeliver,
            m.GroupLeave: self._leave,
            m.GroupList: self._list,
            m.GroupSeek: self._seek,
            m.GroupTakeOver: self._take,
            m.GroupCommit: self._commit,
            m.GroupDelete: self._delete,
        }

    def _log(
        self, topic: ShardTopic, group: ConsumerGroup, change: LeaseChange | None, batch: CommitBatch
    ) -> None:
        self._registry.log(topic, group, change, batch)

    def _open(
        self, message: m.GroupOpen, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, config, now_ms = self._registry.topic_of(message), _group_config(message), now_us // 1_000
        group = find_group(topic, config.key)
        is_new = group is None
        if group is None:
            if not message.make:
                raise GroupNotFound("no such group", topic=topic.name, group=config.key)
            if len(topic.groups) >= GROUPS_PER_TOPIC_MAX:
                raise Throttled(
                    f"a topic has at most {GROUPS_PER_TOPIC_MAX} consumer groups: delete one first",
                    limit="groups", max=GROUPS_PER_TOPIC_MAX, retry_after_ms=1_000,
                )  # fmt: skip
            change = created(
                self._registry.tokens.allocate(1), config, _clamped(topic, message.start), now_ms
            )
            group = create_group(change, self._registry.tokens)
            self._registry.add(topic, group)
            self._log(topic, group, change, batch)
        elif group.config.mode != config.mode:
            raise GroupIncompatible(
                "the consumer group exists with another mode: use another name", topic=topic.name,
                group=config.key, mode=group.config.mode.name.lower(),
            )  # fmt: skip
        if message.node:
            checked_node(message)
            group.holders.require_room(message.node, now_ms)
            group.holders.touch_member(message.node, now_ms)
        return info_of(topic, group, created=is_new)

    def _leave(
        self, message: m.GroupLeave, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group = self._registry.find_named(message)
        group.apply_expirations(now_us // 1_000)
        released = group.holders.held_by(message.node)
        self._log(topic, group, group.leave(message.node, now_us // 1_000), batch)
        self._leases.waiting_claims.wake(group.number)
        return m.GroupLeft(topic.name, released)

    # -- redelivery of dead letters -----------------------------------------------------------------

    def _redeliver(
        self, message: m.Redeliver, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        """Redeliver the records of dead letters, as far as the records still exist."""
        topic, group = self._registry.find_named(message, Mode.QUEUE)
        if topic.topic_id != message.topic_id:
            raise StaleEpoch("the topic was deleted and created again", topic=topic.name)
        seqs, calls = entries_in(message.seqs, message.calls)
        if calls is None or len(calls) > GROUP_DEAD_LETTERS_PER_MOVE:
            raise BatchTooLarge(
                f"dead letters with calls must be 1 to {GROUP_DEAD_LETTERS_PER_MOVE}, got {len(seqs)}",
                seqs=len(seqs), max=GROUP_DEAD_LETTERS_PER_MOVE,
            )  # fmt: skip
        repeated, gone = 0, []
        is_there = is_alive(live_of(topic), seqs)
        rows = list(zip(seqs.tolist(), calls.tolist(), is_there.tolist(), strict=True))
        for seq, call, _ in rows:
            if group.is_exhausted(seq) and group.recent_calls.find(call) is None:
                # The dead letter exists, but the scheduler has not confirmed it yet. The confirmation will
                # mark the record as done for the group. If the redrive counted it as redelivered now, it
                # would be lost.
                raise NotReady(
                    "the record is being moved to the dead-letter topic, retry later", topic=topic.name,
                    seq=seq, retry_after_ms=REDELIVER_RETRY_MS,
                )  # fmt: skip
        for seq, call, is_here in rows:
            if group.recent_calls.find(call) is not None:
                repeated += 1
            elif not is_here:
                gone.append(seq)
            else:
                self._log(topic, group, group.redeliver(seq, now_us // 1_000, call=call), batch)
        self._leases.waiting_claims.wake(group.number)
        return m.Redelivered(topic.name, repeated, seqs_to_bytes(gone))

    # -- queries --------------------------------------------------------------------------------------

    def _list(
        self, message: m.GroupList, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic = self._registry.topic_of(message)
        groups = sorted(topic.groups.values(), key=lambda each: each.config.key)
        return m.GroupListReply(topic.name, [info_of(topic, group) for group in groups])

    # -- positions ------------------------------------------------------------------------------------

    def _seek(
        self, message: m.GroupSeek, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group = self._registry.find_named(message)
        self._log(topic, group, group.seek(_clamped(topic, message.cursor), now_us // 1_000), batch)
        self._leases.on_capacity_freed(topic, group)
        return info_of(topic, group)

    def _take(
        self, message: m.GroupTakeOver, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group = self._registry.find_named(message, Mode.STREAM)
        checked_node(message)
        change = group.recent_calls.find(message.call)
        if change is None:
            change = group.take_over_stream(
                message.node, self._registry.tokens.allocate(1), now_us // 1_000, call=message.call
            )
            self._log(topic, group, change, batch)
        return m.GroupTakenOver(topic.name, change.rows[0], group.committed, topic.epoch)

    def _commit(
        self, message: m.GroupCommit, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic, group = self._registry.find_named(message, Mode.STREAM)
        if not -1 < message.committed < message.cursor <= topic.head_seq + 1:
            raise InvalidRequest(
                "committed must be >= 0 and < cursor, and cursor must be <= head_seq + 1",
                committed=message.committed, cursor=message.cursor, head_seq=topic.head_seq,
            )  # fmt: skip
        is_holder = message.token != 0 and message.token == group.reader_token
        if is_holder:
            group.holders.touch_member(group.reader, now_us // 1_000)
            self._log(topic, group, group.commit(message.committed, message.cursor, now_us // 1_000), batch)
        return m.GroupCommitted(topic.name, group.committed, group.cursor, is_holder)

    def _delete(
        self, message: m.GroupDelete, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic = self._registry.topic_of(message)
        group = find_group(topic, message.group)
        if group is not None:
            self._log(topic, group, group.remove(now_us // 1_000), batch)
            self._registry.remove(topic, group)
            self._leases.forget_group(topic, group)
            self._leases.on_capacity_freed(topic, group)
        return m.GroupDeleted(topic.name, message.group, group is not None)


def info_of(topic: ShardTopic, group: ConsumerGroup, *, created: bool = False) -> m.GroupInfo:
    """Return the description of a group for replies."""
    config = group.config
    return m.GroupInfo(
        topic.name, config.key, config.name, int(config.mode), config.tags, created, group.lowest_undelivered,
        group.ack_floor, group.pending, config.deliveries_max, config.dead_letter, config.pending_max,
        config.member_max,
        config.backoff_ms, config.backoff_max_ms,
    )  # fmt: skip


def _group_config(message: m.GroupOpen) -> GroupConfig:
    """Validate the settings of a group. Raise InvalidRequest."""
    if not is_topic_name(message.group):
        raise InvalidRequest(
            f"group must be a valid name of 1 to {GROUP_NAME_BYTES_MAX} bytes, got {message.group[:64]!r}",
            field="group", found=message.group[:64], max=GROUP_NAME_BYTES_MAX, rule="as a topic's name",
        )  # fmt: skip
    if message.mode not in list(Mode):
        raise InvalidRequest("unknown mode", field="mode", found=message.mode)
    if message.tags:
        parse_stored_match(message.tags, "tags")
    if len(message.tags.encode()) > TAG_BYTES_MAX + 1:
        raise InvalidRequest(
            f"tags must be at most {TAG_BYTES_MAX + 1} bytes, got {len(message.tags.encode())}", field="tags",
            found=message.tags[:64],
        )  # fmt: skip
    check_settings(
        GROUP_SETTINGS,
        {
            "max_in_flight": message.pending_max, "member_max_in_flight": message.member_max,
            "max_deliveries": message.max_deliveries, "backoff_ms": message.backoff_ms,
            "backoff_max_ms": message.backoff_max_ms,
        },
        "group",
    )  # fmt: skip
    of_leases = {
        "max_in_flight": message.pending_max, "member_max_in_flight": message.member_max,
        "backoff_ms": message.backoff_ms,
    }  # fmt: skip
    for field, value in of_leases.items():
        if value and message.mode != Mode.QUEUE:
            raise InvalidRequest(f"{field} is allowed only for groups in mode queue", field=field)
    return GroupConfig(
        message.group, Mode(message.mode), message.tags, message.pending_max, message.member_max,
        *_dead_letters(message), message.backoff_ms, message.backoff_max_ms,
    )  # fmt: skip


def _dead_letters(message: m.GroupOpen) -> tuple[int, str]:
    """Validate and return (maximum deliveries, name of the dead-letter topic) of a group."""
    most, target = message.max_deliveries, message.dead_letter
    if target and (not is_topic_name(target) or target == message.topic or message.mode != Mode.QUEUE):
        raise InvalidRequest(
            f"invalid dead_letter for this group: {target[:64]!r}", field="dead_letter", found=target[:64],
            rule="a valid topic name other than the group's own topic; only for groups in mode queue",
        )  # fmt: skip
    if most and not target:
        raise InvalidRequest("max_deliveries requires dead_letter", field="dead_letter")
    return most, target


def _clamped(topic: ShardTopic, cursor: int) -> int:
    """Return `cursor`, limited to the range from the earliest seq to one after the head."""
    return min(max(cursor, topic.earliest_seq), topic.head_seq + 1)
