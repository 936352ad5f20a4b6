"""Resource limits: memory, descriptors, processes, CPU, disk space, read-only disks, stale locks and pids.

Real processes run under load; work is counted before, during and after each fault. Settings: `long`: include
cases that take many seconds; `only`: the name of one case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from chaos.limits import disks, processes
from chaos.order import Account, CannotRun, Order
from chaos.rigs.bench import Bench, bench
from chaos.rigs.cases import Case, replay_chosen, run_chosen
from chaos.rigs.small_disks import own_mounts

CASES: tuple[Case[Bench], ...] = (*disks.CASES, *processes.CASES)
SETTINGS: dict[str, dict[str, Any]] = {
    "gateway": {"enabled": True},
    "wal": {"file_bytes": 1 << 20, "volatile_bytes": 1 << 28},
    "storage": {"enabled": True, "segment_age_ms": 200, "own_segment_bytes": 65_536},
    "supervisor": {"stuck_after_s": 6.0},
}


def run(order: Order, account: Account) -> None:
    """Run every case that the plan selects, repeatedly, until the time is over."""
    run_chosen(order, account, CASES, partial(_opened, order))


def replay(order: Order, case: str) -> None:
    """Repeat one case; `all`: every case, and the final judgement."""
    replay_chosen(order, case, CASES, partial(_opened, order))


@contextlib.contextmanager
def _opened(order: Order, account: Account) -> Iterator[Bench]:
    try:
        own_mounts()
    except CannotRun as e:
        account.skip("private mounts", str(e))
    with bench(order, account, settings=SETTINGS) as made:
        yield made
