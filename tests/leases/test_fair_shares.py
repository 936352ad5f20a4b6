"""Fair shares of jobs among concurrent claims."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.leases.fair_shares import fair_shares, split_runs
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.live_seqs import LiveSeqs
from ringlog.leases.tokens import LeaseTokens
from ringlog.leases.types import ClaimRequest

wants = st.lists(st.integers(0, 12), max_size=12)


@pytest.mark.parametrize(
    ("asked", "supply", "shares"),
    [
        ([10] * 10, 50, [5] * 10), ([10] * 4, 20, [5] * 4), ([1, 10, 10], 12, [1, 6, 5]),
        ([10, 1, 10], 12, [6, 1, 5]), ([3, 3], 0, [0, 0]), ([], 5, []), ([5, 5], 99, [5, 5]),
        ([1000, 1, 1000], 2, [1, 1, 0]),
    ],
)  # fmt: skip
def test_fair_shares_gives_the_worked_examples(asked, supply, shares):
    """No claim gets more than it requests, and the shares of unsatisfied claims differ by at most one."""
    assert fair_shares(asked, supply) == shares


@given(wants, st.integers(0, 80))
def test_fair_shares_equals_round_robin(asked, supply):
    """Round robin gives one job to each unsatisfied claim in turn."""
    dealt = [0] * len(asked)
    left = min(supply, sum(asked))
    while left:
        for n, want in enumerate(asked):
            if left and dealt[n] < want:
                dealt[n] += 1
                left -= 1
    shares = fair_shares(asked, supply)
    assert shares == dealt
    hungry = [share for share, want in zip(shares, asked, strict=True) if share < want]
    assert not hungry or max(hungry) - min(hungry) <= 1


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=8), wants)
def test_split_runs_keeps_all_jobs_in_order(lengths, asked):
    found, at = [], 1
    for length, deliveries in lengths:
        found.append((at, at + length, deliveries))
        at += length + 2
    jobs = [(seq, often) for first, stop, often in found for seq in range(first, stop)]
    shares = fair_shares(asked, len(jobs))
    parts = split_runs(found, shares)
    given_out = [
        [(seq, often) for first, stop, often in part for seq in range(first, stop)] for part in parts
    ]
    assert [len(part) for part in given_out] == shares
    assert [job for part in given_out for job in part] == jobs[: sum(shares)]


def test_each_claim_has_its_own_lease():
    """Each lease has the node and the length of its claim, and all start at the same time."""
    queue = ConsumerGroup(tokens=LeaseTokens(1))
    requests = [ClaimRequest("a", 2, 100), ClaimRequest("b", 9, 500), ClaimRequest("a", 1, 300)]
    first, second, third = queue.claim_fair_shares(LiveSeqs(1, 6), requests, 1_000, 1_000)
    assert [(each.count, each.until_ms) for each in (first, second, third)] == [
        (2, 1_100),
        (3, 1_500),
        (1, 1_300),
    ]
    assert queue.leased == 6
    queue.apply_expirations(1_101)
    assert queue.leased == 4
    queue.check()
    assert [
        each.count if each else 0 for each in queue.claim_fair_shares(LiveSeqs(1, 6), requests, 1, 1_200)
    ] == [1, 0, 0], "no more than so many"
