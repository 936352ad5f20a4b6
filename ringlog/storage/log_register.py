"""`meta/log-NN`: the register, a file outside of the log that names the newest log file of a shard.

Each log file proves which earlier files must exist, but no later file proves the existence of the newest
one. The shard therefore writes the file's number durably into the register before the first commit batch of
that file. If the file is missing at a start, recovery knows that acknowledged records are missing. The
register also stores the last topic id and epoch assigned before that file. Later ids were assigned in that
file, so that no id is assigned twice, whatever else is lost.

Each incarnation creates the file again. The file has two entries of 4096 bytes. The incarnation overwrites
them alternately in place: one sync, no new space, and a torn write leaves the other entry valid. Entry
`number` lies at index `number % 2`.

byte   size  field
 0     8     magic           b"RLOGREG1"
 8     4     version         1
 12    4     shard           as in the file name
 16    8     number          number of the entry, from 1
 24    16    engine_id       the data directory's identity
 40    8     last_id         last topic id assigned before the log file
 48    8     last_epoch      last epoch assigned before the log file
 56    8     file_bytes      size with which the log file was created
 64    8     shards          number of shards of the engine
 72    8     file            pack_file(incarnation, n) of the newest file; 0 = none
 80    8     earlier         number of pairs that follow
 88    16 ×  pairs           (shards, file): newest file under each other number of shards, ascending
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
"""Greatest number of pairs in an entry. An engine has fewer different shard counts."""
_NAME = re.compile(r"^log-(\d{2,5})$")


class RegisterEntry(NamedTuple):
    """One entry of a register."""

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
        """Return the 4096 bytes."""
        head = _HEAD.pack(
            MAGIC, VERSION, self.shard, self.number, self.engine_id, self.last_id, self.last_epoch,
            self.file_bytes, self.shards, self.file, len(self.earlier),
        )  # fmt: skip
        pairs = b"".join([_PAIR.pack(*pair) for pair in self.earlier])
        body = (head + pairs).ljust(ENTRY_BYTES - 8, b"\0")
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def register_name(shard: int) -> str:
    """Return the file name of a shard's register below `meta/`."""
    return f"log-{shard:02d}"


def parse_register_name(name: str) -> int | None:
    """Return the shard number of a register's file name, or None for any other name."""
    match = _NAME.match(name)
    return int(match[1]) if match and register_name(int(match[1])) == name else None


def encode_register(entry: RegisterEntry) -> bytes:
    """Return the bytes of a register that contains only this entry."""
    blank = bytes(ENTRY_BYTES)
    return blank + entry.encode() if entry.number % 2 else entry.encode() + blank


def decode_register(data: bytes, path: str) -> RegisterEntry:
    """Return the newest valid entry. Raise CorruptData with the path and the reason if there is none."""
    if len(data) != 2 * ENTRY_BYTES:
        raise CorruptData(
            f"log register must have {2 * ENTRY_BYTES} bytes, got {len(data)}", file=path, bytes=len(data)
        )
    found = [_decode(data[at : at + ENTRY_BYTES], path) for at in (0, ENTRY_BYTES)]
    valid = [entry for place, entry in enumerate(found) if entry and entry.number % 2 == place]
    if not valid:
        raise CorruptData("log register has no valid entry", file=path, offset=0)
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
            f"log register version must be {VERSION}, got {version}; upgrade ringlog",
            file=path,
            version=version,
        )
    if earlier > EARLIER_MAX:
        return None
    pairs = tuple(_PAIR.iter_unpack(body[_HEAD.size : _HEAD.size + earlier * _PAIR.size]))
    return RegisterEntry(shard, number, engine_id, last_id, last_epoch, file_bytes, shards, file, pairs)


def read_register(disk: Disk, data_dir: str, shard: int) -> RegisterEntry | None:
    """Return the valid entry of a shard's register, or None without one. Raise CorruptData or DiskError."""
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
        raise CorruptData(
            f"log register must belong to shard {shard}, got shard {entry.shard}",
            file=relative,
            shard=entry.shard,
        )
    return entry


def registered_shards(disk: Disk, data_dir: str) -> list[int]:
    """Return the numbers of shards that have a register, ascending."""
    meta = f"{data_dir}/{META_DIR}"
    names = disk.list_dir(meta) if disk.exists(meta) else []
    return sorted(found for name in names if (found := parse_register_name(name)) is not None)


class LogRegister:
    """The register of the shard's log that this incarnation writes.

    The file stays open: a process without free descriptors can still begin its next log file.
    """

    def __init__(self, disk: Disk, data_dir: str, shard: int) -> None:
        self._disk, self._data_dir, self._shard = disk, data_dir, shard
        self._entry: RegisterEntry | None = None
        self._fd = -1

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def record_newest_file(
        self, engine_id: bytes, shards: int, file: int, file_bytes: int, last_identity: tuple[int, int]
    ) -> None:
        """Make durable that `file` is the shard's newest log file. Raise DiskError.

        The first call creates the register again, because the durability of the predecessor's register is
        unknown. A register that does not verify is replaced as well: recovery has already decided whether
        that matters.
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
        self._fd = self._disk.open_for_overwrite(f"{meta}/{register_name(self._shard)}")

    def _overwrite(self, entry: RegisterEntry) -> None:
        self._disk.write_at(self._fd, [entry.encode()], entry.number % 2 * ENTRY_BYTES)
        self._disk.sync_data(self._fd)
