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

import errno
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from pyroaring import BitMap64

from ringlog import stop_points
from ringlog.actors.reclaimer.orphan_files import OrphanFiles, group_parts
from ringlog.actors.reclaimer.plan import (
    Ranges,
    RegisteredSegment,
    SegmentLiveness,
    SegmentRewrite,
    SegmentSpans,
    TopicLiveness,
    assess_segment,
    plan_rewrites,
    superseded_ranges,
)
from ringlog.actors.reclaimer.rewriter import Rewriter, SegmentOrigin
from ringlog.clock import Clock
from ringlog.config import StorageConfig
from ringlog.envelope import messages as m
from ringlog.errors import (
    ColdUnavailable,
    CorruptData,
    DiskError,
    FrameInvalid,
    Refused,
    RequestTimeout,
    ShuttingDown,
)
from ringlog.logs import log_event
from ringlog.placement import shards_of
from ringlog.segment.layout import DATA, DEL, IDX, TAGS
from ringlog.segment.parts import part_names, remove_topic_dir, topic_dirs, topic_of_dir
from ringlog.segment.segment import Segment
from ringlog.storage.disk import Disk
from ringlog.storage.layout import TMP_SUFFIX
from ringlog.tier.copies import SegmentCopies
from ringlog.types import Codec

log = logging.getLogger("ringlog.reclaimer")
LIVE_TOPICS_PER_ASK = 1_024
"""Topics per request. A shard replies in about 1 ms, and the bitmaps fit into one envelope."""
FULL_ROUND_NS = 60 * 1_000_000_000
"""Minimum interval of liveness queries while there is no new snapshot or segment, in ns."""
SWEEP_NS = 60 * 1_000_000_000
ORPHANS_PER_ROUND = 64


class ReclaimRequester(Protocol):
    """A request to a shard: (reply, attachment). It raises the errors of link.shard_requests."""

    def __call__(self, shard: int, message: m.Message, attachment: Any = None) -> tuple[Any, Any]: ...


@dataclass(slots=True)
class ReclaimCounters:
    """Counters for the board."""

    dropped: int = 0
    rewritten: int = 0
    reclaimed_bytes: int = 0


@dataclass(slots=True)
class _RegisteredState:
    """Replies of the shards in one round."""

    snapshots: dict[int, int]
    segments: dict[int, RegisteredSegment]
    is_complete: bool
    """Whether every shard replied."""
    unreadable: set[str] = field(default_factory=set)
    """Stems of registered segments with an unreadable index or with missing parts."""
    liveness: dict[int, TopicLiveness] = field(default_factory=dict)


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
    ) -> None:
        """Create a reclaimer.

        `submit_cold_job(job)` runs a job that may block on the cold store in another thread, or returns False
        if its queue is full. `want_checkpoint` requests new snapshots, which no longer list dropped segments.
        """
        self._disk, self._data_dir, self._settings = disk, data_dir, settings
        self._copies, self._rewriter = copies, rewriter
        self._shards, self._engine_id = shards, engine_id
        self._ask, self._clock = ask, clock
        self._quarantined, self._want_checkpoint = quarantined, want_checkpoint
        self._submit_cold_job = submit_cold_job
        self.counts = ReclaimCounters()
        self._tables: dict[int, Any] = {}
        self._measured: dict[tuple[int, int], tuple[tuple[Any, ...], tuple[int, int]]] = {}
        self._orphans = OrphanFiles()
        self._assessed_state: tuple[dict[int, int], set[tuple[int, int]]] | None = None
        self._assessed_ns = 0
        self._swept_ns = -(1 << 62)
        self._removing: set[str] = set()
        self._cold_done: deque[str] = deque()
        self._reported_orphans: set[str] = set()

    def run_round(self) -> None:
        """Run one round.

        Raises ShuttingDown; other errors are logged, and the work is left for a later round.
        """
        state = self._query_shards()
        self._orphans.discard(
            [registered.ref.stem for registered in state.segments.values()] + list(state.unreadable)
        )
        if self._is_full_round_due(state):
            self._drop_and_rewrite(state)
        if state.is_complete:
            self._sweep(state)

    def _is_full_round_due(self, state: _RegisteredState) -> bool:
        facts = (
            state.snapshots,
            {(registered.ref.number, registered.ref.tier) for registered in state.segments.values()},
        )
        now_ns = self._clock.monotonic_ns()
        if facts == self._assessed_state and now_ns - self._assessed_ns < FULL_ROUND_NS:
            return False
        self._assessed_state, self._assessed_ns = facts, now_ns
        return True

    def _drop_and_rewrite(self, state: _RegisteredState) -> None:
        """Drop dead segments, and rewrite or merge others."""
        state.liveness = self._query_liveness([each.table["topic_id"] for each in state.segments.values()])
        elsewhere, shared = superseded_ranges(
            self._undamaged_segments(state), self._stored_ranges, self._shards
        )
        alive = {
            number: assess_segment(registered, state.liveness, elsewhere.get(number, {}), self._measure)
            for number, registered in state.segments.items()
        }
        for number, counted in alive.items():
            if not counted.records:
                self._drop(state, state.segments[number])
        self._rewrite(state, alive, shared)

    # -- queries --------------------------------------------------------------------------------------

    def _query_shards(self) -> _RegisteredState:
        by_number: dict[int, tuple[m.SegmentRef, list[int]]] = {}
        snapshots: dict[int, int] = {}
        missing: set[str] = set()
        for shard in range(self._shards):
            plan = self._try(shard, m.CheckpointOpen())
            if plan is None:
                continue
            snapshots[shard] = plan[0].number
            missing |= {ref.stem for ref in plan[0].missing}
            for ref in plan[0].segments:
                by_number.setdefault(ref.number, (ref, []))[1].append(shard)
        readable, unreadable = {}, missing
        for number, (ref, shards) in by_number.items():
            table = self._table(ref)
            if table is None:
                unreadable.add(ref.stem)
            else:
                readable[number] = RegisteredSegment(ref, tuple(shards), table)
        self._tables = {number: self._tables[number] for number in readable}
        self._measured = {key: kept for key, kept in self._measured.items() if key[0] in readable}
        return _RegisteredState(snapshots, readable, len(snapshots) == self._shards, unreadable)

    def _try(self, shard: int, message: m.Message, attachment: Any = None) -> tuple[Any, Any] | None:
        """Send a request; return None if the shard refused it or did not reply."""
        try:
            return self._ask(shard, message, attachment)
        except ShuttingDown:
            raise
        except (Refused, RequestTimeout) as e:
            log_event(log, logging.DEBUG, "shard did not answer", shard=shard, reason=str(e))
            return None

    def _table(self, ref: m.SegmentRef) -> Any:
        if ref.number not in self._tables:
            try:
                segment = Segment.open(self._disk, self._data_dir, ref.stem)
            except (CorruptData, DiskError) as e:
                # The scrub also finds and reports it. Here the segment is only skipped.
                log_event(log, logging.WARNING, "index not readable", segment=ref.stem, reason=str(e))
                return None
            self._tables[ref.number] = np.array(segment.topics)
            segment.close()
        return self._tables[ref.number]

    def _query_liveness(self, topics: list[Any]) -> dict[int, TopicLiveness]:
        """Return the live state of all these topics. Topics of a shard that did not reply are missing."""
        if not topics:
            return {}
        ids = np.unique(np.concatenate(topics)).astype("<u8")
        owners = shards_of(ids, self._shards)
        found: dict[int, TopicLiveness] = {}
        for shard in range(self._shards):
            own = ids[owners == shard]
            for start in range(0, len(own), LIVE_TOPICS_PER_ASK):
                part = own[start : start + LIVE_TOPICS_PER_ASK]
                answer = self._try(shard, m.LiveAsk(len(part)), part.tobytes())
                if answer is not None:
                    found.update(_decode_liveness(*answer))
        return found

    def _measure(
        self, registered: RegisteredSegment, at: int, live: TopicLiveness, elsewhere: Ranges
    ) -> tuple[int, int]:
        """Return the result of `_count`. It is cached until more of the topic is dead."""
        key, facts = (registered.ref.number, at), (live.earliest_seq, len(live.deleted), tuple(elsewhere))
        kept = self._measured.get(key)
        if kept is None or kept[0] != facts:
            kept = self._measured[key] = (facts, self._count(registered, at, live, elsewhere))
        return kept[1]

    def _count(
        self, registered: RegisteredSegment, at: int, live: TopicLiveness, elsewhere: Ranges
    ) -> tuple[int, int]:
        """Return the live records and accounted bytes of one topic of a segment, from its index.

        If the index cannot be read, all records count as alive.
        """
        row = registered.table[at]
        try:
            segment = Segment.open(self._disk, self._data_dir, registered.ref.stem)
            try:
                seqs, sizes, _ = segment.positions(at, live.earliest_seq, int(row["last_seq"]))
            finally:
                segment.close()
        except (CorruptData, DiskError) as e:
            log_event(log, logging.WARNING, "index not readable", segment=registered.ref.stem, reason=str(e))
            return int(row["records"]), int(row["bytes"])
        is_alive = ~np.isin(seqs, np.array(live.deleted.to_array(), dtype=np.uint64), assume_unique=True)
        for first, last in elsewhere:
            is_alive &= (seqs < first) | (seqs > last)
        return int(is_alive.sum()), int(sizes[is_alive].sum())

    def _undamaged_segments(self, state: _RegisteredState) -> list[RegisteredSegment]:
        """Return the segments that may supersede others: those that are not quarantined."""
        quarantined = self._quarantined()
        return [registered for number, registered in state.segments.items() if number not in quarantined]

    def _stored_ranges(self, registered: RegisteredSegment, at: int) -> Ranges:
        """Return the ranges of positions in a segment, from its index; [] if it cannot be read."""
        try:
            segment = Segment.open(self._disk, self._data_dir, registered.ref.stem)
        except (CorruptData, DiskError) as e:
            log_event(log, logging.WARNING, "index not readable", segment=registered.ref.stem, reason=str(e))
            return []
        row = segment.topics[at]
        entries = segment.entries[int(row["entry_start"]) : int(row["entry_stop"])]
        segment.close()
        first, after = entries["base_seq"], entries["base_seq"] + entries["count"]
        is_cut = np.append(True, first[1:] != after[:-1])
        starts = np.flatnonzero(is_cut)
        stops = np.append(starts[1:], len(entries)) - 1
        return list(zip(first[starts].tolist(), (after[stops] - 1).tolist(), strict=True))

    # -- drops ----------------------------------------------------------------------------------------

    def _change(
        self, shards: Collection[int], added: Mapping[int, list[m.SegmentRef]], removed: list[int]
    ) -> str:
        """Send each shard its added segments and the removed ones.

        Returns:
            "" if all shards accepted, "refused" if all refused, else "unknown".
        """
        took = refused = 0
        for shard in sorted({*shards, *added}):
            known = removed if shard in shards else []
            answer = self._try(shard, m.SegmentsChange(added.get(shard, []), known))
            if answer is not None and answer[0].accepted:
                took += 1
            elif answer is not None:
                refused += 1
                log_event(
                    log, logging.WARNING, "shard refused a segment change", shard=shard,
                    reason=answer[0].reason,
                )  # fmt: skip
            else:
                return "unknown"
        return "" if not refused else "unknown" if took else "refused"

    def _drop(self, state: _RegisteredState, registered: RegisteredSegment) -> None:
        """Deregister a segment without live records at its shards. Its files are removed later."""
        if self._change(registered.shards, {}, [registered.ref.number]):
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

    def _forget_segments(self, state: _RegisteredState, sources: Iterable[RegisteredSegment]) -> None:
        for registered in sources:
            state.segments.pop(registered.ref.number, None)
            self._orphans.add([registered.ref.stem], state.snapshots)

    # -- rewrites and merges --------------------------------------------------------------------------

    def _rewrite(
        self, state: _RegisteredState, alive: Mapping[int, SegmentLiveness], shared: set[int]
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

    def _remake_one(self, state: _RegisteredState, planned: SegmentRewrite, spans: SegmentSpans) -> None:
        ids = np.unique(np.concatenate([registered.table["topic_id"] for registered in planned.sources]))
        if not all(int(topic_id) in state.liveness for topic_id in ids):
            return  # A shard did not report which records are alive.
        liveness_now = self._query_liveness([ids])
        if len(liveness_now) < len(ids):
            return
        shards = planned.sources[0].shards
        origin = SegmentOrigin(self._engine_id, self._shards, self._clock.now_us())
        by_shard = self._rewriter.rewrite(planned.sources, liveness_now, spans, origin)
        new_refs = [ref for refs in by_shard.values() for ref in refs]
        stop_points.hit("reclaim_after_write")
        # Mark records that were deleted during the rewrite. From the registration on the compactor marks
        # them.
        self._rewriter.mark_deleted(new_refs, self._query_liveness([ids]))
        outcome = self._change(shards, by_shard, [registered.ref.number for registered in planned.sources])
        if outcome == "refused":
            self._rewriter.remove_segments(new_refs)
        if outcome:
            return
        stop_points.hit("reclaim_after_change")
        self._rewriter.mark_deleted(new_refs, self._query_liveness([ids]))
        self._forget_segments(state, planned.sources)
        before, after = (sum(ref.data_bytes for ref in refs) for refs in (_refs(planned.sources), new_refs))
        self.counts.rewritten += len(planned.sources)
        self.counts.reclaimed_bytes += max(before - after, 0)
        log_event(log, logging.INFO, "segments rewritten", reason=planned.reason,
            segments=len(planned.sources), into=len(new_refs), bytes_before=before,
            bytes_after=after)  # fmt: skip

    # -- sweep ----------------------------------------------------------------------------------------

    def _sweep(self, state: _RegisteredState) -> None:
        """Find orphans, and remove those that may be removed. Every shard replied in this round."""
        while self._cold_done:
            self._remove_index(self._cold_done.popleft())
        now_ns = self._clock.monotonic_ns()
        try:
            if now_ns - self._swept_ns >= SWEEP_NS:
                self._swept_ns = now_ns
                names = part_names(self._disk, self._data_dir)
                stems, temporaries = group_parts(names)
                registered_stems = {
                    segment.ref.stem for segment in state.segments.values()
                } | state.unreadable
                self._orphans.add((stems.keys() - registered_stems) | set(temporaries), state.snapshots)
                self._orphans.add(self._orphan_dirs({*names, *registered_stems}), state.snapshots)
            due = [name for name in self._orphans.removable(state.snapshots) if name not in self._removing]
            for name in due[:ORPHANS_PER_ROUND]:
                self._remove(name, state)
        except DiskError as e:
            log_event(log, logging.WARNING, "orphan files not removed, will retry", reason=str(e))
        if len(self._orphans):
            self._want_checkpoint()

    def _orphan_dirs(self, names: Collection[str]) -> set[str]:
        """Return the empty directories of deleted topics.

        `names` are all existing and all registered paths: a missing part still needs its directory when it is
        restored.
        """
        empty = set(topic_dirs(self._disk, self._data_dir)) - {name.rpartition("/")[0] for name in names}
        topics = {topic_of_dir(name): name for name in empty}
        liveness = self._query_liveness([np.array(sorted(topics), dtype=np.uint64)])
        # If a shard does not reply, its topics are not in `liveness`. A halted topic still exists.
        return {
            name for topic_id, name in topics.items() if topic_id in liveness and not liveness[topic_id].epoch
        }

    def _remove(self, name: str, state: _RegisteredState) -> None:
        """Remove a temporary file, an empty directory, or the parts of a segment in both tiers.

        The index is removed last, because it shows what is left to remove. Raises DiskError; the next round
        retries.
        """
        if name.endswith(TMP_SUFFIX):
            if self._disk.exists(path := f"{self._data_dir}/{name}"):
                self._disk.unlink(path)
            self._orphans.discard([name])
        elif topic_of_dir(name):
            # A deleted topic never comes back, because ids are not reused. If the directory is not empty any
            # more, the next sweep checks it again.
            remove_topic_dir(self._disk, self._data_dir, name)
            self._orphans.discard([name])
        elif self._is_dead(name, state):
            self._copies.drop_local(name, (DATA, TAGS, DEL))
            stop_points.hit("reclaim_mid_unlink")
            if self._copies.store is None:
                self._remove_index(name)
            elif self._submit_cold_job(lambda: self._remove_cold(name)):
                self._removing.add(name)
        else:
            self._report_kept(name)

    def _is_dead(self, stem: str, state: _RegisteredState) -> bool:
        """Return whether every live record of an orphan is also in a registered segment.

        An orphan with an unreadable index is not dead: an operator must decide about it.
        """
        try:
            segment = Segment.open(self._disk, self._data_dir, stem)
        except CorruptData:
            return False
        except DiskError as e:
            if e.errno != errno.ENOENT:
                raise
            return not self._copies.has_local(stem + DATA)
        try:
            # Number 0: every registered segment supersedes it.
            orphan = RegisteredSegment(
                msgspec.structs.replace(segment.ref, number=0), (), np.array(segment.topics)
            )
        finally:
            segment.close()
        liveness = self._query_liveness([orphan.table["topic_id"]])
        elsewhere, _ = superseded_ranges(
            [orphan, *self._undamaged_segments(state)], self._stored_ranges, self._shards
        )
        return not assess_segment(orphan, liveness, elsewhere.get(0, {}), self._count).records

    def _report_kept(self, stem: str) -> None:
        """Log once that an orphan is kept. It is checked again with the next snapshots."""
        if stem not in self._reported_orphans:
            self._reported_orphans.add(stem)
            log_event(
                log, logging.WARNING, "orphan segment kept: it has live or unreadable records", segment=stem
            )

    def _remove_cold(self, stem: str) -> None:
        """Remove the cold parts of a segment. Runs in a thread that may wait for the store."""
        try:
            self._copies.drop_cold(stem)
        except ColdUnavailable as e:
            log_event(log, logging.WARNING, "cold segment not removed", segment=stem, reason=str(e))
            self._removing.discard(stem)
        else:
            self._cold_done.append(stem)

    def _remove_index(self, stem: str) -> None:
        self._removing.discard(stem)
        try:
            self._copies.drop_local(stem, (IDX,))
        except DiskError as e:
            log_event(log, logging.WARNING, "index not removed", segment=stem, reason=str(e))
        else:
            self._orphans.discard([stem])


def _refs(sources: Iterable[RegisteredSegment]) -> list[m.SegmentRef]:
    return [registered.ref for registered in sources]


def _decode_liveness(reply: m.LiveReply, attachment: Any) -> dict[int, TopicLiveness]:
    """Decode a LiveReply: topic id -> live state."""
    rows = np.frombuffer(attachment, dtype="<u8").reshape(-1, 5)
    codecs = reply.codecs or bytes(len(rows))
    return {
        topic_id: TopicLiveness(
            epoch,
            earliest,
            BitMap64.deserialize(reply.deleted[start:stop]) if stop > start else BitMap64(),
            Codec(codec),
        )
        for (topic_id, epoch, earliest, start, stop), codec in zip(rows.tolist(), codecs, strict=True)
    }
