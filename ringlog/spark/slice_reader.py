"""Reads slices in a Spark task: slices in, records out; the same code for batch and stream.

A task locates its positions again when it runs, so it finds segments that were moved or compacted after
planning. Records that were lost since then are reported, never skipped silently. Checksums are verified
before any code uses bytes of a memory-mapped file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringlog.client.client import Client
from ringlog.client.connection.ref_count import WINDOW_BYTES
from ringlog.client.read.fetch_result import FetchResult
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Cursor
from ringlog.client.read.tail_batch import TailBatch, tail_batches_of
from ringlog.errors import CorruptData, NotReady, TopicNotFound
from ringlog.limits import KIB
from ringlog.spark.catalog import GapRow
from ringlog.spark.clients import client_of, disk_of
from ringlog.spark.errors import DataLoss
from ringlog.spark.options import SourceOptions
from ringlog.spark.plan import Bounds, Slice, Slices
from ringlog.spark.workers import freeze_imports
from ringlog.topic.tombstone import RECREATED, RESTART_LOSS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log: logging.Logger = logging.getLogger("ringlog.spark")
OnGap = Callable[[GapRow], None]
DELETED, CORRUPT = "deleted", "corrupt"
WINDOW_BYTES_MIN = 64 * KIB
"""Smallest number of bytes that one fetch requests, near the end of a slice."""
POLL_INTERVAL_S = 1.0
IDLE_POLLS_MAX = 30
"""Polls of POLL_INTERVAL_S without progress before a task gives up on an engine that is starting."""
_NO_LIMIT = 1 << 62


def read_slices(
    slices: Slices | None, options: SourceOptions, struct: StructType, on_gap: OnGap | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a partition as Arrow batches with exactly Spark's schema. None yields nothing.

    Raises DataLoss for positions that were lost since planning, if failOnDataLoss is on. If it is off, each
    gap goes to `on_gap` (default: logged). Raises CorruptData, NotReady (retriable) and EngineNotRunning.
    """
    from ringlog.spark.arrow import ArrowBatchBuilder

    if slices:
        made = ArrowBatchBuilder(struct, options)
        for item in read_batches(slices, options, on_gap):
            yield from made.add(item)
        yield from made.flush()
        freeze_imports("read")


def read_batches(
    slices: Iterable[Slice],
    options: SourceOptions,
    on_gap: OnGap | None = None,
    *,
    checks_bodies: bool = True,
) -> Iterator[TailBatch]:
    """Yield the records of slices as memory-mapped batches, in order, without the tag filter.

    Set `checks_bodies` to False if the receiver of the frames verifies body checksums itself.
    """
    client = client_of(options.path)
    reader: _SliceReader | None = None
    try:
        for each in slices:
            if reader is None or reader.topic != each.bounds.topic:
                if reader is not None:
                    reader.close()
                reader = _SliceReader(client, each.bounds.topic, options, on_gap or log_gap, checks_bodies)
            yield from reader.read(each)
    finally:
        if reader is not None:
            reader.close()


def log_gap(gap: GapRow) -> None:
    """Log a gap as a warning."""
    log.warning("records %d..%d of topic %s are lost: %s", gap.gap_from, gap.gap_to, gap.topic, gap.reason)


@dataclass(slots=True)
class _SlicePosition:
    """Progress within a slice, and the number of its bytes that remain."""

    bounds: Bounds
    seq: int
    bytes_left: int
    idle: int = 0

    @property
    def is_done(self) -> bool:
        return self.seq >= self.bounds.until

    @property
    def window(self) -> int:
        """Bytes of the next fetch.

        It reaches little beyond the slice, because another task reads the next one.
        """
        return min(max(self.bytes_left, WINDOW_BYTES_MIN), WINDOW_BYTES)


class _SliceReader:
    """Reads slices of one topic."""

    def __init__(
        self, client: Client, topic: str, options: SourceOptions, on_gap: OnGap, checks_bodies: bool
    ) -> None:
        self.topic = topic
        self._client = client
        self._options = options
        self._on_gap = on_gap
        self._source = LocalSource(
            client.connection, topic, is_mapped=True, checks_bodies=checks_bodies, disk=disk_of(options.path)
        )
        self._damage: tuple[str, int] | None = None

    def close(self) -> None:
        """Close the files. Batches that were yielded stay valid."""
        self._source.close()

    def read(self, wanted: Slice) -> Iterator[TailBatch]:
        """Yield the records of a slice."""
        place = _SlicePosition(wanted.bounds, wanted.bounds.after, wanted.bytes)
        while not place.is_done:
            fetched = self._fetch(place)
            if fetched is None:
                continue
            if fetched.epoch != place.bounds.epoch:
                self._report_loss(place, place.bounds.until, RECREATED, fetched)
                continue
            if fetched.head_seq < place.bounds.until:
                # These records were never durable. The restarted shard assigns their seqs to other records.
                self._report_loss(place, place.bounds.until, RESTART_LOSS, fetched)
                continue
            before = place.seq
            if fetched.gap is not None:
                self._report_loss(place, fetched.gap.gap_to, fetched.gap.reason, fetched)
            yield from self._batches(place, fetched)
            self._count_idle_poll(place, before)

    def _fetch(self, place: _SlicePosition) -> FetchResult | None:
        """Return the next fetch result, or None if the position moved without one."""
        cursor = Cursor(place.bounds.epoch, place.seq)
        steps = self._source.fetch(cursor, limit=_NO_LIMIT, bytes_max=place.window, wait_s=POLL_INTERVAL_S)
        try:
            fetched: FetchResult = self._client.run(steps)
        except TopicNotFound:
            self._report_loss(place, place.bounds.until, DELETED, None)
            return None
        except CorruptData as e:
            self._skip_damage(place, e)
            return None
        return fetched

    def _batches(self, place: _SlicePosition, fetched: FetchResult) -> Iterator[TailBatch]:
        until = place.bounds.until
        for batch in tail_batches_of(fetched, self.topic):
            if batch.first_seq > until:
                break
            if not self._source.is_current:
                return  # Records that were read ahead may be deleted by now: fetch again.
            shown = batch.until(until)
            place.bytes_left -= shown.stored_bytes
            place.seq = shown.last_seq
            yield shown
        place.seq = max(place.seq, min(fetched.examined, until))

    def _report_loss(
        self, place: _SlicePosition, last: int, reason: str, fetched: FetchResult | None
    ) -> None:
        """Raise DataLoss for the lost positions up to `last`, or report the gap and continue after it."""
        bounds = place.bounds
        last = min(last, bounds.until)
        if last <= place.seq:
            return
        earliest, head = (0, 0) if fetched is None else (fetched.earliest_seq, fetched.head_seq)
        gap = GapRow(self.topic, bounds.epoch, place.seq + 1, last, reason, earliest, head)
        if self._options.fail_on_data_loss:
            raise data_loss(gap)
        place.seq = last
        self._on_gap(gap)

    def _skip_damage(self, place: _SlicePosition, error: CorruptData) -> None:
        """For onCorrupt=quarantine: continue after a damaged frame. Re-raise if its end is not known."""
        where = (str(error.detail.get("file", "")), int(error.detail.get("offset", -1)))
        last = min(int(error.detail.get("last_seq", 0)), place.bounds.until)
        if not self._options.quarantine or last <= place.seq or where == self._damage:
            raise error
        self._damage = where
        first = max(int(error.detail.get("first_seq", 0)), place.seq + 1)
        self._source.close()  # Its reader is positioned before the damage.
        place.seq = last
        self._on_gap(GapRow(self.topic, place.bounds.epoch, first, last, CORRUPT, 0, 0))

    def _count_idle_poll(self, place: _SlicePosition, before: int) -> None:
        place.idle = 0 if place.seq > before else place.idle + 1
        if place.idle >= IDLE_POLLS_MAX:
            raise NotReady(
                "planned records did not become readable in time; retry", topic=self.topic, after=place.seq,
                until=place.bounds.until,
            )  # fmt: skip


def data_loss(gap: GapRow) -> DataLoss:
    """Return the error for a gap; its text names both remedies."""
    return DataLoss(
        f"records {gap.gap_from}..{gap.gap_to} of topic {gap.topic!r} are lost ({gap.reason}). Set "
        "failOnDataLoss=false to continue without them, or change startingOffsets; a stream also needs a "
        "new checkpoint",
        topic=gap.topic,
        epoch=gap.epoch,
        gap_from=gap.gap_from,
        gap_to=gap.gap_to,
        reason=gap.reason,
        earliest_seq=gap.earliest_seq,
        head_seq=gap.head_seq,
    )
