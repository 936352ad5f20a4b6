"""Routers into topics of this shard: creation, deletion, listing, and their forward requests. Pure.

A forward request (message Route) contains a range of records of one source, each frame once. Its rows state
which routers copy which frame. The shard stages the applied copies as routed frames. A routed frame contains
the copies and the new cursors of their routers, so both are in the commit batch or neither is (F1). If
nothing is to be copied, only the cursor is logged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringlog.actors.wal_shard.commit.admission import HAVE_DELIVERY_ATTRIBUTES, Admission, update_next_expiry
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch, RoutedCopy, RoutedPart
from ringlog.actors.wal_shard.commit.control_records import (
    RangeLost,
    RouterCreated,
    RouterMoved,
    RouterRemoved,
    frame_of,
)
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, TopicNotFound
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.measure import FORMAT_FAULTS, measure
from ringlog.frame.routed_frame import ROW_WORDS, CopyRow, routed_bytes, routed_content_of, routed_frame
from ringlog.limits import FRAME_BYTES_MAX, LIST_PAGE_MAX, ROUTE_ROWS_MAX, ROUTER_HOPS_MAX, SEQ_MAX
from ringlog.topic.config import DISCARD_REJECT
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.routers import Router, RouterPassOutcome, check_router_facts
from ringlog.topic.state import ShardTopic, with_range
from ringlog.types import Durability

_CONTROL_BYTES = 120
"""Maximum bytes of a control frame with a router's cursor, or with lost seqs."""


def added_bytes(message: m.Message) -> int:
    """Return the maximum log bytes of a forward request in addition to its attachment."""
    rows = len(message.rows) if isinstance(message, m.Route) else 0
    return rows * (8 * ROW_WORDS + 2 * _CONTROL_BYTES)


class _RoutedFrames(NamedTuple):
    """The frames of a forward request, and for each frame the facts that its copies need."""

    buffer: bytearray
    batch: FrameBatch
    counts: list[int]
    sizes: list[int]
    """Accounted bytes of each frame."""
    expires: list[int]
    """Not 0 if records of the frame have their own expiry."""
    marked: list[int]
    """Not 0 if records of the frame have delivery attributes (`not_before` or priority)."""


class ShardRouters:
    """The routers into topics of one shard, and the handlers of their forward requests."""

    def __init__(
        self, directory: TopicDirectory, admission: Admission,
        invalidate_readers: Callable[[ShardTopic, CommitBatch], None],
    ) -> None:  # fmt: skip
        """Create the handlers.

        `invalidate_readers` makes readers of a topic query the shard again after publication.
        """
        self._directory = directory
        self._admission = admission
        self._invalidate_readers = invalidate_readers
        self._by_number: dict[int, ShardTopic] = {}
        """Router number -> destination topic. May contain deleted topics, which `_find` filters out."""
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message]
        ] = {
            m.RouterPut: self._put,
            m.RouterDrop: self._drop,
            m.ListShardRouters: self._list,
            m.Route: self._route,
        }

    def finish_recovery(self) -> None:
        """Register the routers of the recovered topics."""
        for topic in self._directory.by_id.values():
            for number in topic.routers:
                self._by_number[number] = topic

    def forget(self, topic: ShardTopic) -> None:
        """Drop the routers into a deleted topic (F3)."""
        for number in topic.routers:
            self._by_number.pop(number, None)

    def _find(self, number: int) -> tuple[ShardTopic, Router] | None:
        topic = self._by_number.get(number)
        if topic is None or self._directory.by_id.get(topic.topic_id) is not topic:
            return None
        return topic, topic.routers[number]

    # -- routers --------------------------------------------------------------------------------------

    def _put(
        self, message: m.RouterPut, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        facts = message.facts
        check_router_facts(facts.name, facts.source, facts.dest, facts.flags, facts.filter)
        topic = self._directory.by_id.get(facts.dest_id)
        if topic is None:
            raise TopicNotFound("no such topic", topic=facts.dest)
        # If the requesting process dies and retries, the same router arrives under two numbers. Keep the
        # first one.
        named = [each for each in topic.routers.values() if each.name == facts.name]
        known = topic.routers.get(facts.router) or (named[0] if named else None)
        if known is not None and (known.flags, known.filter) == (facts.flags, facts.filter):
            return facts_of(topic, known)
        router = known or Router(
            facts.router, facts.name, facts.source, facts.source_id, facts.source_epoch, 0, "", facts.cursor
        )
        router.flags, router.filter = facts.flags, facts.filter
        if not topic.routers:
            self._invalidate_readers(topic, batch)  # Readers must learn that a router feeds this topic.
        topic.routers = {**topic.routers, router.number: router}
        self._by_number[router.number] = topic
        batch.add_control(created_frame(topic, router), topic)
        return facts_of(topic, router)

    def _drop(
        self, message: m.RouterDrop, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        found = self._find(message.router)
        if found is None:
            return m.RouterDropped(message.router, False)
        topic, router = found
        topic.routers = {n: each for n, each in topic.routers.items() if n != router.number}
        self._by_number.pop(router.number)
        if not topic.routers:
            self._invalidate_readers(topic, batch)
        batch.add_control(frame_of(RouterRemoved(router.number), topic.topic_id, topic.epoch), topic)
        return m.RouterDropped(router.number, True)

    def _list(
        self, message: m.ListShardRouters, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        size = min(max(message.page_size, 1), LIST_PAGE_MAX)
        numbers = sorted([number for number in self._by_number if number > message.after])
        found = [pair for number in numbers[:size] if (pair := self._find(number)) is not None]
        return m.ShardRoutersReply([facts_of(*pair) for pair in found], len(numbers) > size)

    # -- forward requests -----------------------------------------------------------------------------

    def _route(self, message: m.Route, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        """Apply the rows whose router is at the row's start (F2), in the order of their frames."""
        sent = _frames_of(message, event.attachment)
        replies = [m.RoutedRow(RouterPassOutcome.GONE)] * len(message.rows)
        order = sorted(range(len(message.rows)), key=lambda n: message.rows[n].frame)
        copies: dict[tuple[int, bool], list[tuple[CopyRow, RoutedCopy]]] = {}
        for n in order:
            row = message.rows[n]
            found = self._find(row.router)
            if found is None or found[0].topic_id != row.dest_id:
                continue
            topic, router = found
            outcome = router.outcome_of(row.start, row.stop)
            if outcome is not None:
                replies[n] = _row(outcome, topic, router)
                continue
            if row.frame < 0:
                replies[n] = self._advance_without_copy(topic, router, row, batch)
                continue
            records, size = sent.counts[row.frame], sent.sizes[row.frame]
            refused = self._refused(topic, router, records, size)
            if refused is not None:
                replies[n] = refused
                continue
            copy = self._stage(topic, router, row, records, size, now_us)
            if sent.marked[row.frame]:
                topic.attributes_to = topic.next_seq - 1
            self._note_retention(topic, sent, row.frame, copy.commit_ts)
            is_volatile = topic.config.durability == Durability.EPHEMERAL
            if is_volatile:
                # The copies do not survive this process, but the cursor does: records are not forwarded
                # twice.
                batch.add_control(cursor_frame(topic, router, records), topic, sync=False)
            copies.setdefault((row.frame, is_volatile), []).append(
                (copy, RoutedCopy(topic, copy.base_seq, copy.base_seq + records - 1, size))
            )
            replies[n] = _row(RouterPassOutcome.DONE, topic, router)
        for (number, is_volatile), made in copies.items():
            carried = routed_content_of(sent.buffer, sent.batch, number, hops=message.hops)
            frame = routed_frame(carried, [copy for copy, _ in made])
            batch.add_routed(RoutedPart(frame, [place for _, place in made], is_volatile))
        return m.Routed(replies)

    def _advance_without_copy(
        self, topic: ShardTopic, router: Router, row: m.RouteRow, batch: CommitBatch
    ) -> m.RoutedRow:
        """Advance a router without copies.

        Report records that the source lost, with one seq for each of them.
        """
        if row.lost:
            first, last = topic.next_seq, topic.next_seq + row.lost - 1
            if last > SEQ_MAX:
                return _row(RouterPassOutcome.CLOSED, topic, router)
            topic.next_seq = last + 1
            mark_trimmed(topic, first, last)
            lost = RangeLost(first, last, True)
            batch.add_control(frame_of(lost, topic.topic_id, topic.epoch), topic)
            self._invalidate_readers(topic, batch)
        router.advance(row.stop, 0)
        batch.add_control(cursor_frame(topic, router, 0), topic, sync=bool(row.lost))
        return _row(RouterPassOutcome.DONE, topic, router)

    def _refused(self, topic: ShardTopic, router: Router, records: int, size: int) -> m.RoutedRow | None:
        """Return a refusal, with the free room, if these copies do not fit into the topic; otherwise None."""
        config = topic.config
        if topic.next_seq + records - 1 > SEQ_MAX:
            return _row(RouterPassOutcome.CLOSED, topic, router)
        if config.durability == Durability.EPHEMERAL and self._admission.is_volatile_closed:
            return _row(RouterPassOutcome.CLOSED, topic, router)
        if config.discard != DISCARD_REJECT:
            free = self._admission.total.room_for(size)
            return None if free >= size else _row(RouterPassOutcome.FULL, topic, router, records, free)
        room = (
            config.cap_records - topic.staged_count if config.cap_records else records,
            config.cap_bytes - topic.staged_bytes if config.cap_bytes else size,
        )
        if records <= room[0] and size <= room[1]:
            free = self._admission.total.room_for(size)
            if free >= size:
                return None
            room = records, free
        return _row(RouterPassOutcome.FULL, topic, router, max(room[0], 0), max(room[1], 0))

    def _stage(
        self, topic: ShardTopic, router: Router, row: m.RouteRow, records: int, size: int, now_us: int
    ) -> CopyRow:
        base, stamp = topic.next_seq, max(now_us, topic.last_ts)
        durability = int(topic.config.durability)
        topic.next_seq = base + records
        topic.last_ts = stamp
        topic.staged_count += records
        topic.staged_bytes += size
        self._admission.total.add(size)
        topic.is_reserving |= durability < Durability.FSYNC
        router.advance(row.stop, records)
        return CopyRow(topic.topic_id, base, stamp, topic.epoch, router.number, row.stop, durability)

    def _note_retention(self, topic: ShardTopic, sent: _RoutedFrames, frame: int, stamp: int) -> None:
        config = topic.config
        if config.ttl_ms or config.cap_records or config.cap_bytes or sent.expires[frame]:
            self._admission.needs_retention[topic.topic_id] = topic
            if update_next_expiry(topic, sent.buffer, sent.batch.take(slice(frame, frame + 1)), stamp):
                self._admission.earlier_expiry.append(topic)


def mark_trimmed(topic: ShardTopic, first: int, last: int) -> None:
    """Mark these seqs as representing records that the source lost before they were forwarded."""
    topic.lost = with_range(topic.lost, first, last)
    topic.trimmed = with_range(topic.trimmed, first, last)


def replay_router(topic: ShardTopic, body: RouterCreated | RouterRemoved | RouterMoved) -> None:
    """Apply a logged change of a router, unless the topic's state includes it already."""
    router = topic.routers.get(body.router)
    if isinstance(body, RouterRemoved):
        topic.routers = {n: each for n, each in topic.routers.items() if n != body.router}
    elif isinstance(body, RouterMoved):
        if router is not None:
            router.advance(body.cursor, body.copies)
    elif router is not None:
        router.flags, router.filter = body.flags, body.filter
    else:
        made = Router(
            body.router, body.name, body.source, body.source_id, body.source_epoch, body.flags, body.filter,
            body.cursor,
        )  # fmt: skip
        topic.routers = {**topic.routers, made.number: made}


def created_frame(topic: ShardTopic, router: Router) -> bytearray:
    """Build the frame that creates a router or changes its flags and filter."""
    body = RouterCreated(
        router.number, router.name, router.source, router.source_id, router.source_epoch, router.flags,
        router.filter, router.cursor, topic.next_seq - 1,
    )  # fmt: skip
    return frame_of(body, topic.topic_id, topic.epoch)


def facts_of(topic: ShardTopic, router: Router) -> m.RouterFacts:
    """Return the description of a router for replies."""
    return m.RouterFacts(
        router.number, router.name, router.source, router.source_id, router.source_epoch, topic.name,
        topic.topic_id, router.flags, router.filter, router.cursor, router.forwarded,
        int(topic.config.durability),
    )  # fmt: skip


def _row(
    outcome: RouterPassOutcome, topic: ShardTopic, router: Router, records: int = 0, size: int = 0
) -> m.RoutedRow:
    return m.RoutedRow(outcome, router.cursor, int(topic.config.durability), records, size)


def cursor_frame(topic: ShardTopic, router: Router, copies: int) -> bytearray:
    return frame_of(RouterMoved(router.number, router.cursor, copies), topic.topic_id, topic.epoch)


def _frames_of(message: m.Route, data: bytearray | None) -> _RoutedFrames:
    """Decode and verify the attached frames. Raise InvalidRequest if any of them is invalid.

    The sender is a process of the engine, so a partly invalid request is refused as a whole."""
    if len(data or b"") & 7:
        raise InvalidRequest("attachment must be a multiple of 8 bytes", bytes=len(data or b""))
    batch = frames.scan(data or b"")
    rows = len(message.rows)
    is_announced = len(batch) == message.frames and batch.stop == len(data or b"")
    if not is_announced or rows > ROUTE_ROWS_MAX or not 0 < message.hops <= ROUTER_HOPS_MAX:
        raise InvalidRequest(
            "forward request does not match its announced frames, rows or hops", frames=len(batch),
            announced=message.frames, rows=rows, max=ROUTE_ROWS_MAX, hops=message.hops,
        )  # fmt: skip
    for row in message.rows:
        is_copy = 0 <= row.frame < len(batch) and not row.lost
        if not (is_copy or (row.frame == -1 and row.lost >= 0)) or not 0 <= row.start < row.stop:
            raise InvalidRequest("forward request has an invalid row", router=row.router, frame=row.frame)
    measures = measure(data or b"", batch)
    wrong = (
        ~frames.is_of_type(batch.words, layout.FrameType.APPEND)
        | ((frames.columns_of(batch.words) & ~np.uint64(layout.PRODUCER_COLUMNS)) != 0)
        | (frames.body_hashes(data or b"", batch) != batch.words[:, layout.W_BODY_XXH3])
        | np.isin(measures.faults, list(FORMAT_FAULTS))
    )
    largest = int(batch.total_bytes.max()) if len(batch) else 0
    if wrong.any() or routed_bytes(rows, largest) > FRAME_BYTES_MAX:
        raise InvalidRequest(
            "forward request has an invalid or too large frame", largest=largest, max=FRAME_BYTES_MAX
        )
    expires = frames.columns_of(batch.words) >> np.uint64(layout.Column.EXPIRES_AT) & np.uint64(1)
    return _RoutedFrames(
        data or bytearray(), batch, frames.counts_of(batch.words).tolist(), measures.accounted.tolist(),
        expires.tolist(), (batch.words[:, layout.W_HEAD] & np.uint64(HAVE_DELIVERY_ATTRIBUTES)).tolist(),
    )  # fmt: skip
