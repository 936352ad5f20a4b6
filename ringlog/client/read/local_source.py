"""Source of a topic on the engine's host: the shard gives the location, the board the limit, and files the
records."""

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
from ringlog.link.futures import Steps
from ringlog.link.subscription import LocationHint
from ringlog.storage.disk import Disk
from ringlog.storage.extents import VOLATILE_PREFIX, LogHighWatermark
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.reader import FIRST_WINDOW_BYTES, Pause, TopicReader
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.storage.segment_cache import SegmentCache
from ringlog.storage.visibility import NO_SEQS, VisibilityFilter
from ringlog.topic.tombstone import Floors, ReadPlan, plan_read

_MS = 1_000_000
_READS_MAX = 40
"""Most reads in a row that find neither records nor the end. The caller then gets the result so far."""
_TRIES_PER_LOCATE = 4
_TRIES_MAX = 200
"""Most locations in a row that lead to no record. After the first few, retries pause for _REREAD_PAUSE_S. The
caller then gets NotReady."""
_WAKES_MAX = 64
"""Most publications to wait through between two retries."""
SCAN_POSITIONS_MIN = 100_000
"""Number of seqs without a record that are skipped before control returns to the caller."""
_REREAD_PAUSE_S = 0.05
"""Pause in seconds before another read."""
_WAIT_SLICE_S = 5.0
"""Longest single wait for a publication, in seconds. It bounds the delay until a restart of the engine is
noticed without a bell."""


class LocalSource:
    """Reads the engine's files directly: the shard says where to begin, the board where to stop."""

    def __init__(
        self, connection: Connection, topic: str, *, is_mapped: bool = False, is_settling: bool = False,
        checks_bodies: bool = True, is_following: bool = False, clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:  # fmt: skip
        """Create a source; no file is opened yet.

        Args:
            connection: Connection of the client.
            topic: Name of the topic.
            is_mapped: Map files instead of reading them. Only for processes that may be killed by a disk
                error.
            is_settling: See open_source.
            checks_bodies: See TopicReader.
            is_following: See open_source.
            clock: Clock; default: the system's.
            disk: Disk; default: the real one.
        """
        self.cold_reads = 0
        """Reads of cold segments by the relocator."""
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
        """`_located` contains the location of every record after this seq."""
        self._wants_all = False
        """True if the reader moves back and forth: the next location must cover the whole topic."""
        self._located_us = 0
        self._generation = -1
        self._reader: TopicReader | None = None
        self._segment_cache: SegmentCache | None = None
        self._record_index: StoredRecordIndex | None = None
        self._cached_frames = CachedFrames()
        self._pending_advance: LocationHint | None = None
        """Last frame that another watch has read for this source, and by which the file reader has not
        advanced yet."""

    def close(self) -> None:
        """Release the files. The next read locates the topic again."""
        if self._reader is not None:
            self._reader.close()
        if self._segment_cache is not None:
            self._segment_cache.close()
        if self._record_index is not None:
            self._record_index.close()
        if self._keep_alive is not None:
            self._keep_alive.end()
        self._keep_alive = None
        self._reader = self._located = self._located_for = self._segment_cache = self._record_index = (
            self._pending_advance
        ) = None
        self._cached_frames.clear()

    def keep_topic_alive(self, epoch: int = 0) -> None:
        """See Source.keep_topic_alive."""
        handle = self._keep_alive
        if self._is_following and (handle is None or epoch not in {0, handle.epoch}):
            self._keep_alive = self._connection.keep_topic_alive(self._topic, epoch)
            if handle is not None:
                handle.end()

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[FetchResult]:
        """See Source.fetch."""
        started_ns = self._clock.monotonic_ns()
        tries = skipped = 0
        # A read that waits receives copies when routers make them.
        may_settle = self._is_settling and wait_s <= 0
        # One time for the whole read. A record that had expired by then is below a floor if the shard was
        # queried later, so no record is skipped without its announcement.
        now_us = self._clock.now_us()
        while True:
            if self._generation != self._connection.generation:
                self.close()
            located = yield from self._locate(cursor)
            seen = self._connection.marks(located.shard)
            facts = self._connection.facts(located)
            if facts is None or facts.state != TOPIC_LIVE or self._is_stale(located, facts, now_us):
                # Another life, no topic, or removed records: only the shard knows.
                tries = yield from self._try_again(tries, located.shard)
                self._invalidate_location()
                continue
            if facts.head_seq < cursor.seq and self._located_for != cursor:
                # Another life of the topic, or a shard that temporarily shows a lower head: the shard knows.
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
            result = self._result(plan, located, facts, now_us)
            if result.gap is not None or _has_visible_records(result):
                return result
            if pause is Pause.COLD:
                yield from self._fetch_cold(located)
                now_us = self._clock.now_us()
                continue
            if result.examined > plan.after and skipped < SCAN_POSITIONS_MIN and result.examined < plan.stop:
                # All of these records were removed; later ones may exist.
                skipped += result.examined - plan.after
                cursor = Cursor(located.epoch, result.examined)
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
            if result.examined < plan.stop:
                if result.examined > plan.after:
                    return result  # All were removed: the caller continues after them.
                # Published a moment ago, or the shard is restarting: the mark will advance soon.
                tries += 1
                if tries >= _READS_MAX:
                    return result
                if tries % _TRIES_PER_LOCATE == 0:
                    self._invalidate_location()
                left_s = max(left_s, _REREAD_PAUSE_S)
                yield self._connection.published_since(located.shard, seen, min(left_s, _REREAD_PAUSE_S))
                now_us = self._clock.now_us()
                continue
            if left_s <= 0 or plan.stop < facts.head_seq:
                return result
            tries = 0
            # Skipped seqs need not be read again.
            cursor = Cursor(located.epoch, max(result.examined, cursor.seq))
            yield self._connection.published_since(located.shard, seen, min(left_s, _WAIT_SLICE_S))
            now_us = self._clock.now_us()

    def read_leased(self, first: int, last: int, epoch: int, found: list[Any]) -> Steps[None]:
        """Add the records first to last to `found`. The caller holds leases on them, so removals are not
        checked.

        Fewer records are found if some were removed anyway. Raises StaleEpoch if the topic is in another
        life, and the errors of `fetch`. Records before damage are found.
        """
        after, tries = first - 1, 0
        while after < last:
            if self._generation != self._connection.generation:
                self.close()
            located = yield from self._locate(Cursor(epoch, after))
            if located.epoch < epoch:
                # The location is of an earlier life: the topic was deleted and created again meanwhile.
                self.close()
                tries = yield from self._try_again(tries, located.shard)
                continue
            if located.epoch != epoch:
                self._invalidate_location()
                raise StaleEpoch(
                    "the topic was deleted and created again", topic=self._topic, epoch=located.epoch
                )
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
        """Read only the frame at this location, if it comes next and the topic has no other change to report.

        `is_head` also requires that the frame is the last of the topic. Returns None if a condition fails;
        the caller then uses `fetch`. Raises DiskError.
        """
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
        lag = facts.head_seq - hint.last_seq
        if lag < 0 or (lag and is_head) or facts.earliest_seq > hint.first_seq:
            return None
        if not self._is_untouched(located, reader, hint.first_seq, hint.last_seq):
            return None
        view = reader.read_at_hint(*hint)
        if view is None:
            return None
        self._cached_frames.clear()
        return view, facts

    @property
    def located(self) -> Located | None:
        """Location of the topic at the last read. None if the next read must locate it again."""
        return self._located

    @property
    def slot_sequence(self) -> int:
        """Change number of the topic's slot; -1 if another reader might read other records at the same
        position."""
        located = self._located
        if located is None or located.ttl_us or located.recreated:
            return -1
        return self._connection.topic_sequence(located)

    @property
    def never_expires(self) -> bool:
        """True if no record of the topic has an expiry."""
        facts = None if self._located is None else self._connection.facts(self._located)
        return facts is not None and not facts.due_us and not facts.ttl_us

    def make_shared_frame(
        self, epoch: int, sequence: int, hint: LocationHint, view: FrameView, earliest_seq: int
    ) -> SharedFrame:
        """Return the frame that was read at `hint`, as of `sequence`, for other watches."""
        assert self._located is not None
        record_batches, cursor = (FrameRecordBatch(view),), Cursor(epoch, hint.last_seq)
        return SharedFrame(
            self._located, self._generation, sequence, epoch, hint, record_batches, earliest_seq, cursor
        )

    def is_frame_current(self, shared_frame: SharedFrame) -> bool:
        """Return True if the topic has not changed since: a read would return the same frame."""
        connection = self._connection
        return (
            shared_frame.generation == connection.generation
            and connection.topic_sequence(shared_frame.located) == shared_frame.sequence
        )

    def make_shared_page(self, page: Page, limits: PageLimits) -> SharedPage | None:
        """Return the page for other watches. None if they might read other records there.

        This is the case for records that expire, and for records that are only in memory.
        """
        located, reader = self._located, self._reader
        if located is None or reader is None or self._generation != self._connection.generation:
            return None
        is_plain = page.tombstone is None and page.batches and page.epoch == located.epoch
        if not is_plain or located.ttl_us or located.recreated or not self.never_expires:
            return None
        if any(extent.path.startswith(VOLATILE_PREFIX) for extent in located.extents):
            return None
        # A page from several reads may contain records that were removed in between; `located` is of the last
        # read.
        first, last = page.batches[0].seq_at(0), page.cursor.seq
        if first < located.earliest_seq or not self._is_untouched(located, reader, first, last):
            return None
        record_batches = tuple(record_batch.read_only() for record_batch in page.batches)
        file_id, offset = self._location_after(page.cursor.seq)
        return SharedPage(
            located, self._generation, page.epoch, limits, record_batches, page.cursor, file_id, offset,
        )  # fmt: skip

    def _location_after(self, seq: int) -> tuple[int, int]:
        """Return the log file and offset of the frame with the record after `seq`; (0, 0) = unknown."""
        reader, cached = self._reader, self._cached_frames
        if reader is None:
            return 0, 0
        for run in cached.runs:
            if run.last_seq > seq:
                first = run.frames_after(seq)
                return reader.records.log_file_id(run.path), run.origin + int(first.batch.stored_offsets[0])
        return reader.log_position if reader.cursor == seq else (0, 0)

    def facts_if_current(self, shared_page: SharedPage) -> TopicFacts | None:
        """Return the current state of the topic, if a read of this page would return the same records; else
        None."""
        connection, located = self._connection, shared_page.located
        if shared_page.generation != connection.generation:
            return None
        facts = connection.facts(located)
        if facts is None or facts.state != TOPIC_LIVE or facts.version > located.version:
            return None
        never_expires = not facts.due_us and not facts.ttl_us
        return facts if never_expires and facts.head_seq >= shared_page.cursor.seq else None

    def advance_past_page(self, shared_page: SharedPage) -> None:
        """Continue after a page that another watch has read."""
        self._cached_frames.clear()
        self._pending_advance = None
        if self._reader is not None:
            self._reader.advance_past(shared_page.cursor.seq, shared_page.file_id, shared_page.offset)

    def advance_past(self, hint: LocationHint) -> None:
        """Continue after a frame that another watch has read.

        With hundreds of watches, all but one only call this for hours. The file reader therefore advances
        once, before its next use.
        """
        self._pending_advance = hint

    def _apply_pending_advance(self) -> None:
        """Advance the file reader past the frames that other watches read. Call before the files are used."""
        hint, self._pending_advance = self._pending_advance, None
        if hint is not None:
            self._cached_frames.clear()
            if self._reader is not None:
                self._reader.advance_past(hint.last_seq, hint.file_id, hint.stop)

    @staticmethod
    def _is_untouched(located: Located, reader: TopicReader, first_seq: int, last_seq: int) -> bool:
        """Return True if none of these seqs was lost or deleted, as of `located`."""
        if located.lost and located.lost[-1] >= first_seq:
            return False
        if located.deleted_to and last_seq > located.deleted_to:
            return False
        return reader.records.deleted is None or not reader.records.deleted.range_cardinality(
            first_seq, last_seq + 1
        )

    @property
    def is_current(self) -> bool:
        """True if no record was removed or expired since the last read."""
        located = self._located
        facts = None if located is None else self._connection.facts(located)
        if located is None or facts is None:
            return False
        return not self._is_stale(located, facts, self._clock.now_us())

    def record_check(self, version: int) -> RecordCheck:
        """See Source.record_check."""
        return LocalRecordCheck(self._connection, self._located, self._generation, version, self._clock)

    def seek_time(self, ts_us: int) -> Steps[Cursor]:
        """See Source.seek_time. Uses the indexes of segments and the commit times in the log."""
        after = tries = 0
        while True:
            located = yield from self._locate_all(after)
            if self._record_index is None:
                self._record_index = StoredRecordIndex(
                    self._disk, self._connection.data_dir, self._connection.shm_dir,
                    self._marks_of(located.shard),
                )  # fmt: skip
            try:
                found = self._record_index.seek_time(located, ts_us)
            except DiskError as e:
                if e.errno != errno.ENOENT:
                    raise
                # A file was deleted; the next location names its successor.
                tries = yield from self._try_again(tries, located.shard)
                self._invalidate_location()
                continue
            if len(located.extents) < EXTENTS_PER_LOCATE_MAX or found <= after:
                return Cursor(located.epoch, max(found, after))
            after = found  # This may only be the end of a truncated list.
            self._invalidate_location()

    def _locate_all(self, after: int) -> Steps[Located]:
        """Return a current location that covers all records after `after`. Reuses the last one if
        possible."""
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
        """Return True if the shard has not started another log file since."""
        file_id, _ = self._connection.marks(located.shard).wal
        return any(extent.file_id == file_id and not extent.segment for extent in located.extents)

    def _is_stale(self, located: Located, facts: TopicFacts, now_us: int) -> bool:
        """Return True if records were removed since the location was requested, or are due to expire."""
        if facts.version > located.version:
            return True
        return 0 < facts.due_us <= now_us and self._located_us < facts.due_us

    def _invalidate_location(self) -> None:
        # Keep the reader: it remembers a hole that it saw. Only a second sight of it proves damage.
        self._located = self._located_for = None
        self._cached_frames.clear()

    def _try_again(self, tries: int, shard: int) -> Steps[int]:
        """Count a location that led to no record. Pause after the first few.

        Files move while they are read, and the next location names their new place. If it does not, the
        moving process or the shard may be restarting. The caller sees only a pause.
        """
        if tries >= _TRIES_PER_LOCATE and not can_open_descriptors(READ_DESCRIPTORS):
            raise NotReady(descriptor_limit_message(), topic=self._topic, errno=errno.EMFILE)
        if tries >= _TRIES_MAX:
            raise NotReady(
                "the topic moved or changed during every read attempt: retry later", topic=self._topic
            )
        if tries >= _TRIES_PER_LOCATE:
            for _ in range(_WAKES_MAX):
                marks = self._connection.marks(shard)
                if not (yield self._connection.published_since(shard, marks, _REREAD_PAUSE_S)):
                    break
        return tries + 1

    def _locate(self, cursor: Cursor) -> Steps[Located]:
        if self._located is None:
            self._generation = self._connection.generation
            self._located_us = self._clock.now_us()
            after = 0 if self._wants_all else cursor.seq
            self._located = located = yield self._connection.locate(self._topic, after, cursor.epoch)
            if len(located.extents) >= EXTENTS_PER_LOCATE_MAX:
                self._wants_all = False  # It does not fit into one reply.
            self._located_for, self._located_after = cursor, after
            self.keep_topic_alive(located.epoch)
        return self._located

    def _plan(self, cursor: Cursor, located: Located, facts: TopicFacts) -> ReadPlan:
        # Either may be newer; floors never decrease.
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
        """Make the cached frames cover the seqs after `plan.after`. Returns why it stopped; None = enough was
        read."""
        self._apply_pending_advance()
        cached = self._cached_frames
        if cached.covers(plan.after, located.epoch):
            cached.runs_after(plan.after)
            return None
        reader = self._reader
        if reader is None:
            self._segment_cache = SegmentCache(self._disk, self._connection.data_dir)
            reader = self._reader = self._open_reader(located, plan.after)
        elif reader.records.located is not located:
            reader.relocate(located, plan.after)
        elif plan.after < reader.cursor:
            cached.clear()
            if plan.after < self._located_after or not reader.records.is_in_segment(plan.after + 1):
                # Only the shard knows the location. The reader moved back once and may do so again.
                self._wants_all = reader.records.is_in_segment(plan.after + 1)
                return Pause.MOVED
            reader.relocate(located, plan.after)
        else:
            reader.skip_to(plan.after)
        most = min(plan.stop, located.deleted_to or plan.stop)
        runs, pause = self._collect(reader, most, limit, bytes_max)
        reached = max(plan.after, reader.cursor)
        is_end = pause is Pause.BEYOND_HEAD or (
            pause in {Pause.MOVED, Pause.AT_MARK} and reader.records.accounts_for(reached + 1, most)
        )
        if is_end and most < plan.stop:
            pause = Pause.MOVED  # Later deletions must be requested from the shard.
        elif is_end:
            pause = Pause.BEYOND_HEAD
        stop = most if is_end else min(reached, most)
        cached.store(runs, plan.after, stop, located.epoch)
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
                    return runs, None  # Records before the damage are returned first.
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
            read_watermark=self._marks_of(located.shard), disk=self._disk, is_mapped=self._is_mapped,
            checks_bodies=self._checks_bodies, cold_dir=connection.cold_dir,
            segment_cache=self._segment_cache, log_map=connection.log_map,
        )  # fmt: skip

    def _marks_of(self, shard: int) -> Callable[[bool], LogHighWatermark]:
        connection = self._connection

        def marks(is_volatile: bool) -> LogHighWatermark:
            found = connection.marks(shard)
            return LogHighWatermark(*(found.volatile if is_volatile else found.wal))

        return marks

    def _fetch_cold(self, located: Located) -> Steps[None]:
        """Have the relocator read the range that the reader needs. A failure is not a loss of records."""
        reader = self._reader
        needed = None if reader is None else reader.cold_range_needed
        if reader is not None and needed is not None:
            data = yield self._connection.cold_read(ColdRead(needed.path, needed.start, needed.stop))
            reader.supply_cold_bytes(needed, data)
            self.cold_reads += 1

    def _result(self, plan: ReadPlan, located: Located, facts: TopicFacts, now_us: int) -> FetchResult:
        cached = self._cached_frames
        reader = self._reader
        mask = VisibilityFilter(
            reader.records.deleted if reader is not None else None, located.ttl_us, now_us
        )
        return FetchResult(
            located.epoch,
            facts.head_seq,
            max(facts.earliest_seq, located.earliest_seq),
            plan.gap,
            plan.after,
            tuple(cached.runs),
            max(plan.after, cached.stop),
            mask.hidden_seqs(cached.runs),
            located.version,
        )


def _has_visible_records(result: FetchResult) -> bool:
    """Return False if every record of the result is hidden."""
    if not result.runs or not len(result.hidden):
        return bool(result.runs)
    return any(len(record_batch) for record_batch in result.batches(""))
