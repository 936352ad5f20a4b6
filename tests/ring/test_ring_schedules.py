"""Every schedule of the two ends of a ring, with a crash of either end at every step (RF-115).

The explorer drives the real RingProducer and RingConsumer. It also has to catch seven planted bugs; otherwise
a pass of the real classes would prove nothing.
"""

from __future__ import annotations

import pytest

from chaos.schedules.ring import FRAME_BYTES, Plan, explore
from ringlog.drill.checks import GuaranteeBroken
from ringlog.ring.consumer import RingConsumer
from ringlog.ring.layout import RingWord
from ringlog.ring.producer import RingProducer

pytestmark = pytest.mark.interpreted

TWO_FRAMES = 2 * FRAME_BYTES
TWO_FRAMES_AND_A_PAD = TWO_FRAMES + 8


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [TWO_FRAMES, TWO_FRAMES_AND_A_PAD], ids=["exact", "padded"])
def test_no_schedule_with_a_crash_of_each_side_loses_duplicates_or_reorders(capacity: int) -> None:
    """The capacity is two frames, three frames are pushed, and each side dies once, at any step (RF-115)."""
    explored = explore(Plan(capacity, frames=3))
    assert explored.states > 40_000, "the bound shrank: this is no longer the whole space"
    assert explored.schedules > 100_000


@pytest.mark.slow
@pytest.mark.parametrize(("push", "settle_entries"), [("push_one", 2), ("push_run", 3), ("push_buffer", 3)])
def test_no_schedule_of_frames_pushed_together_loses_or_duplicates(push: str, settle_entries: int) -> None:
    """`push_run` and `push_buffer` publish frames by one store, with padding between them (RF-115)."""
    capacity = 3 * FRAME_BYTES + 8
    explored = explore(Plan(capacity, frames=4, settle_entries=settle_entries, push=push, batch=2))
    assert explored.states > 50_000


def test_no_schedule_with_one_settle_entry_gets_stuck() -> None:
    """The smallest settle area still lets every frame through."""
    assert explore(Plan(TWO_FRAMES_AND_A_PAD, frames=3, settle_entries=1)).schedules > 100_000


@pytest.mark.slow
def test_a_new_producer_that_resends_unsettled_frames_duplicates_nothing() -> None:
    """The consumer recognises resent frames and settles them with their first seqs."""
    assert explore(Plan(TWO_FRAMES_AND_A_PAD, frames=3, resend=True)).schedules > 100_000


@pytest.mark.night
@pytest.mark.parametrize(("producer", "consumer"), [(2, 1), (1, 2)])
def test_no_schedule_with_repeated_crashes_loses_or_duplicates(producer: int, consumer: int) -> None:
    """One side dies twice, also while its successor attaches (RF-115)."""
    explored = explore(
        Plan(TWO_FRAMES_AND_A_PAD, frames=3, producer_crashes=producer, consumer_crashes=consumer)
    )
    assert explored.states > 80_000


class TailBeforeSettlement(RingConsumer):
    """Stores the tail first: a crash between the two stores loses the settlement."""

    def settle(self, entries, new_tail):
        self._tail = new_tail
        self._memory.store(RingWord.TAIL, new_tail)
        super().settle(entries, new_tail)


class TailMovedOnRead(RingConsumer):
    """Frees the space of a frame before the frame is processed. This bug lost 14 records within a minute."""

    def copy_pending(self, limit):
        got = super().copy_pending(limit)
        if got is not None:
            self._tail = got[0] + len(got[1])
            self._memory.store(RingWord.TAIL, self._tail)
        return got

    def settle(self, entries, new_tail):
        super().settle(entries, max(new_tail, self._tail))


class SettleHeadBeforeEntries(RingConsumer):
    """Lets the producer read an entry that is not written yet."""

    def settle(self, entries, new_tail):
        self._memory.store(RingWord.SETTLE_HEAD, self._settle_head + len(entries))
        super().settle(entries, new_tail)


class HeadBeforeBody(RingProducer):
    """Lets the consumer read bytes that are not written yet."""

    def _write_laps(self, source, split, total, lap_left):
        stop = total if total == split else lap_left + total - split
        self._memory.store(RingWord.HEAD, self._head + stop)
        return super()._write_laps(source, split, total, lap_left)


class SettleTailBeforeEntries(RingProducer):
    """Lets the consumer overwrite entries that were not read yet."""

    def _unread_entries(self):
        head = self._memory.load(RingWord.SETTLE_HEAD)
        self._memory.store(RingWord.SETTLE_TAIL, head)
        return super()._unread_entries()


class BelievesRepeats(RingProducer):
    """Counts a repeated settlement of a restarted consumer as a new one."""

    def take_settlements(self):
        entries, self._settle_tail = self._unread_entries()
        self._memory.store(RingWord.SETTLE_TAIL, self._settle_tail)
        self._in_flight -= len(entries)
        return entries


class ReadsSettledAgain(RingConsumer):
    """A successor that starts at the tail and reads settled frames again."""

    def _skip_settled(self):
        return


class ForgetsThePad(RingProducer):
    """Writes no pad word at the end of a lap."""

    def _write_pad(self, start, stop):
        assert start <= stop


MUTANTS = [
    (TailBeforeSettlement, {"producer_crashes": 0}, "frames never settled"),
    (TailMovedOnRead, {"producer_crashes": 0, "capacity": TWO_FRAMES}, "lost, doubled or out of order"),
    (SettleHeadBeforeEntries, {}, "speaks of frame"),
    (HeadBeforeBody, {"batch": 2}, "published bytes"),
    (SettleTailBeforeEntries, {}, "frames never settled"),
    (BelievesRepeats, {"consumer": ReadsSettledAgain}, "settled twice in one life"),
    (ForgetsThePad, {}, "published bytes"),
]


@pytest.mark.parametrize(
    ("mutant", "changes", "promise"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_explorer_detects_each_planted_bug(mutant: type, changes: dict, promise: str) -> None:
    """For each planted bug, some schedule breaks the invariant that the bug affects."""
    side = "producer" if issubclass(mutant, RingProducer) else "consumer"
    with pytest.raises(GuaranteeBroken, match=promise):
        explore(Plan(TWO_FRAMES_AND_A_PAD, frames=3), **{side: mutant, **changes})
