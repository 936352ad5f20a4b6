"""RF-115, T-6: every schedule of a ring's two ends, with either end dying at every step.

The explorer drives the real RingProducer and RingConsumer. It also has to catch each of the classic
mistakes, or its silence about the real classes would mean nothing.
"""

from __future__ import annotations

import pytest

from chaos.order import Broken
from chaos.schedules.ring import FRAME_BYTES, Plan, explore
from ringlog.ring.consumer import RingConsumer
from ringlog.ring.layout import RingWord
from ringlog.ring.producer import RingProducer

TWO_FRAMES = 2 * FRAME_BYTES
TWO_FRAMES_AND_A_PAD = TWO_FRAMES + 8


@pytest.mark.parametrize("capacity", [TWO_FRAMES, TWO_FRAMES_AND_A_PAD], ids=["exact", "padded"])
def test_no_schedule_with_a_crash_of_each_side_loses_doubles_or_reorders(capacity: int) -> None:
    """RF-115, INV-17: capacity two frames, three frames, each side dies once, anywhere."""
    explored = explore(Plan(capacity, frames=3))
    assert explored.states > 40_000, "the bound shrank: this is no longer the whole space"
    assert explored.schedules > 100_000


@pytest.mark.slow
@pytest.mark.parametrize("push", ["push_one", "push_run", "push_buffer"])
def test_no_schedule_of_frames_pushed_together_breaks_a_promise(push: str) -> None:
    """RF-115 for each call that publishes several frames by one store, padding between them."""
    capacity = 3 * FRAME_BYTES + 8
    explored = explore(Plan(capacity, frames=4, settle_entries=3, push=push, batch=2))
    assert explored.states > 50_000


def test_no_schedule_with_one_settle_entry_gets_stuck() -> None:
    """The smallest settle area still lets everything through."""
    assert explore(Plan(TWO_FRAMES_AND_A_PAD, frames=3, settle_entries=1)).schedules > 100_000


def test_a_new_producer_that_sends_again_what_it_was_not_told_doubles_nothing() -> None:
    """CL-4, decision 11: resent frames are recognised and settled with their first numbers."""
    assert explore(Plan(TWO_FRAMES_AND_A_PAD, frames=3, resend=True)).schedules > 100_000


@pytest.mark.slow
@pytest.mark.parametrize(("producer", "consumer"), [(2, 1), (1, 2)])
def test_no_schedule_with_repeated_crashes_breaks_a_promise(producer: int, consumer: int) -> None:
    """RF-115: one side dies twice, also while its successor attaches."""
    explored = explore(
        Plan(TWO_FRAMES_AND_A_PAD, frames=3, producer_crashes=producer, consumer_crashes=consumer)
    )
    assert explored.states > 80_000


class TailBeforeSettlement(RingConsumer):
    """Mutant 20: a crash between the two stores takes the settlement with it."""

    def settle(self, entries, new_tail):
        self._tail = new_tail
        self._memory.store(RingWord.TAIL, new_tail)
        super().settle(entries, new_tail)


class TailMovedOnRead(RingConsumer):
    """What lost 14 records within a minute: the room is given back before the work is done."""

    def copy_pending(self, limit):
        got = super().copy_pending(limit)
        if got is not None:
            self._tail = got[0] + len(got[1])
            self._memory.store(RingWord.TAIL, self._tail)
        return got

    def settle(self, entries, new_tail):
        super().settle(entries, max(new_tail, self._tail))


class SettleHeadBeforeEntries(RingConsumer):
    """The producer reads an entry that is not there yet."""

    def settle(self, entries, new_tail):
        self._memory.store(RingWord.SETTLE_HEAD, self._settle_head + len(entries))
        super().settle(entries, new_tail)


class HeadBeforeBody(RingProducer):
    """The consumer sees bytes that are not there yet."""

    def _write_laps(self, source, split, total, lap_left):
        stop = total if total == split else lap_left + total - split
        self._memory.store(RingWord.HEAD, self._head + stop)
        return super()._write_laps(source, split, total, lap_left)


class SettleTailBeforeEntries(RingProducer):
    """The consumer overwrites entries that were not read yet."""

    def _unread_entries(self):
        head = self._memory.load(RingWord.SETTLE_HEAD)
        self._memory.store(RingWord.SETTLE_TAIL, head)
        return super()._unread_entries()


class BelievesRepeats(RingProducer):
    """A frame that a restarted consumer settles again is taken for news."""

    def take_settlements(self):
        entries, self._settle_tail = self._unread_entries()
        self._memory.store(RingWord.SETTLE_TAIL, self._settle_tail)
        self._in_flight -= len(entries)
        return entries


class ReadsSettledAgain(RingConsumer):
    """A successor that begins at the tail, as who settles again would have to."""

    def _pass_settled(self):
        return


class ForgetsThePad(RingProducer):
    """The rest of a lap is left as it was."""

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
def test_the_explorer_catches(mutant: type, changes: dict, promise: str) -> None:
    """Section 7, mutant 20 and its neighbours: some schedule must break the promise the mistake is about."""
    side = "producer" if issubclass(mutant, RingProducer) else "consumer"
    with pytest.raises(Broken, match=promise):
        explore(Plan(TWO_FRAMES_AND_A_PAD, frames=3), **{side: mutant, **changes})
