"""Clock faults: a preloaded shim gives each engine process the wall time from a mapped file.

Settings: `long`: include cases that take many seconds; `only`: the name of one case.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from chaos.clocks import steps
from chaos.clocks.walls import Walls
from chaos.order import Account, Order
from chaos.rigs.bench import Bench, bench
from chaos.rigs.cases import Case, replay_chosen, run_chosen
from ringlog.drill.checks import GuaranteeBroken

SETTINGS: dict[str, dict[str, Any]] = {
    "gateway": {"enabled": True},
    "wal": {"file_bytes": 1 << 20},
    "storage": {
        "enabled": True,
        "segment_age_ms": 500,
        "own_segment_bytes": 65_536,
        "reclaim_interval_s": 0.5,
    },
    "supervisor": {"stuck_after_s": 6.0},
}


def _set_right(run: Callable[[Bench, random.Random], None]) -> Callable[[Bench, random.Random], None]:
    """Wrap a case so that the clocks are correct after it, whatever its result."""

    def wrapped(made: Bench, chance: random.Random) -> None:
        try:
            run(made, chance)
        finally:
            steps.walls(made).right()

    return wrapped


CASES: tuple[Case[Bench], ...] = tuple(
    Case(case.name, case.faults, _set_right(case.run), case.is_long) for case in steps.CASES
)


@contextlib.contextmanager
def _clocked(order: Order, account: Account) -> Iterator[Bench]:
    clocks = Walls(order.scratch)
    preload = " ".join(filter(None, (str(clocks.preload), os.environ.get("LD_PRELOAD", ""))))
    try:
        with bench(order, account, environ={"LD_PRELOAD": preload}, settings=SETTINGS) as made:
            made.more["walls"] = clocks
            if not clocks.readings("wal_shard"):
                raise GuaranteeBroken("the clock shim is not loaded in the shards: they never read its clock")
            yield made
    finally:
        clocks.close()


def run(order: Order, account: Account) -> None:
    """Run every case that the plan selects, repeatedly, until the time is over."""
    run_chosen(order, account, CASES, partial(_clocked, order))


def replay(order: Order, case: str) -> None:
    """Repeat one case; `all`: every case, and the final judgement."""
    replay_chosen(order, case, CASES, partial(_clocked, order))
