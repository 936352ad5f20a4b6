"""Topics: making, finding, changing and removing them."""

from __future__ import annotations

from typing import Any

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Name, Place, Seq


class TopicPut(Message, frozen=True):
    """Create or configure a topic (T-1..T-7). `config` holds fields of semantics section 5 by name."""

    topic: Name
    config: dict[str, Any] = {}
    mode: Name = "upsert"
    """`upsert` = PUT; `create` refuses nothing but leaves an existing topic as it is; `merge` changes
    only the named fields of an existing topic and is topic_not_found for an absent one; `update` is `merge`
    for an existing topic and `create` for an absent one."""


class TopicInfo(Message, frozen=True):
    """A topic as it stands: identity, place and configuration. Also the reply to TopicPut."""

    topic: Name
    topic_id: U64
    epoch: U32
    shard: Place
    slot: Place
    """Index of its slot in the shard's topic table on the board."""
    created: bool
    config: dict[str, Any]


class TopicResolve(Message, frozen=True):
    """Who is this topic? Never creates."""

    topic: Name


class TopicState(Message, frozen=True):
    """State of a topic (TS-1); never creates. `touch` refreshes last_read_ts."""

    topic: Name
    touch: bool = True


class TopicStateReply(Message, frozen=True):
    """Fields of semantics section 6, milliseconds for stamps."""

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
    """The consumer group for which records stay that caps or TTL would have taken (retain_until_acked)."""
    is_fed: bool = False
    """Routers lead to it; see Located."""
    keys: Seq = 0
    """Idempotency keys and dedup ids remembered."""
    keys_forgotten: Seq = 0
    """Those that had to make room before their window was over, since the shard's last start."""
    missing_part: str = ""
    """The missing or unreadable file for which reads and writes are refused (TopicHalted); "" = none is."""


class TopicList(Message, frozen=True):
    """Names after `after`, in byte order, at most `page_size` (T-10..T-14). One shard's share."""

    prefix: Name = ""
    after: Name = ""
    page_size: U32 = 100


class TopicListReply(Message, frozen=True):
    """One page of one shard; `more` = further names exist."""

    topics: list[TopicStateReply]
    more: bool


class TopicDelete(Message, frozen=True):
    """Remove a topic and all it holds (T-15..T-18)."""

    topic: Name
    if_empty: bool = False


class TopicDeleted(Message, frozen=True):
    """`deleted` is false when there was no such topic. `routers` led to it, and went with it."""

    topic: Name
    deleted: bool
    routers: list[str] = []
