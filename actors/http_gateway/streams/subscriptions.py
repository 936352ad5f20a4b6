"""The subscriptions of one connection. Those that are behind are read from storage, turn by turn."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from ringlog.actors.http_gateway.api.error_replies import status_and_code
from ringlog.actors.http_gateway.records.diffs import tombstone_fields
from ringlog.actors.http_gateway.streams.fan_out import FanOutPage, Projection, Subscriber, record_body
from ringlog.board.layout import WatermarkKind
from ringlog.board.processes import shard_slot
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Cursor, Filters, Page
from ringlog.client.read.paging import read_page
from ringlog.errors import CorruptData, Refused, RinglogError, TopicNotFound
from ringlog.limits import DURABLE_POLL_MS

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway
    from ringlog.envelope.messages import TopicInfo
    from ringlog.link.futures import Steps

_RETRY_S = 0.2
_encode = msgspec.json.Encoder().encode
Event = tuple[str, bytes]
"""Kind and JSON text of one frame."""


class Subscriptions(ABC):
    """Subscribers of one connection. Implements fan_out.Outlet; a subclass frames and sends the events."""

    def __init__(self, gateway: Gateway, *, is_strong: bool = False) -> None:
        self.gateway = gateway
        self.subs: dict[str, Subscriber] = {}
        self.wake: asyncio.Event = asyncio.Event()
        """Set when `turn` has something to do, and by the connection."""
        self._behind: deque[Subscriber] = deque()
        self._sources: dict[str, LocalSource] = {}
        self._is_strong = is_strong

    # -- for subclasses -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether `emit` may be called now."""

    @abstractmethod
    async def room(self) -> None:
        """Wait until `has_room`. Raises StreamEnded."""

    @abstractmethod
    def emit(self, sub: Subscriber, events: list[Event], delivery: FanOutPage | None) -> None:
        """Send events of one topic, whose subscriber stands behind them. Raises StreamEnded."""

    # -- membership -----------------------------------------------------------------------------------

    def begin(self, sub: Subscriber) -> None:
        """Deliver to a subscriber, first what it has not read."""
        sub.outlet = self
        sub.is_new = sub.was_behind = True
        self.subs[sub.topic] = sub
        self.fell_behind(sub)

    def end(self, sub: Subscriber) -> None:
        """Deliver no more to a subscriber."""
        sub.leave()
        sub.outlet = None
        if self.subs.get(sub.topic) is sub:
            del self.subs[sub.topic]
        self._release(sub.topic)

    def end_all(self) -> None:
        """Deliver no more to any subscriber."""
        for sub in tuple(self.subs.values()):
            self.end(sub)
        self._behind.clear()

    @property
    def has_backlog(self) -> bool:
        """Whether `turn` has something to do."""
        return bool(self._behind)

    # -- fan_out.Outlet -------------------------------------------------------------------------------

    def deliver(self, sub: Subscriber, delivery: FanOutPage) -> None:
        """Send what the feed read."""
        page = delivery.page
        body = delivery.body(sub.projection)
        sub.seq, sub.head_seq = page.cursor.seq, page.head_seq
        self._emit_page(sub, [], body, page, delivery)

    def fell_behind(self, sub: Subscriber) -> None:
        """Read for this subscriber from storage."""
        if sub not in self._behind:
            self._behind.append(sub)
        self.wake.set()

    def topic_ended(self, sub: Subscriber, reason: str) -> None:
        """Send `topic-deleted`, and drop the subscription."""
        body = {"topic": sub.topic, "head_seq": sub.head_seq, "reason": reason}
        self.end(sub)
        self.emit(sub, [("topic-deleted", _encode(body))], None)
        self.wake.set()

    # -- reading from storage -------------------------------------------------------------------------

    async def turn(self) -> None:
        """Read and send one page for the subscriber whose turn it is. Raises StreamEnded."""
        sub = self._behind.popleft()
        if self.subs.get(sub.topic) is not sub:
            return
        await self.room()
        if self.subs.get(sub.topic) is not sub or self._is_live_again(sub):
            return
        try:
            await self._read(sub)
        except TopicNotFound:
            if self.subs.get(sub.topic) is sub:
                self.topic_ended(sub, "deleted")
        except RinglogError as e:
            if self.subs.get(sub.topic) is not sub:
                return
            if isinstance(e, CorruptData | Refused) and not e.retriable:
                self.end(sub)
                self.emit(sub, [("error", error_json(e, sub.topic))], None)
            else:
                self.gateway.loop.call_later(_RETRY_S, self._again, sub)

    def _is_live_again(self, sub: Subscriber) -> bool:
        """Send what the feed read a moment ago. Returns whether the subscriber needs no read from storage."""
        feed = self.gateway.watches.fan_out.feed(sub.topic)
        if feed is None or self._is_strong or sub.is_new:
            return False
        while self.has_room:
            delivery = feed.recent(sub)
            if delivery is None:
                return sub.seq == feed.seq and feed.add(sub)
            self.deliver(sub, delivery)
        self.fell_behind(sub)
        return True

    def _again(self, sub: Subscriber) -> None:
        if self.subs.get(sub.topic) is sub:
            self.fell_behind(sub)

    async def _read(self, sub: Subscriber) -> None:
        gateway, topic, projection = self.gateway, sub.topic, sub.projection
        source = self._sources.get(topic)
        if source is None:
            source = self._sources[topic] = LocalSource(
                gateway.client.connection, topic, is_settling=sub.is_new
            )
        steps: Steps[Page] = read_page(
            source, topic, Cursor(sub.epoch, sub.seq), limit=sub.limit, max_bytes=sub.max_bytes,
            filters=projection.filters,
        )  # fmt: skip
        page = await gateway.client._shell.run_reading(steps)
        info: TopicInfo = await gateway.client.run(_resolved(gateway, topic))
        if self._is_strong:
            await self._durable(sub, info)
        if self.subs.get(topic) is not sub:
            return
        events: list[Event] = []
        after, tombstone = sub.seq, page.tombstone
        if tombstone is not None:
            fields = {"topic": topic, **tombstone_fields(tombstone)}
            if tombstone.reason == "recreated":
                if not sub.is_new:
                    self.topic_ended(sub, "recreated")
                    return
                after = 0
            else:
                after = tombstone.gap_to
                if sub.is_new:
                    fields |= {"reason": "from_seq_too_old", "cause": tombstone.reason}
            sub.seq, sub.epoch = after, page.epoch
            self.emit(sub, [("tombstone", _encode(fields))], None)
        plain = Projection(
            projection.include_data, projection.include_tags, projection.include_meta, Filters()
        )
        body = record_body(page, after, plain)
        sub.seq, sub.epoch, sub.head_seq, sub.is_new = page.cursor.seq, page.epoch, page.head_seq, False
        self._emit_page(sub, events, body, page, None)
        if not page.caught_up or self._is_strong or not self._join(sub, info):
            await self._more(sub, page, info)
        else:
            self._release(topic)

    def _join(self, sub: Subscriber, info: TopicInfo) -> bool:
        return self.gateway.watches.fan_out.join(sub, info)

    async def _more(self, sub: Subscriber, page: Page, info: TopicInfo) -> None:
        """Read on in a later turn. A strong watch at the head waits for a publication."""
        if page.caught_up and self._is_strong:
            session = self.gateway.client.connection
            waiting = session.published_since(info.shard, session.marks(info.shard), 1.0)
            facts = session.facts(info)
            if facts is not None and facts.head_seq == sub.seq:
                waiting.when_done(lambda _: self._again(sub))
                return
        self.fell_behind(sub)

    async def _durable(self, sub: Subscriber, info: TopicInfo) -> None:
        """Wait until the device has all that the topic's shard has published, or the subscription ends."""
        if info.config.get("durability") == "ephemeral":
            return
        page = self.gateway.board.process(shard_slot(info.shard))
        published = page.watermark(WatermarkKind.PUBLISHED)
        while page.watermark(WatermarkKind.DURABLE) < published and self.subs.get(sub.topic) is sub:
            await asyncio.sleep(DURABLE_POLL_MS / 1_000)

    def _emit_page(
        self, sub: Subscriber, events: list[Event], body: bytes, page: Page, delivery: FanOutPage | None
    ) -> None:
        if body:
            events.append(("record", body))
        if not page.caught_up:
            sub.was_behind = True
        elif body or sub.was_behind:
            sub.was_behind = False
            events.append(("caught-up", b'{"topic":%b,"head_seq":%d}' % (_encode(sub.topic), page.head_seq)))
        if events:
            self.emit(sub, events, delivery)

    def _release(self, topic: str) -> None:
        source = self._sources.pop(topic, None)
        if source is not None:
            source.close()


def error_json(error: RinglogError, topic: str = "") -> bytes:
    """Return the JSON text of an `error` frame."""
    status, code = status_and_code(error)
    fields: dict[str, Any] = {"code": status, "error": code, "message": error.message}
    return _encode(fields | ({"topic": topic} if topic else {}))


def _resolved(gateway: Gateway, topic: str) -> Any:
    info = yield gateway.client.connection.resolve(topic)
    return info
