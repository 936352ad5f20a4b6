"""The live seqs of a queue, and iteration over ranges of them. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.leases.spans import Span, spans_of

I64 = NDArray[np.int64]


class LiveSeqs:
    """The live and published jobs: `front` to `head`, inclusive, without dead and lost ones."""

    __slots__ = ("dead", "front", "head", "lost")

    def __init__(
        self, front: int, head: int, dead: BitMap64 | None = None, lost: Sequence[tuple[int, int]] = ()
    ) -> None:
        """`lost` has inclusive ranges, ascending."""
        self.front: int = front
        self.head: int = head
        self.dead: BitMap64 | None = dead
        self.lost: Sequence[tuple[int, int]] = lost


def bitmap_of(seqs: NDArray[np.int64]) -> BitMap64:
    """Return the set of these seqs."""
    return BitMap64(array("Q", np.ascontiguousarray(seqs, dtype="<u8").tobytes()))


def next_alive(live: LiveSeqs, at: int, passed: BitMap64 | None = None) -> Span:
    """Return the first range of live jobs at or above `at` that are not in `passed`.

    If there is none, the range starts after the head."""
    at, stop = _next_alive(live, at)
    if not passed:
        return at, stop
    while at <= live.head and at in passed:
        at, stop = _next_alive(live, end_of(passed, at))
    if at <= live.head and passed.range_cardinality(at, stop):
        stop = min(stop, passed.next_set_bit(at))
    return at, stop


def _next_alive(live: LiveSeqs, at: int) -> Span:
    stop = live.head + 1
    dead = live.dead
    while at <= live.head:
        before = at
        for first, last in live.lost:
            if first <= at <= last:
                at = last + 1
        if dead is not None and at in dead:
            at = end_of(dead, at)
        if at == before:
            break
    if at > live.head:
        return stop, stop
    for first, _ in live.lost:
        if first > at:
            stop = min(stop, first)
            break
    if dead is not None and dead.range_cardinality(at, stop):
        stop = min(stop, dead.next_set_bit(at))
    return at, stop


def end_of(numbers: BitMap64, first: int) -> int:
    """Return the end (exclusive) of the gapless range in a set that starts at `first`, which is in the
    set."""
    step = 1
    while numbers.contains_range(first, first + 2 * step):
        step *= 2
    low, high = first + step, first + 2 * step
    while low < high:
        middle = (low + high) // 2
        if numbers.contains_range(first, middle + 1):
            low = middle + 1
        else:
            high = middle
    return low


def alive_within(live: LiveSeqs, first: int, stop: int) -> list[Span]:
    """Return the live ranges within [first, stop)."""
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


def is_alive(live: LiveSeqs, seqs: I64) -> NDArray[np.bool_]:
    """Return (n,) which of these seqs are alive."""
    alive: NDArray[np.bool_] = (seqs >= live.front) & (seqs <= live.head)
    for first, last in live.lost:
        alive &= (seqs < first) | (seqs > last)
    if live.dead:
        dead = live.dead
        alive &= np.fromiter((seq not in dead for seq in seqs.tolist()), np.bool_, len(seqs))
    return alive
