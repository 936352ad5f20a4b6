"""Stretches of positions, [first, stop): counting and cutting them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from ringlog.queue.live import Span
from ringlog.queue.runs import BLOCK


def positions_of(found: Iterable[tuple[int, int, int]]) -> int:
    """How many there are in these stretches; what else they say is not looked at."""
    return sum(stop - first for first, stop, _ in found)


def cut(found: list[tuple[int, int, int]], most: int) -> list[tuple[int, int, int]]:
    """The first `most` positions of these."""
    kept: list[tuple[int, int, int]] = []
    for first, stop, deliveries in found:
        if most <= 0:
            break
        kept.append((first, min(stop, first + most), deliveries))
        most -= stop - first
    return kept


def flat(spans: Iterable[Span]) -> list[int]:
    """First, count, first, count and so on, as a change has them."""
    return [number for first, stop in spans for number in (first, stop - first)]


def gaps(first: int, stop: int, spans: list[Span]) -> list[Span]:
    """What of [first, stop) is in none of these ascending spans."""
    found: list[Span] = []
    for low, high in [*spans, (stop, stop)]:
        if first < low:
            found.append((first, low))
        first = high
    return found


def blocks_of(first: int, stop: int) -> list[Span]:
    """[first, stop) cut at the ends of blocks, which no run crosses."""
    return list(pairwise([first, *range((first & -BLOCK) + BLOCK, stop, BLOCK), stop]))
