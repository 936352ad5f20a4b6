"""Shared memory: rings and boards overwritten, cut, unlinked, full, of another life; producers that lie.

Real processes, one engine under load for most cases. Settings: `only`, the name of one case.
"""

from __future__ import annotations

from chaos.memory import files, lies
from chaos.order import Account, Broken, Order
from chaos.rigs.bench import Bench, bench
from chaos.rigs.cases import Case, named, run_case, run_cases

CASES: tuple[Case[Bench], ...] = (*lies.CASES, *files.CASES)
SETTINGS = {"run": {"ring_bytes": 1 << 20, "settle_entries": 1_024}}


def run(order: Order, account: Account) -> None:
    """Every case, over and over while there is time."""
    chosen = order.choose({"only": ""})
    cases = [case for case in CASES if chosen["only"] in {"", case.name}]
    with bench(order, account, settings=SETTINGS) as made:
        run_cases(order, account, cases, made)
    account.did("cases", account.counts["lies"] + account.counts["scribbles"])


def replay(order: Order, case: str) -> None:
    """One case again; `all`: every case, and the judge at the end."""
    account = Account()
    with bench(order, account, settings=SETTINGS) as made:
        for each in CASES if case.startswith("all") else (named(CASES, case),):
            text = case if not case.startswith("all") else f"{each.name}:{case.partition(':')[2]}"
            run_case(order, account, each, made, text)
    for finding in account.findings:
        raise Broken(finding.story)
    for skip in account.skipped:
        print(f"skipped {skip.what}: {skip.why}")
