"""Topics: create, resolve, configure and delete them."""

from __future__ import annotations

from typing import Any

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Name, Place, Seq


class TopicPut(Message, frozen=True):
    """Client, gateway, scheduler or supervisor to home shard, client to gateway: create or configure a topic.

    Reply: TopicInfo. `config` has the topic's settings by name.
    """

    topic: Name
    config: dict[str, Any] = {}
    mode: Name = "upsert"
    """`upsert` replaces the configuration or creates the topic. `create` keeps an existing topic as it is.
    `merge` changes only the named fields; it fails with topic_not_found if there is no such topic. `update`
    is `merge` for an existing topic and `create` otherwise."""
    allow_inert: bool = False
    """Store settings that have no effect on topics of this type, instead of refusing them."""


class TopicInfo(Message, frozen=True):
    """Reply to TopicPut and TopicResolve: identity, location and configuration of a topic."""

    topic: Name
    topic_id: U64
    epoch: U32
    shard: Place
    slot: Place
    """Index of its slot in the shard's topic table on the board."""
    created: bool
    config: dict[str, Any]


class TopicResolve(Message, frozen=True):
    """Client, gateway or scheduler to the home shard, client to gateway: resolve a topic.

    Reply: TopicInfo.

    The request never creates a topic.
    """

    topic: Name


class TopicState(Message, frozen=True):
    """Client or scheduler to shard, client to gateway: query the state of a topic. Reply: TopicStateReply.

    The request never creates a topic. `touch` updates last_read_ts.
    """

    topic: Name
    touch: bool = True


class TopicStateReply(Message, frozen=True):
    """Reply to TopicState, and a row of TopicListReply. Times in milliseconds."""

    topic: Name
    topic_id: U64
    epoch: U32
    shard: U32
    type: str
    head_seq: Seq
    earliest_seq: U64
    count: Seq
    bytes: Seq
    evict_floor: U64
    last_write_ts: Seq | None
    last_read_ts: Seq | None
    config: dict[str, Any]
    held_by: Name = ""
    """Consumer group for which the topic keeps records beyond its caps or TTL (retain_until_acked)."""
    is_fed: bool = False
    """Routers lead to the topic; see Located."""
    keys: Seq = 0
    """Number of remembered idempotency keys and dedup ids."""
    keys_forgotten: Seq = 0
    """Number of keys that were dropped before the end of their window, for lack of space, since the shard
    started."""
    missing_part: str = ""
    """Missing or unreadable file for which reads and writes are refused (TopicHalted); "" = none."""


class TopicList(Message, frozen=True):
    """Client to every shard, client to gateway: list topics of the receiver. Reply: TopicListReply.

    By name in byte order, above `after`, at most `page_size`. A shard lists only its own topics, a gateway
    all.
    """

    prefix: Name = ""
    after: Name = ""
    page_size: U32 = 100


class TopicListReply(Message, frozen=True):
    """Reply to TopicList: one page; `more` = further names exist."""

    topics: list[TopicStateReply]
    more: bool


class TopicDelete(Message, frozen=True):
    """Client to shard or gateway: delete a topic and all its records. Reply: TopicDeleted."""

    topic: Name
    if_empty: bool = False


class TopicDeleted(Message, frozen=True):
    """Reply to TopicDelete. `deleted` is false if there was no such topic.

    `routers` led to it and are deleted with it.
    """

    topic: Name
    deleted: bool
    routers: list[str] = []
