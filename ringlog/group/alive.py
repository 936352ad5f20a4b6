"""Which positions of a topic are there to be given out. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.queue.live import Live, Span
from ringlog.queue.stretches import spans_of

I64 = NDArray[np.int64]
_LOOK_MAX = 1 << 20
"""Positions looked at in one step over a stretch where nothing is alive."""


def alive_from(live: Live, at: int, most: int) -> tuple[list[Span], int]:
    """Up to `most` live positions from `at` on, and where to go on looking."""
    found: list[Span] = []
    at, step = max(at, live.front), most
    while most > 0 and at <= live.head:
        stop = min(at + step, live.head + 1)
        spans = alive_within(live, at, stop)
        count = sum(last - first for first, last in spans)
        if count > most:
            spans, stop = _cut(spans, most)
            count = most
        found += spans
        most -= count
        # Where little is alive, more is looked at the next time.
        at, step = stop, max(most, min(step * 2, _LOOK_MAX))
    return found, at


def alive_within(live: Live, first: int, stop: int) -> list[Span]:
    """The live positions of [first, stop)."""
    first, stop = max(first, live.front), min(stop, live.head + 1)
    if first >= stop:
        return []
    gone = BitMap64()
    if live.dead is not None and live.dead.range_cardinality(first, stop):
        gone = live.dead & BitMap64(range(first, stop))
    for a, b in live.lost:
        if a < stop and b >= first:
            gone |= BitMap64(range(max(a, first), min(b + 1, stop)))
    if not gone:
        return [(first, stop)]
    dead = np.array(gone.to_array(), dtype=np.int64)
    alive: list[Span] = []
    for low, high in [*spans_of(dead), (stop, stop)]:
        if first < low:
            alive.append((first, low))
        first = high
    return alive


def is_alive(live: Live, seqs: I64) -> NDArray[np.bool_]:
    """(n,) Which of these are there."""
    alive: NDArray[np.bool_] = (seqs >= live.front) & (seqs <= live.head)
    for first, last in live.lost:
        alive &= (seqs < first) | (seqs > last)
    if live.dead:
        dead = live.dead
        alive &= np.fromiter((seq not in dead for seq in seqs.tolist()), np.bool_, len(seqs))
    return alive


def _cut(spans: list[Span], most: int) -> tuple[list[Span], int]:
    """The first `most` positions of these, and where the rest begins."""
    kept: list[Span] = []
    for first, stop in spans:
        stop = min(stop, first + most)
        kept.append((first, stop))
        most -= stop - first
        if not most:
            break
    return kept, kept[-1][1]
