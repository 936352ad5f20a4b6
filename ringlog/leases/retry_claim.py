"""A claim that comes again: what of its first answer holds still. Pure.

An answer that was lost is given again, and the leases in it are its holder's. But some of them may have been
given back meanwhile, by the gateway that could not read their records, and be another one's by now: who asks
again must not be told that they are his.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ringlog.leases.spans import spans_of

ClaimRun = tuple[int, int, int, int]
"""(first number, jobs, deliveries, token of the first) as in the message ClaimReply."""
I64 = NDArray[np.int64]


def entries_of(runs: Iterable[ClaimRun]) -> tuple[I64, NDArray[np.uint64]]:
    """(n,) numbers, ascending as the runs are, and (n,) their tokens."""
    seqs = [np.arange(first, first + count, dtype=np.int64) for first, count, _, _ in runs]
    tokens = [np.arange(token, token + count, dtype=np.uint64) for _, count, _, token in runs]
    return np.concatenate(seqs), np.concatenate(tokens)


def still_held(runs: list[ClaimRun], held: I64) -> list[ClaimRun]:
    """What is left of these runs, when of their numbers those of `held` (ascending) are held still."""
    if len(held) == sum(count for _, count, _, _ in runs):
        return runs
    left: list[ClaimRun] = []
    for first, count, deliveries, token in runs:
        low, high = np.searchsorted(held, (first, first + count))
        left += [
            (start, stop - start, deliveries, token + start - first)
            for start, stop in spans_of(held[low:high])
        ]
    return left
