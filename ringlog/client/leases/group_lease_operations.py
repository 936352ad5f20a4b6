"""Operations of a member on a consumer group, without waiting: shared by both clients.

Claims, acks and other requests are those of queues (lease_operations.py). The tag filter of a group is
applied here. A record that does not match is claimed and acked at once, so the group skips it permanently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ringlog.client.connection.session import Session
from ringlog.client.leases.claim_result import ClaimResult, Leases
from ringlog.client.leases.dead_letters import dead_letter_of_group, require_no_dead_letter_cycle
from ringlog.client.leases.group_facts import GroupMember, GroupStats, GroupSummary, PendingEntry
from ringlog.client.leases.lease_extender import Lease, new_call_number
from ringlog.client.leases.lease_operations import STATES, ClaimHandle, LeaseOperations, QueueConnection
from ringlog.client.read.fetch_result import Source
from ringlog.client.read.pages import (
    STORED,
    Cursor,
    Filters,
    Page,
    Record,
    Start,
    TagFilter,
    Tombstone,
    tag_filter,
)
from ringlog.client.read.paging import read_page, resolve_start
from ringlog.client.read.read_ahead import ReadAhead
from ringlog.client.read.source import open_source
from ringlog.client.requests.results import Settled
from ringlog.clock import Clock
from ringlog.envelope.messages import (
    GroupCommit,
    GroupCommitted,
    GroupDelete,
    GroupInfo,
    GroupLeave,
    GroupLeft,
    GroupList,
    GroupListReply,
    GroupOpen,
    GroupSeek,
    GroupTakenOver,
    GroupTakeOver,
    LeaseStats,
    LeaseStatsReply,
    PendingReply,
    TopicInfo,
)
from ringlog.errors import GroupIncompatible, LeaseLost, RinglogError, UsageError
from ringlog.limits import BACKOFF_MAX_MS_DEFAULT, SEQ_MAX
from ringlog.link.futures import Steps, delegate
from ringlog.link.peer import MS
from ringlog.payload import V
from ringlog.settings import describe_differences, differences
from ringlog.tags import parse_match, request_form

MODES = {"queue": 1, "stream": 2}
_NAMES = {number: name for name, number in MODES.items()}
STREAM_SLICE_S = 2.0
"""Longest time in seconds that a stream's read waits before it checks whether the iteration has ended."""


class GroupLeaseOperations(LeaseOperations):
    """View of one member on one group."""

    def __init__(
        self, topic: str, name: str, mode: str, node: str, clock: Clock, *, start: Start = STORED,
        tags: TagFilter | None = None, max_in_flight: int | None = None,
        member_max_in_flight: int | None = None, min_idle_ms: int = 0, create: bool = True,
        max_deliveries: int | None = None, dead_letter: str | None = None, backoff_ms: int | None = None,
        backoff_max_ms: int | None = None, release_on_exit: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(topic, node, clock, release_on_exit=release_on_exit, min_idle_ms=min_idle_ms)
        if mode not in MODES:
            raise UsageError(f"mode must be queue or stream, got {repr(mode)[:64]}", found=mode)
        without_effect = {
            "max_in_flight": max_in_flight, "member_max_in_flight": member_max_in_flight,
            "min_idle_ms": min_idle_ms, "backoff_ms": backoff_ms,
        }  # fmt: skip
        for setting, value in without_effect.items():
            if value and mode != "queue":
                raise UsageError(f"{setting} has no effect on a group in mode {mode}")
        self.name: str = name
        self.mode: str = mode
        self.tags: str = parse_match(tags, "tags").text if tags is not None else ""
        self.group: str = f"{name}@{self.tags}" if self.tags else name
        match = tag_filter(tags)
        self.filters: Filters = Filters(tag=match)
        self._is_wanted = None if match is None else match.test
        """Predicate on an encoded tag; None = every record is wanted."""
        self._start = start
        named = {
            "max_in_flight": max_in_flight, "member_max_in_flight": member_max_in_flight,
            "max_deliveries": max_deliveries, "dead_letter": dead_letter, "backoff_ms": backoff_ms,
            "backoff_max_ms": backoff_max_ms,
        }  # fmt: skip
        self._named: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        """Settings that the program named. An existing group must have the same values."""
        self._create = create
        self._is_open = not create
        """True if the group is known to exist. With create=False it is assumed, and every request to a
        missing group fails."""

    def resolve_topic(self, connection: QueueConnection) -> Steps[TopicInfo]:
        """Return the topic, and create the group if necessary."""
        info: TopicInfo = yield connection.resolve(self.topic)
        if not self._is_open:
            yield from self.open(connection)
        return info

    def dead_letter(self, connection: QueueConnection) -> Steps[str]:
        """Return the name of the group's dead-letter topic. Raises InvalidRequest if it has none."""
        yield from self.resolve_topic(connection)
        reply: LeaseStatsReply = (
            yield connection.request_jobs(LeaseStats(self.topic, group=self.group))
        ).message
        return dead_letter_of_group(reply.info)

    def open(
        self, connection: QueueConnection, *, make: bool = True, node: str | None = None
    ) -> Steps[GroupInfo]:
        """Create the group if it does not exist. Raises GroupIncompatible.

        Args:
            connection: Connection to the engine.
            make: False fails with GroupNotFound instead of creating the group.
            node: Node that becomes a member. None = this one, "" = none.

        Returns:
            The group as the shard has it.
        """
        first = yield from self._first(connection, self._start)
        named = self._named
        dead_letter = named.get("dead_letter", "")
        if dead_letter:
            yield from delegate(require_no_dead_letter_cycle(connection, self.topic, dead_letter))
        opened = GroupOpen(
            self.topic, self.name, MODES[self.mode], self.tags, first, named.get("max_in_flight", 0),
            named.get("member_max_in_flight", 0), self.node if node is None else node, make,
            max_deliveries=named.get("max_deliveries", 0), dead_letter=dead_letter,
            backoff_ms=named.get("backoff_ms", 0),
            backoff_max_ms=named.get("backoff_max_ms", BACKOFF_MAX_MS_DEFAULT),
        )  # fmt: skip
        info: GroupInfo = (yield connection.request_jobs(opened)).message
        if not info.created:
            self._require_same(info)
        self._is_open = True
        return info

    def _require_same(self, info: GroupInfo) -> None:
        """Raise GroupIncompatible if the settings of the group differ from the settings that the program
        named."""
        existing = {
            "max_in_flight": info.pending_max, "member_max_in_flight": info.member_max,
            "max_deliveries": info.max_deliveries, "dead_letter": info.dead_letter,
            "backoff_ms": info.backoff_ms, "backoff_max_ms": info.backoff_max_ms,
        }  # fmt: skip
        found = differences(self._named, existing)
        if found:
            raise GroupIncompatible(
                f"group {self.group} of topic {self.topic} exists with other settings: "
                f"{describe_differences(found)}. "
                "A group keeps the settings of its creation: name the same settings, or delete it first",
                topic=self.topic, group=self.group, differences=found,
            )  # fmt: skip

    def _first(self, connection: QueueConnection, start: Start) -> Steps[int]:
        """Return the first seq at a start position."""
        if start is STORED:
            return 1
        source = open_source(connection, self.topic)
        try:
            cursor: Cursor = yield from delegate(resolve_start(connection, source, self.topic, start))
        finally:
            source.close()
        return min(cursor.seq + 1, SEQ_MAX)

    # -- records --------------------------------------------------------------------------------------

    def claim(
        self, connection: QueueConnection, most: int, wait_s: float, lease_ms: int | None, handle: ClaimHandle
    ) -> Steps[ClaimResult]:
        """Claim as LeaseOperations.claim does. Records that do not match the group's filter are skipped
        permanently."""
        yield from self.resolve_topic(connection)
        begun_ns = self._clock.monotonic_ns()
        while True:
            left_s = wait_s
            if wait_s != math.inf:
                left_s = max(wait_s - (self._clock.monotonic_ns() - begun_ns) / (1_000 * MS), 0.0)
            found = yield from super().claim(connection, most, left_s, lease_ms, handle)
            if self.filters.tag is None or not len(found):
                return found
            unmatched = found.retain_wanted(self._matches)
            if unmatched:
                yield from self.ack(connection, unmatched)
            if len(found):
                return found

    def ack_and_claim(
        self, connection: QueueConnection, done: Leases, most: int, lease_ms: int | None, handle: ClaimHandle
    ) -> Steps[ClaimResult | None]:
        """Ack and claim as LeaseOperations.ack_and_claim does. Returns None for a group with a filter, which
        may skip claimed records."""
        if self.filters.tag is not None:
            return None
        return (yield from super().ack_and_claim(connection, done, most, lease_ms, handle))

    def _matches(self, record: Record) -> bool:
        return self._is_wanted is None or self._is_wanted((record.tag or "").encode())

    def reject(self, connection: QueueConnection, leases: Sequence[Lease], reason: str) -> Steps[Settled]:
        """Move records to the group's dead-letter topic. Raises InvalidRequest if it has none."""
        yield from self.resolve_topic(connection)
        return (yield from super().reject(connection, leases, reason))

    # -- inspecting and moving ------------------------------------------------------------------------

    def leave(self, connection: QueueConnection) -> Steps[int]:
        """Release the records of this member for other members at once. Returns their number."""
        yield from self.resolve_topic(connection)
        reply: GroupLeft = (
            yield connection.request_jobs(GroupLeave(self.topic, self.group, self.node))
        ).message
        return reply.released

    def stats(self, connection: QueueConnection) -> Steps[Any]:
        """Return the state of the group as GroupStats."""
        yield from self.resolve_topic(connection)
        reply: LeaseStatsReply = (
            yield connection.request_jobs(LeaseStats(self.topic, group=self.group))
        ).message
        info = reply.info
        members = tuple([GroupMember(name, seen / 1_000, held) for name, seen, held in reply.members])
        return GroupStats(
            info.topic, info.group, _NAMES.get(info.mode, ""), info.cursor, info.floor, reply.head_seq,
            reply.undelivered, reply.in_flight, reply.delayed, reply.returned, reply.waiting, members,
            reply.holder, reply.is_holding, reply.exhausted,
            None if reply.oldest_ready_ms < 0 else reply.oldest_ready_ms, reply.wait_p99_ms,
        )  # fmt: skip

    def pending(
        self,
        connection: QueueConnection,
        node: str,
        idle_ms: int,
        min_deliveries: int,
        after: int,
        limit: int,
    ) -> Steps[list[PendingEntry]]:
        """Return entries of the pending list."""
        yield from self.resolve_topic(connection)
        entries: list[PendingEntry] = []
        has_more = True
        while has_more and len(entries) < limit:
            left = limit - len(entries)
            reply, has_more = yield from self._pending(connection, node, idle_ms, min_deliveries, after, left)
            entries += [_entry(row, reply) for row in reply.rows]
            after = entries[-1].last_seq if entries else after
        return entries

    def seek(self, connection: QueueConnection, start: Start) -> Steps[int]:
        """Move the group to a start position. Returns the first seq that it delivers from now on."""
        yield from self.resolve_topic(connection)
        if start is STORED:
            raise UsageError("start must be EARLIEST, LATEST, a seq, a Cursor or a datetime, got STORED")
        first = yield from self._first(connection, start)
        info: GroupInfo = (yield connection.request_jobs(GroupSeek(self.topic, self.group, first))).message
        return info.cursor

    def delete(self, connection: QueueConnection) -> Steps[bool]:
        """Delete the group. Returns False if it did not exist."""
        self._is_open = not self._create
        reply = yield connection.request_jobs(GroupDelete(self.topic, self.group))
        return bool(reply.message.deleted)


class GroupStreamReader:
    """Reader of a group in mode stream: its position, the processed records, and when to commit them."""

    def __init__(self, operations: GroupLeaseOperations, auto_commit_ms: int | None, clock: Clock) -> None:
        self._operations, self._clock = operations, clock
        self._every_ns = None if auto_commit_ms is None else auto_commit_ms * MS
        self._source: Source | None = None
        self._ahead = ReadAhead()
        self._token = 0
        self._cursor = Cursor(0, 0)
        self.delivered: int = 0
        """Highest seq up to which the program received every record."""
        self.processed: int = 0
        """Highest seq up to which the program requested the following record."""
        self.committed: int = 0
        self._committed_ns = 0

    def take_over(self, connection: QueueConnection) -> Steps[None]:
        """Become the reader of the group. The previous reader is fenced: its next commit raises LeaseLost."""
        operations = self._operations
        yield from operations.resolve_topic(connection)
        take = GroupTakeOver(operations.topic, operations.group, operations.node, new_call_number())
        reply: GroupTakenOver = (yield connection.request_jobs(take)).message
        self._token = reply.token
        self.processed = self.delivered = self.committed = reply.committed
        self._cursor = Cursor(reply.epoch, reply.committed)
        self._committed_ns = self._clock.monotonic_ns()

    def page(self, connection: QueueConnection) -> Steps[Page]:
        """Return the next records. Commits processed records before it waits for new ones."""
        page = yield from self._read(connection, 0.0)
        if not len(page) and page.tombstone is None and page.caught_up:
            self.processed = self.delivered = max(self.delivered, page.cursor.seq)
            if self._every_ns is not None:
                yield from self.try_commit(connection)
            page = yield from self._read(connection, STREAM_SLICE_S)
        return page

    def _read(self, connection: QueueConnection, wait_s: float) -> Steps[Page]:
        if self._source is None:
            self._source = open_source(connection, self._operations.topic, is_following=True)
        page: Page = yield from delegate(
            read_page(
                self._source, self._operations.topic, self._cursor, limit=self._ahead.limit, wait_s=wait_s,
                filters=self._operations.filters,
            )
        )  # fmt: skip
        self._cursor = page.cursor
        return page

    def items(self, page: Page[V] | None) -> Iterator[Record[V] | Tombstone]:
        """Iterate over the items of a page. The request of the next item marks the previous one as
        processed."""
        source = self._source
        if page is None or source is None:
            return
        if page.tombstone is not None:
            yield page.tombstone
        for record in self._ahead.records(page, source):
            self.delivered = record.seq
            yield record
            self.processed = record.seq
        if self._ahead.is_stale:
            self._cursor = Cursor(page.epoch, self._ahead.seq)
            return
        self.delivered = self.processed = max(self.processed, page.cursor.seq)

    @property
    def is_auto(self) -> bool:
        """True if processed records are committed automatically."""
        return self._every_ns is not None

    @property
    def is_due(self) -> bool:
        """True if it is time to commit."""
        if self._every_ns is None or self.processed <= self.committed:
            return False
        return self._clock.monotonic_ns() - self._committed_ns >= self._every_ns

    def commit(self, connection: QueueConnection, seq: int) -> Steps[None]:
        """Commit every record up to `seq`. Raises LeaseLost if another member reads the group, UsageError
        above `delivered`."""
        if seq > self.delivered:
            raise UsageError(
                f"seq must be <= {self.delivered}, the last delivered seq, got {seq}", seq=seq,
                delivered=self.delivered,
            )  # fmt: skip
        if seq <= self.committed:
            return
        operations = self._operations
        ask = GroupCommit(operations.topic, operations.group, self._token, seq, self.delivered + 1)
        reply: GroupCommitted = (yield connection.request_jobs(ask)).message
        if not reply.is_holder:
            raise LeaseLost(
                "another member reads the group now, or the group was moved by seek(): iterate again",
                topic=operations.topic, group=operations.group, committed=reply.committed,
            )  # fmt: skip
        self.committed = seq
        self._committed_ns = self._clock.monotonic_ns()

    def try_commit(self, connection: QueueConnection) -> Steps[None]:
        """Commit processed records; ignore retriable errors.

        The next commit covers them. If this program ends before, the group delivers these records again.
        """
        try:
            yield from self.commit(connection, self.processed)
        except RinglogError as e:
            if not e.retriable:
                raise

    def close(self) -> None:
        """Release the files."""
        if self._source is not None:
            self._source.close()
            self._source = None


def list_groups(session: Session, topic: str) -> Steps[tuple[GroupSummary, ...]]:
    """Return all groups of a topic, by name."""
    reply: GroupListReply = yield from session.topics.ask_resolved_topic(topic, lambda _: GroupList(topic))
    return tuple(map(_summary, reply.groups))


def _summary(info: GroupInfo) -> GroupSummary:
    tags = request_form(info.tags)
    return GroupSummary(
        info.topic, info.group, info.name, _NAMES.get(info.mode, ""), tuple(tags) if tags else None,
        info.cursor, info.floor, info.pending, info.max_deliveries, info.dead_letter or None,
    )  # fmt: skip


def _entry(row: tuple[int, ...], reply: PendingReply) -> PendingEntry:
    first, count, state, deliveries, first_given, last_given, until, node_index, _ = row
    return PendingEntry(
        first, first + count - 1, STATES.get(state, ""), reply.nodes[node_index], deliveries,
        first_given / 1_000, last_given / 1_000, until / 1_000, max(reply.now_ms - last_given, 0),
    )  # fmt: skip
