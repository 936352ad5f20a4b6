"""What is verified over and over, in which order, and how long a pass takes (RD-23). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ringlog.envelope.messages import ScrubReport, SegmentRef
from ringlog.limits import SCRUB_FINDINGS_MAX

COLD = 2


@dataclass(frozen=True, slots=True)
class ScrubItem:
    """One thing to verify: a segment, or with `ref` None the snapshot at `path`."""

    path: str
    bytes: int
    ref: SegmentRef | None = None


def scrub_items(refs: Iterable[SegmentRef], snapshots: Iterable[tuple[str, int]]) -> list[ScrubItem]:
    """Snapshots first, because everything rests on them; then segments by name."""
    found = [ScrubItem(path, size) for path, size in sorted(snapshots)]
    return found + [
        ScrubItem(ref.stem, ref.data_bytes, ref) for ref in sorted(refs, key=lambda ref: ref.stem)
    ]


@dataclass(slots=True)
class ScrubPass:
    """One pass: what is still to be looked at, and what was found."""

    pending: deque[ScrubItem] = field(default_factory=deque)
    files: int = 0
    bytes: int = 0
    findings: list[str] = field(default_factory=list)
    findings_total: int = 0

    @classmethod
    def from_items(cls, everything: Iterable[ScrubItem]) -> ScrubPass:
        """A pass over these, in their order."""
        return cls(deque(everything))

    @property
    def remaining_bytes(self) -> int:
        """Bytes still to be verified."""
        return sum(item.bytes for item in self.pending)

    def record(self, item: ScrubItem, findings: list[str]) -> None:
        """An item was looked at."""
        self.files += 1
        self.bytes += item.bytes
        self.findings_total += len(findings)
        self.findings += findings[: SCRUB_FINDINGS_MAX - len(self.findings)]

    def report(self) -> ScrubReport:
        """What is told to who asked."""
        hidden = self.findings_total - len(self.findings)
        more = [f"and {hidden} more findings"] if hidden else []
        return ScrubReport(self.files, self.bytes, self.findings + more)


def pass_seconds(total_bytes: int, bytes_per_s: int) -> int:
    """How long a whole pass takes at this pace, at least a second; 0 = it is off."""
    return max(1, total_bytes // bytes_per_s) if bytes_per_s else 0
