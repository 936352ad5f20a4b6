"""`meta/engine`: identity of a data directory, and its counter of incarnation numbers.

Incarnation numbers order the log files. If the counter went back, new files would look older than the files
that a snapshot covers, and recovery would skip them. The file therefore has its own checksum.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Annotated

import msgspec
import xxhash

from ringlog.errors import DiskError
from ringlog.storage.disk import Disk
from ringlog.storage.layout import META_DIR, RESTORED, WAL_DIR, parse_shard_dir, parse_wal_name

ENGINE_FILE = "engine"
_BYTES_MAX = 65_536
_RESTORE_ID = re.compile(rb"[0-9a-f]{16}")


class EngineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of `meta/engine`, as JSON."""

    engine_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    next_incarnation: Annotated[int, msgspec.Meta(ge=1)]
    shm_dir: str = ""
    check: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""
    """Checksum of the other fields. Files of old versions have none."""


def encode_identity(engine_id: str, next_incarnation: int, shm_dir: str) -> bytes:
    """Return the bytes of the file."""
    check = _check(engine_id, next_incarnation, shm_dir)
    return msgspec.json.encode(
        EngineFile(engine_id=engine_id, next_incarnation=next_incarnation, shm_dir=shm_dir, check=check)
    )


def decode_identity(data: bytes) -> EngineFile:
    """Decode and verify the file. Raise ValueError with the reason if it is invalid."""
    try:
        found = msgspec.json.decode(data, type=EngineFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ValueError(str(e)) from None
    if found.check and found.check != _check(found.engine_id, found.next_incarnation, found.shm_dir):
        raise ValueError("checksum mismatch")
    return found


def read_identity(disk: Disk, data_dir: str) -> EngineFile | None:
    """Return the identity of the directory, or None if the file is missing. Raise ValueError or DiskError."""
    path = os.path.join(data_dir, META_DIR, ENGINE_FILE)
    if not disk.exists(path):
        return None
    fd = disk.open_read(path)
    try:
        data = disk.read_at(fd, _BYTES_MAX, 0)
    finally:
        disk.close(fd)
    return decode_identity(data)


def read_restore_id(disk: Disk, data_dir: str) -> str:
    """Return the restore id of the directory; empty if it was never restored. Raise ValueError or DiskError.

    The log of a restored directory is another log than before: it repeats positions of records that the
    backup lacks. Only state that outlives the directory, such as a checkpoint of Spark, needs the difference.
    """
    path = os.path.join(data_dir, META_DIR, RESTORED)
    if not disk.exists(path):
        return ""
    fd = disk.open_read(path)
    try:
        found = disk.read_at(fd, _BYTES_MAX, 0)
    finally:
        disk.close(fd)
    if not _RESTORE_ID.fullmatch(found):
        raise ValueError(f"a restore id must be 16 hexadecimal digits, got {found[:32]!r}")
    return found.decode()


def newest_incarnation(disk: Disk, data_dir: str) -> int:
    """Return the highest incarnation in the names of log files, or 0 if there is none. Raise DiskError.

    The last incarnation of a shard always leaves a file: only closed files are absorbed by a snapshot, and
    only by a later incarnation or after a later file exists. Entries of `wal/` that are not directories are
    skipped here; their shard reports the error.
    """
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
