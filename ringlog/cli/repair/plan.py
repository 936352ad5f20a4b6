"""RepairPlan: what is done with each file of a damaged directory, and which records are saved or lost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ringlog.limits import BATCH_RECORDS_MAX
from ringlog.segment.salvage import SalvagedSlice, SalvagedTopic
from ringlog.verify.directory import Verification
from ringlog.verify.findings import FileReport, Range, subtract_ranges
from ringlog.verify.frame_decoder import VerifyError
from ringlog.verify.log_order import NeededLog
from ringlog.verify.repair import DamagedSpan, PartialLog, header_bytes, repair_log
from ringlog.verify.snapshot_decoder import snapshots_in_force

WAL_NAME = re.compile(r"^wal/shard-(\d+)/wal-(\d+)-(\d+)\.log$")
_FILE_SHIFT = 24
_FRAME_BYTES_MIN = 96

Key = tuple[int, int]
"""(topic_id, epoch)."""

Lost = dict[tuple[int, int], list[Range]]


@dataclass(slots=True)
class RepairPlan:
    """Decisions about each file of the directory."""

    found: Verification
    root: Path
    cold: Path | None
    repaired_logs: dict[str, PartialLog] = field(default_factory=dict)
    """Log files with damaged spans, and placeholders for missing log files."""
    resealed: dict[str, bytes] = field(default_factory=dict)
    """Log files with a damaged header, under a new header."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Path or stem -> reason for the quarantine."""
    rebuilt: list[str] = field(default_factory=list)
    """Segments with sound data: their other parts are rebuilt from it."""
    dropped: set[int] = field(default_factory=set)
    """Numbers of segments that the copy does not contain."""
    salvaged: dict[Key, SalvagedTopic] = field(default_factory=dict)
    """Records for new segments."""
    lost: Lost = field(default_factory=dict)
    unknown: list[NeededLog] = field(default_factory=list)
    """Missing newest log files. Only an upper bound of their records is known."""
    unread_frames: dict[Key, list[SalvagedSlice]] | None = None
    """Complete frames in files that an engine does not read."""

    @property
    def snapshots(self) -> list[FileReport]:
        """The snapshots in force, in descending order of their numbers."""
        return snapshots_in_force([each for each in self.found.files if each.kind == "snapshot"])

    def damaged_spans(self) -> Iterator[DamagedSpan]:
        """Yield the damaged spans of all repaired log files."""
        for partial_log in self.repaired_logs.values():
            yield from partial_log.damaged_spans

    def max_unknown_records(self, topic_id: int) -> int:
        """Return how many records of a topic the missing newest log files may have contained.

        The repaired engine must not assign their seqs again."""
        files = [log for log in self.unknown if shard_of(topic_id, log.shards) == numbers_of(log.path)[0]]
        return sum(log.file_bytes // _FRAME_BYTES_MIN * BATCH_RECORDS_MAX for log in files)

    def has_room(self, path: str, partial_log: PartialLog) -> bool:
        """Return whether the announcements of losses fit into the damaged spans of a log file."""
        try:
            self.repaired_bytes(path, partial_log)
        except VerifyError:
            return False
        return True

    def repaired_bytes(self, path: str, partial_log: PartialLog) -> bytes:
        """Return the repaired content of a log file. Raises VerifyError."""
        report = next((each for each in self.found.files if each.path == path), None)
        if path in self.resealed:
            return repair_log(self.resealed[path], partial_log)
        if report is None or path in self.quarantined:
            return repair_log(header_bytes(partial_log.header), partial_log)
        return repair_log((self.root / path).read_bytes(), partial_log, report.extra.get("limit", 0))


def numbers_of(path: str) -> tuple[int, int, int]:
    """Return (shard, incarnation, n) from the name of a log file."""
    found = WAL_NAME.match(path)
    assert found is not None, path
    return int(found[1]), int(found[2]), int(found[3])


def log_file_id(path: str) -> int:
    """Return the number of a log file from its name."""
    _, incarnation, n = numbers_of(path)
    return incarnation << _FILE_SHIFT | n


def shard_of(topic_id: int, shards: int) -> int:
    """Return the shard of a topic."""
    return xxhash.xxh3_64_intdigest(topic_id.to_bytes(8, "little")) % shards


def intersection(ranges: Sequence[Range], wanted: list[Range]) -> list[Range]:
    """Return the intersection."""
    return subtract_ranges(list(ranges), subtract_ranges(list(ranges), wanted))
