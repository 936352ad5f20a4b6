"""The table of runs: lookup by seq, splits and drops, in blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringlog.leases.runs import BLOCK, LEASED, LeaseRuns


def test_find_returns_a_run_for_each_of_its_seqs_and_no_other():
    runs = LeaseRuns()
    row = runs.add(10, 20, LEASED, token=100)
    assert [runs.find(seq) for seq in (9, 10, 19, 20, 10 + BLOCK)] == [-1, row, row, -1, -1]


def test_split_row_keeps_the_values_and_tokens():
    runs = LeaseRuns()
    row = runs.add(10, 20, LEASED, at=5, token=100, holder=3, deliveries=2)
    new = runs.split_row(row, 14)
    assert (runs.first[row], runs.stop[row], runs.first[new], runs.stop[new]) == (10, 14, 14, 20)
    assert (runs.token[new], runs.at[new], runs.holder[new], runs.deliveries[new]) == (104, 5, 3, 2)
    assert (runs.find(13), runs.find(14)) == (row, new)


def test_dropped_rows_are_reused():
    runs = LeaseRuns()
    for turn in range(10_000):
        runs.drop(runs.add(turn * 7, turn * 7 + 3, LEASED))
    assert (len(runs), len(runs.state), len(runs.blocks)) == (0, 1, 0)
    assert len(runs._order) <= 2 * BLOCK, "blocks that are no more are forgotten"


SPANS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=40)


@given(SPANS, st.integers(0, 400), st.integers(0, 400), st.integers(1, 300))
def test_within_and_below_agree_with_a_full_scan(spans, low, floor, length):
    runs, at, made = LeaseRuns(), BLOCK - 100, []
    for gap, size in spans:
        at += gap
        stop = min(at + size, (at & -BLOCK) + BLOCK)
        made.append((runs.add(at, stop, LEASED), at, stop))
        at = stop
    first = BLOCK - 150 + low
    wanted = [row for row, begin, stop in made if begin < first + length and stop > first]
    assert runs.within(first, first + length) == wanted
    below = [row for row, begin, _ in made if begin < BLOCK - 150 + floor]
    assert runs.below(BLOCK - 150 + floor) == below
    assert runs.below(BLOCK - 150 + floor) == below, "looking changes nothing"
    assert runs.rows() == [row for row, _, _ in made]
