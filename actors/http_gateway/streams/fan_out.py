"""Live delivery of topics to streams: one reader for each followed topic, which all its subscribers share.

A feed waits for publications of its shard, reads the new records once, and encodes them once for each
distinct projection. It writes the same bytes to every subscriber at the same position. A subscriber that is
behind, or whose connection has no room, is left out: its stream reads from storage until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from ringlog.actors.http_gateway.records.record_json import records_json
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Cursor, Filters, Page
from ringlog.client.read.paging import read_page
from ringlog.errors import CorruptData, RinglogError, TopicNotFound
from ringlog.limits import FEED_IDLE_MS, READ_BYTES_DEFAULT, READ_LIMIT_MAX
from ringlog.link.futures import Pending, Steps, run_steps

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway
    from ringlog.client.connection.session import Session
    from ringlog.envelope.messages import TopicInfo

_RETRY_S = 0.2
_BACKUP_S = 5.0
_RECENT_PAGES, _RECENT_BYTES = 64, 32_768
"""Pages that a feed keeps for connections that had no room for a moment, and the largest such page."""
_encode = msgspec.json.Encoder().encode


class Projection(msgspec.Struct, frozen=True):
    """Which records of a topic a subscriber gets, and which of their fields. A key of caches."""

    include_data: bool = True
    include_tags: bool = False
    include_meta: bool = True
    filters: Filters = Filters()


class Outlet(Protocol):
    """A connection to which frames are sent."""

    @property
    def has_room(self) -> bool:
        """Whether it accepts a frame now."""

    def deliver(self, sub: Subscriber, delivery: FanOutPage) -> None:
        """Send what a read found for a subscriber. Called only while `has_room`."""

    def fell_behind(self, sub: Subscriber) -> None:
        """The subscriber is behind the feed: read for it from storage."""

    def topic_ended(self, sub: Subscriber, reason: str) -> None:
        """The topic was deleted."""


class Subscriber:
    """Position of one stream in one topic."""

    __slots__ = (
        "epoch", "feed", "head_seq", "is_live", "is_new", "limit", "max_bytes", "outlet", "projection", "seq",
        "topic", "was_behind",
    )  # fmt: skip

    def __init__(
        self, topic: str, cursor: Cursor, projection: Projection, limit: int, max_bytes: int
    ) -> None:
        self.topic: str = topic
        self.projection: Projection = projection
        self.epoch: int = cursor.epoch
        self.seq: int = cursor.seq
        self.limit: int = limit
        self.max_bytes: int = max_bytes
        self.outlet: Outlet | None = None
        self.feed: Feed | None = None
        self.head_seq: int = 0
        self.is_live: bool = False
        """Whether the feed delivers to it. Otherwise its stream reads from storage."""
        self.is_new: bool = True
        """Whether nothing was read since the connection began."""
        self.was_behind: bool = True
        """Whether a backlog exists that was not announced as read."""

    def leave(self) -> None:
        """End the delivery by the feed."""
        self.is_live = False
        if self.feed is not None:
            self.feed.remove(self)
            self.feed = None


class FanOutPage:
    """One page of one topic, and its encoded forms, which subscribers with equal projections share."""

    __slots__ = ("_bodies", "after", "cache", "page")

    def __init__(self, page: Page, after: int) -> None:
        self.page: Page[bytes | None] = page
        self.after: int = after
        self._bodies: dict[Projection, bytes] = {}
        self.cache: dict[object, object] = {}
        """For outlets: frames made of the bodies."""

    def body(self, projection: Projection) -> bytes:
        """Return the JSON text of a `record` frame, b"" if the filters leave nothing."""
        found = self._bodies.get(projection)
        if found is None:
            found = self._bodies[projection] = record_body(self.page, self.after, projection)
        return found


def record_body(page: Page, after: int, projection: Projection) -> bytes:
    """Return the JSON text of a `record` frame for a page that was read after a position."""
    batches = page.batches
    if projection.filters:
        chosen = []
        for batch in batches:
            rows = projection.filters.rows(batch)
            chosen.append(batch if rows is None else batch.select_rows(rows))
        batches = tuple(batch for batch in chosen if len(batch))
    if not any(map(len, batches)):
        return b""
    records = records_json(
        batches, include_data=projection.include_data, include_tags=projection.include_tags,
        include_meta=projection.include_meta,
    )  # fmt: skip
    return b'{"topic":%b,"from_seq":%d,"to_seq":%d,"head_seq":%d,"records":%b}' % (
        _encode(page.topic), after, page.cursor.seq, page.head_seq, records,
    )  # fmt: skip


class Feed:
    """The shared reader of one topic."""

    def __init__(self, fan_out: FanOut, topic: str, info: TopicInfo, seq: int) -> None:
        self._fan_out = fan_out
        self.topic: str = topic
        self.info: TopicInfo = info
        self.seq: int = seq
        self.subscribers: set[Subscriber] = set()
        self._source = LocalSource(fan_out.session, topic, is_following=True)
        self._source.keep_topic_alive(info.epoch)
        self._recent: OrderedDict[int, FanOutPage] = OrderedDict()
        self._sequence = -2
        self._is_reading = self._is_again = False
        self._retry: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None
        self.is_closed: bool = False

    def add(self, sub: Subscriber) -> bool:
        """Deliver to a subscriber from now on. False if it must read more records before."""
        if sub.epoch != self.info.epoch or sub.seq < self.seq or self.is_closed:
            return False
        sub.is_live, sub.feed = True, self
        self.subscribers.add(sub)
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        self.poke()
        return True

    def recent(self, sub: Subscriber) -> FanOutPage | None:
        """Return the page that comes next for a subscriber, if it was read a moment ago."""
        found = None if self.is_closed or sub.epoch != self.info.epoch else self._recent.get(sub.seq)
        return None if found is None or len(found.page) > sub.limit else found

    def remove(self, sub: Subscriber) -> None:
        """Deliver no more to a subscriber. Without subscribers the feed does not read, and closes soon.

        Not at once: they may all have no room for a moment, and continue with its recent pages.
        """
        self.subscribers.discard(sub)
        if not self.subscribers and self._closing is None and not self.is_closed:
            self._closing = self._fan_out.gateway.loop.call_later(FEED_IDLE_MS / 1_000, self.close)

    def poke(self) -> None:
        """Read if the topic has changed since the last read."""
        if self.is_closed or not self.subscribers:
            return
        if self._is_reading:
            self._is_again = True
            return
        session = self._fan_out.session
        place = (
            self._source.location.located or self.info
        )  # A restarted shard may give the topic another slot.
        sequence = session.topic_sequence(place)
        if sequence == self._sequence and sequence >= 0 and session.facts(place) is not None:
            return
        self._sequence = sequence
        self._read()

    def _read(self) -> None:
        self._is_reading, self._is_again = True, False
        steps: Steps[Page] = read_page(
            self._source, self.topic, Cursor(self.info.epoch, self.seq), limit=READ_LIMIT_MAX,
            max_bytes=READ_BYTES_DEFAULT,
        )  # fmt: skip
        run_steps(steps).when_done(self._found)

    def _found(self, done: Pending[Page]) -> None:
        self._is_reading = False
        if self.is_closed:
            self._source.close()
            return
        error = done.error
        if error is not None:
            if isinstance(error, TopicNotFound):
                self._end("deleted")
            elif isinstance(error, RinglogError):
                if isinstance(error, CorruptData):
                    self._leave_all()
                else:
                    self._retry_later()
            else:
                raise error
            return
        page = done.result()
        if page.epoch != self.info.epoch:
            self._end("recreated")
            return
        after, self.seq = self.seq, page.cursor.seq
        if page.cursor.seq > after or page.tombstone is not None:
            delivery = FanOutPage(page, after)
            if (
                page.tombstone is None
                and sum([int(batch.sizes().sum()) for batch in page.batches]) <= _RECENT_BYTES
            ):
                self._recent[after] = delivery
                if len(self._recent) > _RECENT_PAGES:
                    self._recent.popitem(last=False)
            else:
                self._recent.clear()
            self._deliver(delivery)
        if not page.caught_up:
            self._sequence = -2
            self._fan_out.gateway.loop.call_soon(self.poke)
        elif self._is_again:
            self.poke()

    def _deliver(self, delivery: FanOutPage) -> None:
        page, after = delivery.page, delivery.after
        reached, count = page.cursor.seq, len(page)
        has_gap = page.tombstone is not None
        for sub in tuple(self.subscribers):
            outlet = sub.outlet
            if outlet is None or sub.seq >= reached:
                continue
            if sub.seq != after or count > sub.limit or has_gap or not outlet.has_room:
                sub.leave()
                sub.was_behind = True
                outlet.fell_behind(sub)
            else:
                outlet.deliver(sub, delivery)

    def _retry_later(self) -> None:
        self._sequence = -2
        self._retry = self._fan_out.gateway.loop.call_later(_RETRY_S, self.poke)

    def _leave_all(self) -> None:
        """Close because of damage. Each stream then reads for itself, and reports the error."""
        for sub in tuple(self.subscribers):
            sub.leave()
            if sub.outlet is not None:
                sub.outlet.fell_behind(sub)
        self.close()

    def _end(self, reason: str) -> None:
        subscribers = tuple(self.subscribers)
        self.subscribers.clear()
        self.close()
        for sub in subscribers:
            sub.is_live, sub.feed = False, None
            if sub.outlet is not None:
                sub.outlet.topic_ended(sub, reason)

    def close(self) -> None:
        """Release the files."""
        if not self.is_closed:
            self.is_closed = True
            for timer in (self._retry, self._closing):
                if timer is not None:
                    timer.cancel()
            if not self._is_reading:
                self._source.close()
            self._fan_out.forget(self)


class FanOut:
    """All feeds of a gateway, and one wait for publications for each shard that has any."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._feeds: dict[str, Feed] = {}
        self._by_shard: dict[int, set[Feed]] = {}
        self._waits: set[int] = set()

    @property
    def session(self) -> Session:
        """Session of the gateway's client. Its loop looks for news from now on."""
        return self.gateway.client.connection

    def join(self, sub: Subscriber, info: TopicInfo) -> bool:
        """Deliver live to a subscriber that has read up to the head. False if it must read more before."""
        if sub.epoch != info.epoch:
            self.session.topics.forget(sub.topic)  # What the client knows of the topic is of another life.
            return False
        feed = self._feeds.get(sub.topic)
        if feed is None or feed.info.epoch != info.epoch or feed.info.slot != info.slot:
            if feed is not None and feed.info.epoch > info.epoch:
                return False
            feed = self._feeds[sub.topic] = Feed(self, sub.topic, info, sub.seq)
            self._by_shard.setdefault(info.shard, set()).add(feed)
            self._wait(info.shard)
        return feed.add(sub)

    def feed(self, topic: str) -> Feed | None:
        """Return the feed of a topic that is followed live."""
        return self._feeds.get(topic)

    def forget(self, feed: Feed) -> None:
        """Drop a closed feed."""
        if self._feeds.get(feed.topic) is feed:
            del self._feeds[feed.topic]
        of_shard = self._by_shard.get(feed.info.shard)
        if of_shard is not None:
            of_shard.discard(feed)
            if not of_shard:
                del self._by_shard[feed.info.shard]

    def _wait(self, shard: int) -> None:
        if shard in self._waits or shard not in self._by_shard:
            return
        self._waits.add(shard)
        session = self.session
        session.published_since(shard, session.marks(shard), _BACKUP_S).when_done(self._published(shard))

    def _published(self, shard: int) -> Callable[[Pending[bool]], None]:
        def published(done: Pending[bool]) -> None:
            self._waits.discard(shard)
            if done.error is not None:
                self.gateway.loop.call_later(_RETRY_S, self._wait, shard)
            else:
                self._wait(shard)  # First: a publication during the reads then ends the wait at once.
            for feed in tuple(self._by_shard.get(shard, ())):
                feed.poke()

        return published
