"""Changes: what a shard logs of a queue whose leases are durable, one of them a call (QL-16). Pure.

A change says results, not requests: which jobs were leased to whom under which tokens. An ack is none: it is
a deletion, whose frame says all there is to say. Two things happen without a change, because they follow from
what is there: a lease or a delay ends when its time is over, and what leaves the topic is no job any more.

In the log it lies as changes of consumer groups do, as one of group 0, with fields of its own behind theirs.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

U64 = Annotated[int, Meta(ge=0)]


class JobsOp(IntEnum):
    """What a change does; numbers as of groups where they do the same."""

    CLAIMED = 2
    RELEASED = 4
    EXTENDED = 5
    REJECTED = 11
    """Leased no more, and on their way to the dead letters."""
    MOVED = 12
    """So many jobs in all were moved to the dead letters."""
    WRITTEN = 13
    """A part of what was known when leases became durable."""
    UNDONE = 14
    """Leased no more, and ready at once; the delivery does not count."""


class JobsChange(msgspec.Struct, array_like=True, frozen=True):
    """One change of one queue."""

    group: U64
    """0: of no group, but of the topic's own jobs."""
    number: U64
    """Of the change, from 1 on since leases became durable."""
    op: JobsOp
    at_ms: U64
    cursor: U64 = 0
    """Not used."""
    node: str = ""
    """CLAIMED: who holds them."""
    until_ms: U64 = 0
    """CLAIMED, EXTENDED: held up to this millisecond, included. RELEASED: ready from it on; 0 = at once."""
    rows: list[U64] = []
    """CLAIMED: [first, count, deliveries, token] …; RELEASED, EXTENDED, REJECTED, UNDONE:
    [first, count] …; MOVED: [jobs]."""
    call: U64 = 0
    """Number of the request, so that it has the same answer when it comes again; 0 = it has none."""
    skipped: list[int] = []
    """What the answer to it names as not held."""
    made: None = None
    """Not used."""
    life: tuple[U64, U64] = (0, 0)
    """CLAIMED: the process that claimed, and when it began (lives.py); zeros: nobody whose end would show."""
    reason: str = ""
    """REJECTED, RELEASED: why."""
    aside: list[U64] = []
    """CLAIMED: [first, count] … of jobs that had all their deliveries, and were set aside instead."""
    saved: bytes | None = None
    """WRITTEN: as in a snapshot, see saved.py."""


class OfGroup(msgspec.Struct, array_like=True, frozen=True):
    """The beginning that changes of queues and of groups share."""

    group: U64


CLAIM_ROW = 4
"""Numbers of a run in `rows` of a claim."""
SPAN_ROW = 2
"""Numbers of a stretch in `rows` of the others."""
