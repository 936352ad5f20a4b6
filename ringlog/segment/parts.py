"""Creation of a segment's parts: first under temporary names, and the data part is renamed last.

Every part is written as packs/<name>.tmp, synced, and renamed. Index, tags and marks are renamed first, and
their names are durable before the data part is renamed. A data part therefore implies a complete segment
(S1). A crash leaves only temporary files and index parts without a data part, which the engine ignores.
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
"""Directories with other names belong to other software and are left unchanged."""


def make_dirs(disk: Disk, data_dir: str, *names: str) -> None:
    """Create nested directories below the data directory, durably.

    An existing directory is synced as well: its creator may have died before the sync, and a power loss
    would then remove the directory together with its new contents.
    """
    at = data_dir
    for name in names:
        inner = f"{at}/{name}"
        if not disk.exists(inner):
            disk.make_dir(inner)
        disk.sync_dir(at)
        at = inner


def make_stem_dir(disk: Disk, data_dir: str, stem: str) -> None:
    """Create the directory of a stem."""
    make_dirs(disk, data_dir, *os.path.dirname(stem).split("/"))


def temporary_path(data_dir: str, number: int, suffix: str) -> str:
    """Return the path of a part before it is renamed."""
    return f"{data_dir}/{PACKS_DIR}/{number:016x}{suffix}{TMP_SUFFIX}"


def create_temporary(disk: Disk, data_dir: str, number: int, suffix: str) -> int:
    """Create the temporary file of a part and replace one that a crash left. Raises DiskError."""
    make_dirs(disk, data_dir, PACKS_DIR)
    path = temporary_path(data_dir, number, suffix)
    if disk.exists(path):
        disk.unlink(path)
    return disk.create(path)


def write_temporary(disk: Disk, data_dir: str, number: int, suffix: str, pieces: Sequence[Any]) -> None:
    """Write and sync a part under its temporary name. Raises DiskError."""
    fd = create_temporary(disk, data_dir, number, suffix)
    try:
        disk.write_at(fd, [piece for piece in pieces if len(piece)], 0)
        disk.sync_file(fd)
    finally:
        disk.close(fd)


def publish_parts(disk: Disk, data_dir: str, stem: str, suffixes: Sequence[str]) -> None:
    """Rename temporary parts to their final names, durably. Raises DiskError."""
    parsed = parse_stem(stem)
    assert parsed is not None, stem
    make_stem_dir(disk, data_dir, stem)
    for suffix in suffixes:
        disk.rename(temporary_path(data_dir, parsed[2], suffix), f"{data_dir}/{stem}{suffix}")
    disk.sync_dir(os.path.dirname(f"{data_dir}/{stem}"))


def part_names(disk: Disk, data_dir: str) -> list[str]:
    """Return the paths, below the data directory, of all files in segment directories, sorted."""
    found = _names_in(disk, data_dir, PACKS_DIR)
    for topic in topic_dirs(disk, data_dir):
        found += _names_in(disk, data_dir, topic)
    return found


def topic_dirs(disk: Disk, data_dir: str) -> list[str]:
    """Return the directories of topics as paths below the data directory."""
    return [name for name in _names_in(disk, data_dir, TOPICS_DIR) if _TOPIC_DIR.match(name)]


def topic_of_dir(name: str) -> int:
    """Return the topic id of a topic's directory, or 0 for another directory."""
    return int(os.path.basename(name), 16) if _TOPIC_DIR.match(name) else 0


def remove_topic_dir(disk: Disk, data_dir: str, name: str) -> bool:
    """Delete a topic's directory, durably. Return False if it is not empty. Raises DiskError."""
    path = f"{data_dir}/{name}"
    try:
        if disk.exists(path):
            disk.remove_dir(path)
    except DiskError as e:
        if e.errno != errno.ENOTEMPTY:
            raise
        return False
    # Also if an earlier incarnation deleted it: that one may have died before its sync.
    disk.sync_dir(os.path.dirname(path))
    return True


def _names_in(disk: Disk, data_dir: str, directory: str) -> list[str]:
    path = f"{data_dir}/{directory}"
    try:
        return [f"{directory}/{name}" for name in disk.list_dir(path)] if disk.exists(path) else []
    except DiskError as e:
        # The reclaimer may delete an empty topic directory concurrently.
        if e.errno != errno.ENOENT:
            raise
        return []
