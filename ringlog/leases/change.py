"""Changes: what a call did to the leases of a queue or consumer group, and what its shard logs of it. Pure.

A change says results, not requests: which numbers are leased to whom under which tokens, not how many were
asked for. The state of a group is what its changes say, applied in the order of their numbers, live and in
replay alike; one that is applied already, by its number, is passed over. Two things happen without a change,
because they follow from what is there: a lease or a delay ends when its time is over, and what leaves the
topic is not leased any more. So an ack of a queue is none: it is a deletion.
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
    """What a group gives out; fixed when it is made."""

    QUEUE = 1
    """Records one by one, leased to its members until each is acked."""
    STREAM = 2
    """All records in their order, to one member at a time, which says how far it is."""


class Op(IntEnum):
    """What a change does."""

    CREATED = 1
    CLAIMED = 2
    ACKED = 3
    RELEASED = 4
    EXTENDED = 5
    STOLEN = 6
    """Leased to another member, whoever held it before; applied like CLAIMED."""
    SEEK = 7
    TAKEN_OVER = 8
    """A stream group is read by this member from here on; its reader before is fenced when it commits."""
    COMMITTED = 9
    REMOVED = 10
    REJECTED = 11
    """Leased no more, and never handed out again; waits to be moved to the dead letters."""
    REDELIVERED = 12
    """Of a group: done, and to be handed out once more: dead letters that come back."""
    SNAPSHOT = 13
    """Of a queue: a part of what was known when its leases became durable."""
    UNDONE = 14
    """Leased no more, and ready at once; the delivery does not count."""
    DEAD_LETTERED = 15
    """Of a queue: so many jobs in all were moved to the dead letters."""


class GroupConfig(msgspec.Struct, array_like=True, frozen=True):
    """What a group is, from its creation on."""

    name: str
    """Empty: the queue's own group, whose ack deletes."""
    mode: Mode
    tags: str = ""
    """Filter of tags, as its members apply it; empty = every record."""
    pending_max: U64 = 0
    """Most positions given out and not done, in all and of one member; 0 = as many as there may be."""
    member_max: U64 = 0
    deliveries_max: U64 = 0
    """What was given out so often and came back is exhausted; 0 = nothing is."""
    dead_letter: str = ""
    """The topic where exhausted records go; "" = the group has none."""
    backoff_ms: U64 = 0
    """What comes back rests so long, doubled with each delivery up to the other one; 0 = not at all."""
    backoff_max_ms: U64 = 0

    @property
    def key(self) -> str:
        """What the group is called in its topic: groups of one name with other filters are others (F51)."""
        return f"{self.name}@{self.tags}" if self.tags else self.name


DEFAULT_GROUP = GroupConfig("", Mode.QUEUE)
"""The group of a queue's workers."""


class LeaseChange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One change of one group."""

    group: U64
    """Its number: never used twice in the topic's life. 0: the queue's own group."""
    number: U64
    """Of the change, ascending: 1 is a group's creation."""
    op: Op
    at_ms: U64
    cursor: U64 = 0
    """After the change: no position from here on was given out. Of a queue's own group it is 0."""
    node: str = ""
    """Whose call it was."""
    until_ms: U64 = 0
    """CLAIMED, STOLEN, EXTENDED: the leases hold up to this millisecond, included. RELEASED: ready from it
    on; 0 = at once."""
    rows: list[U64] = []
    """CLAIMED, STOLEN: [first, count, deliveries, token] …; ACKED, RELEASED, EXTENDED, REJECTED, REDELIVERED,
    UNDONE: [first, count] …; TAKEN: [token]; COMMITTED: [committed]; MOVED: [jobs]. RELEASED without any:
    all that `node` holds."""
    call: U64 = 0
    """Number of the request, so that it has the same answer when it comes again; 0 = it has none."""
    skipped: list[int] = []
    """What the answer to it names as not held."""
    config: GroupConfig | None = None
    """CREATED alone."""
    reason: str = ""
    """REJECTED, RELEASED: why."""
    process_id: tuple[U64, U64] = NO_PROCESS
    """CLAIMED, STOLEN: the process that claimed, and when it began (lives.py); zeros: it is not watched."""
    exhausted: list[U64] = []
    """CLAIMED: [first, count] … of numbers that had all their deliveries, and were exhausted instead."""
    run_columns: bytes | None = None
    """WRITTEN: see run_columns.py."""

    @property
    def count(self) -> int:
        """Numbers in all rows."""
        return sum(self.rows[1 :: CLAIM_ROW if self.op in _LEASES else SPAN_ROW])


CLAIM_ROW = 4
"""Numbers of a run in `rows` of a claim."""
SPAN_ROW = 2
"""Numbers of a span in `rows` of the others."""
_LEASES = frozenset({Op.CLAIMED, Op.STOLEN})
_WIDTHS = {Op.CLAIMED: CLAIM_ROW, Op.STOLEN: CLAIM_ROW} | dict.fromkeys(
    (Op.ACKED, Op.RELEASED, Op.EXTENDED, Op.REJECTED, Op.REDELIVERED, Op.UNDONE), SPAN_ROW
)


def require_valid_change(change: LeaseChange) -> None:
    """Raise CorruptData for a change that no version can have written."""
    width, rows, aside = _WIDTHS.get(change.op, 1), change.rows, change.exhausted
    is_valid_routed_frame = not len(rows) % width and not len(aside) % SPAN_ROW and change.until_ms < 1 << 62
    if width > 1:
        spans = [*zip(rows[::width], rows[1::width], strict=False)]
        spans += zip(aside[::SPAN_ROW], aside[1::SPAN_ROW], strict=False)
        is_valid_routed_frame &= all(
            0 < count <= JOBS_PER_REQUEST_MAX and first < 1 << 62 for first, count in spans
        )
    if width == CLAIM_ROW:
        is_valid_routed_frame &= all(deliveries < 1 << 31 for deliveries in rows[2::CLAIM_ROW])
        is_valid_routed_frame &= all(token < 1 << 63 for token in rows[3::CLAIM_ROW])
    if not is_valid_routed_frame:
        raise CorruptData("a change of leases makes no sense", number=change.number, op=int(change.op))


class _LegacyQueueChange(msgspec.Struct, array_like=True, frozen=True):
    """A change of a queue as it was written before queues and groups had the same."""

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
_decode_jobs = msgspec.msgpack.Decoder(_LegacyQueueChange).decode


def decode_change(data: Any) -> LeaseChange:
    """The change of these bytes; raises msgspec's errors for what no version wrote."""
    try:
        change = _decode(data)
    except msgspec.ValidationError as e:
        try:
            change = LeaseChange(**structs.asdict(_decode_jobs(data)))
        except msgspec.ValidationError:
            raise e from None
    if not change.group and change.op == Op.REDELIVERED:
        return structs.replace(change, op=Op.DEAD_LETTERED)  # As queues numbered it.
    return change
