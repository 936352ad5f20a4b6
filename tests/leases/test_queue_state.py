"""One queue, case by case: time limits, order, matching, ends of leases, and costs."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.live_seqs import LiveSeqs
from ringlog.leases.runs import BLOCK
from ringlog.leases.spans import spans_of
from ringlog.leases.tokens import NUMBER_MAX, LeaseTokens, incarnation_of
from ringlog.leases.types import QueueCounts
from tests.support.lease_runs import lease_runs

A, B = "a", "b"
LEASE = 1_000


def queue(incarnation: int = 1) -> ConsumerGroup:
    return ConsumerGroup(tokens=LeaseTokens(incarnation))


@pytest.fixture
def q() -> ConsumerGroup:
    return queue()


def live(head: int, dead: set[int] = frozenset(), front: int = 1) -> LiveSeqs:
    return LiveSeqs(front, head, BitMap64(dead) if dead else None)


def seqs_of(claimed) -> list[int]:
    return [seq for run in lease_runs(claimed) for seq in range(run.first, run.stop)]


def claim(of: ConsumerGroup, live_: LiveSeqs, most: int, now: int, node: str = A, **options) -> list[int]:
    return seqs_of(of.claim(live_, node, most, LEASE, now, **options))


def ack(of: ConsumerGroup, seqs: list[int], now: int, node: str = A, tokens: list[int] | None = None):
    matched = match(of, seqs, now, node, tokens)
    of.finish_jobs(matched)
    return matched


def match(of: ConsumerGroup, seqs: list[int], now: int, node: str = A, tokens: list[int] | None = None):
    given = None if tokens is None else np.array(tokens, dtype=np.uint64)
    return of.match(np.array(seqs, dtype=np.int64), given, node, now)


# -- order and time ---------------------------------------------------------------------------------------


def test_new_jobs_are_delivered_lowest_seq_first_and_once(q):
    """A claim of more jobs than there are returns the available ones."""
    assert claim(q, live(5), 2, 0) == [1, 2]
    assert claim(q, live(5), 9, 0, B) == [3, 4, 5]
    assert claim(q, live(5), 9, 0) == []


def test_deleted_and_lost_jobs_are_skipped(q):
    """A claim never leases a deleted seq or a seq of a lost range."""
    assert claim(q, LiveSeqs(2, 12, BitMap64({4, 5, 9}), ((6, 7),)), 9, 0) == [2, 3, 8, 10, 11, 12]
    assert claim(q, LiveSeqs(2, 14, BitMap64({4, 5, 9, 13, 14}), ((6, 7),)), 9, 0) == []
    assert claim(q, LiveSeqs(2, 15, BitMap64({4, 5, 9, 13, 14}), ((6, 7),)), 9, 0) == [15]


def test_a_lease_is_valid_through_its_deadline_and_not_after_it(q):
    """The lease is valid in the last millisecond and expired in the next one."""
    claim(q, live(1), 1, 0)
    q.apply_expirations(LEASE)
    assert q.leased == 1
    assert list(match(q, [1], LEASE).leased) == [1]
    assert list(match(q, [1], LEASE + 1).skipped) == [1]
    assert q.leased == 0


def test_a_delay_is_over_at_its_end(q):
    """The job is ready in the millisecond in which its delay ends."""
    claim(q, live(2), 2, 0)
    q.nack(match(q, [1], 5), A, 100, 5)
    assert q.counts(2) == QueueCounts(ready=0, in_flight=1, delayed=1)
    assert claim(q, live(2), 1, 104) == []
    assert claim(q, live(2), 1, 105) == [1]


def test_returned_jobs_are_delivered_before_new_ones(q):
    """The worker that nacked a job may get it again."""
    claim(q, live(6), 4, 0)
    q.nack(match(q, [3, 2], 1), A, 0, 1)
    assert claim(q, live(6), 3, 1) == [2, 3, 5]


def test_the_delivery_count_grows_after_expiry_and_nack(q):
    """Each delivery increments the count of the job."""
    assert lease_runs(q.claim(live(1), A, 1, LEASE, 0))[0].deliveries == 1
    q.nack(match(q, [1], 0), A, 0, 0)
    assert lease_runs(q.claim(live(1), A, 1, LEASE, 0))[0].deliveries == 2
    assert lease_runs(q.claim(live(1), B, 1, LEASE, LEASE + 1))[0].deliveries == 3


def test_extend_replaces_the_deadline_also_by_an_earlier_one(q):
    """The new deadline counts from the time of the call."""
    given = lease_runs(q.claim(live(2), A, 2, LEASE, 0))[0]
    assert q.extend(match(q, [1], 10), A, 5_000, 10).until_ms == 5_010
    assert q.extend(match(q, [2], 10), A, 20, 10).until_ms == 30
    q.apply_expirations(31)
    assert q.leased == 1
    assert list(match(q, [1, 2], 4_000, tokens=[given.token, given.token + 1]).leased) == [1]
    assert list(match(q, [1], 5_011).skipped) == [1], "an expired lease cannot be extended"


def test_a_clock_that_steps_back_does_not_revive_an_expired_lease(q):
    """An applied expiry is final."""
    claim(q, live(1), 1, 0)
    q.apply_expirations(LEASE + 1)
    assert list(match(q, [1], 0).skipped) == [1]


# -- matching ---------------------------------------------------------------------------------------------


def test_match_lists_skipped_jobs_in_the_order_of_the_request(q):
    """A job is skipped if the node does not lease it. A repeated seq is skipped the second time."""
    claim(q, live(6), 3, 0)
    claim(q, live(6), 1, 0, B)
    matched = ack(q, [9, 3, 4, 1, 3, 6], 0)
    assert (matched.leased.tolist(), matched.skipped.tolist()) == ([1, 3], [9, 4, 3, 6])
    assert q.leased == 2
    assert ack(q, [1, 3], 0).skipped.tolist() == [1, 3]


def test_a_token_of_an_earlier_lease_does_not_match(q):
    """The token 0 matches any lease of the node."""
    old = lease_runs(q.claim(live(3), A, 3, LEASE, 0))[0].token
    q.nack(match(q, [2], 0), A, 0, 0)
    new = lease_runs(q.claim(live(3), A, 1, LEASE, 0))[0].token
    assert new > old + 2
    matched = match(q, [1, 2, 3], 0, tokens=[old, old + 1, old + 2])
    assert (matched.leased.tolist(), matched.skipped.tolist()) == ([1, 3], [2])
    assert match(q, [1, 2, 3], 0, tokens=[0, new, 0]).leased.tolist() == [1, 2, 3]


def test_a_lease_matches_only_its_own_node(q):
    """Node names are case-sensitive."""
    claim(q, live(1), 1, 0, "Worker")
    assert match(q, [1], 0, "worker").skipped.tolist() == [1]
    assert match(q, [1], 0, "Worker").leased.tolist() == [1]


def test_an_ack_of_a_deleted_job_succeeds_and_of_an_evicted_job_does_not(q):
    """A delete on request keeps the lease until it is acked or expires. An eviction ends it at once."""
    claim(q, live(4), 4, 0)
    q.apply_removal(3, None, on_request=False)
    q.apply_removal(0, BitMap64([4]), on_request=True)
    assert q.counts(1) == QueueCounts(ready=0, in_flight=1, delayed=0)
    matched = ack(q, [1, 2, 3, 4], 0)
    assert (matched.leased.tolist(), matched.gone.tolist(), matched.skipped.tolist()) == ([3], [4], [1, 2])
    assert len(q.runs) == 0


def test_the_lease_of_a_deleted_job_ends_when_it_expires(q):
    claim(q, live(1), 1, 0)
    q.apply_removal(2, None, on_request=True)
    q.apply_expirations(LEASE + 1)
    assert (len(q.runs), q.next_due_ms(), len(q.holders)) == (0, None, 0)


# -- dead letters -----------------------------------------------------------------------------------------


def test_an_exhausted_job_counts_as_ready_until_it_is_moved(q):
    """A job with `max_deliveries` deliveries becomes exhausted and is not delivered again."""
    for now in (0, 2_000):
        assert claim(q, live(2), 1, now, deliveries_max=2) == [1]
    assert claim(q, live(2), 9, 4_000, deliveries_max=2) == [2]
    assert q.exhausted_runs(10) == [(1, 2, 2)]
    assert q.counts(2) == QueueCounts(ready=1, in_flight=1, delayed=0)
    q.restore_exhausted()
    assert q.exhausted_runs(10) == []
    assert claim(q, live(2), 9, 4_000) == [1], "without a limit it comes back for ever (QD-5)"


def test_a_moved_exhausted_job_is_forgotten(q):
    claim(q, live(3), 3, 0)
    q.nack(match(q, [1, 2, 3], 0), A, 0, 0)
    assert claim(q, live(3), 9, 0, deliveries_max=1) == []
    assert q.exhausted_runs(2) == [(1, 3, 1)]
    q.apply_removal(0, BitMap64([1, 2]), on_request=True)
    assert q.exhausted_runs(9) == [(3, 4, 1)]


# -- costs ------------------------------------------------------------------------------------------------


def test_claiming_a_hundred_of_ten_million_jobs_touches_one_or_two_runs(q):
    """The cost grows with the jobs of the claim, not with the size of the queue."""
    whole = live(10_000_000)
    for _ in range(1_000):
        claimed = q.claim(whole, A, 100, LEASE, 0)
    assert (len(lease_runs(claimed)), claimed.count) == (1, 100)
    assert len(q.runs) <= 1_000 + 100_000 // BLOCK + 1
    small = queue()
    small.claim(live(1_000), A, 100, LEASE, 0)
    assert calls_of(lambda: q.claim(whole, A, 100, LEASE, 0)) <= 2 * calls_of(
        lambda: small.claim(live(1_000), A, 100, LEASE, 0)
    )


def calls_of(use: Callable[[], object]) -> int:
    """Return the number of Python functions that `use` calls."""
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        use()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
def test_a_million_separate_delays_take_less_than_fifty_bytes_per_job_of_the_queue(q):
    """The test measures 50,000 separate delays. It scales the result to one million delayed among eleven
    million jobs."""
    whole = live(11_000_000)
    tracemalloc.start()
    try:
        for _ in range(100):
            claim(q, whole, 1_000, 0)
        for first in range(1, 100_000, 1_000):
            seqs = np.arange(first, first + 1_000, 2, dtype=np.int64)
            q.nack(q.match(seqs, None, A, 0), A, 50_000, 0)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert q.delayed == 50_000
    # 50,000 separate delays, and as many leases between them.
    assert used / 100_000 < 300
    assert used / 100_000 * 1_000_000 / 11_000_000 < 50


def test_heaps_stay_proportional_to_their_live_entries(q):
    claim(q, live(1), 1, 0)
    for now in range(20_000):
        q.extend(match(q, [1], now), A, LEASE + now % 7, now)
    assert len(q.run_order._deadlines) < 2_000
    for _ in range(20_000):
        q.nack(match(q, [1], 20_000), A, 0, 20_000)
        claim(q, live(1), 1, 20_000)
    assert len(q.run_order._deadlines) < 2_000
    assert len(q.run_order._returned) < 2_000


# -- parts ------------------------------------------------------------------------------------------------


def test_tokens_of_two_incarnations_never_collide():
    """A token contains the incarnation (Q3)."""
    first, second = LeaseTokens(1), LeaseTokens(2)
    assert first.allocate(3) + 3 == first.allocate(1)
    assert (incarnation_of(first.allocate(1)), incarnation_of(second.allocate(1))) == (1, 2)
    first._next = NUMBER_MAX
    with pytest.raises(InvariantViolation):
        first.allocate(1)
    with pytest.raises(InvariantViolation):
        LeaseTokens(1 << 24)


def test_spans_of_returns_the_ranges_without_a_gap():
    assert spans_of(np.array([], dtype=np.int64)) == []
    assert spans_of(np.array([3, 4, 5], dtype=np.int64)) == [(3, 6)]
    assert spans_of(np.array([1, 3, 4, 9], dtype=np.int64)) == [(1, 2), (3, 5), (9, 10)]


@pytest.mark.parametrize(
    ("seqs", "shift", "who", "leased"),
    [
        (range(1, 11), {}, A, range(1, 11)),
        (range(3, 8), {}, A, range(3, 8)),
        (range(1, 11), {5: 1}, A, [n for n in range(1, 11) if n != 5]),
        (range(1, 11), {1: 1}, A, range(2, 11)),
        (range(1, 11), {10: 7}, A, range(1, 10)),
        ([1, 2, 4, 3, 5], {}, A, range(1, 6)),
        ([1, 2, 2, 4], {}, A, [1, 2, 4]),
        (range(5, 15), {}, A, range(5, 11)),
        (range(1, 11), {}, B, []),
    ],
    ids=["all", "inside", "token", "first", "last", "order", "twice", "beyond", "stranger"],
)
def test_match_agrees_on_its_fast_and_its_general_path(q, seqs, shift, who, leased):
    """Jobs 1 to 10 belong to one claim of A, and 11 to 20 to one claim of B.

    The fast path matches a whole run. Any deviation uses the general path.
    """
    (run,) = lease_runs(q.claim(live(20), A, 10, LEASE, 0))
    claim(q, live(20), 10, 0, B)
    tokens = [run.token + seq - run.first + shift.get(seq, 0) for seq in seqs]
    matched = match(q, list(seqs), 0, who, tokens)
    assert matched.leased.tolist() == list(leased)
    asked = list(seqs)
    for seq in leased:
        asked.remove(seq)
    assert sorted(matched.skipped.tolist()) == sorted(asked)
    if not shift:
        without = match(q, list(seqs), 0, who)
        assert without.leased.tolist() == list(leased), "and without tokens"


def test_match_of_a_run_handles_deleted_and_expired_jobs(q):
    """A deleted job is reported as deleted, and the others as leased until they expire."""
    (run,) = lease_runs(q.claim(live(10), A, 10, LEASE, 0))
    tokens = [run.token + n for n in range(10)]
    q.apply_removal(0, BitMap64([4]), on_request=True)
    matched = match(q, list(range(1, 11)), 0, A, tokens)
    assert (matched.gone.tolist(), len(matched.leased)) == ([4], 9)
    assert match(q, list(range(1, 11)), LEASE + 1, A, tokens).skipped.tolist() == list(range(1, 11))
