"""A round of the reclaimer: query shards, drop dead segments, rewrite sparse or small ones, remove orphans.

A segment is removed in this order:

1. Its shard reports that the records are dead, durably.
2. The shard deregisters the segment.
3. The snapshots that list it are deleted.
4. The files in both tiers are deleted. The index on the host is last: it shows what is left to remove.

After a crash the steps are repeated from the start. The sweep finds files that no shard has registered, and
registered segments are assessed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ringlog import stop_points
from ringlog.actors.reclaimer.orphan_sweep import OrphanSweep
from ringlog.actors.reclaimer.plan import (
    RegisteredSegment,
    SegmentLiveness,
    SegmentRewrite,
    SegmentSpans,
    assess_segment,
    plan_rewrites,
    superseded_ranges,
)
from ringlog.actors.reclaimer.rewriter import Rewriter, SegmentOrigin
from ringlog.actors.reclaimer.segment_indexes import SegmentIndexes
from ringlog.actors.reclaimer.shard_client import ReclaimerShardClient, ReclaimRequester, RegisteredState
from ringlog.clock import Clock
from ringlog.config import StorageConfig
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, DiskError, FrameInvalid
from ringlog.logs import log_event
from ringlog.storage.disk import Disk
from ringlog.tier.copies import SegmentCopies

log: logging.Logger = logging.getLogger("ringlog.reclaimer")
FULL_ROUND_NS = 60 * 1_000_000_000
"""Minimum interval of liveness queries while there is no new snapshot or segment, in ns."""


@dataclass(slots=True)
class ReclaimCounters:
    """Counters for the board."""

    dropped: int = 0
    rewritten: int = 0
    reclaimed_bytes: int = 0


class Reclaimer:
    """Runs rounds, one after the other.

    For one thread; removals from the cold store are handed to `submit_cold_job`.
    """

    def __init__(
        self,
        disk: Disk,
        data_dir: str,
        settings: StorageConfig,
        *,
        copies: SegmentCopies,
        rewriter: Rewriter,
        shards: int,
        engine_id: bytes,
        ask: ReclaimRequester,
        clock: Clock,
        quarantined: Callable[[], set[int]],
        want_checkpoint: Callable[[], None],
        submit_cold_job: Callable[[Callable[[], None]], bool],
        is_held: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a reclaimer.

        `submit_cold_job(job)` runs a job that may block on the cold store in another thread, or returns False
        if its queue is full. `want_checkpoint` requests new snapshots, which no longer list dropped segments.
        While `is_held` returns True, a backup may copy any orphan, and none is removed.
        """
        self._settings, self._rewriter, self._is_held = settings, rewriter, is_held
        self._engine_id, self._clock, self._quarantined = engine_id, clock, quarantined
        self._shards = ReclaimerShardClient(ask, shards)
        self._indexes = SegmentIndexes(disk, data_dir)
        self._sweep = OrphanSweep(
            disk, data_dir, copies, self._shards, self._indexes, clock, quarantined=quarantined,
            want_checkpoint=want_checkpoint, submit_cold_job=submit_cold_job, is_held=is_held,
        )  # fmt: skip
        self.counts: ReclaimCounters = ReclaimCounters()
        self._assessed_state: tuple[dict[int, int], set[tuple[int, int]]] | None = None
        self._assessed_ns = 0

    def run_round(self) -> None:
        """Run one round.

        Raises ShuttingDown; other errors are logged, and the work is left for a later round.
        """
        self._is_held()  # See SegmentHold: the sweep asks only if something is due.
        state = self._shards.query_segments(self._indexes)
        self._sweep.orphans.discard(
            [registered.ref.stem for registered in state.segments.values()] + list(state.unreadable)
        )
        if self._is_full_round_due(state):
            self._drop_and_rewrite(state)
        if state.is_complete:
            self._sweep.run(state)

    def _is_full_round_due(self, state: RegisteredState) -> bool:
        facts = (
            state.snapshots,
            {(registered.ref.number, registered.ref.tier) for registered in state.segments.values()},
        )
        now_ns = self._clock.monotonic_ns()
        if facts == self._assessed_state and now_ns - self._assessed_ns < FULL_ROUND_NS:
            return False
        self._assessed_state, self._assessed_ns = facts, now_ns
        return True

    def _drop_and_rewrite(self, state: RegisteredState) -> None:
        """Drop dead segments, and rewrite or merge others."""
        state.liveness = self._shards.query_liveness(
            [each.table["topic_id"] for each in state.segments.values()]
        )
        elsewhere, shared = superseded_ranges(
            state.undamaged(self._quarantined()), self._indexes.stored_ranges, self._shards.shards
        )
        alive = {
            number: assess_segment(
                registered, state.liveness, elsewhere.get(number, {}), self._indexes.measure
            )
            for number, registered in state.segments.items()
        }
        for number, counted in alive.items():
            if not counted.records:
                self._drop(state, state.segments[number])
        self._rewrite(state, alive, shared)

    def _drop(self, state: RegisteredState, registered: RegisteredSegment) -> None:
        """Deregister a segment without live records at its shards. Its files are removed later."""
        if self._shards.change_segments(registered.shards, {}, [registered.ref.number]):
            return
        self._forget_segments(state, [registered])
        self.counts.dropped += 1
        self.counts.reclaimed_bytes += registered.ref.data_bytes
        log_event(
            log,
            logging.INFO,
            "segment dropped",
            segment=registered.ref.stem,
            bytes=registered.ref.data_bytes,
        )

    def _forget_segments(self, state: RegisteredState, sources: Iterable[RegisteredSegment]) -> None:
        for registered in sources:
            state.segments.pop(registered.ref.number, None)
            self._sweep.orphans.add([registered.ref.stem], state.snapshots)

    # -- rewrites and merges --------------------------------------------------------------------------

    def _rewrite(
        self, state: RegisteredState, alive: Mapping[int, SegmentLiveness], shared: set[int]
    ) -> None:
        settings, segments = self._settings, list(state.segments.values())
        rewrites = plan_rewrites(
            segments, alive, shared | self._quarantined(), segment_bytes=settings.segment_bytes,
            segment_records=settings.segment_records,
        )  # fmt: skip
        spans = SegmentSpans(segments)
        for planned in rewrites:
            try:
                self._remake_one(state, planned, spans)
            except (CorruptData, FrameInvalid, DiskError) as e:
                log_event(log, logging.ERROR, "segments not rewritten", reason=str(e),
                    sources=[registered.ref.stem for registered in planned.sources])  # fmt: skip

    def _remake_one(self, state: RegisteredState, planned: SegmentRewrite, spans: SegmentSpans) -> None:
        ids = np.unique(np.concatenate([registered.table["topic_id"] for registered in planned.sources]))
        if not all(int(topic_id) in state.liveness for topic_id in ids):
            return  # A shard did not report which records are alive.
        liveness_now = self._shards.query_liveness([ids])
        if len(liveness_now) < len(ids):
            return
        shards = planned.sources[0].shards
        origin = SegmentOrigin(self._engine_id, self._shards.shards, self._clock.now_us())
        by_shard = self._rewriter.rewrite(planned.sources, liveness_now, spans, origin)
        new_refs = [ref for refs in by_shard.values() for ref in refs]
        stop_points.hit("reclaim_after_write")
        # Mark records that were deleted during the rewrite. From the registration on the compactor marks
        # them.
        self._rewriter.mark_deleted(new_refs, self._shards.query_liveness([ids]))
        outcome = self._shards.change_segments(
            shards, by_shard, [registered.ref.number for registered in planned.sources]
        )
        if outcome == "refused":
            self._rewriter.remove_segments(new_refs)
        if outcome:
            return
        stop_points.hit("reclaim_after_change")
        self._rewriter.mark_deleted(new_refs, self._shards.query_liveness([ids]))
        self._forget_segments(state, planned.sources)
        before, after = (sum(ref.data_bytes for ref in refs) for refs in (_refs(planned.sources), new_refs))
        self.counts.rewritten += len(planned.sources)
        self.counts.reclaimed_bytes += max(before - after, 0)
        log_event(log, logging.INFO, "segments rewritten", reason=planned.reason,
            segments=len(planned.sources), into=len(new_refs), bytes_before=before,
            bytes_after=after)  # fmt: skip


def _refs(sources: Iterable[RegisteredSegment]) -> list[m.SegmentRef]:
    return [registered.ref for registered in sources]
