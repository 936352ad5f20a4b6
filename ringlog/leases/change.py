"""Changes: the effect of one call on the leases of a queue or consumer group, as the shard logs it. Pure.

A change states results, not requests: the leased seqs, their holder and their tokens, not the number that was
requested. The state of a group is the sequence of its changes, in operation and in replay. A change with a
number that is applied already has no effect.

Two events have no change, because they follow from the state: a lease or a delay ends at its deadline, and a
record that leaves the topic is not leased any more. An ack of a queue is therefore no change: it is a
deletion.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from ringlog.errors import CorruptData
from ringlog.leases.holders import NO_PROCESS, ProcessId
from ringlog.limits import JOBS_PER_REQUEST_MAX

U64 = Annotated[int, Meta(ge=0)]


class Mode(IntEnum):
    """How a group delivers records; fixed at its creation."""

    QUEUE = 1
    """Records one by one, leased to members until each is acked."""
    STREAM = 2
    """All records in order, to one member at a time, which commits its position."""


class Op(IntEnum):
    """The operation of a change."""

    CREATED = 1
    CLAIMED = 2
    ACKED = 3
    RELEASED = 4
    EXTENDED = 5
    STOLEN = 6
    """Leased to another member, whichever member held it; applied like CLAIMED."""
    SEEK = 7
    TAKEN_OVER = 8
    """This member reads the stream group from now on. A commit of the previous reader is refused."""
    COMMITTED = 9
    REMOVED = 10
    REJECTED = 11
    """No longer leased and never delivered again; waits for its move to the dead-letter topic."""
    REDELIVERED = 12
    """For a group: deliver an acked record again, because its dead letter is redriven."""
    SNAPSHOT = 13
    """For a queue: a part of its state at the time at which its leases became durable."""
    UNDONE = 14
    """No longer leased, and ready at once. The delivery does not count."""
    DEAD_LETTERED = 15
    """For a queue: total number of jobs that were moved to the dead-letter topic."""


class GroupConfig(msgspec.Struct, array_like=True, frozen=True):
    """Settings of a group, fixed at its creation."""

    name: str
    """Empty: the queue's own group, whose ack deletes."""
    mode: Mode
    tags: str = ""
    """Tag filter, which the members apply; empty = every record."""
    pending_max: U64 = 0
    """Highest number of pending positions, of the group and of one member; 0 = the largest possible."""
    member_max: U64 = 0
    deliveries_max: U64 = 0
    """A record with this number of deliveries that returns is exhausted; 0 = no bound."""
    dead_letter: str = ""
    """Topic for exhausted records; "" = the group has none."""
    backoff_ms: U64 = 0
    """Delay of a returned record. It doubles with each delivery up to `backoff_max_ms`. 0 = no delay."""
    backoff_max_ms: U64 = 0

    @property
    def key(self) -> str:
        """Name of the group within its topic.

        Groups with the same name and different filters are different groups.
        """
        return f"{self.name}@{self.tags}" if self.tags else self.name


DEFAULT_GROUP = GroupConfig("", Mode.QUEUE)
"""The group of a queue's workers."""


class LeaseChange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One change of one group."""

    group: U64
    """Number of the group, never reused within the life of the topic. 0: the queue's own group."""
    number: U64
    """Number of the change, ascending: 1 is the creation of the group."""
    op: Op
    at_ms: U64
    cursor: U64 = 0
    """After the change: no position from here on was delivered. 0 for a queue's own group."""
    node: str = ""
    """The node that made the call."""
    until_ms: U64 = 0
    """CLAIMED, STOLEN, EXTENDED: end of the leases in milliseconds, inclusive. RELEASED: time at which the
    records are ready; 0 = at once."""
    rows: list[U64] = []
    """CLAIMED, STOLEN: [first, count, deliveries, token] …; ACKED, RELEASED, EXTENDED, REJECTED, REDELIVERED,
    UNDONE: [first, count] …; TAKEN_OVER: [token]; COMMITTED: [committed]; DEAD_LETTERED: [jobs]. RELEASED
    without rows: all records that `node` holds."""
    call: U64 = 0
    """Number of the request, for the reply to a repeat; 0 = it has none."""
    skipped: list[int] = []
    """Seqs that the reply names as not held."""
    config: GroupConfig | None = None
    """Only with CREATED."""
    reason: str = ""
    """REJECTED, RELEASED: reason of the failure."""
    process_id: tuple[U64, U64] = NO_PROCESS
    """CLAIMED, STOLEN: the process that claimed and its start time (process_id); zeros: it is not
    observed."""
    exhausted: list[U64] = []
    """CLAIMED: [first, count] … of records that the claim exhausted instead of delivering them."""
    run_columns: bytes | None = None
    """SNAPSHOT: see run_columns.py."""

    @property
    def count(self) -> int:
        """Number of seqs in all rows."""
        return sum(self.rows[1 :: CLAIM_ROW if self.op in _LEASES else SPAN_ROW])


CLAIM_ROW = 4
"""Numbers of one run in `rows` of a claim."""
SPAN_ROW = 2
"""Numbers of one span in `rows` of other changes."""
_LEASES = frozenset({Op.CLAIMED, Op.STOLEN})
_WIDTHS = {Op.CLAIMED: CLAIM_ROW, Op.STOLEN: CLAIM_ROW} | dict.fromkeys(
    (Op.ACKED, Op.RELEASED, Op.EXTENDED, Op.REJECTED, Op.REDELIVERED, Op.UNDONE), SPAN_ROW
)


def require_valid_change(change: LeaseChange) -> None:
    """Raise CorruptData for a change that no version can have written."""
    width, rows, exhausted = _WIDTHS.get(change.op, 1), change.rows, change.exhausted
    is_valid = not len(rows) % width and not len(exhausted) % SPAN_ROW and change.until_ms < 1 << 62
    if width > 1:
        spans = [*zip(rows[::width], rows[1::width], strict=False)]
        spans += zip(exhausted[::SPAN_ROW], exhausted[1::SPAN_ROW], strict=False)
        is_valid &= all(0 < count <= JOBS_PER_REQUEST_MAX and first < 1 << 62 for first, count in spans)
    if width == CLAIM_ROW:
        is_valid &= all(deliveries < 1 << 31 for deliveries in rows[2::CLAIM_ROW])
        is_valid &= all(token < 1 << 63 for token in rows[3::CLAIM_ROW])
    if not is_valid:
        raise CorruptData(
            "logged lease change has impossible values", number=change.number, op=int(change.op)
        )


class _LegacyQueueChange(msgspec.Struct, array_like=True, frozen=True):
    """A change of a queue in the format from before queues and groups shared one."""

    group: U64
    number: U64
    op: Op
    at_ms: U64
    cursor: U64
    node: str
    until_ms: U64
    rows: list[U64]
    call: U64
    skipped: list[int]
    config: None
    process_id: ProcessId
    reason: str = ""
    exhausted: list[U64] = []
    run_columns: bytes | None = None


_decode = msgspec.msgpack.Decoder(LeaseChange).decode
_decode_legacy = msgspec.msgpack.Decoder(_LegacyQueueChange).decode


def decode_change(data: Any) -> LeaseChange:
    """Decode a change. Raises msgspec's errors for bytes that no version wrote."""
    try:
        change = _decode(data)
    except msgspec.ValidationError as e:
        try:
            change = LeaseChange(**structs.asdict(_decode_legacy(data)))
        except msgspec.ValidationError:
            raise e from None
    if not change.group and change.op == Op.REDELIVERED:
        return structs.replace(change, op=Op.DEAD_LETTERED)  # The old number for queues.
    return change
