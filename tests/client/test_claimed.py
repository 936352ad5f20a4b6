"""What a claim was given, in columns: the same jobs, looked at together or one by one (QC-3)."""

from __future__ import annotations

import numpy as np
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
    """Records with these numbers; as much of a Piece as a claim looks at."""

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
    """Runs that ascend, and the records of them but for some that were deleted meanwhile."""
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
def test_jobs_made_are_what_the_columns_say(found):
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
def test_every_lease_can_be_given_back_whether_its_job_is_there_or_not(found):
    assert claim(found).granted_leases() == [
        (first + n, token + n) for first, count, _, token in found[0] for n in range(count)
    ]


@given(claims(), st.data())
def test_jobs_that_were_settled_together_are_over_and_those_skipped_are_lost(found, data):
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


def test_jobs_are_a_sequence_like_a_list():
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


def test_of_leases_whose_fate_is_unknown_none_is_kept():
    """CL-9: kept alive, a job that nobody works on would never come back."""
    made = claim(([(3, 2, 1, 100)], [Stretch([3, 4])]))
    leases = [lease for _, lease, _ in made.materialized()]
    for claimed in (made, claim(([(3, 2, 1, 100)], [Stretch([3, 4])]))):
        claimed.mark_lost()
    assert all(lease.is_lost for lease in leases)
    later = claim(([(3, 2, 1, 100)], [Stretch([3, 4])]))
    later.mark_lost()
    assert all(lease.is_lost for _, lease, _ in later.materialized())


@given(claims(), st.integers(1, 9), st.data())
def test_batches_of_a_claim_are_the_claim(found, size, data):
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
