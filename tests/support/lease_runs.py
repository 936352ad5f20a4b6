"""The leases of a change in a form for tests."""

from __future__ import annotations

from typing import NamedTuple

from ringlog.leases.change import CLAIM_ROW, LeaseChange


class LeaseRun(NamedTuple):
    """Seqs `first` up to `stop`, exclusive, that one claim leased together. `token` belongs to the first."""

    first: int
    stop: int
    deliveries: int
    token: int


def lease_runs(change: LeaseChange | None) -> list[LeaseRun]:
    """Return the runs that a claim leased."""
    rows = change.rows if change is not None else []
    return [
        LeaseRun(first, first + count, deliveries, token)
        for first, count, deliveries, token in zip(*(rows[n::CLAIM_ROW] for n in range(4)), strict=True)
    ]
