"""Missing files: a file that is absent at one start is not treated as data loss.

Each file of a small data directory, of every kind, is absent at one start and back at the next. This is done
with the same settings, with another number of shards at that start, and without the cold tier. While the file
is missing, the engine is used: records are appended, topics created, checkpoints taken. Then:

- A topic answers as before, or refuses with an error that names the missing file. A shard that does not start
  names it too.
- No record is announced as lost, and no number or topic id is assigned twice.
- When the file is back, every record is there: the earlier ones and those acknowledged in the meantime.
- The offline verifier reports damage for a directory if the engine refuses anything of it.

Settings: `modes` to run (all); `paths`: only files whose names contain this text.
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
    """Run one case for each kind of file and mode, then the others, in random order."""
    settings = order.choose(KNOWN)
    with suppress_logging():  # avoids one warning per missing file
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
            account.count_work("cases", 1, case.fault)
            for name, times in counts.items():
                account.count_work(name, times)
            if wrong:
                account.report_finding(f"{case.name}: {wrong}"[:900], f"{order.seed}:{case.name}")


def replay(order: Order, case: str) -> None:
    """Repeat one case, named SEED:NAME as in its finding."""
    seed, name = case.split(":", 1)
    with suppress_logging():
        judge = Judge(make_specimen(int(seed)), Path(order.scratch))
        found = next(each for each in all_cases(judge.specimen) if each.name == name)
        wrong, _ = judge.judge(found)
    if wrong:
        raise AssertionError(wrong)
