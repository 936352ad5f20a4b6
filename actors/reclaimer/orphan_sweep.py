"""The sweep: finds files that no shard has registered, and removes those that may be removed."""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Collection

import msgspec
import numpy as np

from ringlog import stop_points
from ringlog.actors.reclaimer.orphan_files import OrphanFiles, group_parts
from ringlog.actors.reclaimer.plan import RegisteredSegment, assess_segment, superseded_ranges
from ringlog.actors.reclaimer.segment_indexes import SegmentIndexes
from ringlog.actors.reclaimer.shard_client import ReclaimerShardClient, RegisteredState
from ringlog.clock import Clock
from ringlog.errors import ColdUnavailable, CorruptData, DiskError
from ringlog.logs import log_event
from ringlog.segment.layout import DATA, DEL, IDX, TAGS
from ringlog.segment.parts import part_names, remove_topic_dir, topic_dirs, topic_of_dir
from ringlog.segment.segment import Segment
from ringlog.storage.disk import Disk
from ringlog.storage.layout import TMP_SUFFIX
from ringlog.tier.copies import SegmentCopies

log: logging.Logger = logging.getLogger("ringlog.reclaimer")
SWEEP_NS = 60 * 1_000_000_000
ORPHANS_PER_ROUND = 64


class OrphanSweep:
    """Removes orphans. For one thread; removals from the cold store are handed to `submit_cold_job`."""

    def __init__(
        self,
        disk: Disk,
        data_dir: str,
        copies: SegmentCopies,
        shards: ReclaimerShardClient,
        indexes: SegmentIndexes,
        clock: Clock,
        *,
        quarantined: Callable[[], set[int]],
        want_checkpoint: Callable[[], None],
        submit_cold_job: Callable[[Callable[[], None]], bool],
        is_held: Callable[[], bool],
    ) -> None:
        """Create a sweep. See Reclaimer for the functions."""
        self._disk, self._data_dir, self._copies = disk, data_dir, copies
        self._shards, self._indexes, self._clock = shards, indexes, clock
        self._quarantined, self._want_checkpoint = quarantined, want_checkpoint
        self._submit_cold_job, self._is_held = submit_cold_job, is_held
        self.orphans: OrphanFiles = OrphanFiles()
        self._swept_ns = -(1 << 62)
        self._removing: set[str] = set()
        self._cold_done: deque[str] = deque()
        self._reported_orphans: set[str] = set()

    def run(self, state: RegisteredState) -> None:
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
                self.orphans.add((stems.keys() - registered_stems) | set(temporaries), state.snapshots)
                self.orphans.add(self._orphan_dirs({*names, *registered_stems}), state.snapshots)
            due = [name for name in self.orphans.removable(state.snapshots) if name not in self._removing]
            if due and not self._is_held():
                for name in due[:ORPHANS_PER_ROUND]:
                    self._remove(name, state)
        except DiskError as e:
            log_event(log, logging.WARNING, "orphan files not removed, will retry", reason=str(e))
        # What keeps a removable orphan may last for days, for example a backup or an absent cold store. More
        # snapshots do not help it.
        if len(self.orphans) > len(self.orphans.removable(state.snapshots)):
            self._want_checkpoint()

    def _orphan_dirs(self, names: Collection[str]) -> set[str]:
        """Return the empty directories of deleted topics.

        `names` are all existing and all registered paths: a missing part still needs its directory when it is
        restored.
        """
        empty = set(topic_dirs(self._disk, self._data_dir)) - {name.rpartition("/")[0] for name in names}
        topics = {topic_of_dir(name): name for name in empty}
        liveness = self._shards.query_liveness([np.array(sorted(topics), dtype=np.uint64)])
        # If a shard does not reply, its topics are not in `liveness`. A halted topic still exists.
        return {
            name for topic_id, name in topics.items() if topic_id in liveness and not liveness[topic_id].epoch
        }

    def _remove(self, name: str, state: RegisteredState) -> None:
        """Remove a temporary file, an empty directory, or the parts of a segment in both tiers.

        The index is removed last, because it shows what is left to remove. Raises DiskError; the next round
        retries.
        """
        if name.endswith(TMP_SUFFIX):
            if self._disk.exists(path := f"{self._data_dir}/{name}"):
                self._disk.unlink(path)
            self.orphans.discard([name])
        elif topic_of_dir(name):
            # A deleted topic never comes back, because ids are not reused. If the directory is not empty any
            # more, the next sweep checks it again.
            remove_topic_dir(self._disk, self._data_dir, name)
            self.orphans.discard([name])
        elif self._is_dead(name, state):
            self._copies.drop_local(name, (DATA, TAGS, DEL))
            stop_points.hit("reclaim_mid_unlink")
            if self._copies.store is None:
                self._remove_index(name)
            elif self._submit_cold_job(lambda: self._remove_cold(name)):
                self._removing.add(name)
        else:
            self._report_kept(name)

    def _is_dead(self, stem: str, state: RegisteredState) -> bool:
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
        liveness = self._shards.query_liveness([orphan.table["topic_id"]])
        elsewhere, _ = superseded_ranges(
            [orphan, *state.undamaged(self._quarantined())], self._indexes.stored_ranges, self._shards.shards
        )
        return not assess_segment(orphan, liveness, elsewhere.get(0, {}), self._indexes.count).records

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
        except (ColdUnavailable, DiskError) as e:
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
            self.orphans.discard([stem])
