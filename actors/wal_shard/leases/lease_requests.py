"""Validation of lease requests, and their replies. Pure."""

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
from ringlog.limits import DEAD_LETTER_REASON_BYTES_MAX, JOBS_PER_REQUEST_MAX, NODE_BYTES_MAX
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
    """Return the number of priority levels of a topic.

    0 means that records are delivered without priorities.
    """
    config = topic.config
    return config.priority_levels if config.record_priority and config.priority_levels > 1 else 0


def backoff_of(topic: ShardTopic) -> RedeliveryBackoff:
    """Return the redelivery backoff that the topic's config sets for its jobs."""
    config = topic.config
    return RedeliveryBackoff(config.backoff_ms, max(config.backoff_max_ms, config.backoff_ms))


def delivery_attributes_of(found: Any, levels: int) -> DeliveryAttributes:
    """Convert delivery attributes from storage to the form that a group uses.

    Times are rounded up to whole milliseconds, so that no record is ready early. Priorities are limited to
    existing levels.
    """
    # Clients of another make can store times before the epoch, which are long past. The lowest one has no
    # negation.
    at_ms = -(-np.maximum(found.not_before, 0) // 1_000)
    if levels:
        of_level = np.minimum(found.priorities, np.uint8(levels - 1))
    else:
        of_level = np.zeros(len(at_ms), np.uint8)
    chosen = (at_ms > 0) | (of_level > 0)
    return DeliveryAttributes(found.seqs.astype(np.int64)[chosen], at_ms[chosen], of_level[chosen])


def damage_error(topic: ShardTopic, damage: CorruptData) -> Internal:
    """Return the error for requests about a queue whose records cannot be read."""
    return Internal(
        "stored records are damaged, so no job is delivered: run ringlog verify", topic=topic.name,
        reason=str(damage),
    )  # fmt: skip


def live_of(topic: ShardTopic) -> LiveSeqs:
    """Return the live and published seqs of a topic."""
    return LiveSeqs(first_live_seq(topic), topic.head_seq, topic.dead, topic.lost)


def live_count(topic: ShardTopic) -> int:
    """Return the number of published live records of a topic. Staged records do not count."""
    return max(topic.staged_count - (topic.next_seq - 1 - topic.head_seq), 0)


def ready_of(topic: ShardTopic, group: ConsumerGroup, acked: int = 0) -> int:
    """Return the number of records that a claim could lease, without expirations that are not applied yet.

    `acked` is the number of acked jobs whose deletion is not staged yet.
    """
    if group.is_default_group:
        return group.counts(live_count(topic) - acked).ready
    return unclaimed_of(topic, group) - len(group.ready_index.delayed) + group.returned


def unclaimed_of(topic: ShardTopic, group: ConsumerGroup) -> int:
    """Return the number of records that a named group has not delivered yet.

    For a group in stream mode, return the number of records above its committed position.
    """
    if not group.is_queue_mode:
        return topic.live_within(group.committed + 1, topic.head_seq)
    return topic.live_within(group.lowest_undelivered, topic.head_seq) - group.delivered_ahead_count


def runs_of(change: LeaseChange | None) -> list[tuple[int, int, int, int]]:
    """Return the leased runs of a claim in the form of ClaimReply.runs. Empty for None."""
    rows = change.rows if change is not None else []
    return list(zip(*(rows[n::CLAIM_ROW] for n in range(CLAIM_ROW)), strict=True))


def claim_reply(
    topic: ShardTopic, group: ConsumerGroup, change: LeaseChange | None, acked: int = 0
) -> m.ClaimReply:
    """Build the reply to a claim from its change.

    None means that no job was leased. `acked` is as in `ready_of`.
    """
    runs, deadline, lease_ms = runs_of(change), 0, 0
    if change is not None:
        deadline = change.until_ms + group.wall_clock_offset_ms
        lease_ms = change.until_ms - change.at_ms if runs else 0
    return m.ClaimReply(
        topic.name, topic.topic_id, topic.epoch, deadline, ready_of(topic, group, acked), runs,
        lease_ms=lease_ms, is_fed=bool(topic.routers),
    )  # fmt: skip


def reply_of(topic: ShardTopic, group: ConsumerGroup, change: LeaseChange, named: int) -> m.Message | None:
    """Rebuild the reply to the request that caused this change, for a retry.

    Return None for other kinds of change. `named` is the number of records in the request.
    """
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
        return m.ExtendReply(topic.name, done, skipped, change.until_ms + group.wall_clock_offset_ms)
    return m.RejectReply(topic.name, done, skipped) if op == Op.REJECTED else None


def revalidate_claim(
    group: ConsumerGroup, answer: m.ClaimReply, node: str, now_ms: int
) -> m.ClaimReply | None:
    """Reduce an earlier claim reply to the jobs that the worker still holds.

    Return None if the lease has expired. Jobs that were returned or stolen meanwhile may belong to another
    worker.
    """
    if not answer.runs:
        return None
    found = group.match(*entries_of(answer.runs), node, now_ms)
    held = np.union1d(found.leased, found.gone)
    # The wall clock may have been set since the reply, so the deadline decides only where the table does not.
    if not len(held) and answer.deadline < now_ms + group.wall_clock_offset_ms:
        return None
    return msgspec.structs.replace(answer, runs=still_held(answer.runs, held))


def exhausted_reply(
    topic: ShardTopic, group: ConsumerGroup, dead_letter: str, **facts: Any
) -> m.ExhaustedReply | None:
    """Build the list of exhausted records of one queue or group that are to be moved. None if there are none.

    The reply contains at most JOBS_PER_REQUEST_MAX seqs, with their failures. For a named group it also
    contains the lease tokens.
    """
    exhausted = group.exhausted_runs(JOBS_PER_REQUEST_MAX)
    known = group.failures
    why = {seq: each for a, b, _ in exhausted for seq in range(a, b) if (each := known.find(seq))}
    if not exhausted:
        return None
    return m.ExhaustedReply(
        topic.name, topic.topic_id, topic.epoch, dead_letter,
        [(first, stop - first, deliveries) for first, stop, deliveries in exhausted],
        {seq: each.reason for seq, each in why.items()}, group.config.key, group.number,
        [] if group.is_default_group else [group.token_of(first) for first, _, _ in exhausted],
        {seq: (each.at_ms, each.nacks) for seq, each in why.items()}, **facts,
    )  # fmt: skip


def was_deleted(topic: ShardTopic, seq: int) -> bool:
    """Return True if this record was deleted on request, and not by a cap, a TTL or a restart."""
    if not topic.evict_floor <= seq <= topic.head_seq or any(a <= seq <= b for a, b in topic.lost):
        return False
    return seq < topic.delete_floor or (topic.dead is not None and seq in topic.dead)


def checked_node(message: Any) -> str:
    """Return the node name of a request. Raise InvalidRequest if it is empty or too long."""
    node: str = message.node
    if not 1 <= len(node.encode()) <= NODE_BYTES_MAX:
        raise InvalidRequest(
            f"node must be 1 to {NODE_BYTES_MAX} bytes of UTF-8, got {len(node.encode())}", field="node",
            bytes=len(node.encode()), max=NODE_BYTES_MAX,
        )  # fmt: skip
    return node


def entries_in(data: bytes, given: bytes) -> tuple[I64, U64 | None]:
    """Decode the seqs of a request and their lease tokens. Tokens are None if `given` is empty.

    Raise InvalidRequest if the lengths do not match, and BatchTooLarge above JOBS_PER_REQUEST_MAX seqs.
    """
    count, rest = divmod(len(data), 8)
    if rest or (given and len(given) != len(data)):
        raise InvalidRequest(
            "seqs and tokens must be multiples of 8 bytes and of equal length", seqs=len(data),
            tokens=len(given),
        )  # fmt: skip
    if count > JOBS_PER_REQUEST_MAX:
        raise BatchTooLarge(
            f"a request must have at most {JOBS_PER_REQUEST_MAX} seqs, got {count}", seqs=count,
            max=JOBS_PER_REQUEST_MAX,
        )  # fmt: skip
    seqs = np.frombuffer(data, dtype="<i8")
    return seqs, np.frombuffer(given, dtype="<u8") if given else None


def reason_of(text: str) -> str:
    """Return the first line of a failure reason, cut to DEAD_LETTER_REASON_BYTES_MAX bytes of UTF-8."""
    line = text.partition("\n")[0].strip().encode(errors="replace")
    if len(line) <= DEAD_LETTER_REASON_BYTES_MAX:
        return line.decode()
    return line[: DEAD_LETTER_REASON_BYTES_MAX - 3].decode(errors="ignore") + "..."


def require_numbers(message: Any) -> None:
    """Raise InvalidRequest if a number of a request is out of its range. The error names the field."""
    for name in _NUMBERS[type(message)]:
        if value := getattr(message, name):
            CALL_SETTINGS[name].check(value)


def check_claim(topic: ShardTopic, message: m.Claim | m.AckAndClaim | m.Steal) -> None:
    """Raise InvalidRequest if the node or a number of a claim is invalid."""
    checked_node(message)
    require_numbers(message)
    if min(getattr(message, "max", 0), message.pid, message.pid_started) < 0:
        raise InvalidRequest("max, pid and pid_started must be >= 0", topic=topic.name)


def skipped_of(matched: LeaseMatch) -> I64:
    """Return the skipped jobs of a nack, extend or reject.

    Deleted jobs count as skipped, since they are not leased.
    """
    return np.concatenate((matched.skipped, matched.gone))


def seqs_to_bitmap(seqs: I64) -> BitMap64:
    """Convert seqs to a bitmap."""
    return BitMap64(seqs.tolist())


def seqs_to_bytes(seqs: I64 | list[int]) -> bytes:
    """Encode seqs for a message: 8 bytes each, little-endian."""
    return np.ascontiguousarray(seqs, dtype="<i8").tobytes()
