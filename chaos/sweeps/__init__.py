"""Fails every disk call, every executed line and every allocation, one at a time.

calls         each changing disk call of twelve workloads, with five errors, once or permanently. The engine
              then ends by a power loss, a kill, or a power loss with random damage. The act runs once for all
              ends, each on a copy of the disk. Counts: `call_runs`, of `cases`
reads         each call that reads, lists or checks in the two workloads that start an engine fails with EIO:
              `read_runs`
lies          syncs that do nothing (RF-44), directories that cannot be synced (RF-56): `lie_runs`
lines         the process dies, or an exception is raised, at lines of six workloads: `line_runs`. In the
              gateway's core only exceptions are raised. Deaths between two changes of the disk or
              acknowledgements leave the same state, so only one of them is run. `lines_covered` counts all
              executed lines that such deaths represent. Exceptions are raised at each line separately
allocations   the k-th allocation of six operations fails: `allocation_runs`
recovery      recovery dies at random lines, 1 to 20 times in a row (RF-13): `recovery_deaths`

`line_and_allocation_runs` is the sum of `line_runs`, `allocation_runs` and `recovery_deaths`. Each line and
allocation runs once and counts for each of its three ends. The result of a fault is judged by a start,
further work, and the readable data. If disk and replies are byte for byte equal to a judged result, the
result is not judged again (judge.Known). `outcomes_judged` counts the judged results of calls.

Calls, reads and lies run in one process, the rest in a parallel one.

Settings: `ends` (1 to 3: number of ends of each call case), `seeds` (number of power losses with random
damage among them), `only` (list of parts from FIRST and SECOND; each then may use the whole time),
`workloads` (list of names); an empty list selects all.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from chaos.doctor import need_allocations
from chaos.order import Account, CannotRun, Order
from chaos.processes import subprocess_task, suppress_logging
from chaos.sweeps import allocations, calls, gateway, lines
from chaos.sweeps.house import Image
from chaos.sweeps.judge import ENDS, ENDS_EACH, Known
from chaos.sweeps.workloads import BY_NAME, Workload
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RinglogError
from ringlog.testing.disk import Halted

SETTINGS: dict[str, Any] = {"ends": len(ENDS), "seeds": 1, "only": [], "workloads": []}
READING = ("recovery", "restart")
"""Workloads in which a start reads existing files."""
READS_MIN = 20
UNHURT = "call:{}:any:0:EIO:0:0"
"""Name of the case of a workload without a fault."""
FIRST = {"lies": 0.1, "reads": 0.2, "calls": 1.0}
"""Parts of the first process, and the share of the time at which each ends."""
SECOND = {"gateway": 0.0, "deaths": 0.3, "exceptions": 0.65, "recoveries": 0.72, "allocations": 1.0}
RECOVERIES_MIN = 3
BATCHES_MIN = 6
"""Minimum number of batches, even if the time is over. It gives each part some cases on a busy host."""
LIE_SEEDS = 4
Until = Callable[[], bool]


def run(order: Order, account: Account) -> None:
    """Run all parts within the time. Calls run in their own process."""
    settings = order.choose(SETTINGS)
    with suppress_logging(), _dead_disks_unheard():
        sweep = _Sweep(order, account, settings, _images(account, settings["workloads"] or list(BY_NAME)))
        if not sweep.images:
            return
        if settings["only"]:
            sweep.do(dict.fromkeys(settings["only"], 1.0))
            return
        collect = subprocess_task(lambda mine: replace(sweep, account=mine).do(FIRST))
        sweep.do(SECOND)
        account.counts["line_and_allocation_runs"] = _line_and_allocation_runs(account)
        collect(account)


def _images(account: Account, names: list[str]) -> dict[str, Image]:
    images: dict[str, Image] = {}
    for name in names:
        try:
            images[name] = BY_NAME[name].image()
        except (RinglogError, AssertionError) as e:
            account.report_finding(f"{name} cannot even be prepared: {e}", UNHURT.format(name))
    return images


def _line_and_allocation_runs(account: Account) -> int:
    counts = account.counts
    return counts["line_runs"] + counts["allocation_runs"] + counts["recovery_deaths"]


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One run of the class, or of one of its two processes."""

    order: Order
    account: Account
    settings: dict[str, Any]
    images: dict[str, Image]
    """Disk of each workload by its name."""
    began: float = field(default_factory=time.monotonic)

    def do(self, parts: dict[str, float]) -> None:
        """Run these parts in sequence, each until its share of the time is over."""
        for name, share in parts.items():
            until = self.began + self.order.seconds * share
            getattr(self, f"_{name}")(lambda until=until: time.monotonic() < until)

    @property
    def _swept(self) -> list[Workload]:
        return [each for each in lines.SWEPT if each.name in self.images]

    def _calls(self, is_time: Until) -> None:
        order, account, images, settings = self.order, self.account, self.images, self.settings
        made = {}
        for workload in [BY_NAME[name] for name in images]:
            try:
                # The first run fills caches, so that the second run makes the same calls as later ones.
                calls.calls_of(workload, images[workload.name])
                made[workload.name] = calls.calls_of(workload, images[workload.name])
            except (RinglogError, AssertionError) as e:
                account.report_finding(
                    f"{workload.name} fails without a fault: {e}", UNHURT.format(workload.name)
                )
        groups: dict[tuple[Any, ...], list[calls.Case]] = {}
        for case in calls.cases(made):
            groups.setdefault((case.workload, case.op, case.nth), []).append(case)
        # All errors of one call run in sequence. They mostly have equal results, and equal results are judged
        # once.
        turns = list(groups.values())
        order.random("calls").shuffle(turns)
        chosen = [case.with_ends(settings["ends"], settings["seeds"]) for turn in turns for case in turn]
        account.counts["cases"] = sum(map(len, chosen))
        account.counts["changing_calls"] = sum(map(len, made.values()))
        known = Known()
        for number, cases in enumerate(chosen):
            if not is_time() or order.is_enough(account.counts, "call_runs"):
                account.figures["calls_left"] = len(chosen) - number
                break
            self._call(cases, known)
        account.counts["outcomes_judged"] += known.judged

    def _call(self, cases: list[calls.Case], known: Known) -> None:
        account = self.account
        told = calls.run_ends(
            cases, self.images[cases[0].workload], known,
            lambda what, one: account.report_finding(f"{one.workload}: {what}", str(one)),
        )  # fmt: skip
        if told is not None:
            account.counts["acked"] += told.acked
            account.counts["failed_visibly"] += told.failed
        account.count_work("call_runs", len(cases), *cases[0].rows())

    def _reads(self, is_time: Until) -> None:
        """Fail calls that read, list or check.

        A failed read must not count as an empty file or as its end (RF-51).
        """
        images = self.images
        looks = {name: calls.looks_of(BY_NAME[name], images[name]) for name in READING if name in images}
        cases, known = list(calls.read_cases(looks)), Known()
        self.order.random("reads").shuffle(cases)
        for number, case in enumerate(cases):
            if number >= READS_MIN and not is_time():
                return
            self._call([case], known)
            self.account.count_work("read_runs")

    def _lies(self, is_time: Until) -> None:
        images, account = self.images, self.account
        for seed in range(LIE_SEEDS):
            for workload in [BY_NAME[name] for name in images]:
                for directories, row in ((False, "RF-44"), (True, "RF-56")):
                    if not is_time():
                        return
                    try:
                        lives = calls.run_lie(workload, images[workload.name], seed, directories=directories)
                        account.counts["lies_survived"] += lives
                    except GuaranteeBroken as e:
                        account.report_finding(
                            f"{workload.name}: {e}", f"lie:{workload.name}:{seed}:{int(directories)}"
                        )
                    account.count_work("lie_runs", 1, row)

    def _line(self, case: lines.Case, known: Known, *rows: str) -> None:
        account = self.account
        try:
            lines.run_case(case, self.images[case.workload], known)
        except lines.TooFew:
            return
        except GuaranteeBroken as e:
            account.report_finding(f"{case.workload}: {e}", str(case))
        account.count_work("line_runs", ENDS_EACH, *rows)

    def _gateway(self, is_time: Until) -> None:
        """Raise an exception at the first execution of every line of the gateway's core."""
        gateway.lines_of()  # The first run fills caches that the second one uses.
        first: dict[lines.Line, int] = {}
        for number, line in enumerate(gateway.lines_of(), 1):
            first.setdefault(line, number)
        for number in first.values():
            try:
                gateway.run_one(number)
            except lines.TooFew:
                continue
            except GuaranteeBroken as e:
                self.account.report_finding(str(e), f"gateway:{number}")
            self.account.count_work("line_runs", 1, "RF-22")

    def _deaths(self, is_time: Until) -> None:
        account, known = self.account, Known()
        for workload in self._swept:
            stretches = lines.stretches_of(workload, self.images[workload.name])
            for number, (first, count) in enumerate(stretches):
                if not is_time():
                    account.figures[f"deaths_left_{workload.name}"] = len(stretches) - number
                    break
                self._line(lines.Case(workload.name, first, lines.DEATH), known, "RF-3")
                account.counts["lines_covered"] += count

    def _exceptions(self, is_time: Until) -> None:
        chance, known = self.order.random("lines"), Known()
        waiting: list[Iterator[lines.Case]] = []
        for workload in self._swept:
            lines.lines_of(workload, self.images[workload.name])
            executed = lines.lines_of(workload, self.images[workload.name])
            self.account.counts["distinct_lines"] += len(set(executed))
            waiting.append(lines.cases(workload, executed, chance))
        while is_time():
            for each in waiting:
                case = next(each)
                self._line(case, known, "RF-22" if case.how == lines.EXCEPTION else "RF-3")

    def _recoveries(self, is_time: Until) -> None:
        for deaths in range(1, lines.RECOVERIES_MAX + 1):
            if deaths > RECOVERIES_MIN and not is_time():
                return
            seed = self.order.random("recovery", deaths).randrange(1 << 30)
            try:
                lines.recover_killed(self.images["recovery"], deaths, random.Random(seed))
            except GuaranteeBroken as e:
                self.account.report_finding(str(e), f"recovery:{deaths}:{seed}")
            self.account.count_work("recovery_deaths", deaths, "RF-13")

    def _allocations(self, is_time: Until) -> None:
        order, account, images = self.order, self.account, self.images
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
            if done >= BATCHES_MIN and not (is_time() and self._lacks_any()):
                break
            before = tally.runs
            allocations.run_batch(
                operation, images[operation.image], numbers, tally, account.report_finding, known
            )
            account.count_work("allocation_runs", tally.runs - before, "RF-18")
        account.counts["allocations_raised"] += tally.raised + tally.failed
        account.counts["interpreter_deaths"] += tally.interpreter_deaths

    def _lacks_any(self) -> bool:
        """Return whether a minimum count is missing.

        If not, this process leaves the CPU to the process with calls.
        """
        counts = self.account.counts | {"line_and_allocation_runs": _line_and_allocation_runs(self.account)}
        enough = self.order.is_enough(counts, "line_and_allocation_runs", "lines_covered", "recovery_deaths")
        return not enough or bool(self.settings["only"])


def replay(order: Order, case: str) -> None:
    """Repeat one case, given as in a finding."""
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
            raise GuaranteeBroken(found[0])


@contextmanager
def _dead_disks_unheard() -> Iterator[None]:
    """Ignore errors of generators that close files of a dead disk when they are garbage-collected."""
    before = sys.unraisablehook

    def say_others(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, Halted):
            before(unraisable)

    sys.unraisablehook = say_others
    try:
        yield
    finally:
        sys.unraisablehook = before
