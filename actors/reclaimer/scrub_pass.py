"""The items of a scrub pass, their order, and the duration of a pass. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ringlog.envelope.messages import ScrubReport, SegmentRef
from ringlog.limits import SCRUB_FINDINGS_MAX

COLD = 2


@dataclass(frozen=True, slots=True)
class ScrubItem:
    """One item to verify: a segment, or the snapshot at `path` if `ref` is None."""

    path: str
    bytes: int
    ref: SegmentRef | None = None


def scrub_items(refs: Iterable[SegmentRef], snapshots: Iterable[tuple[str, int]]) -> list[ScrubItem]:
    """Return the items of a pass: snapshots first, because recovery needs them, then segments by name."""
    found = [ScrubItem(path, size) for path, size in sorted(snapshots)]
    return found + [
        ScrubItem(ref.stem, ref.data_bytes, ref) for ref in sorted(refs, key=lambda ref: ref.stem)
    ]


@dataclass(slots=True)
class ScrubPass:
    """State of one pass: pending items and results."""

    pending: deque[ScrubItem] = field(default_factory=deque)
    files: int = 0
    bytes: int = 0
    findings: list[str] = field(default_factory=list)
    findings_total: int = 0

    @classmethod
    def from_items(cls, everything: Iterable[ScrubItem]) -> ScrubPass:
        """Create a pass over these items, in their order."""
        return cls(deque(everything))

    @property
    def remaining_bytes(self) -> int:
        """Number of bytes that are not verified yet."""
        return sum(item.bytes for item in self.pending)

    def record(self, item: ScrubItem, findings: list[str]) -> None:
        """Record the result of an item."""
        self.files += 1
        self.bytes += item.bytes
        self.findings_total += len(findings)
        self.findings += findings[: SCRUB_FINDINGS_MAX - len(self.findings)]

    def report(self) -> ScrubReport:
        """Return the report for the clients that requested the scrub."""
        hidden = self.findings_total - len(self.findings)
        more = [f"and {hidden} more findings"] if hidden else []
        return ScrubReport(self.files, self.bytes, self.findings + more)


def pass_seconds(total_bytes: int, bytes_per_s: int) -> int:
    """Return the duration of a whole pass at this rate in seconds, at least 1; 0 = the scrub is off."""
    return max(1, total_bytes // bytes_per_s) if bytes_per_s else 0
