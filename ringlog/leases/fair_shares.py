"""Cohorts: jobs dealt out to claims that came in together, in equal shares as far as they want them. Pure.

Shares are what dealing one job per turn gives, round and round in order of arrival (QC-12); which of the jobs
are whose is not: each claim has its own stretch of them, so that a thousand jobs are not a thousand leases.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringlog.leases.spans import SeqRun


def fair_shares(wants: Sequence[int], supply: int) -> list[int]:
    """How much each gets: max-min fair, what is left over to those who came first (QC-13)."""
    shares = [0] * len(wants)
    by_want = sorted(range(len(wants)), key=wants.__getitem__)
    for place, n in enumerate(by_want):
        level, rest = divmod(supply, len(wants) - place)
        if wants[n] > level:
            # All others want more than there is for each.
            for each in by_want[place:]:
                shares[each] = level
            for each in sorted(by_want[place:])[:rest]:
                shares[each] += 1
            break
        shares[n] = wants[n]
        supply -= wants[n]
    return shares


def split_runs(found: Sequence[SeqRun], shares: Sequence[int]) -> list[list[SeqRun]]:
    """The jobs in parts of these sizes, one after the other; there are as many."""
    parts: list[list[SeqRun]] = []
    left, at = list(reversed(found)), 0
    for share in shares:
        part: list[SeqRun] = []
        while share:
            first, stop, deliveries = left[-1]
            first += at
            taken = min(stop - first, share)
            part.append((first, first + taken, deliveries))
            share -= taken
            at += taken
            if first + taken == stop:
                left.pop()
                at = 0
        parts.append(part)
    return parts
