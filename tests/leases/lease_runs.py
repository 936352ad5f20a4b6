"""What a change leases, as tests look at it."""

from __future__ import annotations

from typing import NamedTuple

from ringlog.leases.change import CLAIM_ROW, LeaseChange


class LeaseRun(NamedTuple):
    """Numbers `first` up to `stop`, exclusive, handed out together; `token` is of the first."""

    first: int
    stop: int
    deliveries: int
    token: int


def lease_runs(change: LeaseChange | None) -> list[LeaseRun]:
    """What a claim was given."""
    rows = change.rows if change is not None else []
    return [
        LeaseRun(first, first + count, deliveries, token)
        for first, count, deliveries, token in zip(*(rows[n::CLAIM_ROW] for n in range(4)), strict=True)
    ]
