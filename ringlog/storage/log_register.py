"""`meta/log-NN`: which log file of a stream is the newest, said outside of the log.

A log says of itself what must be there, but for its newest file: nothing behind it speaks of it. So before
a file takes its first group its number is made durable here, and a start that does not find it knows that
what was acknowledged in it is missing. Beside it stand the last topic id and epoch given out by then: what
was made later was made in that file, so that no number is given out twice whatever else is lost.

Each incarnation makes the file anew. It has two entries of 4096 bytes, which that incarnation writes in turn
where they lie: one sync and no new space, and a write that is torn leaves the other. Entry `number` lies at
`number % 2`.

byte   size  field
 0     8     magic           b"RLOGREG1"
 8     4     version         1
 12    4     shard           as in the name
 16    8     number          of the entry, from 1
 24    16    engine_id       the data directory's identity
 40    8     last_id         given out when the file was begun
 48    8     last_epoch
 56    8     file_bytes      size the file was made with
 64    8     shards          how many shards there were
 72    8     file            pack_file(incarnation, n) of the newest file; 0 = none
 80    8     earlier         how many pairs follow
 88    16 ×  pairs           (shards, file): the newest file under each other number of shards, ascending
 4088  8     xxh3            XXH3-64 of bytes 0..4087 of the entry
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import xxhash

from ringlog.errors import CorruptData
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.layout import META_DIR

MAGIC = b"RLOGREG1"
VERSION = 1
ENTRY_BYTES = 4_096
_HEAD = struct.Struct("<8sIIQ16sQQQQQQ")
_PAIR = struct.Struct("<QQ")
EARLIER_MAX = (ENTRY_BYTES - 8 - _HEAD.size) // _PAIR.size
"""More shard counts than an engine may have."""
_NAME = re.compile(r"^log-(\d{2,5})$")


class RegisterEntry(NamedTuple):
    """What a register says."""

    shard: int
    number: int
    engine_id: bytes
    last_id: int
    last_epoch: int
    file_bytes: int
    shards: int
    file: int
    earlier: tuple[tuple[int, int], ...] = ()

    @property
    def newest_files(self) -> tuple[tuple[int, int], ...]:
        """(shards, file) of the newest file under each number of shards."""
        return ((self.shards, self.file), *self.earlier) if self.file else self.earlier

    def encode(self) -> bytes:
        """The 4096 bytes."""
        head = _HEAD.pack(
            MAGIC, VERSION, self.shard, self.number, self.engine_id, self.last_id, self.last_epoch,
            self.file_bytes, self.shards, self.file, len(self.earlier),
        )  # fmt: skip
        pairs = b"".join([_PAIR.pack(*pair) for pair in self.earlier])
        body = (head + pairs).ljust(ENTRY_BYTES - 8, b"\0")
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def register_name(shard: int) -> str:
    """File name of a stream's register, below `meta/`."""
    return f"log-{shard:02d}"


def parse_register_name(name: str) -> int | None:
    """Shard of a register's file name, or None for any other."""
    match = _NAME.match(name)
    return int(match[1]) if match and register_name(int(match[1])) == name else None


def encode_register(entry: RegisterEntry) -> bytes:
    """A register that holds this entry alone."""
    blank = bytes(ENTRY_BYTES)
    return blank + entry.encode() if entry.number % 2 else entry.encode() + blank


def decode_register(data: bytes, path: str) -> RegisterEntry:
    """The newest entry that verifies; raises CorruptData naming the path and what is wrong."""
    if len(data) != 2 * ENTRY_BYTES:
        raise CorruptData("the log's register has the wrong length", file=path, bytes=len(data))
    found = [_decode(data[at : at + ENTRY_BYTES], path) for at in (0, ENTRY_BYTES)]
    valid = [entry for place, entry in enumerate(found) if entry and entry.number % 2 == place]
    if not valid:
        raise CorruptData("the log's register does not verify", file=path, offset=0)
    return max(valid, key=lambda entry: entry.number)


def _decode(data: bytes, path: str) -> RegisterEntry | None:
    body = data[: ENTRY_BYTES - 8]
    if xxhash.xxh3_64_intdigest(body) != int.from_bytes(data[ENTRY_BYTES - 8 :], "little"):
        return None
    magic, version, shard, number, engine_id, last_id, last_epoch, file_bytes, shards, file, earlier = (
        _HEAD.unpack_from(body)
    )
    if magic != MAGIC:
        return None
    if version != VERSION:
        raise CorruptData(
            "register of the log of a version this engine does not know", file=path, version=version
        )
    if earlier > EARLIER_MAX:
        return None
    pairs = tuple(_PAIR.iter_unpack(body[_HEAD.size : _HEAD.size + earlier * _PAIR.size]))
    return RegisterEntry(shard, number, engine_id, last_id, last_epoch, file_bytes, shards, file, pairs)


def read_register(disk: Disk, data_dir: str, shard: int) -> RegisterEntry | None:
    """What a stream's register says, None when there is none; raises CorruptData, DiskError."""
    relative = f"{META_DIR}/{register_name(shard)}"
    path = f"{data_dir}/{relative}"
    if not disk.exists(path):
        return None
    fd = disk.open_read(path)
    try:
        entry = decode_register(disk.read_at(fd, 2 * ENTRY_BYTES + 1, 0), relative)
    finally:
        disk.close(fd)
    if entry.shard != shard:
        raise CorruptData("register of another stream under this name", file=relative, shard=entry.shard)
    return entry


def registered_shards(disk: Disk, data_dir: str) -> list[int]:
    """Streams that have a register, ascending."""
    meta = f"{data_dir}/{META_DIR}"
    names = disk.list_dir(meta) if disk.exists(meta) else []
    return sorted(found for name in names if (found := parse_register_name(name)) is not None)


class LogRegister:
    """The register of the stream that this incarnation writes.

    Its file stays open, so that a process which has no descriptor left can still begin its next log file.
    """

    def __init__(self, disk: Disk, data_dir: str, shard: int) -> None:
        self._disk, self._data_dir, self._shard = disk, data_dir, shard
        self._entry: RegisterEntry | None = None
        self._fd = -1

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def record_newest_file(
        self, engine_id: bytes, shards: int, file: int, file_bytes: int, last_identity: tuple[int, int]
    ) -> None:
        """Make durable that this is the stream's newest file; raises DiskError.

        The first time a new file takes the place of the predecessor's, of which nobody knows how durable it
        is. One that does not verify is replaced, too: whether that matters was decided by recovery.
        """
        before = self._entry
        if before is None:
            try:
                before = read_register(self._disk, self._data_dir, self._shard)
            except CorruptData:
                before = None
        earlier = dict(before.newest_files) if before else {}
        earlier.pop(shards, None)
        number = self._entry.number + 1 if self._entry else 1
        entry = RegisterEntry(
            self._shard, number, engine_id, *last_identity, file_bytes, shards, file,
            tuple(sorted(earlier.items())[-EARLIER_MAX:]),
        )  # fmt: skip
        if self._entry is None:
            self._make(entry)
        else:
            self._overwrite(entry)
        self._entry = entry

    def _make(self, entry: RegisterEntry) -> None:
        meta = f"{self._data_dir}/{META_DIR}"
        self._disk.make_dir(meta)
        self._disk.sync_dir(self._data_dir)
        replace_file(self._disk, meta, register_name(self._shard), encode_register(entry))
        self._fd = self._disk.open_marks(f"{meta}/{register_name(self._shard)}")

    def _overwrite(self, entry: RegisterEntry) -> None:
        self._disk.write_at(self._fd, [entry.encode()], entry.number % 2 * ENTRY_BYTES)
        self._disk.sync_data(self._fd)
