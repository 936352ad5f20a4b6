"""Fair shares: distribute jobs over claims that arrived together, in equal shares up to their wishes.

Pure.

The sizes of the shares are those of dealing one job at a time, in order of arrival. The jobs of a share are
different: each claim gets consecutive jobs, so that 1,000 jobs are not 1,000 leases.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringlog.leases.spans import SeqRun


def fair_shares(requested: Sequence[int], supply: int) -> list[int]:
    """Return the size of each share: max-min fair, with the remainder for the claims that arrived first."""
    shares = [0] * len(requested)
    ascending = sorted(range(len(requested)), key=requested.__getitem__)
    for place, n in enumerate(ascending):
        level, remainder = divmod(supply, len(requested) - place)
        if requested[n] > level:
            # Every other claim wants more than its share.
            for each in ascending[place:]:
                shares[each] = level
            for each in sorted(ascending[place:])[:remainder]:
                shares[each] += 1
            break
        shares[n] = requested[n]
        supply -= requested[n]
    return shares


def split_runs(found: Sequence[SeqRun], shares: Sequence[int]) -> list[list[SeqRun]]:
    """Split the jobs into consecutive parts of these sizes. There must be enough jobs."""
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
