"""WatchedTopic: the position of a watch on one topic, and the events of what it reads there."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringlog.client.read.fetch_result import Source
from ringlog.client.read.pages import Cursor, Filters, Page, Tombstone
from ringlog.client.watches.events import CaughtUp, Lagged, WatchEvent
from ringlog.client.watches.shared_reads import PageLimits, SharedFrame
from ringlog.envelope.messages import TopicInfo
from ringlog.errors import RinglogError
from ringlog.limits import LAG_ANNOUNCED_MS
from ringlog.link.subscription import LocationHint, ReadGrant
from ringlog.topic.tombstone import RECREATED

LAGGED_AFTER_S = LAG_ANNOUNCED_MS / 1_000
"""Time in seconds after which records that wait for their reader count as a backlog."""
HALTED_RETRY_S = 5.0
"""Pause in seconds before a halted topic is read again. It needs a restart of the engine."""


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

    def halt(self, result: GrantResult, error: RinglogError) -> None:
        """Report the error once. The topic cannot be read before the next start of the engine."""
        result.retry_after_s, result.error = HALTED_RETRY_S, None if self.is_halted else error
        self.is_halted = True

    def is_plain(self, grant: ReadGrant, hint: LocationHint, limits: PageLimits) -> bool:
        """Return True if the watch returns the whole frame and nothing else."""
        if not self.has_begun or self.filters or (self.is_strong and hint.last_seq != grant.until):
            return False
        is_small = hint.last_seq - hint.first_seq < limits.records
        return is_small and hint.stop - hint.offset <= limits.bytes

    def apply_frame(self, shared_frame: SharedFrame) -> GrantResult:
        """Apply the next frame, which is the topic's last and of the same life. The short form of
        `apply_page`."""
        last_seq, cursor = shared_frame.hint.last_seq, shared_frame.cursor
        self.cursor, self.head_seq = cursor, last_seq
        result = GrantResult([(shared_frame.page(), cursor)], last_seq, is_consumed=True)
        if not self.is_caught_up:
            result.events.append(self.caught_up_event())
        return result

    def apply_page(
        self,
        page: Page,
        grant: ReadGrant,
        result: GrantResult,
        now_s: float,
        *,
        is_durable_position_unknown: bool,
    ) -> None:
        """Advance by a page that was read for a grant, and add the events to `result`."""
        name, gap = self.info.topic, page.tombstone
        lag = page.head_seq - self.cursor.seq
        if is_durable_position_unknown:
            if gap is not None and gap.reason == RECREATED:
                # It is no record. Without it, the next grant would wait until the new life is as long as the
                # earlier one was.
                self._start_over(page, gap, result)
            elif not lag and not self.is_caught_up:
                self.head_seq = page.head_seq
                result.events.append(self.caught_up_event())
            return
        waited_s = now_s - (
            self.lag_tracker.since_s if self.lag_tracker is not None else grant.granted_ns / 1e9
        )
        may_lag = self.is_caught_up or self.lag_tracker is not None
        if may_lag and lag > len(page) and waited_s >= LAGGED_AFTER_S:
            self.is_caught_up, self.lag_tracker = False, None
            result.events.append((Lagged(name, lag, round(waited_s, 3)), None))
            return  # Return it without records: they might be deleted before the program requests them.
        cursor = page.cursor
        if gap is not None:
            # Without records for the same reason; the next grant begins after it.
            cursor = Cursor(page.epoch, page.batches[0].seq_at(0) - 1 if page.batches else page.cursor.seq)
            result.events.append((gap, cursor))
        elif len(page):
            result.events.append((page, cursor))
        self.cursor, self.head_seq, self.has_begun = cursor, page.head_seq, True
        if cursor.seq < page.head_seq:
            if self.is_caught_up:
                self.is_caught_up, self.lag_tracker = (
                    False,
                    LagTracker(grant.granted_ns / 1e9, page.head_seq, now_s),
                )
            elif self.lag_tracker is not None:
                self.lag_tracker.update(cursor.seq, page.head_seq, now_s)
        elif not self.is_caught_up:
            result.events.append(self.caught_up_event())
        result.after, result.is_consumed = cursor.seq, bool(len(page) or gap is not None)

    def _start_over(self, page: Page, gap: Tombstone, result: GrantResult) -> None:
        first_seq = page.batches[0].seq_at(0) if page.batches else page.cursor.seq + 1
        self.cursor, self.head_seq, self.has_begun = Cursor(page.epoch, first_seq - 1), page.head_seq, True
        result.events.append((gap, self.cursor))
        if self.cursor.seq == page.head_seq and not self.is_caught_up:
            result.events.append(self.caught_up_event())
        result.after, result.is_consumed = self.cursor.seq, True

    def caught_up_event(self) -> tuple[CaughtUp, Cursor]:
        """Return the event for a topic without a backlog."""
        self.is_caught_up, self.lag_tracker = True, None
        return CaughtUp(self.info.topic, self.head_seq), self.cursor

    def is_recreated_in(self, page: Page) -> bool:
        """Return True if the page reports that the topic was deleted and created again."""
        gap, is_other_life = page.tombstone, self.has_begun and page.epoch != self.cursor.epoch
        return is_other_life and gap is not None and gap.reason == RECREATED
