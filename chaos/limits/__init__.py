"""Limits: memory, descriptors, processes, CPU, room, names, read-only disks, cut files, locks of the dead.

Real processes under load; work is counted before, during and after each fault. Settings: `long`, also the
cases that take many seconds each; `only`, the name of one case.
"""

from __future__ import annotations

from typing import Any

from chaos.limits import disks, processes
from chaos.order import Account, Broken, CannotRun, Order
from chaos.rigs.bench import Bench, bench
from chaos.rigs.cases import Case, named, run_case, run_cases
from chaos.rigs.small_disks import own_mounts

CASES: tuple[Case[Bench], ...] = (*disks.CASES, *processes.CASES)
SETTINGS: dict[str, dict[str, Any]] = {
    "gateway": {"enabled": True},
    "wal": {"file_bytes": 1 << 20, "volatile_bytes": 1 << 28},
    "storage": {"enabled": True, "segment_age_ms": 200, "own_segment_bytes": 65_536},
    "supervisor": {"stuck_after_s": 6.0},
}


def run(order: Order, account: Account) -> None:
    """Every case that the plan asks for, over and over while there is time."""
    chosen = order.choose({"long": False, "only": ""})
    cases = [case for case in CASES if chosen["only"] in {"", case.name}]
    cases = [case for case in cases if chosen["long"] or not case.is_long or chosen["only"]]
    _prepare(account)
    with bench(order, account, settings=SETTINGS) as made:
        run_cases(order, account, cases, made)


def replay(order: Order, case: str) -> None:
    """One case again; `all` means: every case, and the judge at the end."""
    account = Account()
    _prepare(account)
    with bench(order, account, settings=SETTINGS) as made:
        for each in CASES if case.startswith("all") else (named(CASES, case),):
            text = case if not case.startswith("all") else f"{each.name}:{case.partition(':')[2]}"
            run_case(order, account, each, made, text)
    for finding in account.findings:
        raise Broken(finding.story)
    for skip in account.skipped:
        print(f"skipped {skip.what}: {skip.why}")


def _prepare(account: Account) -> None:
    try:
        own_mounts()
    except CannotRun as e:
        account.skip("private mounts", str(e))
