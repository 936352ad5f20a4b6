"""Source of a topic on the engine's host: the shard gives the location, the board the limit, and files the
records."""

from __future__ import annotations

import errno
from typing import Any

from ringlog.board.topics import TOPIC_LIVE, TopicFacts
from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.fetch_result import FetchResult, RecordCheck
from ringlog.client.read.located_files import LocatedFiles, marks_of
from ringlog.client.read.pages import Cursor, Page
from ringlog.client.read.read_ahead import LocalRecordCheck
from ringlog.client.read.record_batches import FrameRecordBatch, visible_record_batches
from ringlog.client.read.topic_location import REREAD_PAUSE_S, TRIES_PER_LOCATE, TopicLocation
from ringlog.client.watches.shared_reads import PageLimits, SharedFrame, SharedPage
from ringlog.clock import Clock, SystemClock
from ringlog.envelope.messages import Located
from ringlog.errors import DiskError, StaleEpoch
from ringlog.frame.view import FrameView
from ringlog.limits import EXTENTS_PER_LOCATE_MAX, READ_BYTES_MAX
from ringlog.link.futures import Steps
from ringlog.link.subscription import LocationHint
from ringlog.storage.disk import Disk
from ringlog.storage.extents import VOLATILE_PREFIX
from ringlog.storage.reader import Pause
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.storage.visibility import NO_SEQS, VisibilityFilter
from ringlog.topic.tombstone import Floors, ReadPlan, plan_read

_READS_MAX = 40
"""Most reads in a row that find neither records nor the end. The caller then gets the result so far."""
SCAN_POSITIONS_MIN = 100_000
"""Number of seqs without a record that are skipped before control returns to the caller."""
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
        self._is_settling = is_settling
        self._connection = connection
        self._topic = topic
        self._clock = clock or SystemClock()
        self._disk: Disk = disk or RealDisk()
        self.location: TopicLocation = TopicLocation(
            connection, topic, clock=self._clock, is_following=is_following
        )
        self.files: LocatedFiles = LocatedFiles(
            connection, self.location, self._disk, is_mapped=is_mapped, checks_bodies=checks_bodies
        )
        self._record_index: StoredRecordIndex | None = None

    def close(self) -> None:
        """Release the files. The next read locates the topic again."""
        self.files.close()
        if self._record_index is not None:
            self._record_index.close()
        self._record_index = None
        self.location.close()

    def keep_topic_alive(self, epoch: int = 0) -> None:
        """See Source.keep_topic_alive."""
        self.location.keep_topic_alive(epoch)

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
            if not self.location.is_of_this_start:
                self.close()
            located = yield from self.location.locate(cursor)
            seen = self._connection.marks(located.shard)
            facts = self._connection.facts(located)
            if facts is None or facts.state != TOPIC_LIVE or self.location.is_stale(located, facts, now_us):
                # Another life, no topic, or removed records: only the shard knows.
                tries = yield from self.location.try_again(tries, located.shard)
                self._invalidate_location()
                continue
            if facts.head_seq < cursor.seq and self.location.located_for != cursor:
                # Another life of the topic, or a shard that temporarily shows a lower head: the shard knows.
                tries = yield from self.location.try_again(tries, located.shard)
                self._invalidate_location()
                continue
            if may_settle and located.is_fed and facts.head_seq - cursor.seq <= limit:
                may_settle = False
                yield self._connection.catch_up(located.topic, located.topic_id)
                now_us = self._clock.now_us()
                continue
            plan = self._plan(cursor, located, facts)
            pause = self.files.read(plan, located, limit, bytes_max)
            result = self._result(plan, located, facts, now_us)
            if result.gap is not None or _has_visible_records(result):
                return result
            if pause is Pause.COLD:
                yield from self.files.fetch_cold()
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
                tries = yield from self.location.try_again(tries, located.shard)
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
                if tries % TRIES_PER_LOCATE == 0:
                    self._invalidate_location()
                left_s = max(left_s, REREAD_PAUSE_S)
                yield self._connection.published_since(located.shard, seen, min(left_s, REREAD_PAUSE_S))
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
            if not self.location.is_of_this_start:
                self.close()
            located = yield from self.location.locate(Cursor(epoch, after))
            if located.epoch < epoch:
                # The location is of an earlier life: the topic was deleted and created again meanwhile.
                self.close()
                tries = yield from self.location.try_again(tries, located.shard)
                continue
            if located.epoch != epoch:
                self._invalidate_location()
                raise StaleEpoch(
                    "the topic was deleted and created again", topic=self._topic, epoch=located.epoch
                )
            facts = self._connection.facts(located)
            head = max(last, facts.head_seq if facts is not None else 0)
            pause = self.files.read(ReadPlan(None, after, head), located, last - after, READ_BYTES_MAX)
            reached = min(self.files.cached.stop, last)
            for run in self.files.cached.runs:
                found += visible_record_batches(run, after, reached, NO_SEQS, self._topic)
                after = max(after, min(run.last_seq, reached))
            after = max(after, reached)
            if after >= last or pause in {None, Pause.UNFINISHED}:
                continue
            if pause is Pause.COLD:
                yield from self.files.fetch_cold()
                continue
            tries = yield from self.location.try_again(tries, located.shard)
            if pause is Pause.MOVED or tries % TRIES_PER_LOCATE == 0:
                self._invalidate_location()

    def read_at_hint(
        self, cursor: Cursor, hint: LocationHint, *, is_head: bool
    ) -> tuple[FrameView, TopicFacts] | None:
        """Read only the frame at this location, if it comes next and the topic has no other change to report.

        `is_head` also requires that the frame is the last of the topic. Returns None if a condition fails;
        the caller then uses `fetch`. Raises DiskError.
        """
        self.files.apply_pending_advance()
        located, reader = self.location.located, self.files.reader
        if located is None or reader is None or not self.location.is_of_this_start:
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
        if not self.files.is_untouched(located, reader, hint.first_seq, hint.last_seq):
            return None
        view = reader.read_at_hint(*hint)
        if view is None:
            return None
        self.files.cached.clear()
        return view, facts

    @property
    def slot_sequence(self) -> int:
        """Change number of the topic's slot; -1 if another reader might read other records at the same
        position."""
        located = self.location.located
        if located is None or located.ttl_us or located.recreated:
            return -1
        return self._connection.topic_sequence(located)

    @property
    def never_expires(self) -> bool:
        """True if no record of the topic has an expiry."""
        facts = None if self.location.located is None else self._connection.facts(self.location.located)
        return facts is not None and not facts.due_us and not facts.ttl_us

    def make_shared_frame(
        self, epoch: int, sequence: int, hint: LocationHint, view: FrameView, earliest_seq: int
    ) -> SharedFrame:
        """Return the frame that was read at `hint`, as of `sequence`, for other watches."""
        located, generation = self.location.located, self.location.generation
        assert located is not None
        record_batches, cursor = (FrameRecordBatch(view),), Cursor(epoch, hint.last_seq)
        return SharedFrame(located, generation, sequence, epoch, hint, record_batches, earliest_seq, cursor)

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
        located, reader = self.location.located, self.files.reader
        if located is None or reader is None or not self.location.is_of_this_start:
            return None
        is_plain = page.tombstone is None and page.batches and page.epoch == located.epoch
        if not is_plain or located.ttl_us or located.recreated or not self.never_expires:
            return None
        if any(extent.path.startswith(VOLATILE_PREFIX) for extent in located.extents):
            return None
        # A page from several reads may contain records that were removed in between; `located` is of the last
        # read.
        first, last = page.batches[0].seq_at(0), page.cursor.seq
        if first < located.earliest_seq or not self.files.is_untouched(located, reader, first, last):
            return None
        record_batches = tuple(record_batch.read_only() for record_batch in page.batches)
        file_id, offset = self.files.location_after(page.cursor.seq)
        return SharedPage(
            located, self.location.generation, page.epoch, limits, record_batches, page.cursor, file_id,
            offset,
        )  # fmt: skip

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

    @property
    def is_current(self) -> bool:
        """True if no record was removed or expired since the last read."""
        located = self.location.located
        facts = None if located is None else self._connection.facts(located)
        if located is None or facts is None:
            return False
        return not self.location.is_stale(located, facts, self._clock.now_us())

    def record_check(self, version: int) -> RecordCheck:
        """See Source.record_check."""
        return LocalRecordCheck(
            self._connection, self.location.located, self.location.generation, version, self._clock
        )

    def seek_time(self, ts_us: int) -> Steps[Cursor]:
        """See Source.seek_time. Uses the indexes of segments and the commit times in the log."""
        after = tries = 0
        while True:
            located = yield from self._locate_all(after)
            if self._record_index is None:
                self._record_index = StoredRecordIndex(
                    self._disk, self._connection.data_dir, self._connection.shm_dir,
                    marks_of(self._connection, located.shard),
                )  # fmt: skip
            try:
                found = self._record_index.seek_time(located, ts_us)
            except DiskError as e:
                if e.errno != errno.ENOENT:
                    raise
                # A file was deleted; the next location names its successor.
                tries = yield from self.location.try_again(tries, located.shard)
                self._invalidate_location()
                continue
            if len(located.extents) < EXTENTS_PER_LOCATE_MAX or found <= after:
                return Cursor(located.epoch, max(found, after))
            after = found  # This may only be the end of a truncated list.
            self._invalidate_location()

    def _locate_all(self, after: int) -> Steps[Located]:
        """Return a current location that covers all records after `after`. Reuses the last one if
        possible."""
        located = self.location.located
        if not self.location.is_of_this_start:
            self.close()
        elif located is not None:
            facts = self._connection.facts(located)
            is_old = facts is None or self.location.is_stale(located, facts, self._clock.now_us())
            if is_old or self.location.after > after or not self.location.is_last_file_known(located):
                self._invalidate_location()
        self.location.wants_all = not after
        return (yield from self.location.locate(Cursor(0, after)))

    def _invalidate_location(self) -> None:
        # Keep the reader: it remembers a hole that it saw. Only a second sight of it proves damage.
        self.location.invalidate()
        self.files.cached.clear()

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
            located.recreated and self.location.located_for == cursor
        )
        return plan_read(
            cursor.seq, floors, located.lost, trimmed=located.trimmed, recreated=is_recreated,
            is_behind=located.is_behind,
        )  # fmt: skip

    def _result(self, plan: ReadPlan, located: Located, facts: TopicFacts, now_us: int) -> FetchResult:
        cached = self.files.cached
        reader = self.files.reader
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
