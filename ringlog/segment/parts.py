"""Making the parts of a segment: temporary names first, the data part's name last.

Every part is written as packs/<name>.tmp, synced, and renamed. Index, tags and marks get their names
first, and these are durable before the data part gets its own: where a data part is, all of the segment
is. What a crash leaves are temporaries and index parts without a data part, which nobody believes.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from typing import Any

from ringlog.errors import DiskError
from ringlog.segment.layout import PACKS_DIR, TOPICS_DIR, parse_stem
from ringlog.storage.disk import Disk
from ringlog.storage.layout import TMP_SUFFIX

_TOPIC_DIR = re.compile(f"^{TOPICS_DIR}/[0-9a-f]{{16}}$")
"""Anything else there is not ours and is left alone (ST-5)."""


def make_dirs(disk: Disk, data_dir: str, *names: str) -> None:
    """Make directories below the data directory, each inside of the one before, durably.

    One that is there already is synced too: who made it may have died before that, and what is put into it
    would go with its name when the power does.
    """
    at = data_dir
    for name in names:
        inner = f"{at}/{name}"
        if not disk.exists(inner):
            disk.make_dir(inner)
        disk.sync_dir(at)
        at = inner


def make_stem_dir(disk: Disk, data_dir: str, stem: str) -> None:
    """Make the directory that a stem lies in."""
    make_dirs(disk, data_dir, *os.path.dirname(stem).split("/"))


def temporary_path(data_dir: str, number: int, suffix: str) -> str:
    """Where a part lies until it is whole."""
    return f"{data_dir}/{PACKS_DIR}/{number:016x}{suffix}{TMP_SUFFIX}"


def create_temporary(disk: Disk, data_dir: str, number: int, suffix: str) -> int:
    """Create the temporary file of a part, in place of one that a crash left."""
    make_dirs(disk, data_dir, PACKS_DIR)
    path = temporary_path(data_dir, number, suffix)
    if disk.exists(path):
        disk.unlink(path)
    return disk.create(path)


def write_temporary(disk: Disk, data_dir: str, number: int, suffix: str, pieces: Sequence[Any]) -> None:
    """Write and sync a part under its temporary name; raises DiskError."""
    fd = create_temporary(disk, data_dir, number, suffix)
    try:
        disk.write_at(fd, [piece for piece in pieces if len(piece)], 0)
        disk.sync_file(fd)
    finally:
        disk.close(fd)


def publish_parts(disk: Disk, data_dir: str, stem: str, suffixes: Sequence[str]) -> None:
    """Give temporary parts their names, and make those durable; raises DiskError."""
    parsed = parse_stem(stem)
    assert parsed is not None, stem
    make_stem_dir(disk, data_dir, stem)
    for suffix in suffixes:
        disk.rename(temporary_path(data_dir, parsed[2], suffix), f"{data_dir}/{stem}{suffix}")
    disk.sync_dir(os.path.dirname(f"{data_dir}/{stem}"))


def part_names(disk: Disk, data_dir: str) -> list[str]:
    """Paths below the data directory of everything in the directories of segments, sorted."""
    found = _names_in(disk, data_dir, PACKS_DIR)
    for topic in topic_dirs(disk, data_dir):
        found += _names_in(disk, data_dir, topic)
    return found


def topic_dirs(disk: Disk, data_dir: str) -> list[str]:
    """Directories of topics, as paths below the data directory."""
    return [name for name in _names_in(disk, data_dir, TOPICS_DIR) if _TOPIC_DIR.match(name)]


def topic_of_dir(name: str) -> int:
    """The topic whose directory this is; 0 when it is none."""
    return int(os.path.basename(name), 16) if _TOPIC_DIR.match(name) else 0


def remove_topic_dir(disk: Disk, data_dir: str, name: str) -> bool:
    """Remove a topic's directory, durably; False when there is something in it. Raises DiskError."""
    path = f"{data_dir}/{name}"
    try:
        if disk.exists(path):
            disk.remove_dir(path)
    except DiskError as e:
        if e.errno != errno.ENOTEMPTY:
            raise
        return False
    # Also when another life has removed it: it may have died before this.
    disk.sync_dir(os.path.dirname(path))
    return True


def _names_in(disk: Disk, data_dir: str, directory: str) -> list[str]:
    path = f"{data_dir}/{directory}"
    try:
        return [f"{directory}/{name}" for name in disk.list_dir(path)] if disk.exists(path) else []
    except DiskError as e:
        # A topic's directory that the reclaimer removes meanwhile has nothing in it.
        if e.errno != errno.ENOENT:
            raise
        return []
