"""What a verification found: one report a file, and the stretches of numbers it holds.

Reports travel between processes, so they hold plain values only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DAMAGE = "damage"
UNREACHABLE = "unreachable"
REMARK = "remark"

Range = tuple[int, int]
"""First and last number, both included."""


class FileFinding(NamedTuple):
    """Something worth saying about one file. `damage` fails a verification, `unreachable` leaves it
    incomplete, a `remark` does neither."""

    path: str
    offset: int
    severity: str
    what: str


class ControlFact(NamedTuple):
    """One control frame about a topic, in the order of the log. `value` is its decoded body."""

    topic_id: int
    epoch: int
    type: int
    value: Any


@dataclass(slots=True)
class FileReport:
    """What one file holds and what is wrong with it."""

    path: str
    kind: str
    """wal, segment, snapshot, register or identity."""
    bytes: int = 0
    frames: int = 0
    records: int = 0
    header: dict[str, Any] = field(default_factory=dict)
    stored: dict[tuple[int, int], list[Range]] = field(default_factory=dict)
    """(topic_id, epoch) -> numbers whose records lie here, ascending, neighbours joined."""
    served: dict[tuple[int, int], list[Range]] = field(default_factory=dict)
    """Those of `stored` that an engine reads here: of a log file that a snapshot absorbed it reads none."""
    marked: dict[tuple[int, int], list[Range]] = field(default_factory=dict)
    """(topic_id, epoch) -> numbers marked as deleted here."""
    facts: list[ControlFact] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    """What only files of this kind have."""
    findings: list[FileFinding] = field(default_factory=list)

    def add_damage(self, what: str, offset: int = 0) -> None:
        """Note something that must not be."""
        self.findings.append(FileFinding(self.path, offset, DAMAGE, what))

    def add_unreachable(self, what: str) -> None:
        """Note something that could not be looked at."""
        self.findings.append(FileFinding(self.path, 0, UNREACHABLE, what))

    def add_remark(self, what: str, offset: int = 0) -> None:
        """Note something that may be."""
        self.findings.append(FileFinding(self.path, offset, REMARK, what))

    def add_records(self, topic_id: int, epoch: int, first: int, count: int) -> None:
        """Note that `count` records of a topic lie here from number `first` on."""
        ranges = self.stored.setdefault((topic_id, epoch), [])
        extend_ranges(ranges, first, first + count - 1)
        self.records += count

    @property
    def is_damaged(self) -> bool:
        """Is anything wrong?"""
        return any(finding.severity == DAMAGE for finding in self.findings)


# -- ranges -------------------------------------------------------------------------------------------


def extend_ranges(ranges: list[Range], first: int, last: int) -> None:
    """Add numbers that are read in rising order mostly; neighbours are joined."""
    if ranges and ranges[-1][0] <= first <= ranges[-1][1] + 1:
        ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
    else:
        ranges.append((first, last))


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The same numbers, ascending, nothing twice, neighbours joined."""
    joined: list[Range] = []
    for first, last in sorted(ranges):
        extend_ranges(joined, first, last)
    return joined


def subtract_ranges(ranges: list[Range], holes: list[Range]) -> list[Range]:
    """Numbers of `ranges` that are in none of `holes`; both joined."""
    left: list[Range] = []
    at = 0
    for first, last in ranges:
        while at < len(holes) and holes[at][1] < first:
            at += 1
        here = at
        while here < len(holes) and holes[here][0] <= last:
            if holes[here][0] > first:
                left.append((first, holes[here][0] - 1))
            first = holes[here][1] + 1
            here += 1
        if first <= last:
            left.append((first, last))
    return left


def count_seqs(ranges: Iterable[Range]) -> int:
    """How many numbers these are."""
    return sum(last - first + 1 for first, last in ranges)
