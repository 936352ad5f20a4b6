"""The pending list of a group: what was delivered and is not done, with its holders and times. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ringlog.leases.runs import DELAYED, EXHAUSTED, LEASED, RETURNED
from ringlog.leases.table import LeaseTable

_PENDING = (LEASED, DELAYED, RETURNED, EXHAUSTED)


class PendingRange(NamedTuple):
    """Positions [first, stop) of the pending list with the same facts."""

    first: int
    stop: int
    state: int
    node: str
    """The holder; "" = none."""
    deliveries: int
    begun_ms: int
    given_ms: int
    until_ms: int
    """LEASED: deadline, inclusive. DELAYED: time at which they are ready. Else 0."""
    token: int
    """Token of the first position."""


def list_pending(
    table: LeaseTable, now_ms: int, *, node: str = "", idle_ms: int = 0, min_deliveries: int = 0,
    after: int = 0, limit: int = 100,
) -> tuple[list[PendingRange], bool]:  # fmt: skip
    """Return the pending positions after `after`, ascending, at most `limit` runs; and: are there more?

    It changes only what has expired."""
    table.apply_expirations(now_ms)
    holder = table.holders.find(node)
    if node and holder < 0:
        return [], False
    states = (LEASED,) if node else _PENDING
    rows = table.runs.select(
        states, now_ms - idle_ms, min_deliveries, holder if node else -1, -1, after
    ).tolist()
    return [_pending_range(table, row, after) for row in rows[:limit]], len(rows) > limit


def _pending_range(table: LeaseTable, row: int, after: int) -> PendingRange:
    runs, state = table.runs, table.runs.state[row]
    first = max(runs.first[row], after + 1)
    return PendingRange(
        first, runs.stop[row], state,
        table.holders.name_of(runs.holder[row]) if state == LEASED else "",
        table.deliveries_of(row), runs.begun[row], runs.given[row],
        runs.at[row] if state in {LEASED, DELAYED} else 0, runs.token[row] + first - runs.first[row],
    )  # fmt: skip
