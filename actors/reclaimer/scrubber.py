"""Scrub: every checksum of every segment in both tiers and of every snapshot; and healing what can be.

A damaged data part is quarantined: nobody moves or rewrites it until it verifies again (SG-10). If the
other tier has a copy that verifies, that is put in its place; an index or a dictionary that does not agree
with its sound data part is made anew from it (SG-5). Nothing is ever repaired by guessing, and a scrub that
was asked for by hand changes nothing (SG-15).
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from actors.reclaimer.scrub_pass import COLD, ScrubItem
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

log = logging.getLogger("ringlog.reclaimer")
T = TypeVar("T")


@dataclass(slots=True)
class ScrubCounters:
    """For the board."""

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
        pace: Callable[[int], None],
        is_current: Callable[[SegmentRef], bool],
    ) -> None:
        """`is_current` asks the shards whether a segment still lies where it did: what moved or went while we
        looked is no finding. `pace` is told of bytes before they are read, and waits."""
        self._disk, self._data_dir, self._copies = disk, data_dir, copies
        self._pace, self._is_current = pace, is_current
        self.counts = ScrubCounters()
        self.quarantined: set[int] = set()

    def list_snapshots(self) -> list[tuple[str, int]]:
        """(path below the data directory, bytes) of every snapshot. Raises DiskError."""
        directory = f"{self._data_dir}/{META_DIR}"
        names = self._disk.list_dir(directory) if self._disk.exists(directory) else []
        paths = [f"{META_DIR}/{name}" for name in names if parse_snapshot_name(name) is not None]
        return [(path, self._read(path, self._disk.size) or 0) for path in paths]

    def verify_item(self, item: ScrubItem, *, heals: bool) -> list[str]:
        """Look at one item; what is wrong with it and still is, as `path: reason`."""
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
            log_event(log, logging.ERROR, "damage found at rest", path=item.path, finding=finding)
        return findings

    # -- looking --------------------------------------------------------------------------------------

    def _snapshot(self, item: ScrubItem) -> list[str]:
        self._pace(item.bytes)
        try:
            data = self._read(item.path, lambda fd: self._disk.read_at(fd, self._disk.size(fd), 0))
            if data is not None:  # else the compactor removed it meanwhile
                decode_snapshot(data, item.path)
        except (CorruptData, DiskError) as e:
            return [f"{item.path}: {e}"]
        return []

    def _read(self, path: str, read: Callable[[int], T]) -> T | None:
        """What `read` makes of an open file; None when it is gone."""
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
        self._pace(ref.data_bytes)
        return verify_segment(self._disk, self._data_dir, ref.stem)

    def _cold(self, ref: SegmentRef) -> list[str]:
        """The data part by its own checksums, the others by those of the host's, which lead."""
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
            return findings  # not looked at is not damaged; the next pass comes back
        except CorruptData as e:
            findings.append(f"{ref.stem}{DATA}: {e}")
        return findings

    # -- healing --------------------------------------------------------------------------------------

    def _heal(self, ref: SegmentRef, findings: list[str]) -> list[str]:
        """Try what may be tried; what is wrong afterwards."""
        try:
            if not self._try_to_heal(ref, findings):
                return findings
        except (CorruptData, DiskError, ColdUnavailable) as e:
            log_event(log, logging.WARNING, "segment not healed", segment=ref.stem, reason=str(e))
            return findings
        left = self._segment(ref)
        if not left:
            self.counts.healed += 1
            log_event(log, logging.WARNING, "segment healed", segment=ref.stem, was=findings[:8])
        return left

    def _try_to_heal(self, ref: SegmentRef, findings: list[str]) -> bool:
        stem = ref.stem
        if any(finding.startswith(stem + DATA) for finding in findings):
            return self._copies.heal_cold(stem + DATA) if ref.tier == COLD else self._copies.heal_local(stem)
        if not any(finding.startswith((stem + IDX, stem + TAGS)) for finding in findings):
            return False
        if ref.tier != COLD:
            rebuild_index(self._disk, self._data_dir, stem).close()
            return True
        for suffix in LOCAL_INDEX[:2]:
            if self._copies.require_store().exists(stem + suffix):
                self._copies.download_part(stem + suffix)
        return True
