"""The producer history of a topic, compared with a plain dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ringlog.limits import DEDUP_FRAMES_PER_PRODUCER, DEDUP_RUNS_PER_TOPIC_MAX
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


def runs_of(producers: ProducerTable) -> int:
    return sum(past.run_count for _, past in producers.items())


@pytest.mark.slow
@pytest.mark.parametrize("gaps", [0, 100])
def test_producers_that_write_in_turns_have_bounded_histories_and_every_used_number_is_known(gaps):
    """A model without the bound decides which numbers were used. `gaps`: one number in so many is skipped.

    The latest frames of each producer keep their seqs, however many producers write."""
    rng = random.Random(gaps)
    producers, base = ProducerTable(), 1
    ids = [SESSION_BIT | each if each % 3 else each for each in range(1, 451)]
    model: dict[int, dict[int, tuple[int, int]]] = {each: {} for each in ids}
    number = dict.fromkeys(ids, 0)
    for step in range(700):
        for each in ids:
            number[each] += 2 if gaps and rng.randrange(gaps) == 0 else 1
            count = 1 + (step + each) % 3
            past = producers.admit(each)
            assert past is not None
            past.extend(number[each], 1, base, count)
            model[each][number[each]] = (base, count)
            base += count
    assert runs_of(producers) <= DEDUP_RUNS_PER_TOPIC_MAX
    for each, past in producers.items():
        used = model[each]
        assert past.highest == number[each]
        assert [past.is_settled(n) for n in range(1, number[each] + 2)] == [
            n in used for n in range(1, number[each] + 2)
        ]
        assert all(past.find(n) in (None, used[n]) for n in used)
        assert all(past.find(n) == used[n] for n in list(used)[-128:])


@pytest.mark.slow
def test_gaps_are_forgotten_last_and_those_of_sessions_before_those_of_named_producers():
    """Producers that use every second number have a run for each frame, with or without seqs."""
    producers, base = ProducerTable(), 1
    named, sessions = range(1, 9), [SESSION_BIT | each for each in range(1, 33)]
    for number in range(2, 20_000, 2):
        for each in (*named, *sessions):
            past = producers.admit(each)
            assert past is not None
            past.extend(number, 1, base, 1)
            base += 1
    assert runs_of(producers) <= DEDUP_RUNS_PER_TOPIC_MAX
    for each, past in producers.items():
        assert past.find(19_998) is not None
        if each in named:
            assert not any(past.is_settled(number) for number in range(1, 20_000, 2))
    assert any(past.is_settled(3) for each, past in producers.items() if each in sessions)


@pytest.mark.slow
def test_a_silent_producer_forgets_seqs_before_a_busy_one():
    """Sessions that have ended do not shorten the history of those that write."""
    producers, base = ProducerTable(), 1
    for each in range(1, 301):
        past = producers.admit(SESSION_BIT | each)
        assert past is not None
        for number in range(1, 1_001):
            producers.admit(SESSION_BIT | each)
            past.extend(number, 1, base, 1)
            base += 2
    histories = [past for _, past in producers.items()]
    assert runs_of(producers) <= DEDUP_RUNS_PER_TOPIC_MAX
    assert histories[0].find(1) is None
    assert histories[0].is_settled(1)
    assert histories[0].find(1_000) is not None
    assert histories[-1].find(1) is not None
