"""Files in gapsPath: the gaps that a stream skipped, as JSON lines.

    gaps-<range>.jsonl           gaps that the plan of an offset range found
    gaps-<range>-<rows>.jsonl    gaps that a task found later, while it read the range

`<range>` is a hash of the two offsets. After a crash Spark plans a range again. What earlier tasks missed is
then a gap of the new plan, so its file replaces all files of the range. `<rows>` is a hash of the gaps:
attempts of a task that miss the same positions write the same file. So each gap is listed once, unless
attempts of one task miss different positions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from ringlog.spark.catalog import GapRow
from ringlog.spark.stream_state import TopicBreak
from ringlog.storage.disk import Disk, replace_file

SUFFIX = ".jsonl"
PARENTS_MAX = 64
"""Maximum number of directory levels to create for a path."""


@dataclass(frozen=True, slots=True)
class RangeGaps:
    """The gap files of one offset range. Its partitions carry it to the tasks."""

    directory: str
    range_id: str
    planned: tuple[GapRow, ...] = ()
    """Gaps that the plan has listed. Slices may cover their positions."""

    def write_read(self, disk: Disk, rows: Sequence[GapRow]) -> None:
        """Write the gaps that a task found, without those that are listed already. Raises DiskError."""
        new = [part for row in rows for part in _outside(row, self.planned)]
        if new:
            content = _lines(new)
            _make(disk, self.directory)
            name = f"gaps-{self.range_id}-{xxhash.xxh3_64_hexdigest(content)}{SUFFIX}"
            replace_file(disk, self.directory, name, content)


def write_planned(
    disk: Disk,
    directory: str,
    start: Mapping[str, Any],
    end: Mapping[str, Any],
    rows: Sequence[GapRow | TopicBreak],
) -> RangeGaps:
    """Write the gaps that a plan found between two offsets, and remove the files of an earlier plan.

    Raises DiskError.
    """
    _make(disk, directory)
    range_id = xxhash.xxh3_64_hexdigest(json.dumps([start, end], sort_keys=True).encode())
    name = f"gaps-{range_id}{SUFFIX}"
    if rows:
        replace_file(disk, directory, name, _lines(rows))
    earlier = [
        each
        for each in disk.list_dir(directory)
        if each.startswith(f"gaps-{range_id}") and each.endswith(SUFFIX) and not (rows and each == name)
    ]
    for each in earlier:
        disk.unlink(os.path.join(directory, each))
    if earlier:
        disk.sync_dir(directory)
    return RangeGaps(directory, range_id, tuple(row for row in rows if isinstance(row, GapRow)))


def _outside(row: GapRow, listed: Iterable[GapRow]) -> list[GapRow]:
    """Return the parts of a gap that are not within the listed gaps."""
    left = [row]
    for other in listed:
        if (other.topic, other.epoch) == (row.topic, row.epoch):
            left = [
                replace(part, gap_from=first, gap_to=last)
                for part in left
                for first, last in (
                    (part.gap_from, min(part.gap_to, other.gap_from - 1)),
                    (max(part.gap_from, other.gap_to + 1), part.gap_to),
                )
                if first <= last
            ]
    return left


def _lines(rows: Iterable[GapRow | TopicBreak]) -> bytes:
    return "".join(json.dumps(_plain(row), sort_keys=True) + "\n" for row in rows).encode()


def _plain(row: GapRow | TopicBreak) -> dict[str, Any]:
    """Return a line with the columns of view=gaps.

    For an ended topic, the last lost position is unknown (None).
    """
    if isinstance(row, TopicBreak):
        return {
            "topic": row.topic, "epoch": row.epoch, "gap_from": row.seq + 1, "gap_to": None,
            "reason": row.reason, "missed_estimate": None, "earliest_seq": None, "head_seq": None,
        }  # fmt: skip
    return {
        "topic": row.topic, "epoch": row.epoch, "gap_from": row.gap_from, "gap_to": row.gap_to,
        "reason": row.reason, "missed_estimate": row.missed_estimate, "earliest_seq": row.earliest_seq,
        "head_seq": row.head_seq,
    }  # fmt: skip


def _make(disk: Disk, directory: str) -> None:
    """Create the directory and its parents."""
    missing = []
    for _ in range(PARENTS_MAX):
        if disk.exists(directory):
            break
        missing.append(directory)
        directory = os.path.dirname(directory)
    for path in reversed(missing):
        disk.make_dir(path)
        disk.sync_dir(os.path.dirname(path))
