"""Files that are away at one start: absence is not loss.

Each file of a small data directory, of every kind, is away for one start, and back at the next; once with the
same settings, once with another number of shards at that start, once without the cold tier. While it is away
the engine is used: records are appended, topics made, checkpoints taken. Then:

- a topic answers as it always did, or refuses with an error that names the file that is away; a shard that
  does not start names it too;
- nothing is announced as lost, and no number or topic id is given out twice;
- when the file is back every record is there, those of before and those acknowledged meanwhile;
- the offline verifier fails over a directory of which the engine refuses anything.

Settings: `modes` to run (all), `paths`: only files whose names contain this.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from chaos.absences.judge import MODES, Case, Judge, all_cases
from chaos.order import Account, Order
from chaos.processes import suppress_logging
from chaos.rot.specimen import make_specimen

KNOWN: dict[str, Any] = {"modes": list(MODES), "paths": ""}


def run(order: Order, account: Account) -> None:
    """One case of each kind of file and mode, then the others, in an order of chance."""
    settings = order.choose(KNOWN)
    with suppress_logging():  # a warning for each file that is away helps nobody
        begun = time.monotonic()
        judge = Judge(make_specimen(order.seed), order.scratch)
        cases = [
            case for case in all_cases(judge.specimen)
            if case.mode in settings["modes"] and settings["paths"] in case.path
        ]  # fmt: skip
        order.random("cases").shuffle(cases)
        first: dict[str, Case] = {}
        for case in cases:
            first.setdefault(f"{case.kind} {case.mode}", case)
        chosen = list(first.values())
        for case in [*chosen, *(each for each in cases if each not in chosen)]:
            is_over = time.monotonic() > begun + order.seconds or order.is_enough(account.counts)
            if is_over and case not in chosen:
                break
            wrong, counts = judge.judge(case)
            account.did("cases", 1, case.fault)
            for name, times in counts.items():
                account.did(name, times)
            if wrong:
                account.found(f"{case.name}: {wrong}"[:900], f"{order.seed}:{case.name}")


def replay(order: Order, case: str) -> None:
    """One case again: SEED:NAME, as a finding names it."""
    seed, name = case.split(":", 1)
    with suppress_logging():
        judge = Judge(make_specimen(int(seed)), Path(order.scratch))
        found = next(each for each in all_cases(judge.specimen) if each.name == name)
        wrong, _ = judge.judge(found)
    if wrong:
        raise AssertionError(wrong)
