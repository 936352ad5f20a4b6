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
from dataclasses import dataclass, field
from fnmatch import translate
from re import compile as compile_pattern
from typing import Literal, TypeAlias

from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.fetch_result import Source
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import (
    EARLIEST,
    LATEST,
    Cursor,
    Filters,
    Page,
    Start,
    TagFilter,
    node_filter,
    tag_filter,
)
from ringlog.client.read.paging import read_page, resolve_start
from ringlog.client.read.record_batches import FrameRecordBatch
from ringlog.client.read.source import open_source
from ringlog.client.requests.validation import (
    check_bool,
    check_int_range,
    check_nodes,
    check_sequence,
    check_start,
    check_str,
    check_tag_filter,
)
from ringlog.client.watches.events import (
    CaughtUp,
    Lagged,
    TopicDeleted,
    WatchEvent,
    decode_cursors,
    encode_cursors,
)
from ringlog.client.watches.shared_reads import PageLimits, SharedFrame, SharedReads
from ringlog.envelope.messages import TopicInfo
from ringlog.errors import (
    ConnectionTrouble,
    CorruptData,
    DiskError,
    NotReady,
    RinglogError,
    TopicHalted,
    TopicNotFound,
    UsageError,
    is_shard_failed,
)
from ringlog.limits import (
    CREDIT_DEFAULT,
    CREDIT_MAX,
    FEEDS_PER_SUBSCRIPTION_MAX,
    LAG_ANNOUNCED_MS,
    READ_BYTES_DEFAULT,
    READ_BYTES_MAX,
    WATCH_LIMIT_DEFAULT,
    WATCH_LIMIT_MAX,
)
from ringlog.link.futures import Steps
from ringlog.link.subscription import UNBOUNDED, LocationHint, ReadGrant
from ringlog.topic.tombstone import RECREATED
from ringlog.types import Durability

Topics: TypeAlias = str | Iterable[str] | Mapping[str, Start]
Consistency: TypeAlias = Literal["eventual", "strong"]
LAGGED_AFTER_S = LAG_ANNOUNCED_MS / 1_000
"""Time in seconds after which records that wait for their reader count as a backlog."""
RETRY_S = 0.1
HALTED_RETRY_S = 5.0
"""Pause in seconds before a halted topic is read again. It needs a restart of the engine."""
_WILD = "*"
_RETRIABLE = (NotReady, ConnectionTrouble)


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Checked options of a watch."""

    exact: dict[str, Start]
    patterns: dict[str, Start]
    tags: TagFilter | None
    node: str | list[str] | None
    limit: int
    max_bytes: int
    consistency: Consistency
    credit: int
    lenient: bool
    cursors: dict[str, Cursor]


def watch_options(
    topics: Topics, *, start: Start = EARLIEST, cursor: str = "", tags: TagFilter | None = None,
    node: str | list[str] | None = None, limit: int = 0, max_bytes: int = 0,
    consistency: Consistency = "eventual", credit: int = CREDIT_DEFAULT, lenient: bool = False,
) -> WatchOptions:  # fmt: skip
    """Check the arguments of `watch`. Raises UsageError or InvalidRequest."""
    if isinstance(topics, Mapping):
        wanted = {check_str(name, "topics"): check_start(where, "topics") for name, where in topics.items()}
    else:
        names = [topics] if isinstance(topics, str) else check_sequence(topics, "topics")
        wanted = dict.fromkeys([check_str(name, "topics") for name in names], check_start(start))
    if not 1 <= len(wanted) <= FEEDS_PER_SUBSCRIPTION_MAX:
        raise UsageError(
            f"topics must have 1 to {FEEDS_PER_SUBSCRIPTION_MAX} names, got {len(wanted)}", found=len(wanted),
            min=1, max=FEEDS_PER_SUBSCRIPTION_MAX,
        )  # fmt: skip
    if check_str(consistency, "consistency") not in {"eventual", "strong"}:
        raise UsageError(
            f"consistency must be eventual or strong, got {consistency[:64]!r}", found=consistency
        )
    limit, max_bytes = check_int_range(limit, "limit"), check_int_range(max_bytes, "max_bytes")
    node = check_nodes(node)
    node_filter(node)
    return WatchOptions(
        {name: where for name, where in wanted.items() if _WILD not in name},
        {name: where for name, where in wanted.items() if _WILD in name},
        check_tag_filter(tags), node, min(limit or WATCH_LIMIT_DEFAULT, WATCH_LIMIT_MAX),
        min(max_bytes or READ_BYTES_DEFAULT, READ_BYTES_MAX), consistency,
        check_int_range(credit, "credit", 1, CREDIT_MAX), check_bool(lenient, "lenient"),
        decode_cursors(check_str(cursor, "cursor")),
    )  # fmt: skip


@dataclass(slots=True)
class LagTracker:
    """Age of the oldest unread record of a reader that reads on but does not catch up."""

    since_s: float
    observed_head: int
    """Head of the topic at `mark_s`. Once the reader is there, its unread records are not older than
    `mark_s`."""
    mark_s: float

    def update(self, seq: int, head_seq: int, now_s: float) -> None:
        """Record that the reader is at `seq`, below the head."""
        if seq >= self.observed_head:
            self.since_s, self.observed_head, self.mark_s = self.mark_s, head_seq, now_s


@dataclass(slots=True)
class WatchedTopic:
    """One topic of a watch."""

    info: TopicInfo
    source: Source
    filters: Filters
    cursor: Cursor
    feed: int = 0
    head_seq: int = 0
    has_begun: bool = False
    """True once the topic's life (epoch) is known, from a first read or its head."""
    is_caught_up: bool = False
    lag_tracker: LagTracker | None = None
    """Set if the topic had caught up and lags now, before a Lagged event."""
    is_strong: bool = False
    is_halted: bool = False
    """True after the watch raised the error of a halted topic or a failed shard. Reading resumes when the
    engine finds the missing file or restarts."""


@dataclass(slots=True)
class GrantResult:
    """Result of one grant: events, and the instructions of the owner to the subscription."""

    events: list[tuple[WatchEvent, Cursor | None]] = field(default_factory=list)
    """Events, each with the topic's cursor after it, or None if it moves no cursor."""
    after: int = 0
    is_consumed: bool = False
    is_topic_ended: bool = False
    """The watch drops the topic."""
    retry_after_s: float = 0.0
    """Seconds after which the topic is read again; 0 = when a new grant arrives."""
    error: Exception | None = None


class WatchCore:
    """State of one watch, for one consumer at a time. It reads without the client's lock."""

    def __init__(self, options: WatchOptions, shared: SharedReads) -> None:
        """Create the state of a watch. `shared` is common to the watches of a client."""
        self.options = options
        self._shared = shared
        shared.watches += 1
        self._limits = PageLimits(options.limit, options.max_bytes)
        self._is_closed = False
        self.events: deque[tuple[str, WatchEvent, Cursor | None]] = deque()
        """Events that are not yet returned: those of one grant, and those of new topics."""
        self._topics: dict[int, WatchedTopic] = {}
        self._names: set[str] = set()
        """Topics that the watch follows, or must not follow again: damaged topics, and deleted topics that
        were named."""
        self._positions: dict[str, Cursor] = {}
        """Position after the last returned event, by topic."""
        self._matches = [(compile_pattern(translate(each)).fullmatch, where)
                         for each, where in options.patterns.items()]  # fmt: skip

    @property
    def prefixes(self) -> list[str]:
        """Prefixes to list, which cover every name that a pattern matches."""
        return sorted({pattern.partition(_WILD)[0] for pattern in self.options.patterns})

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

    def begin_steps(self, connection: Connection) -> Steps[list[WatchedTopic]]:
        """Open the named topics. Raises TopicNotFound for an unknown one, unless lenient, and if none
        exists."""
        found = yield from self._open_all(connection, self.options.exact)
        if not found and not self.options.patterns:
            raise TopicNotFound("none of the topics exists", topics=list(self.options.exact)[:16])
        return found

    def matching(self, names: Iterable[str]) -> dict[str, Start]:
        """Return the names that match a pattern and are not followed yet, with their start positions."""
        found: dict[str, Start] = {}
        for name in names:
            if name in self._names or name in self.options.exact:
                continue
            for is_match, where in self._matches:
                if is_match(name):
                    found[name] = where
                    break
        return found

    def open_matching_steps(
        self, connection: Connection, wanted: Mapping[str, Start], *, is_new: bool
    ) -> Steps[list[WatchedTopic]]:
        """Open topics that match a pattern. Topics that are new since the watch began are read from their
        beginning."""
        starts = dict.fromkeys(wanted, EARLIEST) if is_new else dict(wanted)
        return (yield from self._open_all(connection, starts, is_lenient=True))

    def follow(self, topics: Iterable[WatchedTopic], feeds: list[int]) -> None:
        """Assign the feed numbers of the subscription to new topics."""
        for topic, feed in zip(topics, feeds, strict=True):
            topic.feed = feed
            self._topics[feed] = topic
            self._shared.follow(topic.info.topic_id)

    def _open_all(
        self, connection: Connection, wanted: Mapping[str, Start], *, is_lenient: bool = False
    ) -> Steps[list[WatchedTopic]]:
        resolving = [(name, connection.resolve(name)) for name in wanted]
        found = []
        for name, pending in resolving:
            try:
                info: TopicInfo = yield pending
            except TopicNotFound:
                if self.options.lenient or is_lenient:
                    continue
                raise
            found.append((yield from self._open(connection, info, wanted[name])))
        self._names.update(topic.info.topic for topic in found)
        return found

    def _open(self, connection: Connection, info: TopicInfo, where: Start) -> Steps[WatchedTopic]:
        options = self.options
        nodes = node_filter(options.node) if info.config.get("dedupe_node", True) else frozenset()
        source = open_source(connection, info.topic, is_following=True)
        source.keep_topic_alive(info.epoch)
        stored = options.cursors.get(info.topic)
        cursor = yield from resolve_start(connection, source, info.topic, stored or where)
        level = Durability.parse(str(info.config.get("durability", "disk")))
        # The classes `fsync` and `ephemeral` know only one consistency: acks are durable, or never.
        is_strong = options.consistency == "strong" and level not in {Durability.FSYNC, Durability.EPHEMERAL}
        self._positions[info.topic] = cursor
        # The head was just read, so the life is known.
        has_begun = stored is None and where is LATEST
        return WatchedTopic(
            info, source, Filters(nodes, tag_filter(options.tags)), cursor, has_begun=has_begun,
            is_strong=is_strong,
        )  # fmt: skip

    # -- grants -----------------------------------------------------------------------------------------

    def grant_steps(self, grant: ReadGrant, now_s: Callable[[], float]) -> Steps[GrantResult]:
        """Read the topic of one grant."""
        topic = self._topics.get(grant.feed)
        if topic is None:
            return GrantResult()
        result = GrantResult(after=topic.cursor.seq)
        if grant.error is not None:
            self._halt(topic, result, grant.error)
            return result
        sequence = self._sequence(topic, grant)
        # The durable position is not known: check the state of the topic, but return no records.
        is_durable_position_unknown = topic.is_strong and grant.until >= UNBOUNDED
        try:
            page = self._take_shared_page(topic)
            if page is None:
                page = yield from read_page(
                    topic.source, topic.info.topic, topic.cursor, limit=self.options.limit,
                    max_bytes=self.options.max_bytes, filters=topic.filters,
                    until=grant.until if topic.is_strong else None,
                )  # fmt: skip
                page = self._share_page(topic, page)
        except TopicNotFound:
            self._end_topic(topic, result, "deleted")
        except _RETRIABLE as e:
            if is_shard_failed(e):
                self._halt(topic, result, e)
            else:
                result.retry_after_s = RETRY_S if e.detail.get("reason") != "cold_unavailable" else 1.0
        except CorruptData as e:
            self._drop(topic)
            result.is_topic_ended, result.error = True, e
        except TopicHalted as e:
            self._halt(topic, result, e)
        else:
            topic.is_halted = False
            if sequence >= 0:
                page = self._share_frame(topic, grant, page, sequence)
            self._apply_page(
                topic,
                page,
                grant,
                result,
                now_s(),
                is_durable_position_unknown=is_durable_position_unknown,
            )
        return result

    @staticmethod
    def _halt(topic: WatchedTopic, result: GrantResult, error: RinglogError) -> None:
        """Report the error once. The topic cannot be read before the next start of the engine."""
        result.retry_after_s, result.error = HALTED_RETRY_S, None if topic.is_halted else error
        topic.is_halted = True

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
        if not self._is_plain(topic, grant, hint) or not source.is_frame_current(shared_frame):
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
        if topic is None or hint is None or not self._is_plain(topic, grant, hint):
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
        return self._apply_frame(topic, shared_frame)

    def _is_plain(self, topic: WatchedTopic, grant: ReadGrant, hint: LocationHint) -> bool:
        """Return True if the watch returns the whole frame and nothing else."""
        if not topic.has_begun or topic.filters or (topic.is_strong and hint.last_seq != grant.until):
            return False
        options = self.options
        is_small = hint.last_seq - hint.first_seq < options.limit
        return is_small and hint.stop - hint.offset <= options.max_bytes

    def _apply_frame(self, topic: WatchedTopic, shared_frame: SharedFrame) -> GrantResult:
        """Apply the next frame, which is the topic's last and of the same life. The short form of
        `_apply_page`."""
        last_seq, cursor = shared_frame.hint.last_seq, shared_frame.cursor
        topic.cursor, topic.head_seq = cursor, last_seq
        result = GrantResult([(shared_frame.page(), cursor)], last_seq, is_consumed=True)
        if not topic.is_caught_up:
            result.events.append(self.caught_up_event(topic))
        return result

    def _sequence(self, topic: WatchedTopic, grant: ReadGrant) -> int:
        """Return the change number of the topic's slot before a read that may be shared; -1 if it will not be
        shared."""
        source, is_wanted = topic.source, grant.hint is not None and self._shared.is_useful
        return source.slot_sequence if is_wanted and isinstance(source, LocalSource) else -1

    def _take_shared_page(self, topic: WatchedTopic) -> Page | None:
        """Return the page that another watch of this client read at this position, if it is still current."""
        source, cursor = topic.source, topic.cursor
        shared_page = self._shared.get_page(topic.info.topic_id, cursor, self._limits)
        if shared_page is None or not self._is_for_all(topic) or not isinstance(source, LocalSource):
            return None
        facts = source.facts_if_current(shared_page)
        if facts is None:
            return None
        source.files.advance_past_page(shared_page)
        return Page(
            topic.info.topic, shared_page.batches, shared_page.cursor, tombstone=None,
            head_seq=facts.head_seq, earliest_seq=facts.earliest_seq,
        )  # fmt: skip

    def _share_page(self, topic: WatchedTopic, page: Page) -> Page:
        """Share a page with other watches that will reach its position. Returns the page to use instead."""
        source, after = topic.source, topic.cursor
        is_wanted = self._shared.is_followed_by_several(topic.info.topic_id) and self._is_for_all(topic)
        is_wanted = is_wanted and after.epoch in {0, page.epoch}
        if not is_wanted or not isinstance(source, LocalSource):
            return page
        shared_page = source.make_shared_page(page, self._limits)
        if shared_page is None:
            return page
        self._shared.put_page(topic.info.topic_id, after.seq, shared_page)
        return Page(
            page.topic, shared_page.batches, page.cursor, tombstone=None, head_seq=page.head_seq,
            earliest_seq=page.earliest_seq,
        )  # fmt: skip

    @staticmethod
    def _is_for_all(topic: WatchedTopic) -> bool:
        """Return True if this watch omits and delays no records."""
        return not topic.filters and not topic.is_strong

    def _share_frame(self, topic: WatchedTopic, grant: ReadGrant, page: Page, sequence: int) -> Page:
        """Share a page with other watches if it is the whole frame of its grant. Returns the page to use
        instead."""
        hint, source, record_batches = grant.hint, topic.source, page.batches
        if hint is None or not isinstance(source, LocalSource) or len(record_batches) != 1:
            return page
        batch = record_batches[0]
        if not isinstance(batch, FrameRecordBatch) or not batch.is_whole or page.tombstone is not None:
            return page
        view = batch.view
        is_it = (view.first_seq, view.last_seq, page.head_seq) == (
            hint.first_seq, hint.last_seq, hint.last_seq,
        )  # fmt: skip
        # Expiry depends on the clock and does not change the slot.
        if not is_it or source.slot_sequence != sequence or not source.never_expires:
            return page
        shared_frame = source.make_shared_frame(
            page.epoch, sequence, hint, view.read_only(), page.earliest_seq
        )
        self._shared.put_frame(topic.info.topic_id, shared_frame)
        return Page(
            page.topic, shared_frame.batches, page.cursor, tombstone=None, head_seq=page.head_seq,
            earliest_seq=page.earliest_seq,
        )  # fmt: skip

    def _apply_page(
        self,
        topic: WatchedTopic,
        page: Page,
        grant: ReadGrant,
        result: GrantResult,
        now_s: float,
        *,
        is_durable_position_unknown: bool,
    ) -> None:
        name, gap = topic.info.topic, page.tombstone
        is_other_life = topic.has_begun and page.epoch != topic.cursor.epoch
        if is_other_life and gap is not None and gap.reason == RECREATED:
            self._end_topic(topic, result, RECREATED)
            return
        lag = page.head_seq - topic.cursor.seq
        if is_durable_position_unknown:
            if not lag and not topic.is_caught_up:
                topic.head_seq = page.head_seq
                result.events.append(self.caught_up_event(topic))
            return
        waited_s = now_s - (
            topic.lag_tracker.since_s if topic.lag_tracker is not None else grant.granted_ns / 1e9
        )
        may_lag = topic.is_caught_up or topic.lag_tracker is not None
        if may_lag and lag > len(page) and waited_s >= LAGGED_AFTER_S:
            topic.is_caught_up, topic.lag_tracker = False, None
            result.events.append((Lagged(name, lag, round(waited_s, 3)), None))
            return  # Return it without records: they might be deleted before the program requests them.
        cursor = page.cursor
        if gap is not None:
            # Without records for the same reason; the next grant begins after it.
            cursor = Cursor(page.epoch, page.batches[0].seq_at(0) - 1 if page.batches else page.cursor.seq)
            result.events.append((gap, cursor))
        elif len(page):
            result.events.append((page, cursor))
        topic.cursor, topic.head_seq, topic.has_begun = cursor, page.head_seq, True
        if cursor.seq < page.head_seq:
            if topic.is_caught_up:
                topic.is_caught_up, topic.lag_tracker = (
                    False,
                    LagTracker(grant.granted_ns / 1e9, page.head_seq, now_s),
                )
            elif topic.lag_tracker is not None:
                topic.lag_tracker.update(cursor.seq, page.head_seq, now_s)
        elif not topic.is_caught_up:
            result.events.append(self.caught_up_event(topic))
        result.after, result.is_consumed = cursor.seq, bool(len(page) or gap is not None)

    @staticmethod
    def caught_up_event(topic: WatchedTopic) -> tuple[CaughtUp, Cursor]:
        """Return the event for a topic without a backlog."""
        topic.is_caught_up, topic.lag_tracker = True, None
        return CaughtUp(topic.info.topic, topic.head_seq), topic.cursor

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
        if cursor is not None:
            self._positions[name] = cursor
        return event

    def close(self) -> None:
        """Release the files. Idempotent."""
        self._shared.watches -= not self._is_closed
        self._is_closed = True
        for topic in list(self._topics.values()):
            self._drop(topic)
