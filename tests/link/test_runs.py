"""Settle entries are matched with frames in flight, and frames are stamped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.errors import RingError
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.codec import encode_frames
from ringlog.frame.settle_entry import S_POSITION, WORDS
from ringlog.link.channel.outbound_frames import InFlight, OutboundFrames

# The test subclasses OutboundFrames, which is impossible if the class is compiled and the subclass is not.
pytestmark = pytest.mark.interpreted


class Kept(OutboundFrames):
    """A run of frames that records its results."""

    __slots__ = ("got", "lost")

    def __init__(self, count, payload=b"x" * 24):
        buffer, offsets = encode_frames([payload] * count, 1, topic_id=0)
        super().__init__("t", buffer, offsets, 0)
        self.got, self.lost = [], []

    def on_entries(self, first, entries):
        self.got += list(
            zip(range(first, first + len(entries)), entries[:, S_POSITION].tolist(), strict=True)
        )

    def on_failed(self, first, count, error):
        self.lost.append((first, count, error))


def entries_at(positions):
    entries = np.zeros((len(positions), WORDS), dtype=np.uint64)
    entries[:, S_POSITION] = positions
    return entries


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8), cuts=st.lists(st.integers(1, 9), max_size=30)
)
def test_every_frame_gets_its_own_entry(sizes, cuts):
    in_flight, runs, position = InFlight(), [], 0
    placed = []
    for size in sizes:
        run = Kept(size)
        positions = list(range(position, position + size * 8, 8))
        position += size * 8
        in_flight.add(run, positions)
        runs.append(run)
        placed += positions
    at = 0
    for cut in [*cuts, len(placed)]:
        part = placed[at : at + cut]
        assert in_flight.match(entries_at(part)) == len(part)
        at += len(part)
    assert in_flight.frames == 0
    expected = iter(placed)
    for run in runs:
        assert run.got == [(row, next(expected)) for row in range(run.count)]


def test_an_entry_of_another_frame_is_refused():
    in_flight = InFlight()
    in_flight.add(Kept(2), [0, 64])
    with pytest.raises(RingError, match="not belong to the oldest"):
        in_flight.match(entries_at([64]))


def test_drain_returns_unsettled_runs_once_and_oldest_first():
    in_flight, first, second = InFlight(), Kept(3), Kept(1)
    in_flight.add(first, [0, 8])
    in_flight.add(first, [16])
    in_flight.add(second, [24])
    in_flight.match(entries_at([0]))
    assert in_flight.drain() == [first, second]
    assert in_flight.frames == 0
    assert first.settled == 1


@pytest.mark.parametrize("count", [1, 5])
def test_stamping_numbers_the_frames_and_keeps_their_bodies(count):
    run = Kept(count)
    run.stamp(topic_id=9, epoch=3, producer_id=(1 << 63) + 5, first_producer_seq=100)
    found = frames.scan(run.buffer)
    assert frames.first_bad_body(run.buffer, found) is None
    words = found.words
    assert words[:, layout.W_TOPIC].tolist() == [9] * count
    assert words[:, layout.W_PRODUCER_ID].tolist() == [(1 << 63) + 5] * count
    assert words[:, layout.W_PRODUCER_SEQ].tolist() == list(range(100, 100 + count))
    assert frames.epochs_of(words).tolist() == [3] * count
    assert frames.counts_of(words).tolist() == [1] * count


def test_copy_frames_returns_complete_frames_in_the_given_order():
    run = Kept(4)
    run.stamp(topic_id=1, epoch=1, producer_id=7, first_producer_seq=1)
    buffer, offsets = run.copy_frames(np.array([1, 3]))
    found = frames.scan(buffer)
    assert found.words[:, layout.W_PRODUCER_SEQ].tolist() == [2, 4]
    assert offsets.tolist() == [*found.offsets.tolist(), len(buffer)]


def test_first_larger_returns_the_first_frame_that_is_too_large():
    run = Kept(3)
    size = run.size_of(0)
    assert run.first_larger(size) == 3
    assert run.first_larger(size - 8) == 0
    run.pushed = 2
    assert run.first_larger(size - 8) == 2


def test_frames_that_left_a_ring_count_as_sent_after_a_rewind():
    """Their outcome is unknown, however often they are pushed again."""
    run = Kept(3)
    assert (run.was_sent, run.rewind(), run.was_sent) == (False, 0, False)
    run.pushed = 2
    run.settled = 1
    assert (run.rewind(), run.pushed, run.was_sent) == (1, 1, True)
