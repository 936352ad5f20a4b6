"""Every call, every line and every allocation fails, one at a time (T-3, T-4).

calls         each changing disk call of twelve workloads x five errors x once or for ever x the end of the
              engine (power loss, kill, power loss with chance damage): `call_runs`, of `cases`. The act is
              done once for all ends, each of which has a copy of the disk
reads         each call that reads, lists or looks in two workloads that start, fails with EIO: `read_runs`
lies          syncs that do nothing (RF-44), directories that cannot be synced (RF-56)
lines         the process ends, or an exception is raised, at lines of six paths and (exceptions alone) of the
              gateway's core: `line_runs`. A death leaves
              what lies on the disk, so that lines between which nothing was given to the disk or
              acknowledged leave the same: one of each such stretch is run, and `lines_covered` counts the
              executed lines in them all. Exceptions are run line by line
allocations   the k-th allocation of six operations fails: `allocation_runs`
recovery      dies at chance lines one to twenty times in a row (RF-13): `recovery_deaths`

`line_and_allocation_runs` is the sum of runs of the last three; each line and allocation is run once and
counts for each of the three ends that it is judged with. What a fault left is judged by a start, work and
what is there; where it is the same to the last byte, on the disk and in what clients were told, as something
that was judged before, it is not judged again (judge.Known; `outcomes_judged`: those of calls that were).
Calls and lies run in one process, the rest in another beside it.

Settings: `ends` (1 to 3, how many ends each call case has); `seeds` (how many losses of power with chance
damage are among them); `only` (some of PARTS, each of which then has all the time) and `workloads` (names),
empty: all.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chaos.beside import beside
from chaos.doctor import need_allocations
from chaos.hush import hushed
from chaos.order import Account, Broken, CannotRun, Order
from chaos.sweeps import allocations, calls, gateway, lines
from chaos.sweeps.house import Image
from chaos.sweeps.judge import ENDS, ENDS_EACH, Known
from chaos.sweeps.workloads import BY_NAME
from ringlog.errors import RinglogError
from ringlog.testing.disk import Halted

SETTINGS: dict[str, Any] = {"ends": len(ENDS), "seeds": 1, "only": [], "workloads": []}
READING = ("recovery", "restart")
"""Workloads in which a start reads what is there."""
READS_MIN = 20
UNHURT = "call:{}:any:0:EIO:0:0"
"""The case of a workload in which nothing fails."""
PARTS = ("lies", "reads", "calls", "gateway", "deaths", "exceptions", "recoveries", "allocations")
LIES_SHARE = 0.1
READS_SHARE = 0.2
"""Where these parts of the first process end; calls have the rest."""
DEATHS_SHARE = 0.3
EXCEPTIONS_SHARE = 0.65
RECOVERIES_SHARE = 0.72
"""Where each part of the second process ends; allocations have the rest."""
RECOVERIES_MIN = 3
BATCHES_MIN = 6
"""Done however late it is: each part has some cases on a machine that is busy."""
LIE_SEEDS = 4
Until = Callable[[], bool]


def run(order: Order, account: Account) -> None:
    """Sweep for as long as there is time; calls in a process of their own."""
    settings = order.choose(SETTINGS)
    with hushed(), _dead_disks_unheard():
        _run(order, account, settings)


def _run(order: Order, account: Account, settings: dict[str, Any]) -> None:
    names = settings["workloads"] or list(BY_NAME)
    images: dict[str, Image] = {}
    for name in names:
        try:
            images[name] = BY_NAME[name].image()
        except (RinglogError, AssertionError) as e:
            account.found(f"{name} cannot even be prepared: {e}", UNHURT.format(name))
    if not images:
        return
    began = time.monotonic()

    def within(share: float) -> Until:
        share = 1.0 if settings["only"] else share
        return lambda: time.monotonic() - began < order.seconds * share

    if settings["only"]:
        _some(order, images, account, within, settings)
        return
    collect = beside(lambda mine: _calls(order, images, settings, mine, within))
    _gateway(account)
    _deaths(images, account, within(DEATHS_SHARE))
    _exceptions(order, images, account, within(EXCEPTIONS_SHARE))
    _recoveries(order, images, account, within(RECOVERIES_SHARE))
    _allocations(order, images, account, lambda: within(1.0)() and not _is_enough(order, account))
    account.counts["line_and_allocation_runs"] = _line_and_allocation_runs(account)
    collect(account)


def _is_enough(order: Order, account: Account) -> bool:
    """This process leaves its core to the one with the calls."""
    counts = account.counts | {"line_and_allocation_runs": _line_and_allocation_runs(account)}
    return order.is_enough(counts, "line_and_allocation_runs", "lines_covered", "recovery_deaths")


def _line_and_allocation_runs(account: Account) -> int:
    counts = account.counts
    return counts["line_runs"] + counts["allocation_runs"] + counts["recovery_deaths"]


def _some(
    order: Order, images: dict[str, Image], account: Account, within: Callable[[float], Until],
    settings: dict[str, Any],
) -> None:  # fmt: skip
    """The chosen parts, in this process, one after the other."""
    parts: dict[str, Callable[[], None]] = {
        "lies": lambda: _lies(images, account, within(1.0)),
        "reads": lambda: _reads(order, images, account, within(1.0)),
        "calls": lambda: _all_calls(order, images, settings, account, within),
        "gateway": lambda: _gateway(account),
        "deaths": lambda: _deaths(images, account, within(1.0)),
        "exceptions": lambda: _exceptions(order, images, account, within(1.0)),
        "recoveries": lambda: _recoveries(order, images, account, within(1.0)),
        "allocations": lambda: _allocations(order, images, account, within(1.0)),
    }
    for name in settings["only"]:
        parts[name]()


def replay(order: Order, case: str) -> None:
    """One case, as a finding names it."""
    with _dead_disks_unheard():
        _again(case)


def _again(case: str) -> None:
    kind, *rest = case.split(":")
    if kind == "call":
        one = calls.Case.parse(case)
        print(f"acknowledged {calls.run_case(one, BY_NAME[one.workload].image()).model.acked}")
    elif kind == "line":
        at = lines.Case.parse(case)
        print(lines.run_case(at, BY_NAME[at.workload].image()))
    elif kind == "gateway":
        print(gateway.run_one(int(rest[0])))
    elif kind == "lie":
        workload = BY_NAME[rest[0]]
        calls.run_lie(workload, workload.image(), int(rest[1]), directories=rest[2] == "1")
    elif kind == "recovery":
        image = BY_NAME["recovery"].image()
        lines.recover_killed(image, int(rest[0]), random.Random(int(rest[1])))
    else:
        operation = allocations.BY_OPERATION[rest[0]]
        tally = allocations.Tally()
        found: list[str] = []
        allocations.run_batch(
            operation,
            BY_NAME[operation.image].image(),
            [int(rest[1])],
            tally,
            lambda what, _: found.append(what),
        )
        if found:
            raise Broken(found[0])


@contextmanager
def _dead_disks_unheard() -> Iterator[None]:
    """A generator that is thrown away with its dead process closes its file, which a dead disk refuses."""
    before = sys.unraisablehook

    def say_others(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, Halted):
            before(unraisable)

    sys.unraisablehook = say_others
    try:
        yield
    finally:
        sys.unraisablehook = before


# -- calls --------------------------------------------------------------------------------------------


def _calls(
    order: Order, images: dict[str, Image], settings: dict[str, Any], account: Account,
    within: Callable[[float], Until],
) -> None:  # fmt: skip
    _lies(images, account, within(LIES_SHARE))
    _reads(order, images, account, within(READS_SHARE))
    _all_calls(order, images, settings, account, within)


def _all_calls(
    order: Order, images: dict[str, Image], settings: dict[str, Any], account: Account,
    within: Callable[[float], Until],
) -> None:  # fmt: skip
    made = {}
    for workload in [BY_NAME[name] for name in images]:
        try:
            # The first life fills caches that later ones find filled.
            calls.calls_of(workload, images[workload.name])
            made[workload.name] = calls.calls_of(workload, images[workload.name])
        except (RinglogError, AssertionError) as e:
            account.found(
                f"{workload.name} fails without a fault: {e}", f"call:{workload.name}:any:0:EIO:0:0"
            )
    groups: dict[tuple[Any, ...], list[calls.Case]] = {}
    for case in calls.cases(made):
        groups.setdefault((case.workload, case.op, case.nth), []).append(case)
    # All errors of one call one after the other: they mostly end alike, and what is alike is judged once.
    turns = list(groups.values())
    order.random("calls").shuffle(turns)
    chosen = [case.with_ends(settings["ends"], settings["seeds"]) for turn in turns for case in turn]
    account.counts["cases"] = sum(map(len, chosen))
    account.counts["changing_calls"] = sum(map(len, made.values()))
    is_time, known = within(1.0), Known()
    for number, cases in enumerate(chosen):
        if not is_time() or order.is_enough(account.counts, "call_runs"):
            account.figures["calls_left"] = len(chosen) - number
            break
        _call(cases, images, known, account)
    account.counts["outcomes_judged"] += known.judged


def _call(cases: list[calls.Case], images: dict[str, Image], known: Known, account: Account) -> None:
    told = calls.run_ends(
        cases, images[cases[0].workload], known,
        lambda what, one: account.found(f"{one.workload}: {what}", str(one)),
    )  # fmt: skip
    if told is not None:
        account.counts["acked"] += told.acked
        account.counts["failed_visibly"] += told.failed
    account.did("call_runs", len(cases), *cases[0].rows())


def _reads(order: Order, images: dict[str, Image], account: Account, is_time: Until) -> None:
    """Calls that read, list or look fail: nothing may be taken for empty, or for the end (RF-51)."""
    looks = {name: calls.looks_of(BY_NAME[name], images[name]) for name in READING if name in images}
    cases, known = list(calls.read_cases(looks)), Known()
    order.random("reads").shuffle(cases)
    for number, case in enumerate(cases):
        if number >= READS_MIN and not is_time():
            return
        _call([case], images, known, account)
        account.did("read_runs")


def _lies(images: dict[str, Image], account: Account, is_time: Until) -> None:
    for seed in range(LIE_SEEDS):
        for workload in [BY_NAME[name] for name in images]:
            for directories, row in ((False, "RF-44"), (True, "RF-56")):
                if not is_time():
                    return
                try:
                    lives = calls.run_lie(workload, images[workload.name], seed, directories=directories)
                    account.counts["lies_survived"] += lives
                except Broken as e:
                    account.found(f"{workload.name}: {e}", f"lie:{workload.name}:{seed}:{int(directories)}")
                account.did("lie_runs", 1, row)


# -- lines --------------------------------------------------------------------------------------------


def _line(
    case: lines.Case, images: dict[str, Image], account: Account, known: Known, *rows: str
) -> None:  # fmt: skip
    try:
        lines.run_case(case, images[case.workload], known)
    except lines.TooFew:
        return
    except Broken as e:
        account.found(f"{case.workload}: {e}", str(case))
    account.did("line_runs", ENDS_EACH, *rows)


def _gateway(account: Account) -> None:
    """An exception at the first execution of every line of the gateway's core."""
    gateway.lines_of()  # The first conversation fills caches that the second finds filled.
    first: dict[lines.Line, int] = {}
    for number, line in enumerate(gateway.lines_of(), 1):
        first.setdefault(line, number)
    for number in first.values():
        try:
            gateway.run_one(number)
        except lines.TooFew:
            continue
        except Broken as e:
            account.found(str(e), f"gateway:{number}")
        account.did("line_runs", 1, "RF-22")


def _deaths(images: dict[str, Image], account: Account, is_time: Until) -> None:
    known = Known()
    for workload in [each for each in lines.SWEPT if each.name in images]:
        stretches = lines.stretches_of(workload, images[workload.name])
        for number, (first, count) in enumerate(stretches):
            if not is_time():
                account.figures[f"deaths_left_{workload.name}"] = len(stretches) - number
                break
            _line(lines.Case(workload.name, first, lines.DEATH), images, account, known, "RF-3")
            account.counts["lines_covered"] += count


def _exceptions(order: Order, images: dict[str, Image], account: Account, is_time: Until) -> None:
    chance, known = order.random("lines"), Known()
    waiting: list[Iterator[lines.Case]] = []
    for workload in [each for each in lines.SWEPT if each.name in images]:
        lines.lines_of(workload, images[workload.name])
        executed = lines.lines_of(workload, images[workload.name])
        account.counts["distinct_lines"] += len(set(executed))
        waiting.append(lines.cases(workload, executed, chance))
    while is_time():
        for each in waiting:
            case = next(each)
            _line(case, images, account, known, "RF-22" if case.how == lines.EXCEPTION else "RF-3")


def _recoveries(order: Order, images: dict[str, Image], account: Account, is_time: Until) -> None:
    for deaths in range(1, lines.RECOVERIES_MAX + 1):
        if deaths > RECOVERIES_MIN and not is_time():
            return
        seed = order.random("recovery", deaths).randrange(1 << 30)
        try:
            lines.recover_killed(images["recovery"], deaths, random.Random(seed))
        except Broken as e:
            account.found(str(e), f"recovery:{deaths}:{seed}")
        account.did("recovery_deaths", deaths, "RF-13")


# -- allocations --------------------------------------------------------------------------------------


def _allocations(order: Order, images: dict[str, Image], account: Account, is_time: Until) -> None:
    try:
        need_allocations()
    except CannotRun as e:
        account.skip("allocation sweep", str(e))
        return
    chance, tally, known = order.random("allocations"), allocations.Tally(), Known()
    batches = []
    for operation in [each for each in allocations.OPERATIONS if each.image in images]:
        count = allocations.allocations_of(operation, images[operation.image])
        account.counts["allocations"] += count
        numbers = list(range(count))
        chance.shuffle(numbers)
        batches += [
            (operation, numbers[at : at + allocations.BATCH]) for at in range(0, count, allocations.BATCH)
        ]
    chance.shuffle(batches)
    for done, (operation, numbers) in enumerate(batches):
        if done >= BATCHES_MIN and not is_time():
            break
        before = tally.runs
        allocations.run_batch(operation, images[operation.image], numbers, tally, account.found, known)
        account.did("allocation_runs", tally.runs - before, "RF-18")
    account.counts["allocations_raised"] += tally.raised + tally.failed
    account.counts["interpreter_deaths"] += tally.interpreter_deaths
