"""LocatedFiles: reads frames of one topic from the files that its location names."""

from __future__ import annotations

from collections.abc import Callable

from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.fetch_result import CachedFrames
from ringlog.client.read.topic_location import TopicLocation
from ringlog.client.watches.shared_reads import SharedPage
from ringlog.envelope.messages import ColdRead, Located
from ringlog.errors import CorruptData
from ringlog.link.futures import Steps
from ringlog.link.subscription import LocationHint
from ringlog.storage.disk import Disk
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.reader import FIRST_WINDOW_BYTES, Pause, TopicReader
from ringlog.storage.segment_cache import SegmentCache
from ringlog.topic.tombstone import ReadPlan


class LocatedFiles:
    """Open files of one topic, and the frames of the last read."""

    def __init__(
        self, connection: Connection, location: TopicLocation, disk: Disk, *, is_mapped: bool,
        checks_bodies: bool,
    ) -> None:  # fmt: skip
        """`is_mapped`: see LocalSource. `checks_bodies`: see TopicReader."""
        self._connection, self._location, self._disk = connection, location, disk
        self._is_mapped, self._checks_bodies = is_mapped, checks_bodies
        self.reader: TopicReader | None = None
        self.cached: CachedFrames = CachedFrames()
        self.cold_reads: int = 0
        """Reads of cold segments by the relocator."""
        self._segment_cache: SegmentCache | None = None
        self._pending_advance: LocationHint | None = None
        """Last frame that another watch has read for this source, and by which the file reader has not
        advanced yet."""

    def close(self) -> None:
        """Release the files."""
        if self.reader is not None:
            self.reader.close()
        if self._segment_cache is not None:
            self._segment_cache.close()
        self.reader = self._segment_cache = self._pending_advance = None
        self.cached.clear()

    def location_after(self, seq: int) -> tuple[int, int]:
        """Return the log file and offset of the frame with the record after `seq`; (0, 0) = unknown."""
        reader, cached = self.reader, self.cached
        if reader is None:
            return 0, 0
        for run in cached.runs:
            if run.last_seq > seq:
                first = run.frames_after(seq)
                return reader.records.log_file_id(run.path), run.origin + int(first.batch.stored_offsets[0])
        return reader.log_position if reader.cursor == seq else (0, 0)

    def advance_past_page(self, shared_page: SharedPage) -> None:
        """Continue after a page that another watch has read."""
        self.cached.clear()
        self._pending_advance = None
        if self.reader is not None:
            self.reader.advance_past(shared_page.cursor.seq, shared_page.file_id, shared_page.offset)

    def advance_past(self, hint: LocationHint) -> None:
        """Continue after a frame that another watch has read.

        With hundreds of watches, all but one only call this for hours. The file reader therefore advances
        once, before its next use.
        """
        self._pending_advance = hint

    def apply_pending_advance(self) -> None:
        """Advance the file reader past the frames that other watches read. Call before the files are used."""
        hint, self._pending_advance = self._pending_advance, None
        if hint is not None:
            self.cached.clear()
            if self.reader is not None:
                self.reader.advance_past(hint.last_seq, hint.file_id, hint.stop)

    @staticmethod
    def is_untouched(located: Located, reader: TopicReader, first_seq: int, last_seq: int) -> bool:
        """Return True if none of these seqs was lost or deleted, as of `located`."""
        if located.lost and located.lost[-1] >= first_seq:
            return False
        if located.deleted_to and last_seq > located.deleted_to:
            return False
        return reader.records.deleted is None or not reader.records.deleted.range_cardinality(
            first_seq, last_seq + 1
        )

    def read(self, plan: ReadPlan, located: Located, limit: int, bytes_max: int) -> Pause | None:
        """Make the cached frames cover the seqs after `plan.after`. Returns why it stopped; None = enough was
        read."""
        self.apply_pending_advance()
        cached = self.cached
        if cached.covers(plan.after, located.epoch):
            cached.runs_after(plan.after)
            return None
        reader = self.reader
        if reader is None:
            self._segment_cache = SegmentCache(self._disk, self._connection.data_dir)
            reader = self.reader = self._open_reader(located, plan.after)
        elif reader.records.located is not located:
            reader.relocate(located, plan.after)
        elif plan.after < reader.cursor:
            cached.clear()
            if plan.after < self._location.after or not reader.records.is_in_segment(plan.after + 1):
                # Only the shard knows the location. The reader moved back once and may do so again.
                self._location.wants_all = reader.records.is_in_segment(plan.after + 1)
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
            if before >= stop:
                return runs, Pause.BEYOND_HEAD
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
            read_watermark=marks_of(connection, located.shard), disk=self._disk, is_mapped=self._is_mapped,
            checks_bodies=self._checks_bodies, cold_dir=connection.cold_dir,
            segment_cache=self._segment_cache, log_map=connection.log_map,
        )  # fmt: skip

    def fetch_cold(self) -> Steps[None]:
        """Have the relocator read the range that the reader needs. A failure is not a loss of records."""
        reader = self.reader
        needed = None if reader is None else reader.cold_range_needed
        if reader is not None and needed is not None:
            data = yield self._connection.cold_read(ColdRead(needed.path, needed.start, needed.stop))
            reader.supply_cold_bytes(needed, data)
            self.cold_reads += 1


def marks_of(connection: Connection, shard: int) -> Callable[[bool], LogHighWatermark]:
    """Return a function that reads where the log of a shard ends: the volatile one, or the WAL."""

    def marks(is_volatile: bool) -> LogHighWatermark:
        found = connection.marks(shard)
        return LogHighWatermark(*(found.volatile if is_volatile else found.wal))

    return marks
