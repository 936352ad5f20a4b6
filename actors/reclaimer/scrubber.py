"""Scrub: verifies all checksums of segments in both tiers and of snapshots, and repairs what it can.

A segment with a damaged data part is quarantined: it is not moved or rewritten until it verifies again. If
the other tier has a copy that verifies, the copy replaces the damaged part. An index or dictionary that
disagrees with a valid data part is rebuilt from it. Nothing is ever repaired by guessing. A scrub that an
operator requests changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ringlog.actors.reclaimer.scrub_pass import COLD, ScrubItem
from ringlog.envelope.messages import SegmentRef
from ringlog.errors import ColdUnavailable, CorruptData, DiskError
from ringlog.logs import log_event
from ringlog.segment.index_rebuild import rebuild_index, verify_segment
from ringlog.segment.layout import DATA, IDX, TAGS
from ringlog.segment.segment import Segment
from ringlog.storage.disk import Disk
from ringlog.storage.layout import META_DIR
from ringlog.storage.snapshot import decode_snapshot, parse_snapshot_name
from ringlog.tier.copies import LOCAL_INDEX, SegmentCopies

log: logging.Logger = logging.getLogger("ringlog.reclaimer")
T = TypeVar("T")


@dataclass(slots=True)
class ScrubCounters:
    """Counters for the board."""

    findings: int = 0
    healed: int = 0


class Scrubber:
    """Verifies one item at a time. For one thread."""

    def __init__(
        self,
        disk: Disk,
        data_dir: str,
        copies: SegmentCopies,
        *,
        rate_limiter: Callable[[int], None],
        is_current: Callable[[SegmentRef], bool],
    ) -> None:
        """Create a scrubber.

        `is_current` queries the shards whether a segment is still in its place: a segment that was moved or
        deleted during its verification is no finding. `rate_limiter` is called with a number of bytes before
        they are read, and may sleep.
        """
        self._disk, self._data_dir, self._copies = disk, data_dir, copies
        self._rate_limiter, self._is_current = rate_limiter, is_current
        self.counts: ScrubCounters = ScrubCounters()
        self.quarantined: set[int] = set()

    def list_snapshots(self) -> list[tuple[str, int]]:
        """Return (path below the data directory, bytes) of every snapshot. Raises DiskError."""
        directory = f"{self._data_dir}/{META_DIR}"
        names = self._disk.list_dir(directory) if self._disk.exists(directory) else []
        paths = [f"{META_DIR}/{name}" for name in names if parse_snapshot_name(name) is not None]
        return [(path, self._read(path, self._disk.size) or 0) for path in paths]

    def verify_item(self, item: ScrubItem, *, heals: bool) -> list[str]:
        """Verify one item and repair it if `heals`. Return the remaining findings, as `path: reason`."""
        if item.ref is None:
            return self._log_findings(item, self._snapshot(item))
        ref = item.ref
        findings = self._segment(ref)
        if findings and not self._is_current(ref):
            return []
        if findings and heals:
            findings = self._heal(ref, findings)
        has_bad_data = any(finding.startswith(ref.stem + DATA) for finding in findings)
        (self.quarantined.add if has_bad_data else self.quarantined.discard)(ref.number)
        return self._log_findings(item, findings)

    def _log_findings(self, item: ScrubItem, findings: list[str]) -> list[str]:
        self.counts.findings += len(findings)
        for finding in findings:
            log_event(log, logging.ERROR, "scrub found damaged data", path=item.path, finding=finding)
        return findings

    # -- verification ---------------------------------------------------------------------------------

    def _snapshot(self, item: ScrubItem) -> list[str]:
        self._rate_limiter(item.bytes)
        try:
            data = self._read(item.path, lambda fd: self._disk.read_at(fd, self._disk.size(fd), 0))
            if data is not None:  # else the compactor removed it meanwhile
                decode_snapshot(data, item.path)
        except (CorruptData, DiskError) as e:
            return [f"{item.path}: {e}"]
        return []

    def _read(self, path: str, read: Callable[[int], T]) -> T | None:
        """Return the result of `read` for an open file, or None if the file does not exist."""
        try:
            fd = self._disk.open_read(f"{self._data_dir}/{path}")
        except DiskError as e:
            if e.errno == errno.ENOENT:
                return None
            raise
        try:
            return read(fd)
        finally:
            self._disk.close(fd)

    def _segment(self, ref: SegmentRef) -> list[str]:
        if ref.tier == COLD:
            return self._cold(ref)
        self._rate_limiter(ref.data_bytes)
        return verify_segment(self._disk, self._data_dir, ref.stem)

    def _cold(self, ref: SegmentRef) -> list[str]:
        """Verify a cold segment: its data part in the store, the other parts on the host, which take
        precedence."""
        findings = []
        try:
            with contextlib.closing(Segment.open(self._disk, self._data_dir, ref.stem)) as segment:
                fault = segment.tags_fault()
                findings += [f"{ref.stem}{TAGS}: {fault}"] if fault else []
        except (CorruptData, DiskError) as e:
            findings.append(f"{ref.stem}{IDX}: {e}")
        if self._copies.store is None:
            return findings
        try:
            self._copies.verify_cold(ref.stem)
        except ColdUnavailable:
            return findings  # Not verified is not damaged. The next pass tries again.
        except CorruptData as e:
            findings.append(f"{ref.stem}{DATA}: {e}")
        return findings

    # -- repair ---------------------------------------------------------------------------------------

    def _heal(self, ref: SegmentRef, findings: list[str]) -> list[str]:
        """Try to repair a segment; return the remaining findings."""
        try:
            if not self._try_to_heal(ref, findings):
                return findings
        except (CorruptData, DiskError, ColdUnavailable) as e:
            log_event(log, logging.WARNING, "segment not healed", segment=ref.stem, reason=str(e))
            return findings
        remaining = self._segment(ref)
        if not remaining:
            self.counts.healed += 1
            log_event(log, logging.WARNING, "segment healed", segment=ref.stem, was=findings[:8])
        return remaining

    def _try_to_heal(self, ref: SegmentRef, findings: list[str]) -> bool:
        stem = ref.stem
        if any(finding.startswith(stem + DATA) for finding in findings):
            return self._copies.heal_cold(stem + DATA) if ref.tier == COLD else self._copies.heal_local(stem)
        if not any(finding.startswith((stem + IDX, stem + TAGS)) for finding in findings):
            return False
        if ref.tier != COLD:
            rebuild_index(self._disk, self._data_dir, stem).close()
            return True
        if self._copies.store is None:
            return False
        for suffix in LOCAL_INDEX[:2]:
            if self._copies.store.exists(stem + suffix):
                self._copies.download_part(stem + suffix)
        return True
