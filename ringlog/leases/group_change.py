"""Changes: what a group's shard logs, one of them a call, and what a group's state is made of. Pure.

A change says results, not requests: which positions are leased to whom under which tokens, not how many were
asked for. So a group's state is what its changes say, applied in the order of their numbers, live and in
replay alike; one that is applied already, by its number, is passed over.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

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
    TAKEN = 8
    """A stream group is read by this member from here on; who read it before is told when it commits."""
    COMMITTED = 9
    REMOVED = 10
    REJECTED = 11
    """Given up: leased no more, and never given out again; waits to be moved to the dead letters."""
    AGAIN = 12
    """Done, and to be given out once more: dead letters that come back."""
    UNDONE = 14
    """Leased no more, and ready at once; the delivery does not count. 13 is an operation of queues."""


class Made(msgspec.Struct, array_like=True, frozen=True):
    """What a group is, from its creation on."""

    name: str
    mode: Mode
    tags: str = ""
    """Filter of tags, as its members apply it; empty = every record."""
    pending_max: U64 = 0
    """Most positions given out and not done, in all and of one member; 0 = as many as there may be."""
    member_max: U64 = 0
    deliveries_max: U64 = 0
    """What was given out so often and came back is set aside for the dead letters; 0 = nothing is."""
    dead_letter: str = ""
    """The topic where they go; "" = the group has none."""

    @property
    def key(self) -> str:
        """What the group is called in its topic: groups of one name with other filters are others (F51)."""
        return f"{self.name}@{self.tags}" if self.tags else self.name


class Change(msgspec.Struct, array_like=True, frozen=True):
    """One change of one group."""

    group: U64
    """Its number: never used twice in the topic's life."""
    number: U64
    """Of the change: 1 is the group's creation."""
    op: Op
    at_ms: U64
    cursor: U64
    """After the change: no position from here on was given out."""
    node: str = ""
    """Whose call it was."""
    until_ms: U64 = 0
    """CLAIMED, STOLEN, EXTENDED: the leases hold up to this millisecond, included. RELEASED: ready from it
    on; 0 = at once."""
    rows: list[U64] = []
    """CLAIMED, STOLEN: [first, count, deliveries, token] …; ACKED, RELEASED, EXTENDED, REJECTED, AGAIN,
    UNDONE: [first, count] …; TAKEN: [token]; COMMITTED: [committed]. RELEASED without any: all that `node`
    holds."""
    call: U64 = 0
    """Number of the request, so that it has the same answer when it comes again; 0 = it has none."""
    skipped: list[int] = []
    """What the answer to it names as not held."""
    made: Made | None = None
    """CREATED alone."""
    reason: str = ""
    """REJECTED, RELEASED: why."""


CLAIM_ROW = 4
"""Numbers of a run in `rows` of a claim."""
SPAN_ROW = 2
"""Numbers of a stretch in `rows` of the others."""
