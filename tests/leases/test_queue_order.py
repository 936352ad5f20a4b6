"""The order of first deliveries: short histories compared with the model, and the parts on their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from ringlog.actors.wal_shard.leases.lease_requests import delivery_attributes_of
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.live_seqs import LiveSeqs
from ringlog.leases.ready_index import DeliveryAttributes, ReadyIndex
from ringlog.leases.schedule import DelaySchedule
from ringlog.leases.tokens import LeaseTokens
from ringlog.leases.types import ClaimRequest, DispatchOrder
from ringlog.leases.wait_times import EnqueueTimes, WaitHistogram
from ringlog.limits import QUEUE_AGES_MAX, QUEUE_READY_INSTANTS_MAX
from ringlog.storage.record_index import RecordDeliveryAttributes
from tests.support.lease_runs import lease_runs
from tests.support.queue_machine import QueueMachine

puts = st.tuples(
    st.just("append"), st.integers(1, 6), st.sampled_from([None, None, 1, 100, 250]), st.integers(0, 3)
)
claims = st.tuples(
    st.just("claim"),
    st.just("a"),
    st.integers(1, 4),
    st.just(100),
    st.just(0),
    st.sampled_from([0, 200, 200]),
)
passing = st.tuples(st.just("time_passes"), st.sampled_from([1, 99, 100, 101, 200, 201]))
changes = st.tuples(st.just("levels_change"), st.sampled_from([0, 2, 3]))
lives = st.lists(st.one_of(puts, puts, claims, claims, passing, changes), max_size=20)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([0, 2, 3]), lives)
@example(
    # Found in November 2026: the job became ready in the same millisecond in which promotion was off.
    2,
    [
        ("append", 2, 1, 0), ("claim", "a", 1, 100, 0, 0), ("time_passes", 201),
        ("claim", "a", 1, 100, 0, 0), ("claim", "a", 1, 100, 0, 200),
    ],
)  # fmt: skip
def test_a_short_history_agrees_with_the_model(levels, life):
    machine = QueueMachine()
    machine.levels_change(levels)
    for name, *arguments in life:
        getattr(machine, name)(*arguments)
        machine.counts_are_what_a_recount_finds()
        machine.the_next_instant_is_the_earliest_one()
        machine.the_oldest_ready_job_is_the_lowest_one()


def queue_of(count: int, at_ms: dict[int, int], levels: dict[int, int], now: int = 1_000) -> ConsumerGroup:
    queue = ConsumerGroup(tokens=LeaseTokens(1))
    queue.invalidate_priorities(max(levels.values(), default=0) + 1 if levels else 0)
    seqs = sorted({*at_ms, *levels})
    queue.enqueue_times.record_enqueue(1, now)
    queue.add_delivery_attributes(
        DeliveryAttributes(
            np.array(seqs, np.int64), np.array([at_ms.get(seq, 0) for seq in seqs], np.int64),
            np.array([levels.get(seq, 0) for seq in seqs], np.uint8),
        ),
        LiveSeqs(1, count), count, now,
    )  # fmt: skip
    return queue


def claimed(queue: ConsumerGroup, live: LiveSeqs, most: int, now: int, starvation: int = 0) -> list[int]:
    found = queue.claim(live, "w", most, 100_000, now, order=DispatchOrder(queue.levels, starvation))
    queue.check()
    return [seq for run in lease_runs(found) for seq in range(run.first, run.stop)]


def test_a_delayed_job_is_delivered_at_its_time_and_not_before():
    queue, live = queue_of(3, {2: 1_500}, {}), LiveSeqs(1, 3)
    assert claimed(queue, live, 9, 1_499) == [1, 3]
    assert (queue.counts(3).delayed, queue.next_due_ms()) == (1, 1_500)
    assert claimed(queue, live, 9, 1_500) == [2], "at equality it is ready"


def test_delayed_jobs_below_the_cursor_are_delivered_before_those_above_it():
    queue = queue_of(9, {2: 1_500, 8: 1_600}, {})
    assert claimed(queue, LiveSeqs(1, 9), 4, 1_000) == [1, 3, 4, 5]
    assert claimed(queue, LiveSeqs(1, 9), 3, 1_600) == [2, 6, 7]
    assert claimed(queue, LiveSeqs(1, 9), 3, 1_600) == [8, 9]


def test_a_job_deleted_while_delayed_is_never_ready():
    queue = queue_of(3, {1: 1_500, 2: 1_500}, {})
    queue.apply_removal(0, BitMap64([2]), on_request=True)
    live = LiveSeqs(1, 3, BitMap64([2]))
    assert queue.counts(2).delayed == 1
    assert claimed(queue, live, 9, 2_000) == [1, 3]
    queue.check()


def test_the_highest_level_is_delivered_first_and_a_reply_is_sorted_by_seq():
    queue, live = queue_of(6, {}, {2: 1, 4: 2, 5: 1}), LiveSeqs(1, 6)
    assert claimed(queue, live, 2, 1_000) == [2, 4]
    assert claimed(queue, live, 2, 1_000) == [1, 5]
    assert claimed(queue, live, 9, 1_000) == [3, 6]
    queue = queue_of(3, {}, {3: 1})
    assert claimed(queue, LiveSeqs(1, 3), 9, 1_000) == [1, 2, 3]


def test_no_job_waits_longer_than_starvation_ms_under_a_stream_of_urgent_jobs():
    """It waits at most the starvation window plus one pass, whatever arrives in the meantime."""
    queue = queue_of(1, {}, {1: 0, 2: 2})
    head, now = 1, 1_000
    while 1 in (live := [1]) and now < 40_000:
        head += 2
        queue.enqueue_times.record_enqueue(head - 1, now)
        marks = DeliveryAttributes(np.array([head - 1, head]), np.zeros(2, np.int64), np.full(2, 2, np.uint8))
        queue.add_delivery_attributes(marks, LiveSeqs(1, head), head, now)
        if 1 in claimed(queue, LiveSeqs(1, head), 1, now, 30_000):
            live.clear()
            break
        now += 1_000
    assert not live
    assert 31_000 < now <= 32_000
    assert queue.promoted == 1


def test_a_restart_restores_delays_from_the_records():
    first = queue_of(2, {1: 5_000}, {})
    assert claimed(first, LiveSeqs(1, 2), 9, 1_000) == [2]
    again = queue_of(2, {1: 5_000}, {}, now=2_000)
    assert claimed(again, LiveSeqs(1, 2), 9, 4_999) == [2]
    assert claimed(again, LiveSeqs(1, 2), 9, 5_000) == [1]


def test_a_million_delayed_jobs_take_at_most_fifty_bytes_each():
    import tracemalloc

    count = 1_000_000
    rng = np.random.default_rng(1)
    seqs = np.arange(10, 10 * count + 10, 10, dtype=np.int64)
    at_ms = rng.integers(2_000, 2_000_000, count)
    live = LiveSeqs(1, 10 * count + 9)
    tracemalloc.start()
    queue = ConsumerGroup(tokens=LeaseTokens(1))
    for part in np.array_split(np.arange(count), 100):
        marks = DeliveryAttributes(seqs[part], at_ms[part], np.zeros(len(part), np.uint8))
        queue.add_delivery_attributes(marks, live, int(seqs[part[-1]]), 1_000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # tracemalloc does not see the bitmaps: at most two bytes a seq, and a few thousand containers.
    bitmaps = sum(
        len(each.serialize()) for each in (queue.ready_index.delayed, queue.ready_index.skipped_by_cursor)
    )
    assert held + bitmaps <= 50 * count
    assert queue.counts(live.head).delayed == count
    assert claimed(queue, live, 12, 1_000) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]


# -- parts ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 60)), max_size=20))
def test_a_delay_schedule_agrees_with_a_sorted_list(steps):
    schedule, model, number = DelaySchedule(), [], 0
    for step in steps:
        if isinstance(step, int):
            due = sorted(seq for at, seq in model if at <= step)
            assert sorted(schedule.pop_due(step).tolist()) == due
            model = [row for row in model if row[0] > step]
        else:
            seqs = list(range(number, number + len(step)))
            schedule.add(np.array(step, np.int64), np.array(seqs, np.int64))
            model += zip(step, seqs, strict=True)
            number += len(step)
        assert len(schedule) == len(model)
        assert schedule.next_ms() == min((at for at, _ in model), default=None)
    kept = BitMap64([seq for _, seq in model if seq % 2])
    schedule.keep_only(kept)
    assert sorted(schedule.pop_due(100).tolist()) == list(kept)


@pytest.mark.parametrize("count", [10, QUEUE_AGES_MAX, 3 * QUEUE_AGES_MAX])
def test_enqueue_times_are_exact_up_to_a_limit_and_never_too_late(count):
    ages = EnqueueTimes()
    for n in range(count):
        ages.record_enqueue(1 + 3 * n, 1_000 + 7 * n)
    grain = 1
    while 7 * count / max(grain, 7) > QUEUE_AGES_MAX:
        grain *= 2
    for n in range(0, count, 11):
        put_ms = 1_000 + 7 * n
        found, bound = ages.put_ms(2 + 3 * n), ages.first_after(put_ms)
        assert put_ms - grain < found <= put_ms
        assert grain > 1 or found == put_ms
        assert bound > 1 + 3 * n
        assert bound <= 1 + 3 * (n + 2 + grain // 7) or bound == 1 << 63
    assert sum(each for each, _ in ages.counts_by_put_time(1, 1 + 3 * count)) == 3 * count
    assert ages.put_ms(0) is None
    assert ages.first_after(999) == 0
    last = ages.put_ms(3 * count)
    ages.forget(3 * count)
    assert len(ages) == 1
    assert ages.put_ms(3 * count) == last


def test_a_wait_histogram_is_exact_to_an_eighth_and_covers_two_windows():
    for waited in (0, 1, 15, 16, 17, 31, 1_000, 123_456, 10**9):
        waits = WaitHistogram()
        waits.record_waits(1, waited, 0)
        assert waited <= waits.p99_ms(59_999) <= waited * 9 / 8
        assert waits.p99_ms(60_000) >= waited
        assert waits.p99_ms(120_000) == 0
    waits = WaitHistogram()
    waits.record_waits(990, 10, 0)
    waits.record_waits(10, 5_000, 0)
    assert waits.p99_ms(0) == 10
    waits.record_waits(1, 5_000, 0)
    assert waits.p99_ms(0) >= 5_000


def test_the_ready_times_kept_are_bounded():
    index = ReadyIndex()
    count = 2 * QUEUE_READY_INSTANTS_MAX
    seqs = np.arange(1, count + 1, dtype=np.int64)
    index.add_delivery_attributes(
        DeliveryAttributes(seqs, seqs + 10, np.ones(count, np.uint8)), LiveSeqs(1, count), 1, 0
    )
    for now in range(11, count + 11):
        assert index.release_due(1, now)
    assert len(index._recently_due) == QUEUE_READY_INSTANTS_MAX
    assert not list(index.overdue(2, 1 << 40))
    index.forget_due_before(count + 11)
    assert list(index.overdue(2, 1 << 40)) == [(1, (1, count + 1))]


def test_delivery_by_seq_ignores_levels_and_starts_with_returned_jobs():
    """Delayed jobs still wait for their time."""
    queue, live = queue_of(12, {3: 1_500, 9: 1_500}, {2: 2, 5: 1, 9: 2}), LiveSeqs(1, 12)
    by_number = DispatchOrder(queue.levels, 0, by_number=True)

    def taken(most: int, now: int, order: DispatchOrder = by_number) -> list[int]:
        found = queue.claim(live, "w", most, 100_000, now, order=order)
        queue.check()
        return [seq for run in lease_runs(found) for seq in range(run.first, run.stop)]

    assert taken(3, 1_000) == [1, 2, 4]
    queue.nack(queue.match(np.array([2, 4]), None, "w", 1_000), "w", 0, 1_000)
    assert taken(4, 1_000) == [2, 4, 5, 6]
    assert taken(1, 1_600, DispatchOrder(queue.levels)) == [9], "the highest level"
    assert taken(4, 1_600) == [3, 7, 8, 10]
    assert queue.promoted == 0


@pytest.mark.parametrize(("jobs", "shares"), [(12, ([1, 3], [2, 4], [5])), (4, ([1, 2], [4], [3]))])
def test_concurrent_claims_may_use_different_orders(jobs, shares):
    """With enough jobs, each claim gets jobs in its own order. Otherwise all jobs are shared out fairly."""
    queue, live = queue_of(jobs, {}, dict.fromkeys((2, 4), 1)), LiveSeqs(1, jobs)
    requests = [
        ClaimRequest("a", 2, 500, by_number=True),
        ClaimRequest("b", 2, 500),
        ClaimRequest("c", 1, 500, by_number=True),
    ]
    answers = queue.claim_fair_shares(live, requests, 100, 1_000, order=DispatchOrder(queue.levels))
    queue.check()
    given = tuple([seq for run in lease_runs(each) for seq in range(run.first, run.stop)] for each in answers)
    assert given == shares


def test_times_before_the_epoch_delay_no_job():
    """A client of another make can store any number, such as the lowest one for "none"."""
    times = np.array([-(1 << 63), -5, 0, 5_001], np.int64)
    stored = RecordDeliveryAttributes(np.arange(1, 5, dtype=np.uint64), times, np.zeros(4, np.uint8))
    found = delivery_attributes_of(stored, 0)
    assert (found.seqs.tolist(), found.at_ms.tolist()) == ([4], [6])
