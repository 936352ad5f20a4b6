"""Repeated claims: the part of the first reply that is still valid. Pure.

If a reply was lost, the client gets the same leases again. Some of them may have been returned in the
meantime, by a gateway that could not read their records, and may belong to another worker now. The repeated
reply must not contain these.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ringlog.leases.spans import spans_of

ClaimRun = tuple[int, int, int, int]
"""(first seq, number of jobs, deliveries, token of the first) as in the message ClaimReply."""
I64 = NDArray[np.int64]


def entries_of(runs: Iterable[ClaimRun]) -> tuple[I64, NDArray[np.uint64]]:
    """Return (n,) seqs in the order of the runs, which ascend, and (n,) their tokens."""
    seqs = [np.arange(first, first + count, dtype=np.int64) for first, count, _, _ in runs]
    tokens = [np.arange(token, token + count, dtype=np.uint64) for _, count, _, token in runs]
    return np.concatenate(seqs), np.concatenate(tokens)


def still_held(runs: list[ClaimRun], held: I64) -> list[ClaimRun]:
    """Return the part of these runs whose seqs are in `held` (ascending)."""
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
