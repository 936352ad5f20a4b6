"""The task of a fault class (Order) and its report (Account).

Every class is a package of `chaos/` with `run(order, account)` and `replay(order, case)`. It does as much as
it can within `order.seconds` and counts its work in the account. It reports each broken guarantee as a
Finding, with the command that repeats it.

The plan states minimum counts. A class below its minimum fails (`chaos/run.py`). Otherwise a harness that
tests less and less would go unnoticed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ringlog.drill.checks import GuaranteeBroken

FINDINGS_MAX = 20
"""Number of findings that an account keeps in full. Further ones are only counted, except the wanted one."""
STORY_CHARS_MAX = 8_000


class WantedFindingReached(BaseException):
    """Ends a class: its account was asked for one finding and has it.

    Not an Exception, so that no case takes it for a broken guarantee.
    """


class CannotRun(Exception):
    """Raised by a class if this host lacks its mechanism entirely.

    The text names the mechanism and how to get it.
    """


@dataclass(frozen=True, slots=True)
class Order:
    """The task of one class."""

    name: str
    """Name of the class: its package under `chaos/`."""
    seed: int
    """Decides every random choice; printed with each finding."""
    seconds: float
    """Time (s) to use. A class that enumerates a fixed set may need less. The runner kills it after `limit_s`
    of the plan."""
    scratch: Path
    """Empty directory for this class, removed afterwards. It is on a real disk unless the plan sets
    `in_memory`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings from the plan. Each class documents its settings and refuses unknown ones."""
    floors: Mapping[str, int] = field(default_factory=dict)
    """Counts at which the class ends. If empty, it uses its whole time."""

    def is_enough(self, counts: Mapping[str, int], *names: str) -> bool:
        """Whether `counts` reach their floors: those in `names`, or by default all.

        Always false if the order has no floors.
        """
        if not self.floors:
            return False
        wanted = names or tuple(self.floors)
        return all(counts.get(name, 0) >= self.floors.get(name, 0) for name in wanted)

    def random(self, *salt: object) -> random.Random:
        """Return a random generator that depends only on seed, class and `salt`."""
        return random.Random(f"{self.seed}/{self.name}/{salt!r}")

    def choose(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return `known` (defaults) updated with the order's settings.

        Raises ValueError for an unknown setting.
        """
        unknown = sorted(set(self.settings) - set(known))
        if unknown:
            raise ValueError(
                f"unknown settings of class {self.name}: {', '.join(unknown)}; expected {sorted(known)}"
            )
        return {**known, **self.settings}


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken guarantee."""

    what: str
    """One sentence: which guarantee, and where."""
    case: str
    """Argument of `python -m chaos replay CLASS CASE` that repeats it."""
    story: str = ""
    """Details: events, differences, the last lines of logs."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A test that this host cannot run. It never counts as done."""

    what: str
    why: str


@dataclass(slots=True)
class Account:
    """The report of a class: what it did in this run."""

    counts: Counter[str] = field(default_factory=Counter)
    """Amount of work by kind. Names are plural nouns ("images", "kills")."""
    faults: Counter[str] = field(default_factory=Counter)
    """Number of cases run and judged, by row id of `chaos/faults.toml`."""
    figures: dict[str, float] = field(default_factory=dict)
    """Measurements, with the unit in the name ("pause_p99_ms")."""
    skipped: list[Skip] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    findings_more: int = 0
    wanted: str | None = None
    """If a finding contains this text, the class ends. None: the class continues after any finding."""

    def count_work(self, what: str, times: int = 1, *faults: str) -> None:
        """Count work, and the rows of the fault matrix that it is a case of."""
        self.counts[what] += times
        for fault in faults:
            self.faults[fault] += times

    def skip(self, what: str, why: str) -> None:
        """Record that this host cannot do something, with the reason."""
        if Skip(what, why) not in self.skipped:
            self.skipped.append(Skip(what, why))

    def report_finding(self, what: str, case: str, story: str = "") -> None:
        """Report a broken guarantee. The class continues with its next case if it can.

        Raises WantedFindingReached if this is the wanted finding.
        """
        is_wanted = self.wanted is not None and self.wanted in what
        if is_wanted or len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(what, case, story[-STORY_CHARS_MAX:]))
        else:
            self.findings_more += 1
        if is_wanted:
            raise WantedFindingReached

    def print_report(self) -> None:
        """Print findings, skips and counts for a person who replays a case.

        Raises GuaranteeBroken if there is a finding.
        """
        for finding in self.findings:
            print(finding.what, finding.story, sep="\n")
        for skip in self.skipped:
            print(f"skipped {skip.what}: {skip.why}")
        print(dict(self.counts), dict(self.faults))
        if self.findings:
            raise GuaranteeBroken(self.findings[0].what)

    def to_json(self) -> bytes:
        """Encode for the runner."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Account:
        """Decode the report of a class. Raises msgspec.DecodeError or ValidationError."""
        raw = msgspec.json.decode(data, type=_Raw)
        return cls(
            Counter(raw.counts), Counter(raw.faults), raw.figures,
            [Skip(**each) for each in raw.skipped], [Finding(**each) for each in raw.findings],
            raw.findings_more,
        )  # fmt: skip


class _Raw(msgspec.Struct):
    counts: dict[str, int]
    faults: dict[str, int]
    figures: dict[str, float]
    skipped: list[dict[str, str]]
    findings: list[dict[str, str]]
    findings_more: int


class FaultClass(Protocol):
    """Interface of a package of `chaos/` that a plan can name."""

    def run(self, order: Order, account: Account) -> None:
        """Do the work. Raises only for errors of the harness or the host."""

    def replay(self, order: Order, case: str) -> None:
        """Repeat one case and print its story. Raises what the case raises."""
