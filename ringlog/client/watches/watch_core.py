"""WatchCore: follows many topics in one place, for the synchronous and the asyncio client.

Its subscription (ringlog/link/delivery.py) returns grants to read topics, in order of priority. The core
reads one grant (at most `limit` records) and turns it into events. It uses the same sources as all readers,
so deletes, retention, damage and tombstones behave as in any read. The program requests the next event at its
own pace. An event that it has not requested costs one grant per topic, and delays no other process.

The core consists of Steps over a Connection. Between the steps its owner, which has the session, makes all
changes to the subscription.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from re import compile as compile_pattern

from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import (
    EARLIEST,
    LATEST,
    Cursor,
    Filters,
    Start,
    node_filter,
    tag_filter,
)
from ringlog.client.read.paging import read_page, resolve_start
from ringlog.client.read.source import open_source
from ringlog.client.watches.events import (
    TopicDeleted,
    WatchEvent,
    encode_cursors,
)
from ringlog.client.watches.page_share import PageShare
from ringlog.client.watches.shared_reads import PageLimits, SharedReads
from ringlog.client.watches.watch_options import WILDCARD, WatchOptions
from ringlog.client.watches.watched_topic import GrantResult, WatchedTopic
from ringlog.envelope.messages import TopicInfo
from ringlog.errors import (
    ConnectionTrouble,
    CorruptData,
    DiskError,
    NotReady,
    TopicHalted,
    TopicNotFound,
    is_shard_failed,
)
from ringlog.link.futures import Steps
from ringlog.link.subscription import UNBOUNDED, ReadGrant
from ringlog.topic.tombstone import RECREATED
from ringlog.types import Durability

RETRY_S = 0.1
LIST_RETRY_S = 1.0
"""Pause in seconds before the names of topics are listed again after an error."""
_RETRIABLE = (NotReady, ConnectionTrouble)


class WatchCore:
    """State of one watch, for one consumer at a time. It reads without the client's lock."""

    def __init__(self, options: WatchOptions, shared: SharedReads) -> None:
        """Create the state of a watch. `shared` is common to the watches of a client."""
        self.options = options
        self._shared = shared
        shared.watches += 1
        self._limits = PageLimits(options.limit, options.max_bytes)
        self._sharing = PageShare(shared, self._limits)
        self._is_closed = False
        self.events: deque[tuple[str, WatchEvent, Cursor | None]] = deque()
        """Events that are not yet returned: those of one grant, and those of new topics."""
        self.opened: list[WatchedTopic] = []
        """Topics that are open and have no feed yet: `follow` or `discard_opened` takes them."""
        self._topics: dict[int, WatchedTopic] = {}
        self._names: set[str] = set()
        """Topics that the watch follows, or must not follow again: damaged topics, and deleted topics that
        were named."""
        self._positions: dict[str, Cursor] = {}
        """Position after the last returned event, by topic. A deleted topic that a pattern matched has none,
        if its next life needs none."""
        self._matches = [(compile_pattern(translate(each)).fullmatch, where)
                         for each, where in options.patterns.items()]  # fmt: skip

    @property
    def prefixes(self) -> list[str]:
        """Prefixes to list, which cover every name that a pattern matches."""
        return sorted({pattern.partition(WILDCARD)[0] for pattern in self.options.patterns})

    @property
    def topics(self) -> list[str]:
        """Topics that the watch follows now."""
        return [topic.info.topic for topic in self._topics.values()]

    @property
    def is_over(self) -> bool:
        """True if no event can occur any more."""
        return not self._topics and not self.options.patterns and not self.events

    @property
    def cursor(self) -> str:
        """Composite cursor after the last returned event."""
        return encode_cursors(self._positions)

    # -- starting ---------------------------------------------------------------------------------------

    def begin_steps(self, connection: Connection) -> Steps[None]:
        """Open the named topics. Raises TopicNotFound for an unknown one, unless lenient, and if none
        exists."""
        yield from self._open_all(connection, self.options.exact)
        if not self.opened and not self.options.patterns:
            raise TopicNotFound("none of the topics exists", topics=list(self.options.exact)[:16])

    def matching(self, names: Iterable[str]) -> dict[str, Start]:
        """Return the names that match a pattern and are not followed yet, with their start positions."""
        found: dict[str, Start] = {}
        for name in names:
            if name in self._names or name in self.options.exact:
                continue
            where = self._start_of(name)
            if where is not None:
                found[name] = where
        return found

    def _start_of(self, name: str) -> Start | None:
        """Return the start position of the first pattern that matches; None if none does."""
        return next((where for is_match, where in self._matches if is_match(name)), None)

    def open_matching_steps(
        self, connection: Connection, wanted: Mapping[str, Start], *, is_new: bool
    ) -> Steps[None]:
        """Open topics that match a pattern. Topics that are new since the watch began are read from their
        beginning."""
        starts = dict.fromkeys(wanted, EARLIEST) if is_new else dict(wanted)
        yield from self._open_all(connection, starts, is_lenient=True)

    def follow(self, feeds: list[int]) -> None:
        """Follow the opened topics, under these feed numbers of the subscription.

        Only then a topic counts as known: one that the watch failed to follow must be found again.
        """
        opened, self.opened = self.opened, []
        for topic, feed in zip(opened, feeds, strict=True):
            topic.feed = feed
            self._topics[feed] = topic
            self._names.add(topic.info.topic)
            self._positions[topic.info.topic] = topic.cursor
            self._shared.follow(topic.info.topic_id)

    def discard_opened(self) -> None:
        """Close the opened topics that the watch failed to follow."""
        opened, self.opened = self.opened, []
        for topic in opened:
            topic.source.close()

    def _open_all(
        self, connection: Connection, wanted: Mapping[str, Start], *, is_lenient: bool = False
    ) -> Steps[None]:
        resolving = [(name, connection.resolve(name)) for name in wanted]
        for name, pending in resolving:
            try:
                info: TopicInfo = yield pending
            except TopicNotFound:
                if self.options.lenient or is_lenient:
                    continue
                raise
            yield from self._open(connection, info, wanted[name])

    def _open(self, connection: Connection, info: TopicInfo, where: Start) -> Steps[None]:
        options = self.options
        nodes = node_filter(options.node) if info.config.get("dedupe_node", True) else frozenset()
        source = open_source(connection, info.topic, is_following=True)
        source.keep_topic_alive(info.epoch)
        stored = options.cursors.get(info.topic)
        level = Durability.parse(str(info.config.get("durability", "disk")))
        # The classes `fsync` and `ephemeral` know only one consistency: acks are durable, or never.
        is_strong = options.consistency == "strong" and level not in {Durability.FSYNC, Durability.EPHEMERAL}
        # With LATEST the head is read now, so the life is known.
        has_begun = stored is None and where is LATEST
        topic = WatchedTopic(
            info, source, Filters(nodes, tag_filter(options.tags)), Cursor(0, 0), has_begun=has_begun,
            is_strong=is_strong,
        )  # fmt: skip
        self.opened.append(topic)
        topic.cursor = yield from resolve_start(connection, source, info.topic, stored or where)

    # -- grants -----------------------------------------------------------------------------------------

    def grant_steps(self, grant: ReadGrant, now_s: Callable[[], float]) -> Steps[GrantResult]:
        """Read the topic of one grant."""
        topic = self._topics.get(grant.feed)
        if topic is None:
            return GrantResult()
        result = GrantResult(after=topic.cursor.seq)
        if grant.error is not None:
            topic.halt(result, grant.error)
            return result
        sequence = self._sharing.sequence(topic, grant)
        # The durable position is not known: check the state of the topic, but return no records.
        is_durable_position_unknown = topic.is_strong and grant.until >= UNBOUNDED
        try:
            page = self._sharing.take_page(topic)
            if page is None:
                page = yield from read_page(
                    topic.source, topic.info.topic, topic.cursor, limit=self.options.limit,
                    max_bytes=self.options.max_bytes, filters=topic.filters,
                    until=grant.until if topic.is_strong else None,
                )  # fmt: skip
                page = self._sharing.share_page(topic, page)
        except TopicNotFound:
            self._end_topic(topic, result, "deleted")
        except _RETRIABLE as e:
            if is_shard_failed(e):
                topic.halt(result, e)
            else:
                result.retry_after_s = RETRY_S if e.detail.get("reason") != "cold_unavailable" else 1.0
        except CorruptData as e:
            self._drop(topic)
            result.is_topic_ended, result.error = True, e
        except TopicHalted as e:
            topic.halt(result, e)
        else:
            topic.is_halted = False
            if sequence >= 0:
                page = self._sharing.share_frame(topic, grant, page, sequence)
            if topic.is_recreated_in(page):
                self._end_topic(topic, result, RECREATED)
            else:
                topic.apply_page(
                    page, grant, result, now_s(), is_durable_position_unknown=is_durable_position_unknown
                )
        return result

    def take_shared_frame(self, grant: ReadGrant) -> bool:
        """Use the frame that another watch of this client has just read, if this watch would read the same.

        Reads no file. Returns True after queueing the page, up to the hint's last record. Returns False if no
        such frame exists; the caller then uses `read_at_hint`.
        """
        topic, hint = self._topics.get(grant.feed), grant.hint
        if topic is None or hint is None or not topic.is_caught_up:
            return False
        source, cursor = topic.source, topic.cursor
        shared_frame = self._shared.get_frame(topic.info.topic_id, cursor.epoch, hint)
        if shared_frame is None or hint.first_seq != cursor.seq + 1 or not isinstance(source, LocalSource):
            return False
        if not topic.is_plain(grant, hint, self._limits) or not source.is_frame_current(shared_frame):
            return False
        source.files.advance_past(hint)
        page, name = shared_frame.page(), topic.info.topic
        # No call between these lines, so that an interruption cannot separate them.
        topic.cursor, topic.head_seq = shared_frame.cursor, hint.last_seq
        self.events.append((name, page, page.cursor))
        return True

    def read_at_hint(self, grant: ReadGrant) -> GrantResult | None:
        """Read only the frame of the grant: the short path of a reader that keeps up.

        Returns None, without side effects, if the short path is not possible. The caller then uses
        `grant_steps`.
        """
        topic, hint = self._topics.get(grant.feed), grant.hint
        if topic is None or hint is None or not topic.is_plain(grant, hint, self._limits):
            return None
        source = topic.source
        if not isinstance(source, LocalSource):
            return None
        sequence = source.slot_sequence if self._shared.is_useful else -1
        try:
            # A reader that lags by more than this frame uses the general path.
            found = source.read_at_hint(topic.cursor, hint, is_head=not topic.is_strong)
        except DiskError:
            return None  # The general path meets the same error and reports it.
        if found is None:
            return None
        view, facts = found
        shared_frame = source.make_shared_frame(topic.cursor.epoch, sequence, hint, view, facts.earliest_seq)
        if sequence >= 0 and facts.head_seq == hint.last_seq:
            self._shared.put_frame(topic.info.topic_id, shared_frame)
        return topic.apply_frame(shared_frame)

    def _end_topic(self, topic: WatchedTopic, result: GrantResult, reason: str) -> None:
        result.events.append((TopicDeleted(topic.info.topic, topic.head_seq, reason), topic.cursor))
        result.is_topic_ended = True
        self._drop(topic)
        if topic.info.topic not in self.options.exact:
            self._names.discard(topic.info.topic)  # A pattern also matches the topic's next life.

    def _drop(self, topic: WatchedTopic) -> None:
        if self._topics.pop(topic.feed, None) is not None:
            self._shared.unfollow(topic.info.topic_id)
        topic.source.close()

    def enqueue_events(self, events: Iterable[tuple[WatchEvent, Cursor | None]]) -> None:
        """Queue events, to be returned one by one."""
        for event, cursor in events:
            self.events.append((event.topic, event, cursor))

    def pop_event(self) -> WatchEvent:
        """Return the next queued event and advance the cursor."""
        name, event, cursor = self.events.popleft()
        if isinstance(event, TopicDeleted) and self._restarts_without_position(name):
            self._positions.pop(name, None)
        elif cursor is not None:
            self._positions[name] = cursor
        return event

    def _restarts_without_position(self, name: str) -> bool:
        """Return True if a resumed watch reads the topic's next life from its beginning in any case.

        In other cases only a position of the ended life in the cursor makes it do so. Topics that are named
        one by one always keep theirs: their number is limited.
        """
        return name not in self.options.exact and self._start_of(name) is EARLIEST

    def close(self) -> None:
        """Release the files. Idempotent."""
        self._shared.watches -= not self._is_closed
        self._is_closed = True
        self.discard_opened()
        for topic in list(self._topics.values()):
            self._drop(topic)
