"""Results of a verification: one report for each file, and the ranges of seqs that the file contains.

Reports are sent between processes, so they contain plain values only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DAMAGE = "damage"
UNREACHABLE = "unreachable"
REMARK = "remark"

Range = tuple[int, int]
"""First and last seq, both inclusive."""


class FileFinding(NamedTuple):
    """One finding about one file.

    `damage` fails a verification, `unreachable` makes it incomplete, a `remark` does neither.
    """

    path: str
    offset: int
    severity: str
    what: str


class ControlFact(NamedTuple):
    """One control frame about a topic, in log order. `value` is its decoded body."""

    topic_id: int
    epoch: int
    type: int
    value: Any


@dataclass(slots=True)
class FileReport:
    """Contents of one file, and the findings about it."""

    path: str
    kind: str
    """wal, segment, snapshot, register or identity."""
    bytes: int = 0
    frames: int = 0
    records: int = 0
    header: dict[str, Any] = field(default_factory=dict)
    stored: dict[tuple[int, int], list[Range]] = field(default_factory=dict)
    """(topic_id, epoch) -> seqs of the records in this file. Ascending, adjacent ranges merged."""
    served: dict[tuple[int, int], list[Range]] = field(default_factory=dict)
    """The part of `stored` that an engine reads here. Nothing, for a log file that a snapshot covers."""
    marked: dict[tuple[int, int], list[Range]] = field(default_factory=dict)
    """(topic_id, epoch) -> seqs that are marked as deleted here."""
    control_frames: list[ControlFact] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """Facts that only files of this kind have."""
    findings: list[FileFinding] = field(default_factory=list)

    def add_damage(self, text: str, offset: int = 0) -> None:
        """Add a finding of severity `damage`. `offset` is in bytes."""
        self.findings.append(FileFinding(self.path, offset, DAMAGE, text))

    def add_unreachable(self, text: str) -> None:
        """Add a finding about data that cannot be read now."""
        self.findings.append(FileFinding(self.path, 0, UNREACHABLE, text))

    def add_remark(self, text: str, offset: int = 0) -> None:
        """Add a finding that is no damage. `offset` is in bytes."""
        self.findings.append(FileFinding(self.path, offset, REMARK, text))

    def add_records(self, topic_id: int, epoch: int, first: int, count: int) -> None:
        """Record that this file contains `count` records of a topic, from seq `first` on."""
        ranges = self.stored.setdefault((topic_id, epoch), [])
        extend_ranges(ranges, first, first + count - 1)
        self.records += count

    @property
    def is_damaged(self) -> bool:
        """Whether there is at least one finding of severity `damage`."""
        return any(finding.severity == DAMAGE for finding in self.findings)


# -- ranges -------------------------------------------------------------------------------------------


def extend_ranges(ranges: list[Range], first: int, last: int) -> None:
    """Append a range in place. Merges it with the last range if it starts within or directly after that."""
    if ranges and ranges[-1][0] <= first <= ranges[-1][1] + 1:
        ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
    else:
        ranges.append((first, last))


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return the same seqs as ascending, disjoint ranges; adjacent ranges are merged."""
    joined: list[Range] = []
    for first, last in sorted(ranges):
        extend_ranges(joined, first, last)
    return joined


def subtract_ranges(ranges: list[Range], holes: list[Range]) -> list[Range]:
    """Return the seqs of `ranges` that are in none of `holes`. Both must be merged (merge_ranges)."""
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
    """Return the number of seqs in these ranges."""
    return sum(last - first + 1 for first, last in ranges)
