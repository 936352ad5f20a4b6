"""A topic read from the engine's files, on its host: the shard says where, the board how far."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from ringlog.board.topics import TOPIC_LIVE, TopicFacts
from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.fetch_result import CachedFrames, FetchResult, RecordCheck
from ringlog.client.read.pages import Cursor, Page
from ringlog.client.read.read_ahead import LocalRecordCheck
from ringlog.client.read.record_batches import FrameRecordBatch, visible_record_batches
from ringlog.client.watches.shared_reads import PageLimits, SharedFrame, SharedPage
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle
from ringlog.clock import Clock, SystemClock
from ringlog.descriptors import READ_DESCRIPTORS, can_open_descriptors, descriptor_limit_message
from ringlog.envelope.messages import ColdRead, Located
from ringlog.errors import CorruptData, DiskError, NotReady, StaleEpoch
from ringlog.frame.view import FrameView
from ringlog.limits import EXTENTS_PER_LOCATE_MAX, READ_BYTES_MAX
from ringlog.link.delivery import LocationHint
from ringlog.link.futures import Steps
from ringlog.storage.disk import Disk, RealDisk
from ringlog.storage.reader import (
    FIRST_WINDOW_BYTES,
    VOLATILE_PREFIX,
    FrameRun,
    LogHighWatermark,
    Pause,
    TopicReader,
)
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.storage.segment_cache import SegmentCache
from ringlog.storage.visibility import NO_SEQS, VisibilityFilter
from ringlog.topic.tombstone import Floors, ReadPlan, plan_read

_MS = 1_000_000
_LOOKS_MAX = 40
"""Looks in a row that find neither records nor the end; then the caller gets what there is."""
_TRIES_PER_LOCATE = 4
_TRIES_MAX = 200
"""Answers in a row that lead nowhere, all but the first few _LOOK_AGAIN_S apart; then the caller is told."""
_WAKES_MAX = 64
"""Publications that are slept through between two of them."""
SCAN_POSITIONS_MIN = 100_000
"""Positions without a record that are passed over before the caller gets a turn (DR-14)."""
_LOOK_AGAIN_S = 0.05
"""Of who is the only one to want a frame."""
_WAIT_SLICE_S = 5.0
"""Longest single wait for a publication: how soon a restarted engine is noticed without a bell."""


class LocalSource:
    """Reads the WAL files itself: the shard says where to begin, the board how far."""

    def __init__(
        self, connection: Connection, topic: str, *, is_mapped: bool = False, is_settling: bool = False,
        checks_bodies: bool = True, is_following: bool = False, clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:  # fmt: skip
        """`is_mapped`: map files instead of reading them (expendable processes only). `is_settling`,
        `is_following`: see open_source; `checks_bodies`: see TopicReader."""
        self._is_following = is_following
        self._keep_alive: KeepAliveHandle | None = None
        self._is_settling = is_settling
        self._connection = connection
        self._topic = topic
        self._is_mapped = is_mapped
        self._checks_bodies = checks_bodies
        self._clock = clock or SystemClock()
        self._disk: Disk = disk or RealDisk()
        self._located: Located | None = None
        self._located_for: Cursor | None = None
        self._located_after = 0
        """`_located` leads to every record behind this position."""
        self._wants_all = False
        """Somebody goes back and forth: the next answer is to lead to all of the topic."""
        self._located_us = 0
        self._generation = -1
        self._reader: TopicReader | None = None
        self._shelf: SegmentCache | None = None
        self._ledger: StoredRecordIndex | None = None
        self._cached_frames = CachedFrames()
        self._pending_advance: LocationHint | None = None
        """The last frame that others have read for us, which our files are not told of yet."""

    def close(self) -> None:
        """Let go of files; what comes next is located anew."""
        if self._reader is not None:
            self._reader.close()
        if self._shelf is not None:
            self._shelf.close()
        if self._ledger is not None:
            self._ledger.close()
        if self._keep_alive is not None:
            self._keep_alive.end()
        self._keep_alive = None
        self._reader = self._located = self._located_for = self._shelf = self._ledger = (
            self._pending_advance
        ) = None
        self._cached_frames.clear()

    def keep_topic_alive(self, epoch: int = 0) -> None:
        """See Source.keep_topic_alive."""
        use = self._keep_alive
        if self._is_following and (use is None or epoch not in {0, use.epoch}):
            self._keep_alive = self._connection.keep_topic_alive(self._topic, epoch)
            if use is not None:
                use.end()

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[FetchResult]:
        """See Source.fetch."""
        started_ns = self._clock.monotonic_ns()
        tries = passed = 0
        # Who waits for records gets copies when they come.
        may_settle = self._is_settling and wait_s <= 0
        # Judged as of one moment: what expired by then is below a floor once the shard was asked later than
        # that, so that nothing is passed over without its announcement.
        now_us = self._clock.now_us()
        while True:
            if self._generation != self._connection.generation:
                self.close()
            located = yield from self._locate(cursor)
            seen = self._connection.marks(located.shard)
            facts = self._connection.facts(located)
            if facts is None or facts.state != TOPIC_LIVE or self._is_stale(located, facts, now_us):
                # Another life, or none, or records have gone: only the shard knows.
                tries = yield from self._try_again(tries, located.shard)
                self._invalidate_location()
                continue
            if facts.head_seq < cursor.seq and self._located_for != cursor:
                # Another life of the topic, or a shard that shows less for a time: it knows.
                tries = yield from self._try_again(tries, located.shard)
                self._invalidate_location()
                continue
            if may_settle and located.is_fed and facts.head_seq - cursor.seq <= limit:
                may_settle = False
                yield self._connection.catch_up(located.topic, located.topic_id)
                now_us = self._clock.now_us()
                continue
            plan = self._plan(cursor, located, facts)
            pause = self._read(plan, located, limit, bytes_max)
            portion = self._portion(plan, located, facts, now_us)
            if portion.gap is not None or _shows_anything(portion):
                return portion
            if pause is Pause.COLD:
                yield from self._fetch_cold(located)
                now_us = self._clock.now_us()
                continue
            if portion.examined > plan.after and passed < SCAN_POSITIONS_MIN and portion.examined < plan.stop:
                # All of it has gone; what follows may not have.
                passed += portion.examined - plan.after
                cursor = Cursor(located.epoch, portion.examined)
                if pause is Pause.MOVED:
                    self._invalidate_location()
                continue
            if pause is Pause.MOVED:
                tries = yield from self._try_again(tries, located.shard)
                self._invalidate_location()
                continue
            if pause is Pause.UNFINISHED:
                continue
            left_s = wait_s - (self._clock.monotonic_ns() - started_ns) / 1e9
            if portion.examined < plan.stop:
                if portion.examined > plan.after:
                    return portion  # All of it has gone: the caller goes on behind it (DR-14).
                # Published a moment ago, or its shard is restarting: the mark is about to move.
                tries += 1
                if tries >= _LOOKS_MAX:
                    return portion
                if tries % _TRIES_PER_LOCATE == 0:
                    self._invalidate_location()
                left_s = max(left_s, _LOOK_AGAIN_S)
                yield self._connection.published_since(located.shard, seen, min(left_s, _LOOK_AGAIN_S))
                now_us = self._clock.now_us()
                continue
            if left_s <= 0 or plan.stop < facts.head_seq:
                return portion
            tries = 0
            # What was passed over need not be looked at again.
            cursor = Cursor(located.epoch, max(portion.examined, cursor.seq))
            yield self._connection.published_since(located.shard, seen, min(left_s, _WAIT_SLICE_S))
            now_us = self._clock.now_us()

    def read_leased(self, first: int, last: int, epoch: int, found: list[Any]) -> Steps[None]:
        """Add to `found` the records first..last, which the caller knows to be alive, since they are leased
        to it: nobody is asked whether something was removed since. Fewer when some went nevertheless.

        Raises StaleEpoch when the topic began another life; else as fetch. What lies before damage is found.
        """
        after, tries = first - 1, 0
        while after < last:
            if self._generation != self._connection.generation:
                self.close()
            located = yield from self._locate(Cursor(epoch, after))
            if located.epoch < epoch:
                # What we know is of the life before: the topic was deleted and made anew under us.
                self.close()
                tries = yield from self._try_again(tries, located.shard)
                continue
            if located.epoch != epoch:
                self._invalidate_location()
                raise StaleEpoch("the topic began another life", topic=self._topic, epoch=located.epoch)
            facts = self._connection.facts(located)
            head = max(last, facts.head_seq if facts is not None else 0)
            pause = self._read(ReadPlan(None, after, head), located, last - after, READ_BYTES_MAX)
            reached = min(self._cached_frames.stop, last)
            for run in self._cached_frames.runs:
                found += visible_record_batches(run, after, reached, NO_SEQS, self._topic)
                after = max(after, min(run.last_seq, reached))
            after = max(after, reached)
            if after >= last or pause in {None, Pause.UNFINISHED}:
                continue
            if pause is Pause.COLD:
                yield from self._fetch_cold(located)
                continue
            tries = yield from self._try_again(tries, located.shard)
            if pause is Pause.MOVED or tries % _TRIES_PER_LOCATE == 0:
                self._invalidate_location()

    def read_at_hint(
        self, cursor: Cursor, hint: LocationHint, *, is_head: bool
    ) -> tuple[FrameView, TopicFacts] | None:
        """The records behind `cursor`, if they are the one frame at this place and nothing else is to be said
        of the topic, `is_head`: not even that it has more; else None, and `fetch` says what there is.

        Raises DiskError."""
        self._apply_pending_advance()
        located, reader = self._located, self._reader
        if located is None or reader is None or self._generation != self._connection.generation:
            return None
        is_plain = not (located.ttl_us or located.recreated) and cursor.epoch == located.epoch
        if not is_plain or reader.cursor != cursor.seq or hint.first_seq != cursor.seq + 1:
            return None
        facts = self._connection.facts(located)
        if facts is None or facts.version > located.version or facts.due_us:
            return None
        behind = facts.head_seq - hint.last_seq
        if behind < 0 or (behind and is_head) or facts.earliest_seq > hint.first_seq:
            return None
        if not self._is_untouched(located, reader, hint.first_seq, hint.last_seq):
            return None
        view = reader.read_at_hint(*hint)
        if view is None:
            return None
        self._cached_frames.clear()
        return view, facts

    @property
    def slot_sequence(self) -> int:
        """Of the topic's slot now; -1 when what is read may not be what others would read (`reading`)."""
        located = self._located
        if located is None or located.ttl_us or located.recreated:
            return -1
        return self._connection.topic_sequence(located)

    @property
    def never_expires(self) -> bool:
        """Nothing of the topic will expire by itself."""
        facts = None if self._located is None else self._connection.facts(self._located)
        return facts is not None and not facts.due_us and not facts.ttl_us

    def make_shared_frame(
        self, epoch: int, sequence: int, hint: LocationHint, view: FrameView, earliest_seq: int
    ) -> SharedFrame:
        """That this frame was what there was at `hint`, as of `sequence`."""
        assert self._located is not None
        pieces, cursor = (FrameRecordBatch(view),), Cursor(epoch, hint.last_seq)
        return SharedFrame(
            self._located, self._generation, sequence, epoch, hint, pieces, earliest_seq, cursor
        )

    def is_frame_current(self, reading: SharedFrame) -> bool:
        """Nothing has happened to the topic since: what was read is what would be read now."""
        connection = self._connection
        return (
            reading.generation == connection.generation
            and connection.topic_sequence(reading.located) == reading.sequence
        )

    def make_shared_page(self, page: Page, limits: PageLimits) -> SharedPage | None:
        """What this page holds, for others; None when they might read something else there, since something
        expires by itself, or is kept in memory only."""
        located, reader = self._located, self._reader
        if located is None or reader is None or self._generation != self._connection.generation:
            return None
        is_plain = page.tombstone is None and page.batches and page.epoch == located.epoch
        if not is_plain or located.ttl_us or located.recreated or not self.never_expires:
            return None
        if any(extent.path.startswith(VOLATILE_PREFIX) for extent in located.extents):
            return None
        # A page of several looks may hold what was removed between them; `located` is the last look's.
        first, last = page.batches[0].seq_at(0), page.cursor.seq
        if first < located.earliest_seq or not self._is_untouched(located, reader, first, last):
            return None
        pieces = tuple(piece.read_only() for piece in page.batches)
        file_id, offset = self._place_behind(page.cursor.seq)
        return SharedPage(
            located, self._generation, page.epoch, limits, pieces, page.cursor, file_id, offset,
        )  # fmt: skip

    def _place_behind(self, seq: int) -> tuple[int, int]:
        """File of the log and offset of the frame that holds the record behind `seq`; (0, 0) = not known."""
        reader, kept = self._reader, self._cached_frames
        if reader is None:
            return 0, 0
        for run in kept.runs:
            if run.last_seq > seq:
                first = run.after(seq)
                return reader.log_file_id(run.path), run.origin + int(first.batch.stored_offsets[0])
        return reader.log_position if reader.cursor == seq else (0, 0)

    def facts_if_current(self, passage: SharedPage) -> TopicFacts | None:
        """How the topic is now, if what was read is what would be read now, as far as it goes."""
        connection, located = self._connection, passage.located
        if passage.generation != connection.generation:
            return None
        facts = connection.facts(located)
        if facts is None or facts.state != TOPIC_LIVE or facts.version > located.version:
            return None
        never_expires = not facts.due_us and not facts.ttl_us
        return facts if never_expires and facts.head_seq >= passage.cursor.seq else None

    def advance_past_page(self, passage: SharedPage) -> None:
        """Go on behind what somebody else has read."""
        self._cached_frames.clear()
        self._pending_advance = None
        if self._reader is not None:
            self._reader.advance_past(passage.cursor.seq, passage.file_id, passage.offset)

    def advance_past(self, hint: LocationHint) -> None:
        """Go on behind a frame that somebody else has read. With hundreds of watches all but one do nothing
        else for hours, so the files hear of the last one only, once they are asked for something."""
        self._pending_advance = hint

    def _apply_pending_advance(self) -> None:
        """Before files are used: behind what was passed over."""
        passed, self._pending_advance = self._pending_advance, None
        if passed is not None:
            self._cached_frames.clear()
            if self._reader is not None:
                self._reader.advance_past(passed.last_seq, passed.file_id, passed.stop)

    @staticmethod
    def _is_untouched(located: Located, reader: TopicReader, first_seq: int, last_seq: int) -> bool:
        """Nothing of these positions was lost or deleted, as far as `located` was told."""
        if located.lost and located.lost[-1] >= first_seq:
            return False
        if located.deleted_to and last_seq > located.deleted_to:
            return False
        return reader.deleted is None or not reader.deleted.range_cardinality(first_seq, last_seq + 1)

    @property
    def is_current(self) -> bool:
        """Nothing was removed and nothing has expired since the last portion was given."""
        located = self._located
        facts = None if located is None else self._connection.facts(located)
        if located is None or facts is None:
            return False
        return not self._is_stale(located, facts, self._clock.now_us())

    def record_check(self, version: int) -> RecordCheck:
        """See Source.record_check."""
        return LocalRecordCheck(self._connection, self._located, self._generation, version, self._clock)

    def seek_time(self, ts_us: int) -> Steps[Cursor]:
        """See Source.seek_time: from the indexes of segments, and the stamps in the log."""
        after = tries = 0
        while True:
            located = yield from self._locate_all(after)
            if self._ledger is None:
                self._ledger = StoredRecordIndex(
                    self._disk, self._connection.data_dir, self._connection.shm_dir,
                    self._marks_of(located.shard),
                )  # fmt: skip
            try:
                found = self._ledger.seek_time(located, ts_us)
            except DiskError as e:
                if e.errno != errno.ENOENT:
                    raise
                # A file of the answer is gone: the next one says where the records lie now.
                tries = yield from self._try_again(tries, located.shard)
                self._invalidate_location()
                continue
            if len(located.extents) < EXTENTS_PER_LOCATE_MAX or found <= after:
                return Cursor(located.epoch, max(found, after))
            after = found  # Perhaps only the end of a list that was cut short.
            self._invalidate_location()

    def _locate_all(self, after: int) -> Steps[Located]:
        """An answer that leads to everything behind `after`, as of now; the one at hand if it still does."""
        located = self._located
        if self._generation != self._connection.generation:
            self.close()
        elif located is not None:
            facts = self._connection.facts(located)
            is_old = facts is None or self._is_stale(located, facts, self._clock.now_us())
            if is_old or self._located_after > after or not self._is_last_file_known(located):
                self._invalidate_location()
        self._wants_all = not after
        return (yield from self._locate(Cursor(0, after)))

    def _is_last_file_known(self, located: Located) -> bool:
        """Has the shard not begun another file of its log since?"""
        file_id, _ = self._connection.marks(located.shard).wal
        return any(extent.file_id == file_id and not extent.segment for extent in located.extents)

    def _is_stale(self, located: Located, facts: TopicFacts, now_us: int) -> bool:
        """Records were removed since the shard was asked, or are due to expire (X-10)."""
        if facts.version > located.version:
            return True
        return 0 < facts.due_us <= now_us and self._located_us < facts.due_us

    def _invalidate_location(self) -> None:
        # The reader stays: it remembers that it saw a hole, which only a second sight makes damage.
        self._located = self._located_for = None
        self._cached_frames.clear()

    def _try_again(self, tries: int, shard: int) -> Steps[int]:
        """Count an answer that led nowhere; before all but the first few there is a pause.

        Files move while they are read, and the next answer says where to. That it does not may be because a
        process that moves them, or the shard, is being replaced: for the caller no more than a pause.
        """
        if tries >= _TRIES_PER_LOCATE and not can_open_descriptors(READ_DESCRIPTORS):
            raise NotReady(descriptor_limit_message(), topic=self._topic, errno=errno.EMFILE)
        if tries >= _TRIES_MAX:
            raise NotReady("the topic keeps changing while it is read", topic=self._topic)
        if tries >= _TRIES_PER_LOCATE:
            for _ in range(_WAKES_MAX):
                marks = self._connection.marks(shard)
                if not (yield self._connection.published_since(shard, marks, _LOOK_AGAIN_S)):
                    break
        return tries + 1

    def _locate(self, cursor: Cursor) -> Steps[Located]:
        if self._located is None:
            self._generation = self._connection.generation
            self._located_us = self._clock.now_us()
            after = 0 if self._wants_all else cursor.seq
            self._located = located = yield self._connection.locate(self._topic, after, cursor.epoch)
            if len(located.extents) >= EXTENTS_PER_LOCATE_MAX:
                self._wants_all = False  # That is more than one answer holds.
            self._located_for, self._located_after = cursor, after
            self.keep_topic_alive(located.epoch)
        return self._located

    def _plan(self, cursor: Cursor, located: Located, facts: TopicFacts) -> ReadPlan:
        # Either may be the younger one; floors never fall.
        floors = Floors(
            facts.head_seq,
            min(max(facts.earliest_seq, located.earliest_seq), facts.head_seq + 1),
            max(facts.cap_floor, located.cap_floor),
            max(facts.ttl_floor, located.ttl_floor),
            max(facts.trim_floor, located.trim_floor),
        )
        is_recreated = cursor.epoch not in {0, located.epoch} or (
            located.recreated and self._located_for == cursor
        )
        return plan_read(
            cursor.seq, floors, located.lost, trimmed=located.trimmed, recreated=is_recreated,
            is_behind=located.is_behind,
        )  # fmt: skip

    def _read(self, plan: ReadPlan, located: Located, limit: int, bytes_max: int) -> Pause | None:
        """Make `kept` cover what follows `plan.after`; return why it stopped, None for enough."""
        self._apply_pending_advance()
        kept = self._cached_frames
        if kept.covers(plan.after, located.epoch):
            kept.runs_after(plan.after)
            return None
        reader = self._reader
        if reader is None:
            self._shelf = SegmentCache(self._disk, self._connection.data_dir)
            reader = self._reader = self._open_reader(located, plan.after)
        elif reader.located is not located:
            reader.relocate(located, plan.after)
        elif plan.after < reader.cursor:
            kept.clear()
            if plan.after < self._located_after or not reader.is_sealed(plan.after + 1):
                # Only the shard knows where. It goes back, so it may do so again.
                self._wants_all = reader.is_sealed(plan.after + 1)
                return Pause.MOVED
            reader.relocate(located, plan.after)
        else:
            reader.skip_to(plan.after)
        most = min(plan.stop, located.deleted_to or plan.stop)
        runs, pause = self._collect(reader, most, limit, bytes_max)
        reached = max(plan.after, reader.cursor)
        is_end = pause is Pause.BEYOND_HEAD or (
            pause in {Pause.MOVED, Pause.AT_MARK} and reader.accounts_for(reached + 1, most)
        )
        if is_end and most < plan.stop:
            pause = Pause.MOVED  # Further deletions have to be asked for.
        elif is_end:
            pause = Pause.BEYOND_HEAD
        stop = most if is_end else min(reached, most)
        kept.store(runs, plan.after, stop, located.epoch)
        return pause

    def _collect(
        self, reader: TopicReader, stop: int, limit: int, bytes_max: int
    ) -> tuple[list[FrameRun], Pause | None]:
        runs: list[FrameRun] = []
        records = size = 0
        window = bytes_max if self._is_mapped else min(bytes_max, FIRST_WINDOW_BYTES)
        while records < limit and size < bytes_max:
            before = reader.cursor
            try:
                run = reader.next_run(stop, window)
            except CorruptData:
                if runs:
                    return runs, None  # What lies before the damage comes first (DR-16).
                raise
            if isinstance(run, Pause):
                return runs, run
            runs.append(run)
            records += reader.cursor - before
            size += int(run.batch.total_bytes.sum())
            window = min(2 * window, max(bytes_max, FIRST_WINDOW_BYTES))
        return runs, None

    def _open_reader(self, located: Located, after: int) -> TopicReader:
        connection = self._connection
        return TopicReader(
            located, after, data_dir=connection.data_dir, shm_dir=connection.shm_dir,
            marks=self._marks_of(located.shard), disk=self._disk, is_mapped=self._is_mapped,
            checks_bodies=self._checks_bodies, cold_dir=connection.cold_dir, shelf=self._shelf,
            log_map=connection.log_map,
        )  # fmt: skip

    def _marks_of(self, shard: int) -> Callable[[bool], LogHighWatermark]:
        connection = self._connection

        def marks(is_volatile: bool) -> LogHighWatermark:
            found = connection.marks(shard)
            return LogHighWatermark(*(found.volatile if is_volatile else found.wal))

        return marks

    def _fetch_cold(self, located: Located) -> Steps[None]:
        """Have the relocator read what the reader wants (TI-10: its failure is no loss)."""
        reader = self._reader
        want = None if reader is None else reader.cold_range_needed
        if reader is not None and want is not None:
            data = yield self._connection.cold_read(ColdRead(want.path, want.start, want.stop))
            reader.supply_cold_bytes(want, data)

    def _portion(self, plan: ReadPlan, located: Located, facts: TopicFacts, now_us: int) -> FetchResult:
        kept = self._cached_frames
        reader = self._reader
        mask = VisibilityFilter(reader.deleted if reader is not None else None, located.ttl_us, now_us)
        return FetchResult(
            located.epoch,
            facts.head_seq,
            max(facts.earliest_seq, located.earliest_seq),
            plan.gap,
            plan.after,
            tuple(kept.runs),
            max(plan.after, kept.stop),
            mask.hidden_seqs(kept.runs),
            located.version,
        )


def _shows_anything(portion: FetchResult) -> bool:
    """True unless every record of the portion is hidden."""
    if not portion.runs or not len(portion.hidden):
        return bool(portion.runs)
    return any(len(piece) for piece in portion.batches(""))
