"""Stretches of numbers: found among numbers, joined, and cut at the ends of blocks. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ringlog.queue.live import Span
from ringlog.queue.runs import BLOCK

I64 = NDArray[np.int64]
Stretch = tuple[int, int, int]
"""Numbers [first, stop), and how often they were handed out."""


def keep_first(chosen: NDArray[np.bool_], ascending: I64) -> None:
    """A number that is listed twice counts once (QA-4)."""
    places = np.flatnonzero(chosen)
    again = np.flatnonzero(ascending[places[1:]] == ascending[places[:-1]]) + 1
    chosen[places[again]] = False


def spans_of(seqs: I64) -> list[Span]:
    """Ascending numbers as stretches without a gap."""
    if not len(seqs):
        return []
    if int(seqs[-1]) - int(seqs[0]) == len(seqs) - 1:
        return [(int(seqs[0]), int(seqs[-1]) + 1)]
    cuts = np.flatnonzero(seqs[1:] != seqs[:-1] + 1) + 1
    firsts = seqs[np.concatenate(([0], cuts))].tolist()
    lasts = seqs[np.concatenate((cuts - 1, [len(seqs) - 1]))].tolist()
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def joined(found: list[Stretch]) -> list[Stretch]:
    """Stretches that follow each other and were handed out as often are one."""
    found_together: list[Stretch] = []
    for first, stop, deliveries in found:
        if found_together and found_together[-1][1:] == (first, deliveries):
            found_together[-1] = found_together[-1][0], stop, deliveries
        else:
            found_together.append((first, stop, deliveries))
    return found_together


def blocks_of(first: int, stop: int) -> list[Span]:
    cuts = [first, *range((first & -BLOCK) + BLOCK, stop, BLOCK), stop]
    return list(pairwise(cuts))
