"""Files on a disk of tests, written durably."""

from __future__ import annotations

from typing import Any


def create_file(disk: Any, path: str, data: bytes) -> None:
    """Create a file with these bytes."""
    fd = disk.create(path)
    disk.write_at(fd, [data], 0)
    disk.sync_file(fd)
    disk.close(fd)
    disk.sync_dir(path.rpartition("/")[0])


def overwrite(disk: Any, path: str, data: bytes) -> None:
    """Replace a file by one with these bytes, to simulate damage."""
    if disk.exists(path):
        disk.unlink(path)
    create_file(disk, path, data)


def damage_file(disk: Any, path: str, at: int, data: bytes = b"\xee") -> None:
    """Overwrite bytes of a file, as bit rot does."""
    fd = disk.open_for_overwrite(path)
    disk.write_at(fd, [data], at)
    disk.sync_file(fd)
    disk.close(fd)
