"""Catalog: queries of a Spark driver before it plans: topics, times, losses, and where records are stored.

Heads come from shared memory. Locations come from the shard and the indexes of segments. No records are read.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from ringlog.client.client import Client
from ringlog.client.read.local_source import LocalSource
from ringlog.envelope.messages import Extent, Located
from ringlog.errors import DiskError, NotReady, TopicNotFound
from ringlog.limits import EXTENTS_PER_LOCATE_MAX
from ringlog.link.futures import Pending, Steps
from ringlog.spark.clients import client_of, disk_of, log_id_of
from ringlog.spark.errors import OptionError
from ringlog.spark.options import SourceOptions
from ringlog.spark.plan import WAL, StoredRange
from ringlog.spark.segment_ranges import Tags, stored_ranges_in_segments
from ringlog.storage.disk import Disk
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.topic.tombstone import RECREATED, RESTART_LOSS, Floors, plan_read

TRIES_MAX = 20
"""Attempts for a topic that changes during a query."""
LOCATES_MAX = 100_000
"""Maximum number of a shard's replies for one list of extents."""
FRAME_OVERHEAD_BYTES = 16
"""Approximate bytes of log per record in addition to its accounted bytes.

It affects only the size of tasks.
"""


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic at one instant.

    `head` is the published head; `earliest` is head + 1 if no record is retained.
    """

    topic: str
    topic_id: int
    epoch: int
    earliest: int
    head: int


@dataclass(frozen=True, slots=True)
class GapRow:
    """Positions gap_from..gap_to (inclusive) that were lost without a request to delete them.

    `reason` is cap, ttl, mixed, source_trim, restart_loss, recreated, deleted or corrupt.
    """

    topic: str
    epoch: int
    gap_from: int
    gap_to: int
    reason: str
    earliest_seq: int
    head_seq: int

    @property
    def missed_estimate(self) -> int:
        """Upper bound of the number of lost records."""
        return self.gap_to - self.gap_from + 1


class Catalog:
    """Queries one engine. For a single thread; a context manager; cheap to open."""

    def __init__(self, client: Client, log_id: str, disk: Disk | None = None) -> None:
        self._client = client
        self._disk: Disk = disk or RealDisk()
        self._record_indexes: dict[int, StoredRecordIndex] = {}
        self._generation = -1
        self.log_id = log_id
        """Identity of the data directory. It does not change when the engine restarts."""

    @classmethod
    def open(cls, path: str) -> Catalog:
        """Open the catalog of a data directory, run directory or cold tier; raise EngineNotRunning."""
        client = client_of(path)
        return cls(client, log_id_of(path), disk_of(path))

    def close(self) -> None:
        """Close the files. The shared client stays open."""
        for record_index in self._record_indexes.values():
            record_index.close()
        self._record_indexes.clear()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- topics -------------------------------------------------------------------------------------

    def topics(self, options: SourceOptions, *, missing_ok: bool = False) -> list[TopicState]:
        """Return the subscribed topics in their current state, in byte order of their names.

        Raises TopicNotFound for a named topic that does not exist; with `missing_ok` it is omitted. Raises
        OptionError if offsets or times name a topic that the pattern does not match.
        """
        if options.pattern is None:
            names: list[str] = list(options.topics)
        else:
            names = [each.topic for each in self._client.topics.list() if options.matches(each.topic)]
            missing_ok = True  # A listed topic may be deleted before it is resolved.
            strangers = [name for name in options.named_topics if not options.matches(name)]
            if strangers:
                raise OptionError("offsets and times must name subscribed topics only", topics=strangers)
        found = []
        for name in sorted(names, key=str.encode):
            try:
                found.append(self.topic(name))
            except TopicNotFound:
                if not missing_ok:
                    raise
        return found

    def topic(self, name: str) -> TopicState:
        """Return the current state of one topic; raise TopicNotFound."""
        connection = self._client.connection
        info: Any = self._request(connection.resolve(name))
        for _ in range(TRIES_MAX):
            facts = connection.facts(info)
            if facts is not None:
                return TopicState(name, facts.topic_id, facts.epoch, facts.earliest_seq, facts.head_seq)
            # The topic was deleted or recreated, or the engine is starting: query the shard.
            info = self._request(connection.locate(name, 0))
        raise NotReady("the topic changed too often during the request; retry", topic=name)

    def position_at(self, topic: str, ts_us: int) -> int | None:
        """Return the position before the first record committed at or after `ts_us` (microseconds).

        Returns None if no record is that new. Raises TopicNotFound.
        """
        source = LocalSource(self._client.connection, topic, disk=self._disk)
        try:
            cursor = self._client.run(source.seek_time(ts_us))
        finally:
            source.close()
        return None if cursor.seq >= self.topic(topic).head else cursor.seq

    def gaps(self, topic: str, epoch: int, after: int, until: int) -> list[GapRow]:
        """Return the ranges of positions after + 1 .. until that were lost involuntarily, in ascending order.

        If the topic has another epoch now, the result is one row with the reason recreated. Raises
        TopicNotFound.
        """
        located = self._located(topic, after)
        facts = self._client.connection.facts(located)
        head = located.head_seq if facts is None else facts.head_seq
        earliest = max(located.earliest_seq, 0 if facts is None else facts.earliest_seq)
        if after >= until:
            return []
        if epoch != located.epoch:
            return [GapRow(topic, epoch, after + 1, until, RECREATED, earliest, head)]
        found: list[GapRow] = []
        floors = Floors(
            max(head, until),
            min(earliest, head + 1),
            located.cap_floor,
            located.ttl_floor,
            located.trim_floor,
        )
        cursor = after
        for _ in range(len(located.lost) + 2):  # Each iteration passes a floor or a lost range, or ends.
            gap = plan_read(cursor, floors, located.lost, trimmed=located.trimmed).gap
            if gap is None:
                following = [first for first in located.lost[::2] if first > cursor + 1]
                if not following or following[0] > until:
                    break
                cursor = following[0] - 1
                gap = plan_read(cursor, floors, located.lost, trimmed=located.trimmed).gap
            if gap is None or gap.gap_from > until:
                break
            found.append(
                GapRow(topic, epoch, gap.gap_from, min(gap.gap_to, until), gap.reason, earliest, head)
            )
            cursor = gap.gap_to
        if until > head:
            # These records were never durable. The restarted shard assigns their seqs again.
            first = max(after, head) + 1
            found = [replace(row, gap_to=min(row.gap_to, first - 1)) for row in found if row.gap_from < first]
            found.append(GapRow(topic, epoch, first, until, RESTART_LOSS, earliest, head))
        return found

    # -- locations ----------------------------------------------------------------------------------

    def stored_ranges(self, topic: str, after: int, until: int, tags: Tags = ()) -> list[StoredRange]:
        """Return where positions after + 1 .. until are stored, ascending: frames of segments, then the log.

        Without `tags` the ranges cover all positions. With tags (exact, or prefix*) they cover only frames of
        segments that contain a matching record, and the log. Raises TopicNotFound, DiskError and NotReady.
        """
        if after >= until:
            return []
        for _ in range(TRIES_MAX):
            located, extents = self._extents(topic, after)
            try:
                sealed = stored_ranges_in_segments(
                    self._record_index(located.shard), located.topic_id, extents, after, until, tags
                )
            except DiskError as e:
                if e.errno != errno.ENOENT:
                    raise
                continue  # Moved or removed meanwhile: locate it again.
            last = max([after, *(each.last_seq for each in extents if each.segment)])
            return sealed + list(self._log_range(located, last, until))
        raise NotReady("the topic changed too often during planning; retry", topic=topic)

    def segments(self, topic: str, after: int = 0) -> list[Extent]:
        """Return the segments, hot and cold, that contain records after position `after`."""
        return [each for each in self._extents(topic, after)[1] if each.segment]

    def _log_range(self, located: Located, after: int, until: int) -> Iterator[StoredRange]:
        if after >= until:
            return
        facts = self._client.connection.facts(located)
        count, accounted = (facts.count, facts.bytes) if facts is not None else (0, 0)
        each = accounted // max(count, 1) + FRAME_OVERHEAD_BYTES
        yield StoredRange(after + 1, until, each * (until - after), until - after, WAL)

    def _extents(self, topic: str, after: int) -> tuple[Located, list[Extent]]:
        """Return the complete list of extents; one reply of a shard is bounded."""
        found: list[Extent] = []
        for _ in range(LOCATES_MAX):
            located = self._located(topic, after)
            found += located.extents
            if len(located.extents) < EXTENTS_PER_LOCATE_MAX or not located.extents[-1].segment:
                return located, found
            after = max(after + 1, located.extents[-1].last_seq)
        raise NotReady("the topic has more segments than can be listed", topic=topic)

    def _located(self, topic: str, after: int) -> Located:
        located: Located = self._request(self._client.connection.locate(topic, after))
        return located

    def _record_index(self, shard: int) -> StoredRecordIndex:
        connection = self._client.connection
        if self._generation != connection.generation:
            self.close()
            self._generation = connection.generation
        record_index = self._record_indexes.get(shard)
        if record_index is None:

            def marks(is_volatile: bool) -> LogHighWatermark:
                found = connection.marks(shard)
                return LogHighWatermark(*(found.volatile if is_volatile else found.wal))

            record_index = StoredRecordIndex(self._disk, connection.data_dir, connection.shm_dir, marks)
            self._record_indexes[shard] = record_index
        return record_index

    def _request(self, pending: Pending[Any]) -> Any:
        def steps() -> Steps[Any]:
            return (yield pending)

        return self._client.run(steps())
