"""Ends a process, or raises an exception, at each executed line of six workloads (RF-3, RF-13, RF-22).

There are two ways to end at a line:

death       the disk ignores all calls from that line on, so its state is the one that a SIGKILL leaves
exception   the line raises, the disk continues to work, and every `finally` and `except` on the way out runs.
            The exception must end the incarnation and must not be swallowed. No state may be incomplete

Exceptions are raised at the first and last execution of each line; further executions are drawn at random
while time remains. The disk is then recovered and judged as after a failed call (judge.py).
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from chaos.rigs.judge import observe, require_same
from chaos.sweeps.calls import act, begin
from chaos.sweeps.house import FaultyEngine, Image
from chaos.sweeps.judge import Known, end_each
from chaos.sweeps.workloads import BY_NAME, WORKLOADS, Workload
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RinglogError
from ringlog.testing.disk import FaultyDisk, Halted
from tests.support.shard_world import NoReply

ROOT = Path(__file__).parent.parent.parent
TRACED = (str(ROOT / "ringlog") + "/",)
NOT_TRACED = (str(ROOT / "ringlog" / "testing") + "/",)
DEATH, EXCEPTION = "death", "exception"
SWEPT = tuple(workload for workload in WORKLOADS if workload.sweeps_lines)
RECOVERIES_MAX = 20
"""Maximum number of deaths in a row inside recovery (RF-13)."""
Line = tuple[str, int]


class Unexpected(Exception):
    """An exception that no code expects."""


class TooFew(Exception):
    """The act executed fewer lines this time."""


class Tracer:
    """Counts executed lines of the product, and calls `strike` once, at the n-th."""

    def __init__(
        self, nth: int, strike: Callable[[], None], on_line: Callable[[Line], None] | None = None
    ) -> None:
        self.count = 0
        self.struck: Line | None = None
        self._nth, self._strike, self._on_line = nth, strike, on_line
        self._known: dict[str, bool] = {}

    def __enter__(self) -> Tracer:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if path not in self._known:
            self._known[path] = path.startswith(TRACED) and not path.startswith(NOT_TRACED)
        return self._line if self._known[path] and not _is_finalizer(frame) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self._on_line is not None:
                self._on_line((frame.f_code.co_filename, frame.f_lineno))
            if self.count == self._nth:
                self.struck = frame.f_code.co_filename, frame.f_lineno
                sys.settrace(None)
                self._strike()
        return self._line


def _is_finalizer(frame: FrameType) -> bool:
    """Return whether this frame runs in a `__del__`, at any depth. Python ignores exceptions there."""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_name != "__del__":
        at = at.f_back
    return at is not None


@dataclass(frozen=True, slots=True)
class Case:
    """One run: the `nth` executed line of a workload's act."""

    workload: str
    nth: int
    how: str

    def __str__(self) -> str:
        return f"line:{self.workload}:{self.nth}:{self.how}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse the result of `str`. Raises ValueError."""
        _, workload, nth, how = text.split(":")
        return cls(workload, int(nth), how)


def lines_of(workload: Workload, image: Image) -> list[Line]:
    """Return every line that the act executes without a fault, in order."""
    found: list[Line] = []
    house = begin(workload, image)
    with Tracer(0, lambda: None, found.append):
        act(workload, house)
    if house.model.failed:
        raise GuaranteeBroken(f"{workload.name} fails without a fault")
    return found


def stretches_of(workload: Workload, image: Image) -> list[tuple[int, int]]:
    """Return (first line, number of lines) of runs of lines in which no persistent state changes."""
    lines_of(workload, image)  # the first run fills caches that the second one uses
    house = begin(workload, image)
    known: list[tuple[Any, ...]] = []
    with Tracer(0, lambda: None, on_line=lambda _: known.append(_survivors(house))):
        act(workload, house)
    firsts = [at for at, each in enumerate(known) if at == 0 or each != known[at - 1]]
    return [(at + 1, stop - at) for at, stop in itertools.pairwise([*firsts, len(known)])]


def _survivors(house: FaultyEngine) -> tuple[Any, ...]:
    """Return counters of the state that survives the processes: the disk, and the replies to clients."""
    model = house.model
    told = sum(each.is_owed or each.is_refused for each in model.frames)
    return house.base.changes, told, sum(each.done_at for each in model.changes), model.granted


def cases(workload: Workload, lines: list[Line], chance: random.Random) -> Iterator[Case]:
    """Yield an exception at the first and last execution of each line, then random cases forever."""
    first: dict[Line, int] = {}
    last: dict[Line, int] = {}
    for number, line in enumerate(lines, 1):
        first.setdefault(line, number)
        last[line] = number
    chosen = sorted({*first.values(), *last.values()})
    chance.shuffle(chosen)
    for number in chosen:
        yield Case(workload.name, number, EXCEPTION)
    while True:
        yield Case(workload.name, chance.randint(1, len(lines)), chance.choice((DEATH, EXCEPTION)))


def run_case(case: Case, image: Image, known: Known | None = None) -> Line:
    """Run a case and judge it with each end; return the line. Raises GuaranteeBroken."""
    workload = BY_NAME[case.workload]
    house = begin(workload, image)
    error = Halted("the process is dead") if case.how == DEATH else Unexpected("at a line")

    def strike() -> None:
        house.faulty.halted = case.how == DEATH
        raise error

    caught: BaseException | None = None
    tracer = Tracer(case.nth, strike)
    with tracer:
        try:
            act(workload, house)
        except (Halted, Unexpected) as e:
            caught = e
        except RinglogError as e:
            caught = e.__cause__ or e.__context__ or e
        except NoReply:
            caught = None  # a swallowed exception may also leave the client without an answer
    sys.settrace(None)
    if tracer.struck is None:
        raise TooFew
    where = f"{tracer.struck[0].removeprefix(str(ROOT) + '/')}:{tracer.struck[1]}"
    if caught is None:
        raise GuaranteeBroken(f"an exception at {where} is swallowed")
    house.faulty.halted = False
    # The processes are dead, so their live state is not read.
    house.world.runs.clear()
    try:
        end_each(house, case.nth, known)
    except GuaranteeBroken as e:
        raise GuaranteeBroken(f"{case.how} at {where}: {e}") from e
    return tracer.struck


# -- repeated recovery --------------------------------------------------------------------------------


def recover_killed(image: Image, deaths: int, chance: random.Random) -> int:
    """Let recovery die `deaths` times in a row at random lines, then finish (RF-13).

    The result must equal that of an undisturbed recovery. Returns the number of lines of recovery that were
    executed before the deaths. Raises GuaranteeBroken.
    """
    plain = FaultyEngine(image)
    plain.start()
    expected = observe(plain.world)
    house = FaultyEngine(image, FaultyDisk)
    counted = _count(image)
    lines = 0
    for _ in range(deaths):
        lines += _die_in_start(house, chance.randint(1, counted))
    house.start()
    require_same(expected, observe(house.world), f"{deaths} deaths inside recovery change what comes out")
    return lines


def _count(image: Image) -> int:
    house = FaultyEngine(image)
    with Tracer(0, lambda: None) as tracer:
        house.start()
    return tracer.count


def _die_in_start(house: FaultyEngine, nth: int) -> int:
    def strike() -> None:
        house.faulty.halted = True
        raise Halted("the process is dead")

    tracer = Tracer(nth, strike)
    # A recovery after a death may be shorter than the first one, and end before the line is reached.
    with tracer, contextlib.suppress(Halted):
        house.start()
    house.faulty.halted = False
    house.faulty.paths.clear()
    house.world.kill()
    return tracer.count
