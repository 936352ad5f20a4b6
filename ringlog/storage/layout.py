"""Names and headers of files in the data directory. Pure.

<data>/LOCK                                 one engine per directory (advisory lock)
<data>/meta/engine                          engine id and the incarnation counter, replaced atomically
<data>/meta/log-NN                          which log file of a stream is the newest (log_register.py)
<data>/wal/shard-NN/LOCK                    held by the shard that writes there
<data>/wal/shard-NN/wal-<incarnation>-<n>.log

A WAL file belongs to one incarnation, which made it with O_EXCL; nobody else ever appends to it.
It opens with one header of 4096 bytes, then come groups of frames, then zeros (it is preallocated):

byte   size  field
 0     8     magic           b"RLOGWAL1"
 8     4     version         1
 12    4     shard           number of the shard that wrote it
 16    4     shards          how many shards there were: the layout
 20    4     n               number of the file within its incarnation, from 0
 24    8     incarnation
 32    8     salt            seed of every seal in this file; random, never 0
 40    16    boot_id         the kernel's boot identity
 56    16    engine_id       the data directory's identity
 72    8     created_us
 80    8     file_bytes      size the file was made with
 88    8     prev_file       pack_file(incarnation, n) of the file before it in this stream, or 0
 96    8     prev_stop       where its bytes end that were known to be durable
 104   8     prev_seal       seal of the frame that ends there, or 0
 112   8     flags           bit 0: the predecessor ended in good order; bit 1: meta/log-NN names the newest
                             file of the stream
 4088  8     header_xxh3     XXH3-64 of bytes 0..4087

The first frame of every group is a GROUP_MARK, whose MessagePack body is [group, prev_stop,
prev_seal, durable_stop, group_bytes, flags, settled]: the group's number in this file, where the
previous group ended and its last seal (the chain), how far a sync had succeeded when this was
written, how many bytes the group has (mark included), flags (1 = MARK_COPIED: all that was in doubt
in earlier files lies again in this file before this mark, and is synced; 2 = MARK_ORDERLY: the last
mark of an orderly stop), and, with MARK_COPIED, pairs [file, stop]: where each earlier file that
held doubtful frames ends from now on, for the topics of the shard that says so; and then, perhaps, the
numbers of those of them that were cut at damage. A mark without further frames follows when a stream
goes idle. An incarnation whose files have no MARK_COPIED did not get through its recovery: what it
wrote is a copy of what still lies in earlier files, and is passed over.

To change a layout: new version number, teach the readers both, then write it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import xxhash

from ringlog.errors import CorruptData
from ringlog.limits import CREATE_BYTES_MIN, WAL_HEADER_BYTES

WAL_MAGIC = b"RLOGWAL1"
WAL_VERSION = 1
WAL_FLAG_PREV_ORDERLY = 1
WAL_FLAG_REGISTERED = 2
MARK_COPIED = 1
MARK_ORDERLY = 2

_HEADER = struct.Struct("<8sIIIIQQ16s16sQQQQQQ")
_NAME = re.compile(r"^wal-(\d+)-(\d+)\.log$")
_SHARD_DIR = re.compile(r"^shard-(\d+)$")

LOCK_NAME = "LOCK"
WAL_DIR = "wal"
META_DIR = "meta"
QUARANTINE_DIR = "quarantine"
"""Copies of damaged files; nobody reads them."""
COLD_OWNER = "cold-owner"
"""In `meta/`: this directory has had a cold tier. Segments without their data part here may lie there."""
TMP_SUFFIX = ".tmp"


def shard_dir(shard: int) -> str:
    """Directory of a shard's stream below `wal/`."""
    return f"shard-{shard:02d}"


def parse_shard_dir(name: str) -> int | None:
    """Shard number of a stream directory, or None for a name that is not one."""
    match = _SHARD_DIR.match(name)
    return int(match[1]) if match else None


def wal_name(incarnation: int, n: int) -> str:
    """File name of a WAL file."""
    return f"wal-{incarnation}-{n}.log"


def parse_wal_name(name: str) -> tuple[int, int] | None:
    """(incarnation, n) of a WAL file's name, or None for a name that is not one."""
    match = _NAME.match(name)
    return (int(match[1]), int(match[2])) if match else None


def pack_file(incarnation: int, n: int) -> int:
    """One number for (incarnation, n) that orders like the pair. Never 0, since incarnations begin at 1."""
    return (incarnation << 24) | n


def unpack_file(file_id: int) -> tuple[int, int]:
    """Inverse of pack_file."""
    return file_id >> 24, file_id & 0xFFFFFF


def ids_upper_bound(known: tuple[int, int], file_bytes: int, shards: int) -> tuple[int, int]:
    """(topic_id, epoch) above all that may have been given out beyond those `known`, in log of that size of
    which nobody knows what it held."""
    topics = file_bytes // CREATE_BYTES_MIN + 1
    # A shard gives out those ids that a hash leads to it: of many every so-many-th one.
    return known[0] + 4 * shards * topics, known[1] + topics


@dataclass(frozen=True, slots=True)
class WalHeader:
    """First 4096 bytes of a WAL file."""

    shard: int
    shards: int
    n: int
    incarnation: int
    salt: int
    boot_id: bytes
    engine_id: bytes
    created_us: int
    file_bytes: int
    prev_file: int
    prev_stop: int
    prev_seal: int
    flags: int

    @property
    def file_id(self) -> int:
        """The file's number as it travels in messages and on the board."""
        return pack_file(self.incarnation, self.n)

    def encode(self) -> bytes:
        """The 4096 bytes."""
        body = _HEADER.pack(
            WAL_MAGIC, WAL_VERSION, self.shard, self.shards, self.n, self.incarnation, self.salt,
            self.boot_id, self.engine_id, self.created_us, self.file_bytes, self.prev_file,
            self.prev_stop, self.prev_seal, self.flags,
        ).ljust(WAL_HEADER_BYTES - 8, b"\0")  # fmt: skip
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def header_verifies(data: bytes) -> bool:
    """Was this header written whole? Not if it is blank, as in a file that was made and never opened."""
    if len(data) < WAL_HEADER_BYTES:
        return False
    body, stored = data[: WAL_HEADER_BYTES - 8], data[WAL_HEADER_BYTES - 8 : WAL_HEADER_BYTES]
    return xxhash.xxh3_64_intdigest(body) == int.from_bytes(stored, "little")


def decode_wal_header(data: bytes, path: str) -> WalHeader:
    """Decode and verify; raises CorruptData naming the path and what is wrong."""
    if len(data) < WAL_HEADER_BYTES:
        raise CorruptData("WAL file is shorter than its header", file=path, bytes=len(data))
    if not header_verifies(data):
        raise CorruptData("WAL file header does not verify", file=path, offset=0)
    magic, version, *rest = _HEADER.unpack_from(data)
    if magic != WAL_MAGIC:
        raise CorruptData("not a WAL file", file=path, offset=0)
    if version != WAL_VERSION:
        raise CorruptData("WAL file of a version this engine does not know", file=path, version=version)
    return WalHeader(*rest)
