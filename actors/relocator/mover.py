"""One move after the other: copy, prove, tell the shards, then delete the hot data part.

hot      the shards lead readers to the host; a cold copy, if there is one, counts for nothing
both     SegmentTier 1: a proven copy of every part lies in the store; the hot one is read
cold     SegmentTier 2: readers of the data go to the store
dropped  the hot data part is gone; index, tags and marks stay

Every step may be repeated, and a crash between any two leaves at least one complete, proven copy where
readers are led (TI-4, TI-5): the hot data part goes only after every shard that knows the segment said that
it leads nobody there. Marks that the compactor made meanwhile are carried over before that (TI-8), and
those it makes later whenever a shard has a new snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from actors.relocator.plan import MoveBackoff, SegmentPlacement, placements, segments_due
from ringlog import stop_points
from ringlog.clock import Clock
from ringlog.config import ColdConfig
from ringlog.envelope import messages as m
from ringlog.errors import ColdUnavailable, CorruptData, DiskError, Refused, RequestTimeout, ShuttingDown
from ringlog.logs import log_event
from ringlog.segment.layout import DATA, DEL, IDX
from ringlog.tier.copies import SegmentCopies

log = logging.getLogger("ringlog.relocator")
M = TypeVar("M", bound=m.Message)


class MoveRequester(Protocol):
    """A request to a shard; see link.shard_requests for what it raises."""

    def __call__(self, shard: int, message: m.Message, wanted: type[M]) -> M: ...


@dataclass(slots=True)
class MoveCounters:
    """For the board."""

    moved: int = 0
    moved_bytes: int = 0
    failed: int = 0
    segments_due: int = 0
    healed: int = 0


class TierChangeRefused(Exception):
    """A shard did not take the new tier; the segment stays as it is until the next round."""


class Mover:
    """Moves what is due. For one thread, which may block for as long as the cold store does."""

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
    ) -> None:
        """`on_change` is told of every cold object that may hold other bytes from now on."""
        self._copies, self._cold, self._shards = copies, cold, shards
        self._ask, self._clock = ask, clock
        self._is_stopping, self._on_change = is_stopping, on_change
        self.backoff = MoveBackoff(cold.interval_s, jitter)
        self.counts = MoveCounters()
        self._dropped: set[int] = set()
        """Cold segments known to have no hot data part any more."""
        self._marks: dict[int, str] = {}
        """Digest of the marks last carried over, by segment; absent for those this life has not looked at."""
        self._sent: dict[int, str] = {}
        """Stems of what this life copied: a copy made while all else of it was removed goes, too."""
        self._snapshots: dict[int, int] = {}

    def run_round(self) -> None:
        """Look at every shard that answers and move what is due, oldest first."""
        plans = self._plans(range(self._shards))
        placed = placements({shard: plan.segments for shard, plan in plans.items()})
        if len(plans) == self._shards:
            self._forget_missing(placed)
        else:
            # A shard that does not answer may lead readers to any pack, and to no topic's own segment that
            # another one leads them to.
            placed = {number: each for number, each in placed.items() if not each.is_pack}
        waiting = segments_due(placed.values(), self._cold.hot_segments, self._cold.hot_bytes)
        self.counts.segments_due = len(waiting)
        for each in waiting:
            self._attempt(each, self.move_segment)
        for each in placed.values():
            if each.tier == m.TIER_COLD and each.ref.number not in self._dropped:
                self._attempt(each, self._drop_hot_data)
        self._refresh_marks(plans, placed)

    def _plans(self, shards: Iterable[int]) -> dict[int, m.CheckpointPlan]:
        """What those of the shards that answer look after."""
        found = {}
        for shard in shards:
            try:
                found[shard] = self._ask(shard, m.CheckpointOpen(), m.CheckpointPlan)
            except ShuttingDown:
                raise
            except (Refused, RequestTimeout) as e:
                log_event(log, logging.DEBUG, "shard not asked", shard=shard, reason=str(e))
        return found

    def _forget_missing(self, placed: Mapping[int, SegmentPlacement]) -> None:
        self.backoff.retain_only(placed)
        self._dropped &= placed.keys()
        self._marks = {number: digest for number, digest in self._marks.items() if number in placed}
        for number in [number for number in self._sent if number not in placed]:
            stem = self._sent[number]
            if self._copies.has_local(stem + IDX):
                # The reclaimer's: a snapshot that recovery may start from can still list it, and the cold
                # copy may be the only one. It removes both tiers' parts when that is over, the index last.
                continue
            try:
                self._copies.drop_cold(stem)
            except ColdUnavailable as e:
                log_event(log, logging.WARNING, "cold copy not removed", segment=stem, reason=str(e))
                return
            del self._sent[number]

    def _attempt(self, each: SegmentPlacement, step: Callable[[SegmentPlacement], None]) -> None:
        """Try one step on one segment; whatever fails leaves it as it is and is tried again later (TI-7)."""
        ref, now_ns = each.ref, self._clock.monotonic_ns()
        if self._is_stopping() or not self.backoff.may_try(ref.number, now_ns):
            return
        try:
            step(each)
        except ColdUnavailable as e:
            self.backoff.record_store_failure(self._clock.monotonic_ns())
            self._note_failure(ref, "cold store unavailable", e)
        except CorruptData as e:
            self._on_damage(each, e)
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

    def _on_damage(self, each: SegmentPlacement, error: CorruptData) -> None:
        """A copy does not verify: leave the segment alone (SG-10); the next round sees whether it healed.

        But what every shard has let go, the reclaimer removes from both tiers, also while it is being copied:
        then nothing is damaged. Nor is that said while no shard answers; the next try meets it again.
        """
        ref = each.ref
        self.counts.failed += 1
        self.backoff.record_failure(ref.number, self._clock.monotonic_ns())
        plans = self._plans(each.shards).values()
        if not any(ref.number == known.number for plan in plans for known in plan.segments):
            log_event(
                log, logging.INFO, "segment gone while it was moved", segment=ref.stem, reason=str(error)
            )
            return
        self.backoff.quarantined.add(ref.number)
        log_event(log, logging.ERROR, "damaged segment not moved", segment=ref.stem, reason=str(error),
            detail=error.detail)  # fmt: skip

    # -- one move -------------------------------------------------------------------------------------

    def move_segment(self, each: SegmentPlacement) -> None:
        """hot or both -> dropped. Raises what kept it from that, at whatever step."""
        ref = each.ref
        size = self._prove_hot(ref)
        self._sent[ref.number] = ref.stem
        sent = self._copies.upload_index_parts(ref.stem)
        self._copies.upload_part(ref.stem + DATA)
        self._on_change(ref.stem + DATA)
        stop_points.hit("relocate_after_copy")
        self._set_tier(each, m.TIER_BOTH)
        self._marks[ref.number] = sent.get(DEL, "")
        self._carry_marks(each)
        self._set_tier(each, m.TIER_COLD)
        stop_points.hit("relocate_after_flip")
        self._drop_hot_data(each)
        stop_points.hit("relocate_after_drop")
        self.counts.moved += 1
        self.counts.moved_bytes += size
        log_event(log, logging.INFO, "segment moved to the cold tier", segment=ref.stem, bytes=size)

    def _prove_hot(self, ref: m.SegmentRef) -> int:
        try:
            return self._copies.verify_local(ref.stem)
        except CorruptData as e:
            # What readers are led to is damaged: the copy from an earlier attempt may be whole.
            if not self._copies.heal_local(ref.stem):
                raise
            self.counts.healed += 1
            log_event(
                log, logging.WARNING, "segment healed from the cold tier", segment=ref.stem, reason=str(e)
            )
            return self._copies.verify_local(ref.stem)

    def _set_tier(self, each: SegmentPlacement, tier: int) -> None:
        for shard in each.shards:
            reply = self._ask(shard, m.SegmentTier(each.ref.number, tier), m.SegmentsChanged)
            if not reply.accepted:
                raise TierChangeRefused(f"shard {shard} refused tier {tier}: {reply.reason}")

    def _drop_hot_data(self, each: SegmentPlacement) -> None:
        """cold -> dropped. A hot data part found beside a cold segment goes only if the copy is whole."""
        stem = each.ref.stem
        if self._copies.has_local(stem + DATA):
            if each.tier == m.TIER_COLD:
                # Found so, after a crash or a failed unlink: nobody of this life has proven the copy.
                self._prove_cold(each.ref)
            self._marks[each.ref.number] = self._copies.upload_changed_marks(
                stem, self._marks.get(each.ref.number, "")
            )
            self._copies.drop_local(stem, (DATA,))
        self._dropped.add(each.ref.number)

    def _prove_cold(self, ref: m.SegmentRef) -> None:
        self._copies.upload_index_parts(ref.stem)
        try:
            self._copies.verify_cold(ref.stem)
        except CorruptData as e:
            self._prove_hot(ref)
            self._copies.upload_part(ref.stem + DATA)
            self._on_change(ref.stem + DATA)
            self.counts.healed += 1
            log_event(log, logging.WARNING, "cold copy healed from the host", segment=ref.stem, reason=str(e))

    # -- marks made later -----------------------------------------------------------------------------

    def _refresh_marks(
        self, plans: Mapping[int, m.CheckpointPlan], placed: Mapping[int, SegmentPlacement]
    ) -> None:
        """The compactor marks in checkpoints: after each, carry over what changed of cold segments (TI-8)."""
        changed = {shard for shard, plan in plans.items() if self._snapshots.get(shard) != plan.number}
        for each in placed.values():
            if each.tier == m.TIER_COLD and changed.intersection(each.shards):
                self._attempt(each, self._carry_marks)
        for shard in changed:
            self._snapshots[shard] = plans[shard].number

    def _carry_marks(self, each: SegmentPlacement) -> None:
        ref = each.ref
        self._marks[ref.number] = self._copies.upload_changed_marks(ref.stem, self._marks.get(ref.number, ""))
