"""Files in gapsPath: the gaps that a stream skipped, as JSON lines, one file per offset range with gaps.

The name of a file is a hash of its range. After a crash Spark plans a range again, and the new file replaces
the old one. So each gap is reported once, and the report matches the last plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from ringlog.spark.catalog import GapRow
from ringlog.spark.stream_state import TopicBreak
from ringlog.storage.disk import Disk, replace_file

SUFFIX = ".jsonl"
PARENTS_MAX = 64
"""Maximum number of directory levels to create for a path."""


def write_gaps(
    disk: Disk,
    directory: str,
    start: Mapping[str, Any],
    end: Mapping[str, Any],
    rows: Sequence[GapRow | TopicBreak],
) -> None:
    """Write the gaps of the range between two offsets. Without gaps, remove the file of an earlier plan.

    Raises DiskError.
    """
    _make(disk, directory)
    text = json.dumps([start, end], sort_keys=True)
    name = f"gaps-{xxhash.xxh3_64_hexdigest(text.encode())}{SUFFIX}"
    path = os.path.join(directory, name)
    if rows:
        lines = [json.dumps(_plain(row), sort_keys=True) for row in rows]
        replace_file(disk, directory, name, ("\n".join(lines) + "\n").encode())
    elif disk.exists(path):
        disk.unlink(path)
        disk.sync_dir(directory)


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
