"""`meta/engine`: who a data directory is, and which incarnation numbers are still unused.

The numbers order the log, so a counter that went back would make new files look older than what snapshots
absorbed, and hide files that are there. The contents therefore carry a checksum of their own.
"""

from __future__ import annotations

import errno
import os
from typing import Annotated

import msgspec
import xxhash

from ringlog.errors import DiskError
from ringlog.storage.disk import Disk
from ringlog.storage.layout import META_DIR, WAL_DIR, parse_shard_dir, parse_wal_name

ENGINE_FILE = "engine"
_BYTES_MAX = 65_536


class EngineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of `meta/engine`, as JSON."""

    engine_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    next_incarnation: Annotated[int, msgspec.Meta(ge=1)]
    shm_dir: str = ""
    check: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""
    """Of the others; a file from before there was one has none."""


def encode_identity(engine_id: str, next_incarnation: int, shm_dir: str) -> bytes:
    """The file's bytes."""
    check = _check(engine_id, next_incarnation, shm_dir)
    return msgspec.json.encode(
        EngineFile(engine_id=engine_id, next_incarnation=next_incarnation, shm_dir=shm_dir, check=check)
    )


def decode_identity(data: bytes) -> EngineFile:
    """Decode and verify; raises ValueError saying what is wrong."""
    try:
        found = msgspec.json.decode(data, type=EngineFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ValueError(str(e)) from None
    if found.check and found.check != _check(found.engine_id, found.next_incarnation, found.shm_dir):
        raise ValueError("its checksum does not fit")
    return found


def read_identity(disk: Disk, data_dir: str) -> EngineFile | None:
    """What the directory says of itself, None when it says nothing; raises ValueError, DiskError."""
    path = os.path.join(data_dir, META_DIR, ENGINE_FILE)
    if not disk.exists(path):
        return None
    fd = disk.open_read(path)
    try:
        data = disk.read_at(fd, _BYTES_MAX, 0)
    finally:
        disk.close(fd)
    return decode_identity(data)


def newest_incarnation(disk: Disk, data_dir: str) -> int:
    """The highest number in the name of a log file, 0 without one. The last life of a shard always left one:
    only closed files are absorbed, and only in a later life or behind a later file. A stream
    that is no directory holds no log; its shard will say so. Raises DiskError."""
    wal = os.path.join(data_dir, WAL_DIR)
    shards = [
        name for name in (disk.list_dir(wal) if disk.exists(wal) else []) if parse_shard_dir(name) is not None
    ]
    names = [name for shard in shards for name in _names_in(disk, os.path.join(wal, shard))]
    return max((parsed[0] for name in names if (parsed := parse_wal_name(name)) is not None), default=0)


def _names_in(disk: Disk, path: str) -> list[str]:
    try:
        return disk.list_dir(path)
    except DiskError as e:
        if e.errno != errno.ENOTDIR:
            raise
        return []


def _check(engine_id: str, next_incarnation: int, shm_dir: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{engine_id} {next_incarnation} {shm_dir}".encode())
