"""Routers, between clients, schedulers and shards."""

from __future__ import annotations

from typing import Any

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Millis, Name, Place, Seq


class RouterCreate(Message, frozen=True):
    """Forward what is published to `source` from here on to `dest` (RT-1, RT-2). The same router again
    changes its other fields and keeps its place."""

    router: Name
    source: Name
    dest: Name
    filter: Any = None
    """A tag, a prefix ending in `*`, or ["tag", "Eq", value], ["tag", "Glob", "prefix*"]."""
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    allow_cycle: bool = False
    guarantee: Name = "at_least_once"


class RouterInfo(Message, frozen=True):
    """A router as it stands. Reply to RouterCreate and RouterGet."""

    router: Name
    source: Name
    dest: Name
    created: bool = False
    filter: Any = None
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    allow_cycle: bool = False
    guarantee: Name = "at_least_once"
    cursor: Seq = 0
    """Position of the source up to which everything was forwarded, or passed over."""
    lag: Seq = 0
    """Positions of the source behind it."""
    forwarded_total: Seq = 0


class RouterGet(Message, frozen=True):
    """How is this router? With `settle_ms` the answer waits so long at most until it has dealt with its
    source up to `until`, or, with 0, up to what is its head when it is asked (RT-20)."""

    router: Name
    settle_ms: Millis = 0
    until: Seq = 0


class RoutesSettle(Message, frozen=True):
    """Have the routers that lead to a topic, and those before them, forward what their sources hold now
    (RT-20). Answered when they have, when one cannot at present, or after `within_ms`."""

    topic: Name
    topic_id: U64
    within_ms: Millis
    hops: U32 = 0
    """So many routers are between this topic and the one that is read."""
    is_own: bool = False
    """A scheduler asks another one, which answers for its own routers alone."""


class RoutesSettled(Message, frozen=True):
    """Reply: who looks now finds their copies."""

    topic: Name


class RouterList(Message, frozen=True):
    """Routers by name behind `after`, at most `page_size`; of one source, or one destination, if named."""

    prefix: Name = ""
    source: Name = ""
    dest: Name = ""
    after: Name = ""
    page_size: U32 = 100


class RouterListReply(Message, frozen=True):
    """One page; `more` = further names exist."""

    routers: list[RouterInfo]
    more: bool = False


class RouterDelete(Message, frozen=True):
    """Forward no more. What was copied stays."""

    router: Name


class RouterDeleted(Message, frozen=True):
    """No copy appears behind this. `deleted` is false when there was no such router."""

    router: Name
    deleted: bool


class RouterFacts(Message, frozen=True):
    """A router as its destination's shard keeps it."""

    router: U64
    """Its number, never used twice."""
    name: Name
    source: Name
    source_id: U64
    source_epoch: U32
    dest: Name
    dest_id: U64
    flags: U32
    filter: str
    cursor: Seq
    forwarded: Seq = 0
    durability: U32 = 0
    """Class of the destination, at present."""


class RouterPut(Message, frozen=True):
    """Scheduler -> shard of the destination: make the router, or change the one of this number. Answered with
    the RouterFacts in force."""

    facts: RouterFacts


class RouterDrop(Message, frozen=True):
    """Scheduler -> shard of the destination: this router is no more."""

    dest_id: U64
    router: U64


class RouterDropped(Message, frozen=True):
    """Reply; `dropped` is false when there was none."""

    router: U64
    dropped: bool


class RouterTell(Message, frozen=True):
    """Scheduler 0 -> the scheduler of the source: a router was made or changed, or is no more."""

    facts: RouterFacts
    is_gone: bool = False


class RouterTold(Message, frozen=True):
    """Reply."""

    router: U64


class RoutersAsk(Message, frozen=True):
    """Scheduler -> shard: which routers lead to topics of yours? By number behind `after`."""

    after: U64 = 0
    page_size: U32 = 1_000


class RoutersReply(Message, frozen=True):
    """One page of one shard; `more` = further ones exist."""

    routers: list[RouterFacts]
    more: bool = False


class RouteRow(Message, frozen=True):
    """One router's part in a pass: it is at `start` of its source and will be at `stop`."""

    router: U64
    dest_id: U64
    start: Seq
    stop: Seq
    frame: Place = -1
    """Which of the attached frames holds its copies; -1 = there is nothing to copy."""
    lost: Seq = 0
    """So many positions of the source went before they were forwarded; then there are no copies (RT-23)."""


class Route(Message, frozen=True):
    """Scheduler -> shard of the destinations: append these copies. The attached part holds `frames` appends
    of no topic, each stored once for all rows that name it; their records came through `hops` routers, this
    one counted. A row applies if its router is at `start`, and then wholly."""

    rows: list[RouteRow]
    frames: U32
    hops: U32 = 1


class RoutedRow(Message, frozen=True):
    """What became of a row: 0 done, 1 there is no such router, 2 it is elsewhere, 3 its destination is
    full, 4 its destination takes nothing at present. With 3 there is room for so many records and bytes."""

    fate: U32
    cursor: Seq = 0
    durability: Place = -1
    """Class of the destination, at present; -1 = there is none."""
    records: Seq = 0
    bytes: Seq = 0


class Routed(Message, frozen=True):
    """Reply to Route, row by row, when the copies are as durable as their destinations ask."""

    rows: list[RoutedRow]
