"""One checkpoint of one shard.

A checkpoint has these steps:

  read the closed log files in passes              nothing is written
  make segments of the pass, read them back        temporary files, then segments that no shard knows
  register them with the shard                     readers use them from now on
  mark records that the log deletes                synced
  request rows, write the snapshot                 durable, read back
  confirm the snapshot, delete released files      only now the log gets shorter

A crash between two steps loses nothing: the log is unchanged, and the next checkpoint makes the segments
again. Segments of the unfinished checkpoint are deregistered by the next one, once its own segments cover
them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ringlog import stop_points
from ringlog.actors.compactor.deletion_marks import mark_deleted_records
from ringlog.actors.compactor.logfile import read_log
from ringlog.actors.compactor.segment_plan import (
    AppendCollector,
    LiveTopics,
    SegmentPlanner,
    SegmentSizeLimits,
    TopicCut,
)
from ringlog.actors.compactor.shard_client import CompactorShardClient
from ringlog.clock import Clock
from ringlog.config import StorageConfig
from ringlog.entropy import random_u64
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, DiskError, Internal, RinglogError
from ringlog.limits import MIB, SNAPSHOTS_KEPT
from ringlog.logs import log_event
from ringlog.placement import shard_of
from ringlog.segment.index_rebuild import read_frames
from ringlog.segment.layout import (
    CREATOR_COMPACTOR,
    CREATOR_SHIFT,
    DATA,
    DATA_HEADER_BYTES,
    SUFFIXES,
    NumberAllocator,
    SegmentDataHeader,
)
from ringlog.segment.segment import Segment
from ringlog.segment.writer import SegmentWriter
from ringlog.storage import snapshot as snapshots
from ringlog.storage.disk import Disk, unlink_if_present
from ringlog.storage.layout import META_DIR
from ringlog.storage.snapshot import Snapshot

log: logging.Logger = logging.getLogger("ringlog.compactor")

PASS_BYTES = 64 * MIB
"""Log in memory at one time. A pass ends after the buffer that reaches this size."""
SEGMENTS_PER_REGISTER_MAX = 1_024
"""Largest number of segments in one message."""


@dataclass(frozen=True, slots=True)
class CheckpointContext:
    """Resources that all checkpoints share."""

    disk: Disk
    data_dir: str
    engine_id: bytes
    storage: StorageConfig
    clock: Clock
    numbers: NumberAllocator
    heartbeat: Callable[[], None]
    """Called between steps of less than 1 s each. It reports progress, and may raise ShuttingDown."""
    throttle: Callable[[], None] = lambda: None
    """Called after every piece of a segment: see throttle.py."""


@dataclass(slots=True)
class CheckpointResult:
    """Result of a checkpoint, with counts for board and log."""

    snapshot: int = 0
    segments: int = 0
    records: int = 0
    absorbed_bytes: int = 0
    unlinked: int = 0


@dataclass(slots=True)
class CheckpointTask:
    """One checkpoint. Call `run` once."""

    context: CheckpointContext
    shard: CompactorShardClient
    plan: m.CheckpointPlan
    result: CheckpointResult = field(default_factory=CheckpointResult)
    _sealed: dict[tuple[int, int], int] = field(default_factory=dict)
    """(topic, epoch) -> last seq that this checkpoint wrote to a segment."""
    _removed: set[int] = field(default_factory=set)
    _added: list[m.SegmentRef] = field(default_factory=list)

    def run(self) -> CheckpointResult:
        """Perform the checkpoint.

        Raises DiskError, CorruptData, and the errors of shard requests. After an error no acknowledged record
        is lost, and the next attempt finds the same log.
        """
        base = self._base()
        for appends in self._passes():
            self._seal_pass(appends)
            del appends  # Free the memory before the next pass is read.
        self._replace_leftovers()
        mark_deleted_records(self.context, self.shard, self._removed, [*self.plan.segments, *self._added])
        stop_points.hit("compact_before_snapshot")
        number = self._write_snapshot(base)
        stop_points.hit("compact_after_snapshot")
        unlink = self.shard.confirm_snapshot(number, self._absorbed())
        stop_points.hit("compact_before_unlink")
        self._unlink(unlink)
        retire_snapshots(self.context.disk, self.context.data_dir, self.plan, keep={number, base.number})
        return self.result

    # -- log to segments ------------------------------------------------------------------------------

    def _passes(self) -> Iterator[AppendCollector]:
        """Yield the log in parts that fit into memory. The last one may be empty."""
        appends = AppendCollector()
        for file in self.plan.files:
            for buffer, batch in read_log(self.context.disk, self.context.data_dir, file):
                appends.add(buffer, batch)
                self.result.absorbed_bytes += batch.stop
                self.context.heartbeat()
                stop_points.hit("compact_mid_read")
                if appends.bytes >= PASS_BYTES:
                    yield appends
                    appends = AppendCollector()
        yield appends

    def _seal_pass(self, appends: AppendCollector) -> None:
        self._removed |= appends.deleted_topics
        table = appends.to_table()
        if not len(table):
            return
        live = self.shard.fetch_live_topics(table.topics())
        planner = SegmentPlanner(table, live, self._sealed)
        storage = self.context.storage
        sizes = SegmentSizeLimits(storage.segment_records, storage.segment_bytes, storage.own_segment_bytes)
        refs: list[m.SegmentRef] = []
        for cuts in planner.plan_segments(sizes):
            ref = self._make_segment(planner, cuts, live)
            if ref is not None:
                refs.append(ref)
        stop_points.hit("compact_before_register")
        for start in range(0, len(refs), SEGMENTS_PER_REGISTER_MAX):
            self._register(refs[start : start + SEGMENTS_PER_REGISTER_MAX], [])
        stop_points.hit("compact_after_register")
        planner.record_last_sealed(self._sealed)

    def _make_segment(
        self, planner: SegmentPlanner, cuts: list[TopicCut], live: LiveTopics
    ) -> m.SegmentRef | None:
        ctx, storage = self.context, self.context.storage
        created_us = ctx.clock.now_us()
        writer = SegmentWriter(
            ctx.disk, ctx.data_dir, number=ctx.numbers.allocate(), salt=random_u64() | 1,
            shard=self.plan.shard, shards=self.plan.shards, engine_id=ctx.engine_id, created_us=created_us,
            compression=storage.compression, compression_min_bytes=storage.compression_min_bytes,
            compression_saving=storage.compression_saving, yield_cpu=ctx.throttle,
        )  # fmt: skip
        try:
            for cut, runs in planner.frame_runs(cuts):
                writer.add_topic(
                    cut.topic_id,
                    cut.epoch,
                    runs,
                    earliest_seq=cut.earliest_seq,
                    dead=live.deleted.get(cut.topic_id),
                    codec=live.codecs.get(cut.topic_id),
                )
                ctx.heartbeat()
            ref = writer.finish()
        except (DiskError, RinglogError):
            writer.abandon()
            raise
        if ref is None:
            return None
        ref = msgspec.structs.replace(ref, created_us=created_us)
        verify_written_segment(ctx, ref)
        return ref

    def _register(self, refs: list[m.SegmentRef], removed: list[int]) -> None:
        if not refs and not removed:
            return
        changed = self.shard.register(refs, removed)
        if not changed.accepted:
            remove_unregistered(self.context.disk, self.context.data_dir, refs)
            raise Internal(
                "a shard refused to register segments", shard=self.plan.shard, reason=changed.reason
            )
        self._added += refs
        self.result.segments += len(refs)
        self.result.records += sum(ref.records for ref in refs)

    def _replace_leftovers(self) -> None:
        """Deregister segments that an unfinished checkpoint made from the same log.

        Such a segment is newer than the snapshot that the shard's plan is based on. `_write_snapshot` ensures
        that no snapshot is older than a segment that it lists.
        """
        found, _ = snapshots.load_snapshots(self.context.disk, self.context.data_dir, self.plan.shard)
        known = [
            each for each in found if each.number == self.plan.number and each.shards == self.plan.shards
        ]
        if not known:
            return
        leftovers = [
            ref for ref in self.plan.segments
            if ref.number >> CREATOR_SHIFT == CREATOR_COMPACTOR and ref.created_us > known[0].created_us
        ]  # fmt: skip
        new_spans = self._spans_of(self._added)
        replaced = [ref.number for ref in leftovers if self._is_covered(self._spans_of([ref]), new_spans)]
        self._register([], replaced)

    def _spans_of(self, refs: Iterable[m.SegmentRef]) -> dict[int, tuple[int, int]]:
        """Return for each topic the first and last seq that these segments contain."""
        spans: dict[int, tuple[int, int]] = {}
        for ref in refs:
            segment = Segment.open(self.context.disk, self.context.data_dir, ref.stem)
            topics = segment.topics
            segment.close()
            columns = [topics[name].tolist() for name in ("topic_id", "first_seq", "last_seq")]
            for topic_id, first, last in zip(*columns, strict=True):
                low, high = spans.get(topic_id, (first, last))
                spans[topic_id] = min(low, first), max(high, last)
        return spans

    def _is_covered(self, spans: dict[int, tuple[int, int]], new_spans: dict[int, tuple[int, int]]) -> bool:
        """Return whether the new segments contain all records in `spans` that belong to this shard.

        A checkpoint under another number of shards may have read more of the log, and its segments may have
        replaced older ones since. Such segments stay registered.
        """
        return all(
            new_spans.get(topic_id, (last + 1, 0))[0] <= first and last <= new_spans[topic_id][1]
            for topic_id, (first, last) in spans.items()
            if shard_of(topic_id, self.plan.shards) == self.plan.shard
        )

    # -- snapshot -------------------------------------------------------------------------------------

    def _base(self) -> Snapshot:
        """Return the snapshot to merge changed rows into. It is empty if all rows must be requested."""
        found, skipped = snapshots.load_snapshots(
            self.context.disk, self.context.data_dir, self.plan.shard, most=1
        )
        for reason in skipped:
            log_event(log, logging.WARNING, "snapshot skipped", reason=reason)
        is_usable = (
            found and found[0].number >= max(self.plan.number, 1) and found[0].shards == self.plan.shards
        )
        return found[0] if is_usable else snapshots.empty_snapshot(self.plan.shard, self.plan.shards)

    def _write_snapshot(self, base: Snapshot) -> int:
        ctx, plan = self.context, self.plan
        rows = self.shard.fetch_snapshot_rows(self._absorbed(), everything=base.number == 0)
        if rows.is_everything:
            # The shard does not know the last snapshot, whose confirmation was lost. Topics deleted since
            # then have a row in that snapshot, so it cannot be the base.
            base = snapshots.empty_snapshot(plan.shard, plan.shards)
        ids, starts, merged = snapshots.merge_rows(base, rows.ids, rows.lengths, rows.rows)
        listed = [ref.created_us for ref in (*plan.segments, *self._added)]
        number = snapshots.next_snapshot_number(ctx.disk, ctx.data_dir, plan.shard, plan.shards, plan.number)
        snapshot = Snapshot(
            number, plan.shard, plan.shards, plan.incarnation, max([ctx.clock.now_us(), *listed]),
            rows.facts, ids, starts, merged,
        )  # fmt: skip
        snapshots.write_snapshot(ctx.disk, ctx.data_dir, snapshot)
        self.result.snapshot = number
        return number

    def _absorbed(self) -> list[int]:
        return list(dict.fromkeys([file.file_id for file in self.plan.files]))

    def _unlink(self, paths: list[str]) -> None:
        disk, data_dir = self.context.disk, self.context.data_dir
        for path in paths:
            if not path.startswith("wal/shard-") or ".." in path:
                raise CorruptData("a shard released a file that is not a log file", file=path)
            # A shard that starts deletes such files, too.
            self.result.unlinked += unlink_if_present(disk, f"{data_dir}/{path}")
        for directory in sorted({path.rpartition("/")[0] for path in paths}):
            disk.sync_dir(f"{data_dir}/{directory}")


def verify_written_segment(ctx: CheckpointContext, ref: m.SegmentRef) -> None:
    """Read a whole segment back before readers use it. Raises CorruptData or DiskError."""
    path = f"{ctx.data_dir}/{ref.stem}{DATA}"
    fd = ctx.disk.open_read(path)
    try:
        header = SegmentDataHeader.decode(ctx.disk.read_at(fd, DATA_HEADER_BYTES, 0), path)
    finally:
        ctx.disk.close(fd)
    records = frames = 0
    for _, _, batch in read_frames(ctx.disk, path, header):
        records += int((batch.words[:, 4] & np.uint64(0xFFFFFFFF)).sum())
        frames += len(batch)
        ctx.heartbeat()
    segment = Segment.open(ctx.disk, ctx.data_dir, ref.stem)
    segment.close()
    expected = (ref.number, ref.salt, ref.records, ref.frames)
    if (header.number, header.salt, records, frames) != expected or segment.ref.records != records:
        raise CorruptData("a segment differs from what was written", file=path)


def remove_unregistered(disk: Disk, data_dir: str, refs: list[m.SegmentRef]) -> None:
    """Remove segments that no shard knows. The data part goes first: without it a segment does not exist.

    The newest segment goes first, durably. A shard that starts assumes that the segments contain everything
    up to their last record. So the remaining segments must have no gap, even after an interruption.
    """
    for ref in reversed(refs):
        for suffix in SUFFIXES:
            if disk.exists(f"{data_dir}/{ref.stem}{suffix}"):
                disk.unlink(f"{data_dir}/{ref.stem}{suffix}")
                if suffix == DATA:
                    disk.sync_dir(f"{data_dir}/{ref.stem.rpartition('/')[0]}")


def retire_snapshots(disk: Disk, data_dir: str, plan: m.CheckpointPlan, keep: set[int]) -> None:
    """Remove a shard's snapshots except those in `keep`: the last one and the valid one before it.

    Snapshots of another layout (number of shards) stay until every shard has SNAPSHOTS_KEPT snapshots of
    this layout. A shard without them would recover its topics from the other layout.
    """
    of_layout: dict[int, list[int]] = {}
    others: list[tuple[int, int]] = []
    for shard, number in snapshots.snapshot_numbers(disk, data_dir):
        if _is_of_layout(disk, data_dir, shard, number, plan.shards):
            of_layout.setdefault(shard, []).append(number)
        else:
            others.append((shard, number))
    have_all = all(len(of_layout.get(shard, [])) >= SNAPSHOTS_KEPT for shard in range(plan.shards))
    old = [(plan.shard, number) for number in of_layout.get(plan.shard, []) if number not in keep]
    if have_all:
        # Snapshots of this layout may be older than those of the other one. Only snapshots that are older
        # than the kept ones of all shards are obsolete.
        oldest = min(of_layout[shard][SNAPSHOTS_KEPT - 1] for shard in range(plan.shards))
        old += [each for each in others if each[1] < oldest]
    for shard, number in old:
        path = f"{data_dir}/{META_DIR}/{snapshots.snapshot_name(shard, number)}"
        if disk.exists(path):
            disk.unlink(path)


def _is_of_layout(disk: Disk, data_dir: str, shard: int, number: int, shards: int) -> bool:
    try:
        return snapshots.snapshot_header(disk, data_dir, shard, number).shards == shards
    except (CorruptData, DiskError):
        return False
