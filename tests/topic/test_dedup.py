"""The producer history of a topic, compared with a plain dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ringlog.limits import DEDUP_FRAMES_PER_PRODUCER
from ringlog.topic.dedup import ProducerHistory, ProducerTable
from ringlog.types import SESSION_BIT


def arrays(*columns: list[int]) -> list[np.ndarray]:
    return [np.array(column, dtype=np.uint64) for column in columns]


@pytest.mark.parametrize("seed", range(20))
def test_find_returns_every_recorded_frame(seed):
    """Frames form runs of equal counts, with gaps in producer numbers and in seqs."""
    rng = random.Random(seed)
    producers, model, base, number = ProducerTable(), {}, 1, 0
    producers.admit(3)
    for _ in range(60):
        seqs, bases, counts = [], [], []
        for _ in range(rng.randint(1, 9)):
            number += rng.choice([1, 1, 1, 1, 5])
            base += rng.choice([0, 0, 0, 3])
            count = rng.choice([1, 1, 1, 2])
            seqs.append(number)
            bases.append(base)
            counts.append(count)
            model[number] = (base, count)
            base += count
        producers.record(3, *arrays(seqs, bases, counts))
    past = producers.get(3)
    assert past is not None
    assert past.highest == number
    assert past.forgotten_to == 0
    for probe in range(number + 3):
        assert past.find(probe) == model.get(probe), probe


@pytest.mark.slow
def test_history_is_bounded_and_covers_at_least_one_full_ring():
    past = ProducerHistory()
    count = 3 * DEDUP_FRAMES_PER_PRODUCER
    for number in range(1, count + 1):
        past.extend(number, 1, number * 10, 1)
    assert len(past._runs) <= 2 * DEDUP_FRAMES_PER_PRODUCER + 2
    oldest = count - DEDUP_FRAMES_PER_PRODUCER + 1
    assert past.find(oldest) == (oldest * 10, 1)
    assert past.find(past.forgotten_to) is None
    assert past.find(past.forgotten_to + 1) is not None
    assert past.forgotten_to >= count - DEDUP_FRAMES_PER_PRODUCER - 1


def test_a_producer_without_gaps_is_one_run():
    past = ProducerHistory()
    past.extend(1, 1_000_000, 1, 3)
    past.extend(1_000_001, 5, 3_000_001, 3)
    assert len(past._runs) == 1
    assert past.find(777_777) == (1 + 777_776 * 3, 3)


def test_the_least_recent_session_is_evicted_first_and_named_producers_never():
    producers = ProducerTable(most=3)
    for each in (SESSION_BIT | 1, SESSION_BIT | 2, 7):
        assert producers.admit(each)
    producers.admit(SESSION_BIT | 1)
    assert producers.admit(8)
    assert producers.get(SESSION_BIT | 2) is None
    assert producers.admit(9)
    assert [each for each, _ in producers.items()] == [7, 8, 9]
    assert not producers.has_room
    assert producers.admit(10) is None
    assert producers.admit(7) is not None
    assert len(producers) == 3
