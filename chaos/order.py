"""What a class of faults is asked to do, and what it says it did.

Every class is a package of `chaos/` with `run(order, account)` and `replay(order, case)`. It does as much
as it can within `order.seconds`, counts its work in the account, and reports each broken promise as a
Finding with the one line that repeats it. Counting is not decoration: the plan states minimum counts, and
a class that did less has failed (`chaos/run.py`), so that a harness cannot shrink in silence.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

FINDINGS_MAX = 20
"""Findings that are kept in full; more are only counted, but for the one that was wanted."""
STORY_CHARS_MAX = 8_000


class Enough(BaseException):
    """Raised by an account that was asked for one finding when it has it: the class ends.

    Not an Exception, so that no case takes it for a broken promise of its own.
    """


class Broken(AssertionError):
    """A promise that did not hold: which one, and what was seen."""

    def __init__(self, what: str, topic: str = "", *, case: str = "", path: Sequence[int] = ()) -> None:
        super().__init__(what)
        self.topic = topic
        """The topic whose events belong into the story, where that is known."""
        self.case = case
        """The case that shows it again, where that is known."""
        self.path = path
        """Which choice was made at each step of a schedule."""


def require(holds: object, otherwise: str | Callable[[], str]) -> None:
    """Raise Broken unless it holds. Not an assertion: those may be switched off."""
    if not holds:
        raise Broken(otherwise if isinstance(otherwise, str) else otherwise())


class CannotRun(Exception):
    """Raised by a class whose mechanism this host lacks altogether; says which, and how to get it."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a class is asked to do."""

    name: str
    """Of the class: its package under `chaos/`."""
    seed: int
    """Decides every choice that is left to chance; printed with each finding."""
    seconds: float
    """Time to use. A class that enumerates a fixed set may need less; the runner kills at
    `limit_s` of the plan."""
    scratch: Path
    """An empty directory of its own, removed afterwards; on a real disk unless the plan says `in_memory`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """From the plan; each class documents what it reads, and refuses what it does not know."""
    floors: Mapping[str, int] = field(default_factory=dict)
    """What is enough, where the class is to end with it; empty: it uses its time."""

    def is_enough(self, counts: Mapping[str, int], *names: str) -> bool:
        """Has it done what it is to end with, of these counts or of all that have a floor?"""
        if not self.floors:
            return False
        wanted = names or tuple(self.floors)
        return all(counts.get(name, 0) >= self.floors.get(name, 0) for name in wanted)

    def random(self, *salt: object) -> random.Random:
        """A generator that depends on the seed and on nothing else."""
        return random.Random(f"{self.seed}/{self.name}/{salt!r}")

    def choose(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Settings over their defaults; raises ValueError for one that the class does not know."""
        unknown = sorted(set(self.settings) - set(known))
        if unknown:
            raise ValueError(
                f"class {self.name} has no setting {', '.join(unknown)}; it knows {sorted(known)}"
            )
        return {**known, **self.settings}


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise that did not hold."""

    what: str
    """One sentence: which promise, where."""
    case: str
    """What `python -m chaos replay CLASS CASE` needs to see it again."""
    story: str = ""
    """What happened, as far as it helps: events, differences, the last lines of logs."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Something that this host cannot do. Never counted as done."""

    what: str
    why: str


@dataclass(slots=True)
class Account:
    """What a class did. Everything in it is a fact of this run."""

    counts: Counter[str] = field(default_factory=Counter)
    """How often; names are nouns in the plural ("images", "kills")."""
    faults: Counter[str] = field(default_factory=Counter)
    """How many cases of each row of `chaos/faults.toml` were really run and judged."""
    figures: dict[str, float] = field(default_factory=dict)
    """What was measured, with the unit in the name ("pause_p99_ms")."""
    skipped: list[Skip] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    findings_more: int = 0
    wanted: str | None = None
    """A finding that says this ends the class; None: it does all it can, whatever it finds."""

    def did(self, what: str, times: int = 1, *faults: str) -> None:
        """Count work, and which rows of the fault matrix it was a case of."""
        self.counts[what] += times
        for fault in faults:
            self.faults[fault] += times

    def skip(self, what: str, why: str) -> None:
        """Say that this host cannot do something, and why."""
        if Skip(what, why) not in self.skipped:
            self.skipped.append(Skip(what, why))

    def found(self, what: str, case: str, story: str = "") -> None:
        """Report a broken promise; the class goes on with the next case if it can. Raises Enough when this is
        the finding that was wanted."""
        is_wanted = self.wanted is not None and self.wanted in what
        if is_wanted or len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(what, case, story[-STORY_CHARS_MAX:]))
        else:
            self.findings_more += 1
        if is_wanted:
            raise Enough

    def tell(self) -> None:
        """Print what was found, skipped and done, for a person who replays a case; raises Broken when
        anything was found."""
        for finding in self.findings:
            print(finding.what, finding.story, sep="\n")
        for skip in self.skipped:
            print(f"skipped {skip.what}: {skip.why}")
        print(dict(self.counts), dict(self.faults))
        if self.findings:
            raise Broken(self.findings[0].what)

    def to_json(self) -> bytes:
        """For the runner."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Account:
        """What a class wrote; raises msgspec.DecodeError or ValidationError."""
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
    """What a package of `chaos/` must offer to stand in a plan."""

    def run(self, order: Order, account: Account) -> None:
        """Do the work; raise only for what is wrong with the harness or the host."""

    def replay(self, order: Order, case: str) -> None:
        """Do one case again, with its story on standard output; raise what it raises."""
