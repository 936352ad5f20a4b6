"""Cases: one fault each, with a name that repeats it. They run in order until the time is used."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from chaos.order import Account, CannotRun, Order
from ringlog.drill.checks import GuaranteeBroken

Bench = TypeVar("Bench")


@dataclass(frozen=True, slots=True)
class Case(Generic[Bench]):
    """One fault, injected and judged."""

    name: str
    faults: tuple[str, ...]
    """Rows of the fault matrix that the case covers."""
    run: Callable[[Bench, random.Random], None]
    """Raises GuaranteeBroken, or CannotRun if the host lacks something."""
    is_long: bool = False
    """Takes many seconds. It runs only if the plan sets `long = true`."""


def run_cases(order: Order, account: Account, cases: Sequence[Case[Bench]], bench: Bench) -> None:
    """Run every case once, then again with other random choices while there is time for a whole round."""
    begun = time.monotonic()
    round_number, took = 0, 0.0
    while round_number == 0 or time.monotonic() - begun + took < order.seconds:
        started = time.monotonic()
        for case in cases:
            run_case(order, account, case, bench, f"{case.name}:{order.seed + round_number}")
        took = time.monotonic() - started
        round_number += 1
        if account.findings:
            # The same fault would be found again, and the engine may be in an unexpected state.
            return


Opens = Callable[[Account], contextlib.AbstractContextManager[Bench]]


def run_chosen(order: Order, account: Account, cases: Sequence[Case[Bench]], opens: Opens[Bench]) -> None:
    """Run the cases that the plan selects, repeatedly, until the time is over."""
    wanted = order.choose({"long": False, "only": ""})
    chosen = [case for case in cases if wanted["only"] in {"", case.name}]
    chosen = [case for case in chosen if wanted["long"] or not case.is_long or wanted["only"]]
    with opens(account) as bench:
        run_cases(order, account, chosen, bench)


def replay_chosen(order: Order, text: str, cases: Sequence[Case[Bench]], opens: Opens[Bench]) -> None:
    """Repeat one case, or every case with `all`, and the final judgement. Raises GuaranteeBroken."""
    account = Account()
    name, _, seed = text.partition(":")
    with opens(account) as bench:
        for case in cases if name == "all" else (named(cases, text),):
            run_case(order, account, case, bench, f"{case.name}:{seed}")
    account.print_report()


def run_case(order: Order, account: Account, case: Case[Bench], bench: Bench, text: str) -> None:
    """Run one case. It is counted only if it was injected and judged."""
    begun = time.monotonic()
    try:
        case.run(bench, random.Random(f"{order.name}/{text}"))
    except CannotRun as e:
        account.skip(case.name, str(e))
        return
    except GuaranteeBroken as e:
        account.report_finding(str(e).splitlines()[0], text, str(e))
    except Exception as e:  # noqa: BLE001  whatever a case meets is a finding of that case, and the next goes on
        account.report_finding(
            f"{type(e).__name__} in {case.name}: {str(e)[:200]}", text, traceback.format_exc()
        )
    took = time.monotonic() - begun
    print(f"{case.name}: {took:.2f} s", flush=True)
    account.count_work("cases", 1, *case.faults)


def named(cases: Iterable[Case[Bench]], text: str) -> Case[Bench]:
    """Return the case of a replay line `name:seed`. Raises ValueError for an unknown name."""
    name = text.partition(":")[0]
    for case in cases:
        if case.name == name:
            return case
    raise ValueError(f"unknown case {name}")
