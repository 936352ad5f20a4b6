"""Pauses of clients after the death of a shard, from journals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringlog.drill.journal import Outcome, Rows, What

HORIZON_NS = 200_000_000
"""A pause that a kill caused begins within this time (ns) after the kill."""


def pauses_ms(rows: Rows, deaths: Iterable[tuple[int, list[int]]]) -> list[float]:
    """Return the longest pause (ms) between acks just after each death.

    `deaths` contains (time in ns, topics of the dead shard).
    """
    is_append = np.isin(rows["op"], rows["op"][rows["what"] == What.APPEND])
    ends = rows[is_append & (rows["what"] == What.RETURN) & (rows["outcome"] == Outcome.OK)]
    found = []
    for at_ns, topics in deaths:
        times = np.unique(ends["at_ns"][np.isin(ends["topic"], topics)])
        if len(times) > 1:
            found.append(longest_gap_ms(times, at_ns))
    return found


def longest_gap_ms(times: Any, at_ns: int) -> float:
    """Return the longest time (ms) without an ack that begins, or is in progress, just after a kill."""
    first = max(int(np.searchsorted(times, at_ns)) - 1, 0)
    last = min(int(np.searchsorted(times, at_ns + HORIZON_NS)) + 1, len(times))
    gaps = np.diff(times[first:last])
    return float(gaps.max()) / 1e6 if len(gaps) else 0.0
