"""Routers: messages between clients, schedulers and shards."""

from __future__ import annotations

from typing import Any

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Millis, Name, Place, Seq


class RouterCreate(Message, frozen=True):
    """Client or gateway to scheduler 0, client to gateway: create or change a router. Reply: RouterInfo.

    The router forwards records that are published to `source` from now on to `dest`. If the router exists,
    the request changes its other fields and keeps its cursor."""

    router: Name
    source: Name
    dest: Name
    filter: Any = None
    """A tag, a prefix that ends in `*`, or ["tag", "Eq", value], ["tag", "Glob", "prefix*"]."""
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    allow_cycle: bool = False
    guarantee: Name = "at_least_once"


class RouterInfo(Message, frozen=True):
    """Reply to RouterCreate and RouterGet, and a row of RouterListReply: a router and its state."""

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
    """Position of the source up to which every record was forwarded or skipped."""
    lag: Seq = 0
    """Number of positions of the source after `cursor`."""
    forwarded_total: Seq = 0


class RouterGet(Message, frozen=True):
    """Client or gateway to scheduler 0, client to gateway: query a router. Reply: RouterInfo.

    With `settle_ms` the reply waits, at most for this time, until the router has processed its source up to
    `until`. `until` 0 = the head of the source at the time of the request."""

    router: Name
    settle_ms: Millis = 0
    until: Seq = 0


class RoutesSettle(Message, frozen=True):
    """Client to scheduler 0 or gateway, scheduler to scheduler: let the routers to a topic catch up.

    Reply: RoutesSettled.

    The routers to the topic, and the routers before them, forward what their sources contain now. The reply
    follows when they have done so, when one of them cannot at present, or after `within_ms`."""

    topic: Name
    topic_id: U64
    within_ms: Millis
    hops: U32 = 0
    """Number of routers between this topic and the topic that the client reads."""
    is_own: bool = False
    """Sent by another scheduler: the receiver waits only for its own routers."""


class RoutesSettled(Message, frozen=True):
    """Reply to RoutesSettle: a reader finds the copies now.

    Exception: a router could not forward at present, or the time was over.
    """

    topic: Name


class RouterList(Message, frozen=True):
    """Client or gateway to scheduler 0, client to gateway: list routers. Reply: RouterListReply.

    By name, above `after`, at most `page_size`. `source` or `dest` restrict the list.
    """

    prefix: Name = ""
    source: Name = ""
    dest: Name = ""
    after: Name = ""
    page_size: U32 = 100


class RouterListReply(Message, frozen=True):
    """Reply to RouterList: one page; `more` = further names exist."""

    routers: list[RouterInfo]
    more: bool = False


class RouterDelete(Message, frozen=True):
    """Client or gateway to scheduler 0, client to gateway: delete a router. Reply: RouterDeleted.

    Copies stay.
    """

    router: Name


class RouterDeleted(Message, frozen=True):
    """Reply to RouterDelete: no copy follows. `deleted` is false if there was no such router."""

    router: Name
    deleted: bool


class RouterFacts(Message, frozen=True):
    """A router as the shard of its destination stores it.

    Reply to RouterPut; part of ShardRoutersReply and NotifyRouterChange.
    """

    router: U64
    """Number of the router, never reused."""
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
    """Current durability class of the destination."""


class RouterPut(Message, frozen=True):
    """Scheduler 0 to the shard of the destination: create the router, or change the one with this number.

    Reply: the RouterFacts in force."""

    facts: RouterFacts


class RouterDrop(Message, frozen=True):
    """Scheduler 0 to the shard of the destination: delete this router. Reply: RouterDropped."""

    dest_id: U64
    router: U64


class RouterDropped(Message, frozen=True):
    """Reply to RouterDrop; `dropped` is false if there was no such router."""

    router: U64
    dropped: bool


class NotifyRouterChange(Message, frozen=True):
    """Scheduler 0 to the scheduler of the source: a router was created, changed or deleted.

    Reply: RouterChangeNotified.
    """

    facts: RouterFacts
    is_gone: bool = False


class RouterChangeNotified(Message, frozen=True):
    """Reply to NotifyRouterChange."""

    router: U64


class ListShardRouters(Message, frozen=True):
    """Scheduler to shard: list the routers whose destination is on this shard. Reply: ShardRoutersReply.

    By number, above `after`.
    """

    after: U64 = 0
    page_size: U32 = 1_000


class ShardRoutersReply(Message, frozen=True):
    """Reply to ListShardRouters: one page of one shard; `more` = further routers exist."""

    routers: list[RouterFacts]
    more: bool = False


class RouteRow(Message, frozen=True):
    """Part of Route: one router moves from `start` to `stop` of its source."""

    router: U64
    dest_id: U64
    start: Seq
    stop: Seq
    frame: Place = -1
    """Index of the attached frame with its copies; -1 = there is nothing to copy."""
    lost: Seq = 0
    """Number of positions of the source that were removed before they were forwarded. Such a row has no
    copies."""


class Route(Message, frozen=True):
    """Scheduler to the shard of the destinations: append these copies. Reply: Routed.

    The attachment has `frames` frames without a topic. The shard stores each once for all rows that name it.
    The copies passed `hops` routers, including this one. The shard applies a row as a whole, and only if its
    router is at `start`."""

    rows: list[RouteRow]
    frames: U32
    hops: U32 = 1


class RoutedRow(Message, frozen=True):
    """Part of Routed: result of one row.

    `fate`: 0 done, 1 no such router, 2 the router is elsewhere, 3 the destination is full, 4 the destination
    accepts nothing at present. With 3 there is space for `records` records and `bytes` bytes."""

    fate: U32
    cursor: Seq = 0
    durability: Place = -1
    """Current durability class of the destination; -1 = there is no destination."""
    records: Seq = 0
    bytes: Seq = 0


class Routed(Message, frozen=True):
    """Reply to Route, one row for each, after the copies are as durable as their destinations require."""

    rows: list[RoutedRow]
