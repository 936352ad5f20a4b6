"""Shared memory: rings and boards that are overwritten, truncated, unlinked, full or foreign.

Includes producers that publish invalid data. Real processes; most cases share one engine under load.
Settings: `only`: the name of one case.
"""

from __future__ import annotations

from chaos.memory import files, lies
from chaos.order import Account, Order
from chaos.rigs.bench import Bench, bench
from chaos.rigs.cases import Case, Opens, replay_chosen, run_chosen

CASES: tuple[Case[Bench], ...] = (*lies.CASES, *files.CASES)
SETTINGS = {"run": {"ring_bytes": 1 << 20, "settle_entries": 1_024}}


def run(order: Order, account: Account) -> None:
    """Run every case, repeatedly, until the time is over."""
    run_chosen(order, account, CASES, _opens(order))
    account.count_work("cases", account.counts["lies"] + account.counts["scribbles"])


def replay(order: Order, case: str) -> None:
    """Repeat one case; `all`: every case, and the final judgement."""
    replay_chosen(order, case, CASES, _opens(order))


def _opens(order: Order) -> Opens[Bench]:
    return lambda account: bench(order, account, settings=SETTINGS)
