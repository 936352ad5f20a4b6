"""The columns of a claim: the same jobs, whether they are read as columns or as job objects."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.client.leases.claim_result import (
    ClaimResult,
    Jobs,
    LeaseBundle,
    unsettled_requests,
    unsplit_claim_of,
)
from ringlog.client.read.pages import Record


class Stretch:
    """Records with these numbers. It stands in for the record batch of a claim."""

    def __init__(self, seqs):
        self._seqs = seqs

    def __len__(self):
        return len(self._seqs)

    @property
    def seqs(self):
        return np.array(self._seqs, dtype=np.int64)

    def slice_rows(self, start, stop):
        return Stretch(self._seqs[start:stop])

    def payloads(self):
        return [b"%d" % seq for seq in self._seqs]

    def records(self):
        return [Record(seq, 0, b"%d" % seq) for seq in self._seqs]


@st.composite
def claims(draw):
    """Draw runs in ascending order and their records, except some that were deleted in the meantime."""
    runs, stretches, at, token = [], [], 1, 1 << 50
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.integers(0, 3))
        count = draw(st.integers(1, 5))
        runs.append((at, count, draw(st.integers(1, 9)), token))
        gone = draw(st.sets(st.integers(0, count - 1)))
        stretches.append(Stretch([at + n for n in range(count) if n not in gone]))
        at, token = at + count, token + count + draw(st.integers(0, 4))
    return runs, stretches


def claim(found):
    runs, stretches = found
    claimed = ClaimResult(runs, 9_000, 500, 77)
    claimed.batches = list(stretches)
    return claimed


def jobs_of(claimed):
    return Jobs(claimed, lambda record, lease, deliveries: (record, lease, deliveries))


@given(claims())
def test_job_objects_equal_the_columns_of_the_claim(found):
    claimed = claim(found)
    seqs, tokens = claimed.entries()
    payloads, numbers = claimed.payloads(), claimed.seqs.tolist()
    jobs = jobs_of(claimed)
    assert len(jobs) == len(numbers)
    made = list(jobs)
    wanted = {first + n: (token + n, times) for first, count, times, token in found[0] for n in range(count)}
    assert [record.seq for record, _, _ in made] == numbers
    assert [(lease.token, times) for _, lease, times in made] == [wanted[seq] for seq in numbers]
    assert np.frombuffer(seqs, "<i8").tolist() == [lease.seq for _, lease, _ in made]
    assert np.frombuffer(tokens, "<u8").tolist() == [lease.token for _, lease, _ in made]
    assert payloads == [record.data for record, _, _ in made] == jobs.payloads()
    assert jobs.seqs.tolist() == numbers
    assert len(jobs) == len(numbers)
    assert all(
        (lease.deadline_ms, lease.lease_ms, lease.until_ns) == (9_000, 500, 77) for _, lease, _ in made
    )


@given(claims())
def test_granted_leases_include_the_leases_of_deleted_jobs(found):
    assert claim(found).granted_leases() == [
        (first + n, token + n) for first, count, _, token in found[0] for n in range(count)
    ]


@given(claims(), st.data())
def test_mark_settled_ends_all_leases_and_marks_skipped_ones_as_lost(found, data):
    claimed = claim(found)
    numbers = claimed.seqs.tolist()
    skipped = data.draw(st.lists(st.sampled_from(numbers), unique=True)) if numbers else []
    is_made_first = data.draw(st.booleans())
    jobs = jobs_of(claimed)
    if is_made_first:
        assert len(list(jobs)) == len(numbers)
        assert unsplit_claim_of(jobs) is None
    else:
        assert unsplit_claim_of(jobs) is claimed
    claimed.mark_settled(skipped)
    leases = [lease for _, lease, _ in jobs]
    assert [lease.seq for lease in leases if lease.is_lost] == sorted(skipped)
    assert all(lease.is_over for lease in leases)
    assert unsplit_claim_of(jobs) is None


def test_jobs_behave_like_a_list():
    jobs = jobs_of(claim(([(3, 4, 1, 100)], [Stretch([3, 4, 5, 6])])))
    assert jobs
    assert [record.seq for record, _, _ in jobs[1:3]] == [4, 5]
    assert jobs[-1][0].seq == 6
    assert jobs == list(jobs)
    none = jobs_of(claim(([], [])))
    assert not none
    assert none == []
    assert none.payloads() == []
    assert none.seqs.tolist() == []


def test_mark_lost_ends_every_lease_with_an_unknown_outcome():
    """A lease that the client kept extending would block its job, since no program works on it."""
    made = claim(([(3, 2, 1, 100)], [Stretch([3, 4])]))
    leases = [lease for _, lease, _ in made.materialized()]
    for claimed in (made, claim(([(3, 2, 1, 100)], [Stretch([3, 4])]))):
        claimed.mark_lost()
    assert all(lease.is_lost for lease in leases)
    later = claim(([(3, 2, 1, 100)], [Stretch([3, 4])]))
    later.mark_lost()
    assert all(lease.is_lost for _, lease, _ in later.materialized())


@given(claims(), st.integers(1, 9), st.data())
def test_the_parts_of_a_claim_equal_the_claim(found, size, data):
    whole, parts = claim(found), claim(found).parts(size)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert len(parts[-1]) in range(1 if len(whole) else 0, size + 1)
    assert [payload for part in parts for payload in part.payloads()] == whole.payloads()
    assert LeaseBundle(parts).entries() == whole.entries()
    assert len(LeaseBundle(parts)) == len(whole)
    assert not any(part.is_lost_at(76) for part in parts)
    assert all(part.is_lost_at(77) for part in parts)

    looked_at = [part for part in parts if data.draw(st.booleans())]
    made = [lease for part in looked_at for _, lease, _ in part.materialized()]
    requests = unsettled_requests(parts)
    assert len(requests) <= 2
    assert sum(map(len, requests)) == len(whole)
    entries = b"".join(each.entries()[0] for each in requests if not isinstance(each, list))
    numbers = {*np.frombuffer(entries, "<i8").tolist(), *(lease.seq for lease in made)}
    assert numbers == set(whole.seqs.tolist())
    skipped = whole.seqs.tolist()[::2]
    LeaseBundle(parts).mark_settled(skipped)
    assert unsettled_requests(parts) == []
    assert [lease.seq for part in parts for _, lease, _ in part.materialized() if lease.is_lost] == skipped


class HeldStretch(Stretch):
    """Records whose creation waits until it may end, and leaves its claim half made."""

    def __init__(self, seqs):
        super().__init__(seqs)
        self.is_begun, self.may_end = threading.Event(), threading.Event()

    def records(self):
        self.is_begun.set()
        assert self.may_end.wait(30)
        return super().records()


@pytest.mark.slow
def test_a_forked_child_creates_jobs_while_a_thread_of_its_parent_creates_others():
    """The thread and the lock that it holds exist only in the parent."""
    ours, stretch = claim(([(1, 1, 1, 1)], [Stretch([1])])), HeldStretch([1])
    theirs = claim(([(1, 1, 1, 1)], [stretch]))
    thread = threading.Thread(target=theirs.materialized)
    thread.start()
    assert stretch.is_begun.wait(30)
    child = os.fork()
    if child == 0:
        status = 2
        try:
            signal.alarm(30)  # Ends a child that waits for a lock.
            status = 0 if len(ours.materialized()) == 1 else 1
        finally:
            os._exit(status)
    stretch.may_end.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
