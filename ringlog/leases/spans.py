"""Spans of seqs, [first, stop): find, merge, count and split them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ringlog.leases.runs import BLOCK

I64 = NDArray[np.int64]
Span = tuple[int, int]
"""Seqs [first, stop)."""
SeqRun = tuple[int, int, int]
"""Seqs [first, stop) and their number of deliveries."""


def keep_first(chosen: NDArray[np.bool_], ascending: I64) -> None:
    """Clear the second entry of a seq that occurs twice: it counts once."""
    indexes = np.flatnonzero(chosen)
    duplicates = np.flatnonzero(ascending[indexes[1:]] == ascending[indexes[:-1]]) + 1
    chosen[indexes[duplicates]] = False


def spans_of(seqs: I64) -> list[Span]:
    """Return ascending seqs as spans without gaps."""
    if not len(seqs):
        return []
    if int(seqs[-1]) - int(seqs[0]) == len(seqs) - 1:
        return [(int(seqs[0]), int(seqs[-1]) + 1)]
    cuts = np.flatnonzero(seqs[1:] != seqs[:-1] + 1) + 1
    firsts = seqs[np.concatenate(([0], cuts))].tolist()
    lasts = seqs[np.concatenate((cuts - 1, [len(seqs) - 1]))].tolist()
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def merge_adjacent(found: list[SeqRun]) -> list[SeqRun]:
    """Merge adjacent runs with the same number of deliveries."""
    merged: list[SeqRun] = []
    for first, stop, deliveries in found:
        if merged and merged[-1][1:] == (first, deliveries):
            merged[-1] = merged[-1][0], stop, deliveries
        else:
            merged.append((first, stop, deliveries))
    return merged


def blocks_of(first: int, stop: int) -> list[Span]:
    """Split [first, stop) at the ends of blocks, which no run crosses."""
    cuts = [first, *range((first & -BLOCK) + BLOCK, stop, BLOCK), stop]
    if stop <= (first & -BLOCK) + BLOCK:
        return [(first, stop)]
    return list(pairwise(cuts))


def count_of(found: Iterable[SeqRun]) -> int:
    """Return the number of seqs in these runs."""
    return sum(stop - first for first, stop, _ in found)


def truncate_runs(found: list[SeqRun], most: int) -> list[SeqRun]:
    """Return the first `most` seqs of these runs."""
    kept: list[SeqRun] = []
    for first, stop, deliveries in found:
        if most <= 0:
            break
        kept.append((first, min(stop, first + most), deliveries))
        most -= stop - first
    return kept


def flatten_spans(spans: Iterable[Span]) -> list[int]:
    """Return first, count, first, count, …, the format of a change."""
    return [number for first, stop in spans for number in (first, stop - first)]


def gaps(first: int, stop: int, spans: list[Span]) -> list[Span]:
    """Return the parts of [first, stop) that are in none of these ascending spans."""
    found: list[Span] = []
    for low, high in [*spans, (stop, stop)]:
        if first < low:
            found.append((first, low))
        first = high
    return found
