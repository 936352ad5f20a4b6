"""Operations on topics, for both clients: create, configure, inspect, list, delete."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ringlog.client.connection.session import Session
from ringlog.client.leases.dead_letters import require_no_dead_letter_cycle
from ringlog.client.read.pages import TagFilter, tag_filter
from ringlog.client.requests.topic_settings import TopicSettings
from ringlog.client.requests.validation import (
    check_bool,
    check_int_range,
    check_seq,
    check_str,
    check_topic_settings,
)
from ringlog.envelope.messages import (
    RecordsDelete,
    RecordsDeleted,
    TopicDelete,
    TopicDeleted,
    TopicInfo,
    TopicList,
    TopicListReply,
    TopicPut,
    TopicState,
    TopicStateReply,
)
from ringlog.errors import InvalidRequest, ShardsChanged, TopicIncompatible, TopicNotFound, UsageError
from ringlog.limits import LIST_PAGE_MAX
from ringlog.link.futures import Steps
from ringlog.settings import LOG, QUEUE, describe_differences, differences, resolve_durable

ExistOk = bool | Literal["update"]
"""What `create` does with an existing topic: refuse it, compare its settings, or configure it."""
EXIST_OK = (False, True, "update")


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """Identity and settings of a topic. `created` is true if this call created it."""

    topic: str
    epoch: int
    created: bool
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TopicSummary:
    """State of a topic. Times are microseconds since the epoch, or None."""

    topic: str
    type: str
    epoch: int
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    evict_floor: int
    last_write_ts: int | None
    last_read_ts: int | None
    config: dict[str, Any]
    held_by: str = ""
    """Consumer group for which the topic retains records beyond caps or TTL (`retain_until_acked`)."""
    keys: int = 0
    """Number of idempotency keys and dedup ids that the engine stores."""
    keys_forgotten: int = 0
    """Number of keys and ids dropped before the end of their window (`idempotency_max`), since the shard's
    start."""
    missing_part: str = ""
    """Missing or unreadable file because of which reads and writes raise `TopicHalted`; "" = the topic is
    served."""

    @property
    def next_seq(self) -> int:
        """Seq of the next record."""
        return self.head_seq + 1


@dataclass(frozen=True, slots=True)
class TopicRemoval:
    """Result of deleting a topic. True in a boolean context if the topic existed."""

    topic: str
    deleted: bool
    routers_removed: tuple[str, ...] = ()
    """Names of the routers from and to the topic, ascending. They were deleted with it."""

    def __bool__(self) -> bool:
        return self.deleted


@dataclass(frozen=True, slots=True)
class Deletion:
    """Result of deleting records: the number of deleted live records, and the state of the topic
    afterwards."""

    topic: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


def create(session: Session, topic: str, exist_ok: ExistOk, config: TopicSettings) -> Steps[TopicDescription]:
    """Create a topic. An existing topic is refused, compared or configured, according to `exist_ok`."""
    topic = check_str(topic, "topic")
    if exist_ok not in EXIST_OK:
        raise UsageError('exist_ok must be False, True or "update"', found=repr(exist_ok)[:80])
    named = check_topic_settings(config)
    yield session.wait_connected()
    # An update also contains the type, so that a topic of another type is refused before it is changed.
    is_update = exist_ok == "update"
    put = TopicPut(topic, {"type": LOG} | named if is_update else named, "update" if is_update else "create")
    if put.config.get("type") == QUEUE:
        yield from _check_dead_letter_cycle(session, topic, put.config)
    info = yield from session.topics.ask_name_owner(topic, put)
    if not info.created and not exist_ok:
        raise TopicIncompatible(
            "the topic exists: pass exist_ok=True to accept it", topic=topic, epoch=info.epoch,
            hint="exist_ok=True",
        )  # fmt: skip
    if not info.created:
        _require_same(topic, {"type": LOG} | resolve_durable(named), info.config)
    return TopicDescription(topic, info.epoch, info.created, info.config)


def _require_same(topic: str, requested: dict[str, Any], existing: dict[str, Any]) -> None:
    """Raise TopicIncompatible if settings of an existing topic differ. The error names each difference."""
    found = differences(requested, existing)
    if found:
        hint = "" if "type" in found else '; exist_ok="update" changes them'
        raise TopicIncompatible(
            f"topic {topic} exists with other settings: {describe_differences(found)}{hint}",
            topic=topic,
            differences=found,
        )


def _check_dead_letter_cycle(session: Session, topic: str, config: dict[str, Any]) -> Steps[None]:
    """Raise InvalidRequest if dead letters could return to the topic."""
    target = config.get("dead_letter")
    if isinstance(target, str) and target:
        yield from require_no_dead_letter_cycle(session, topic, check_str(target, "dead_letter"))


def configure(session: Session, topic: str, config: TopicSettings) -> Steps[TopicDescription]:
    """Change the named settings of an existing topic."""
    topic = check_str(topic, "topic")
    named = check_topic_settings(config)

    def change(_: TopicInfo) -> TopicPut:
        return TopicPut(topic, named, "merge")

    yield from _check_dead_letter_cycle(session, topic, named)
    info: TopicInfo = session.topics.cache((yield from session.topics.ask_resolved_topic(topic, change)))
    return TopicDescription(topic, info.epoch, False, info.config)


def replace(
    session: Session, topic: str, config: dict[str, Any], *, allow_inert: bool = False
) -> Steps[TopicDescription]:
    """Create a topic, or replace all its settings. Settings that are not named get their defaults.

    `config` has settings as in messages. `allow_inert` stores those that have no effect on the topic's type.
    Raises TopicIncompatible if the topic has another type.
    """
    topic = check_str(topic, "topic")
    yield session.wait_connected()
    if config.get("type") == QUEUE:
        yield from _check_dead_letter_cycle(session, topic, config)
    info = yield from session.topics.ask_name_owner(topic, TopicPut(topic, config, "upsert", allow_inert))
    return TopicDescription(topic, info.epoch, info.created, info.config)


def state(session: Session, topic: str, touch: bool) -> Steps[TopicSummary]:
    """Return the counters, positions and settings of a topic."""
    topic, touch = check_str(topic, "topic"), check_bool(touch, "touch")
    reply = yield from session.topics.ask_resolved_topic(topic, lambda _: TopicState(topic, touch))
    if reply.is_fed:
        yield session.catch_up(topic, reply.topic_id)
        reply = yield from session.topics.ask_resolved_topic(topic, lambda _: TopicState(topic, touch))
    return summary_of(reply)


def delete(session: Session, topic: str, if_empty: bool) -> Steps[TopicRemoval]:
    """Delete a topic, and the routers from and to it."""
    topic, if_empty = check_str(topic, "topic"), check_bool(if_empty, "if_empty")
    try:
        info: TopicInfo = yield session.topics.resolve(topic)
        # The topic's shard knows only the routers to the topic, not the routers from it.
        outgoing: list[str] = yield session.schedulers.routers_from(topic)
        reply: TopicDeleted = yield session.topics.ask_topic(info, TopicDelete(topic, if_empty))
    except TopicNotFound:
        return TopicRemoval(topic, False)
    finally:
        session.topics.forget(topic)
    removed = sorted({*reply.routers, *outgoing}) if reply.deleted else []
    return TopicRemoval(topic, reply.deleted, tuple(removed))


def delete_records(session: Session, topic: str, before_seq: int, match: TagFilter | None) -> Steps[Deletion]:
    """Delete records permanently: below `before_seq`, by tag, or both."""
    topic = check_str(topic, "topic")
    before_seq = check_seq(before_seq, "before_seq")
    if match is not None:
        tag_filter(match)
    elif not before_seq:
        raise InvalidRequest("delete_records needs before_seq, match or both, got neither", topic=topic)
    wanted = match if match is None or isinstance(match, str) else list(match)

    # Resolve again and name the epoch: if the request is resent, it must not delete records of a re-created
    # topic.
    session.topics.forget(topic)
    info: TopicInfo = yield session.topics.resolve(topic)
    request = RecordsDelete(topic, before_seq, wanted, epoch=info.epoch)
    reply: RecordsDeleted = yield session.topics.ask_topic(info, request)
    return Deletion(reply.topic, reply.deleted, reply.earliest_seq, reply.head_seq, reply.count, reply.bytes)


def summary_of(reply: TopicStateReply) -> TopicSummary:
    """Convert a shard's reply to the units of this library."""
    return TopicSummary(
        reply.topic, reply.type, reply.epoch, reply.head_seq, reply.earliest_seq, reply.count,
        reply.bytes, reply.evict_floor, _microseconds(reply.last_write_ts),
        _microseconds(reply.last_read_ts), reply.config, reply.held_by, reply.keys, reply.keys_forgotten,
        reply.missing_part,
    )  # fmt: skip


def _microseconds(milliseconds: int | None) -> int | None:
    return None if milliseconds is None else milliseconds * 1_000


def list_topic_names(session: Session, prefixes: Iterable[str]) -> Steps[list[str]]:
    """Return the names of all topics that begin with one of the prefixes."""
    found: list[str] = []
    for prefix in prefixes:
        merge = TopicMerge(prefix, LIST_PAGE_MAX)
        while page := (yield from merge.next_page(session)):
            found += [summary.topic for summary in page]
    return found


def list_topics(
    session: Session, prefixes: Iterable[str], after: str, count: int
) -> Steps[list[TopicSummary]]:
    """Return the first `count` topics above the name `after` that begin with one of the prefixes.

    The prefixes ascend, and none begins with another one: then the topics are in byte order of their names.
    """
    found: list[TopicSummary] = []
    for prefix in prefixes:
        merge = TopicMerge(prefix, min(max(count - len(found), 1), LIST_PAGE_MAX), after)
        while len(found) < count and (page := (yield from merge.next_page(session))):
            found += page
        if len(found) >= count:
            break
    return found[:count]


class TopicMerge:
    """Topics of all shards, merged in byte order of their names. Each name occurs once."""

    def __init__(self, prefix: str, page_size: int, after: str = "") -> None:
        self._prefix = check_str(prefix, "prefix")
        self._page_size = check_int_range(page_size, "page_size", 1, LIST_PAGE_MAX)
        self._pages: list[list[TopicStateReply]] = []
        self._after: list[str | None] = []
        self._last = after
        """Name of the last topic that was returned; at first, the name above which the list begins."""

    def next_page(self, session: Session) -> Steps[list[TopicSummary]]:
        """Return the next topics; an empty list after the last one."""
        yield session.wait_connected()
        found: list[TopicSummary] = []
        while len(found) < self._page_size:
            if len(self._pages) != session.links.shards:
                self._begin_at(self._last, session.links.shards)
            for shard, after in enumerate(self._after):
                if not self._pages[shard] and after is not None:
                    request = TopicList(self._prefix, after, self._page_size)
                    try:
                        reply: TopicListReply = yield session.ask(shard, request)
                    except ShardsChanged:
                        # The number of shards changed. Query all shards again, after the last listed name.
                        self._begin_at(self._last, session.links.shards)
                        return found + (yield from self.next_page(session))
                    self._pages[shard] = list(reply.topics)
                    self._after[shard] = reply.topics[-1].topic if reply.more and reply.topics else None
            heads = [(page[0].topic.encode(), shard) for shard, page in enumerate(self._pages) if page]
            if not heads:
                break
            first_reply = self._pages[min(heads)[1]].pop(0)
            if first_reply.topic != self._last:
                found.append(summary_of(first_reply))
            self._last = first_reply.topic
        return found

    def _begin_at(self, last: str, shards: int) -> None:
        """Query every shard for the topics after this name."""
        self._pages = [[] for _ in range(shards)]
        self._after = [last] * len(self._pages)
