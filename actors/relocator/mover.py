"""Moves segments one after the other: copy, verify, inform the shards, then delete the hot data part.

States of a segment:

- hot: shards direct readers to the host. A cold copy, if there is one, is not used.
- both: tier 1 (TIER_BOTH). A verified copy of every part is in the store. Readers use the hot one.
- cold: tier 2 (TIER_COLD). Readers of the data use the store.
- dropped: the hot data part is deleted. Index, tags and marks stay on the host.

Every step may be repeated. A crash between two steps leaves at least one complete, verified copy where
readers are directed. The hot data part is deleted only after every shard that knows the segment has confirmed
the cold tier. Marks that the compactor made meanwhile are copied before that, and later marks after each new
snapshot of a shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ringlog import stop_points
from ringlog.actors.relocator.plan import MoveBackoff, SegmentPlacement, placements, segments_due
from ringlog.clock import Clock
from ringlog.config import ColdConfig
from ringlog.envelope import messages as m
from ringlog.errors import ColdUnavailable, CorruptData, DiskError, Refused, RequestTimeout, ShuttingDown
from ringlog.logs import log_event
from ringlog.segment.layout import DATA, DEL, IDX
from ringlog.tier.copies import SegmentCopies

log: logging.Logger = logging.getLogger("ringlog.relocator")
M = TypeVar("M", bound=m.Message)


class MoveRequester(Protocol):
    """A request to a shard. It raises the errors of link.shard_requests."""

    def __call__(self, shard: int, message: m.Message, wanted: type[M]) -> M: ...


@dataclass(slots=True)
class MoveCounters:
    """Counters for the board."""

    moved: int = 0
    moved_bytes: int = 0
    failed: int = 0
    segments_due: int = 0
    healed: int = 0


class TierChangeRefused(Exception):
    """A shard refused the new tier. The segment stays as it is until the next round."""


class Mover:
    """Moves segments that are due. For one thread, which may block as long as the cold store does."""

    def __init__(
        self,
        copies: SegmentCopies,
        cold: ColdConfig,
        *,
        shards: int,
        ask: MoveRequester,
        clock: Clock,
        jitter: Callable[[], float],
        is_stopping: Callable[[], bool] = lambda: False,
        on_change: Callable[[str], None] = lambda name: None,
        is_held: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a mover. `on_change` is called with the name of every cold object whose bytes may change.

        While `is_held` returns True, a backup may copy any hot data part, and none is deleted.
        """
        self._copies, self._cold, self._shards = copies, cold, shards
        self._ask, self._clock = ask, clock
        self._is_stopping, self._on_change, self._is_held = is_stopping, on_change, is_held
        self.backoff: MoveBackoff = MoveBackoff(cold.interval_s, jitter)
        self.counts: MoveCounters = MoveCounters()
        self._dropped: set[int] = set()
        """Numbers of cold segments that are known to have no hot data part."""
        self._marks: dict[int, str] = {}
        """Digest of the last copied marks by segment number, if this incarnation has copied any."""
        self._copied: dict[int, str] = {}
        """Stems by number of copied segments of this incarnation. Copies of dropped segments are deleted."""
        self._snapshots: dict[int, int] = {}

    def run_round(self) -> None:
        """Query all shards and move the segments that are due, oldest first."""
        self._is_held()  # See SegmentHold: the steps ask only if something is due.
        plans = self._plans(range(self._shards))
        by_number = known = placements({shard: plan.segments for shard, plan in plans.items()})
        if len(plans) < self._shards:
            # A shard that did not reply may direct readers to any pack. It does not direct them to a topic's
            # own segment that another shard knows.
            by_number = {
                number: placement for number, placement in by_number.items() if not placement.is_pack
            }
        waiting = segments_due(by_number.values(), self._cold.hot_segments, self._cold.hot_bytes)
        self.counts.segments_due = len(waiting)
        if not self.owns_store():
            return
        if len(plans) == self._shards:
            self._forget_missing(known)
        for placement in waiting:
            if self._is_held():
                break
            self._attempt(placement, self.move_segment)
        for placement in by_number.values():
            if placement.tier == m.TIER_COLD and placement.ref.number not in self._dropped:
                self._attempt(placement, self._drop_hot_data)
        self._refresh_marks(plans, by_number)

    def owns_store(self) -> bool:
        """Claim the store, if it has no owner, and return whether it is this engine's.

        After a failure the store is tried again with backoff. Its volume may be unmounted later in the round:
        the store itself checks its owner before each change.
        """
        store = self._copies.require_store()
        if not self.backoff.store_is_due(self._clock.monotonic_ns()):
            return False
        try:
            owner = store.claim()
        except (ColdUnavailable, CorruptData, DiskError) as e:
            self.backoff.record_store_failure(self._clock.monotonic_ns())
            log_event(log, logging.WARNING, "cold store unavailable", reason=str(e))
            return False
        if owner != store.engine_id:
            self.backoff.record_store_failure(self._clock.monotonic_ns())
            log_event(
                log, logging.ERROR, "cold store belongs to another engine, nothing is moved", owner=owner
            )
            return False
        return True

    def _plans(self, shards: Iterable[int]) -> dict[int, m.CheckpointPlan]:
        """Return the plans of the shards that replied."""
        found = {}
        for shard in shards:
            try:
                found[shard] = self._ask(shard, m.CheckpointOpen(), m.CheckpointPlan)
            except ShuttingDown:
                raise
            except (Refused, RequestTimeout) as e:
                log_event(log, logging.DEBUG, "shard did not answer", shard=shard, reason=str(e))
        return found

    def _forget_missing(self, by_number: Mapping[int, SegmentPlacement]) -> None:
        self.backoff.retain_only(by_number)
        self._dropped &= by_number.keys()
        self._marks = {number: digest for number, digest in self._marks.items() if number in by_number}
        for number in [number for number in self._copied if number not in by_number]:
            stem = self._copied[number]
            if self._copies.has_local(stem + IDX):
                # Leave it to the reclaimer: a snapshot for recovery may still list it, and the cold copy may
                # be the only one. The reclaimer later removes the parts in both tiers, the index last.
                continue
            try:
                self._copies.drop_cold(stem)
            except (ColdUnavailable, DiskError) as e:
                log_event(log, logging.WARNING, "cold copy not removed", segment=stem, reason=str(e))
                return
            del self._copied[number]

    def _attempt(self, placement: SegmentPlacement, step: Callable[[SegmentPlacement], None]) -> None:
        """Try one step on one segment.

        After a failure the segment stays as it is and is retried with backoff.
        """
        ref, now_ns = placement.ref, self._clock.monotonic_ns()
        if self._is_stopping() or not self.backoff.may_try(ref.number, now_ns):
            return
        try:
            step(placement)
        except ColdUnavailable as e:
            self.backoff.record_store_failure(self._clock.monotonic_ns())
            self._note_failure(ref, "cold store unavailable", e)
        except CorruptData as e:
            self._on_damage(placement, e)
        except (DiskError, Refused, RequestTimeout, TierChangeRefused) as e:
            self.backoff.record_failure(ref.number, self._clock.monotonic_ns())
            self._note_failure(ref, "segment not moved", e)
        else:
            self.backoff.record_success(ref.number)

    def _note_failure(self, ref: m.SegmentRef, event: str, error: Exception) -> None:
        if isinstance(error, ShuttingDown):
            raise error
        self.counts.failed += 1
        log_event(log, logging.WARNING, event, segment=ref.stem, reason=str(error))

    def _on_damage(self, placement: SegmentPlacement, error: CorruptData) -> None:
        """Quarantine a segment with a damaged copy. This incarnation does not try to move it again.

        If no shard knows the segment any more, the reclaimer removes it from both tiers, possibly during the
        copy. Then it is not damaged. The same holds while no shard replies; the next attempt finds the damage
        again.
        """
        ref = placement.ref
        self.counts.failed += 1
        self.backoff.record_failure(ref.number, self._clock.monotonic_ns())
        plans = self._plans(placement.shards).values()
        if not any(ref.number == known.number for plan in plans for known in plan.segments):
            log_event(
                log, logging.INFO, "segment deleted during its move", segment=ref.stem, reason=str(error)
            )
            return
        self.backoff.quarantined.add(ref.number)
        log_event(log, logging.ERROR, "damaged segment not moved", segment=ref.stem, reason=str(error),
            detail=error.detail)  # fmt: skip

    # -- moves ----------------------------------------------------------------------------------------

    def move_segment(self, placement: SegmentPlacement) -> None:
        """Move a segment from hot or both to dropped. Raises the error of the step that failed."""
        ref = placement.ref
        size = self._verify_hot(ref)
        self._copied[ref.number] = ref.stem
        copied_digests = self._copies.upload_index_parts(ref.stem)
        self._copies.upload_part(ref.stem + DATA)
        self._on_change(ref.stem + DATA)
        stop_points.hit("relocate_after_copy")
        self._set_tier(placement, m.TIER_BOTH)
        self._marks[ref.number] = copied_digests.get(DEL, "")
        self._copy_marks(placement)
        self._set_tier(placement, m.TIER_COLD)
        stop_points.hit("relocate_after_flip")
        self._drop_hot_data(placement)
        stop_points.hit("relocate_after_drop")
        self.counts.moved += 1
        self.counts.moved_bytes += size
        log_event(log, logging.INFO, "segment moved to the cold tier", segment=ref.stem, bytes=size)

    def _verify_hot(self, ref: m.SegmentRef) -> int:
        try:
            return self._copies.verify_local(ref.stem)
        except CorruptData as e:
            # The hot part is damaged, but the copy of an earlier attempt may be intact.
            if not self._copies.heal_local(ref.stem):
                raise
            self.counts.healed += 1
            log_event(
                log, logging.WARNING, "segment healed from the cold tier", segment=ref.stem, reason=str(e)
            )
            return self._copies.verify_local(ref.stem)

    def _set_tier(self, placement: SegmentPlacement, tier: int) -> None:
        for shard in placement.shards:
            reply = self._ask(shard, m.SegmentTier(placement.ref.number, tier), m.SegmentsChanged)
            if not reply.accepted:
                raise TierChangeRefused(f"shard {shard} refused tier {tier}: {reply.reason}")

    def _drop_hot_data(self, placement: SegmentPlacement) -> None:
        """Delete the hot data part of a cold segment, or leave it for a later round while a backup runs.

        If the segment was cold before, its copy is verified first.
        """
        stem = placement.ref.stem
        if self._copies.has_local(stem + DATA):
            if self._is_held():
                return
            if placement.tier == m.TIER_COLD:
                # Left by a crash or a failed unlink: this incarnation has not verified the copy.
                self._verify_cold(placement.ref)
            self._marks[placement.ref.number] = self._copies.upload_changed_marks(
                stem, self._marks.get(placement.ref.number, "")
            )
            self._copies.drop_local(stem, (DATA,))
        self._dropped.add(placement.ref.number)

    def _verify_cold(self, ref: m.SegmentRef) -> None:
        self._copies.upload_index_parts(ref.stem)
        try:
            self._copies.verify_cold(ref.stem)
        except CorruptData as e:
            self._verify_hot(ref)
            self._copies.upload_part(ref.stem + DATA)
            self._on_change(ref.stem + DATA)
            self.counts.healed += 1
            log_event(log, logging.WARNING, "cold copy healed from the host", segment=ref.stem, reason=str(e))

    # -- later marks ----------------------------------------------------------------------------------

    def _refresh_marks(
        self, plans: Mapping[int, m.CheckpointPlan], by_number: Mapping[int, SegmentPlacement]
    ) -> None:
        """Copy changed marks of cold segments.

        The compactor makes marks in checkpoints, so check after each one.
        """
        changed = {shard for shard, plan in plans.items() if self._snapshots.get(shard) != plan.number}
        for placement in by_number.values():
            if placement.tier == m.TIER_COLD and changed.intersection(placement.shards):
                self._attempt(placement, self._copy_marks)
        for shard in changed:
            self._snapshots[shard] = plans[shard].number

    def _copy_marks(self, placement: SegmentPlacement) -> None:
        ref = placement.ref
        self._marks[ref.number] = self._copies.upload_changed_marks(ref.stem, self._marks.get(ref.number, ""))
