"""Requests about leases: what they say, checked, and the replies to them. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from pyroaring import BitMap64

from ringlog.envelope import messages as m
from ringlog.errors import BatchTooLarge, CorruptData, Internal, InvalidRequest
from ringlog.leases.change import CLAIM_ROW, LeaseChange, Op
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.live_seqs import LiveSeqs
from ringlog.leases.ready_index import DeliveryAttributes
from ringlog.leases.retry_claim import entries_of, still_held
from ringlog.leases.types import I64, U64, LeaseMatch, RedeliveryBackoff
from ringlog.limits import (
    DEAD_LETTER_REASON_BYTES_MAX,
    JOBS_PER_REQUEST_MAX,
    NODE_BYTES_MAX,
)
from ringlog.settings import CALL_SETTINGS
from ringlog.topic.retention import first_live_seq
from ringlog.topic.state import ShardTopic

_NUMBERS: dict[type[m.Message], tuple[str, ...]] = {
    kind: tuple(name for name in CALL_SETTINGS if name in kind.__struct_fields__)
    for kind in (
        m.Claim, m.AckAndClaim, m.Nack, m.Extend, m.Steal,
    )
}  # fmt: skip


def levels_of(topic: ShardTopic) -> int:
    """Levels of priority that its records are handed out by; 0: none."""
    config = topic.config
    return config.priority_levels if config.record_priority and config.priority_levels > 1 else 0


def backoff_of(topic: ShardTopic) -> RedeliveryBackoff:
    """How long its jobs rest by themselves when they come back."""
    config = topic.config
    return RedeliveryBackoff(config.backoff_ms, max(config.backoff_max_ms, config.backoff_ms))


def delivery_attributes_of(found: Any, levels: int) -> DeliveryAttributes:
    """What storage said, as a group understands it: whole milliseconds, never early, and levels there are."""
    at_ms = -(-found.not_before // 1_000)
    if levels:
        of_level = np.minimum(found.priorities, np.uint8(levels - 1))
    else:
        of_level = np.zeros(len(at_ms), np.uint8)
    chosen = (at_ms > 0) | (of_level > 0)
    return DeliveryAttributes(found.seqs.astype(np.int64)[chosen], at_ms[chosen], of_level[chosen])


def damage_error(topic: ShardTopic, damage: CorruptData) -> Internal:
    """What requests about a queue are told whose records cannot be read."""
    return Internal(
        "stored records are damaged, so no job is handed out", topic=topic.name, reason=str(damage)
    )


def live_of(topic: ShardTopic) -> LiveSeqs:
    """Which of its jobs are alive and published."""
    return LiveSeqs(first_live_seq(topic), topic.head_seq, topic.dead, topic.lost)


def live_count(topic: ShardTopic) -> int:
    """How many records a topic has: staged ones are not there yet (S-9)."""
    return max(topic.staged_count - (topic.next_seq - 1 - topic.head_seq), 0)


def ready_of(topic: ShardTopic, group: ConsumerGroup, acked: int = 0) -> int:
    """Records that a claim could be given, as it stood at the last `settle`. `acked`: jobs that are done, and
    counted still."""
    if group.is_default_group:
        return group.counts(live_count(topic) - acked).ready
    return unclaimed_of(topic, group) - len(group.ready_index.delayed) + group.returned


def unclaimed_of(topic: ShardTopic, group: ConsumerGroup) -> int:
    """Records that a named group was never given, or that one in mode stream is not done with."""
    if not group.is_queue_mode:
        return topic.live_within(group.committed + 1, topic.head_seq)
    return topic.live_within(group.lowest_undelivered, topic.head_seq) - group.delivered_ahead_count


def runs_of(change: LeaseChange | None) -> list[tuple[int, int, int, int]]:
    """What a claim was given, as it travels."""
    rows = change.rows if change is not None else []
    return list(zip(*(rows[n::CLAIM_ROW] for n in range(CLAIM_ROW)), strict=True))


def claim_reply(
    topic: ShardTopic, group: ConsumerGroup, change: LeaseChange | None, acked: int = 0
) -> m.ClaimReply:
    """The reply to a claim that was given this; `acked` as in `ready_of`."""
    deadline, runs = change.until_ms if change is not None else 0, runs_of(change)
    lease_ms = deadline - change.at_ms if change is not None and runs else 0
    return m.ClaimReply(
        topic.name, topic.topic_id, topic.epoch, deadline, ready_of(topic, group, acked), runs,
        lease_ms=lease_ms, is_fed=bool(topic.routers),
    )  # fmt: skip


def reply_of(topic: ShardTopic, group: ConsumerGroup, change: LeaseChange, named: int) -> m.Message | None:
    """The reply to the request that made this change and named so many records, for a repeat of it."""
    op, skipped = change.op, seqs_to_bytes(change.skipped)
    done = max(named - len(change.skipped), 0)
    ready, leased = ready_of(topic, group), group.leased
    if op in {Op.CLAIMED, Op.STOLEN}:
        return claim_reply(topic, group, change)
    if op == Op.ACKED:
        return m.AckReply(topic.name, done, skipped, ready, leased)
    if op in {Op.RELEASED, Op.UNDONE}:
        return m.NackReply(topic.name, max(done, change.count), skipped, ready, leased)
    if op == Op.EXTENDED:
        return m.ExtendReply(topic.name, done, skipped, change.until_ms)
    return m.RejectReply(topic.name, done, skipped) if op == Op.REJECTED else None


def revalidate_claim(
    group: ConsumerGroup, answer: m.ClaimReply, node: str, now_ms: int
) -> m.ClaimReply | None:
    """An answer that a claim had before, as far as it is true still: what was given back or stolen meanwhile
    is another one's. None when its time is over."""
    if answer.deadline < now_ms:
        return None
    found = group.match(*entries_of(answer.runs), node, now_ms)
    held = np.union1d(found.leased, found.gone)
    return msgspec.structs.replace(answer, runs=still_held(answer.runs, held))


def exhausted_reply(
    topic: ShardTopic, group: ConsumerGroup, dead_letter: str, **facts: Any
) -> m.ExhaustedReply | None:
    """What is to be moved of one queue or group, at most as many numbers as one request names, why it failed,
    and of a named group the tokens of the leases; None when there is nothing."""
    spent = group.exhausted_runs(JOBS_PER_REQUEST_MAX)
    known = group.failures
    why = {seq: each for a, b, _ in spent for seq in range(a, b) if (each := known.find(seq))}
    if not spent:
        return None
    return m.ExhaustedReply(
        topic.name, topic.topic_id, topic.epoch, dead_letter,
        [(first, stop - first, deliveries) for first, stop, deliveries in spent],
        {seq: each.reason for seq, each in why.items()}, group.config.key, group.number,
        [] if group.is_default_group else [group.token_of(first) for first, _, _ in spent],
        {seq: (each.at_ms, each.nacks) for seq, each in why.items()}, **facts,
    )  # fmt: skip


def was_deleted(topic: ShardTopic, seq: int) -> bool:
    """Did somebody ask for the end of this record? Not what a cap, a TTL or a restart took."""
    if not topic.evict_floor <= seq <= topic.head_seq or any(a <= seq <= b for a, b in topic.lost):
        return False
    return seq < topic.delete_floor or (topic.dead is not None and seq in topic.dead)


def checked_node(message: Any) -> str:
    """Who asks; raises InvalidRequest."""
    node: str = message.node
    if not 1 <= len(node.encode()) <= NODE_BYTES_MAX:
        raise InvalidRequest("a node has a name", field="node", bytes=len(node.encode()), max=NODE_BYTES_MAX)
    return node


def entries_in(data: bytes, given: bytes) -> tuple[I64, U64 | None]:
    """The records that a request names and their tokens, or none; raises BatchTooLarge, InvalidRequest
    (QA-2)."""
    count, rest = divmod(len(data), 8)
    if rest or (given and len(given) != len(data)):
        raise InvalidRequest(
            "numbers and tokens are 8 bytes each, and as many", seqs=len(data), tokens=len(given)
        )
    if count > JOBS_PER_REQUEST_MAX:
        raise BatchTooLarge("too many jobs at once", seqs=count, max=JOBS_PER_REQUEST_MAX)
    seqs = np.frombuffer(data, dtype="<i8")
    return seqs, np.frombuffer(given, dtype="<u8") if given else None


def reason_of(text: str) -> str:
    """The first line of a reason, as much as is kept (L27)."""
    line = text.partition("\n")[0].strip().encode(errors="replace")
    if len(line) <= DEAD_LETTER_REASON_BYTES_MAX:
        return line.decode()
    return line[: DEAD_LETTER_REASON_BYTES_MAX - 3].decode(errors="ignore") + "..."


def require_numbers(message: Any) -> None:
    """Raise InvalidRequest, naming the field, for a number of a request that is out of its range."""
    for name in _NUMBERS[type(message)]:
        if value := getattr(message, name):
            CALL_SETTINGS[name].check(value)


def skipped_of(matched: LeaseMatch) -> I64:
    """Of a nack or an extend: jobs that were deleted are not held either."""
    return np.concatenate((matched.skipped, matched.gone))


def seqs_to_bitmap(seqs: I64) -> BitMap64:
    """The same as a set."""
    return BitMap64(seqs.tolist())


def seqs_to_bytes(seqs: I64 | list[int]) -> bytes:
    """As they travel: 8 bytes each."""
    return np.ascontiguousarray(seqs, dtype="<i8").tobytes()
