"""Names and headers of files in the data directory. Pure.

<data>/LOCK                                 one engine per directory (advisory lock)
<data>/meta/engine                          engine id and the incarnation counter, replaced atomically
<data>/meta/log-NN                          newest log file of a shard (log_register.py)
<data>/wal/shard-NN/LOCK                    locked by the shard that writes there
<data>/wal/shard-NN/wal-<incarnation>-<n>.log

One incarnation creates a WAL file with O_EXCL, and only this incarnation appends to it (D3). A file has
one header of 4096 bytes, then commit batches of frames, then zeros, because the file is preallocated:

byte   size  field
 0     8     magic           b"RLOGWAL1"
 8     4     version         1
 12    4     shard           number of the shard that wrote it
 16    4     shards          number of shards of the engine at that time (the layout)
 20    4     n               number of the file within its incarnation, from 0
 24    8     incarnation
 32    8     salt            seed of every seal in this file; random, never 0
 40    16    boot_id         the kernel's boot identity
 56    16    engine_id       the data directory's identity
 72    8     created_us
 80    8     file_bytes      size with which the file was created
 88    8     prev_file       pack_file(incarnation, n) of the shard's previous file, or 0
 96    8     prev_stop       offset up to which the previous file was known to be durable
 104   8     prev_seal       seal of the frame that ends there, or 0
 112   8     flags           bit 0: the previous file was closed in an orderly stop; bit 1: meta/log-NN
                             names the newest file of the shard
 4088  8     header_xxh3     XXH3-64 of bytes 0..4087

The first frame of every commit batch is a GROUP_MARK, the chain mark. Its MessagePack body is [group,
prev_stop, prev_seal, durable_stop, group_bytes, flags, settled]:

group         number of the commit batch in this file
prev_stop     offset at which the previous commit batch ended
prev_seal     seal of its last frame (the chain)
durable_stop  offset up to which the file was synced when this mark was written
group_bytes   bytes of the commit batch, the mark included
flags         1 = MARK_COPIED: this file contains, before this mark, synced copies of all frames of earlier
              files that were in doubt; 2 = MARK_ORDERLY: last mark of an orderly stop
settled       only with MARK_COPIED: pairs [file, stop], the valid end of each earlier file with frames in
              doubt, and of streams of another shard count that ended in order, for topics of this shard;
              optionally followed by the numbers of those files that were cut at damage

A shard whose log is idle writes a mark without further frames. If no file of an incarnation has a
MARK_COPIED, its recovery did not finish. Its files then only copy frames of earlier files, and recovery
ignores them.

To change a layout, add a version number, teach the readers both versions, and only then write the new one.
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
"""Directory for copies of damaged files. The engine does not read them."""
COLD_OWNER = "cold-owner"
"""File in `meta/` that marks a directory with a cold tier. Missing data parts of segments may lie there."""
RESTORED = "restored"
"""File in `meta/` of a directory that `ringlog restore` made: its restore id, 16 random hex digits."""
TMP_SUFFIX = ".tmp"


def shard_dir(shard: int) -> str:
    """Return the name of a shard's directory below `wal/`."""
    return f"shard-{shard:02d}"


def parse_shard_dir(name: str) -> int | None:
    """Return the shard number of a directory name, or None if it is not a shard directory."""
    match = _SHARD_DIR.match(name)
    return int(match[1]) if match else None


def wal_name(incarnation: int, n: int) -> str:
    """Return the file name of a WAL file."""
    return f"wal-{incarnation}-{n}.log"


def parse_wal_name(name: str) -> tuple[int, int] | None:
    """Return (incarnation, n) of a WAL file's name, or None if it is not a WAL file."""
    match = _NAME.match(name)
    return (int(match[1]), int(match[2])) if match else None


def pack_file(incarnation: int, n: int) -> int:
    """Return one integer that orders like (incarnation, n). It is never 0: incarnations begin at 1."""
    return (incarnation << 24) | n


def unpack_file(file_id: int) -> tuple[int, int]:
    """Return (incarnation, n); the inverse of pack_file."""
    return file_id >> 24, file_id & 0xFFFFFF


def ids_upper_bound(known: tuple[int, int], file_bytes: int, shards: int) -> tuple[int, int]:
    """Return a (topic_id, epoch) above all that the shard can have assigned.

    `known` is the last known pair. `file_bytes` is the size of the log after it whose contents are unknown.
    """
    topics = file_bytes // CREATE_BYTES_MIN + 1
    # A shard assigns only ids that hash to itself: on average one id in `shards`.
    return known[0] + 4 * shards * topics, known[1] + topics


@dataclass(frozen=True, slots=True)
class WalHeader:
    """The first 4096 bytes of a WAL file."""

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
        """Number of the file in messages and on the board, see pack_file."""
        return pack_file(self.incarnation, self.n)

    def encode(self) -> bytes:
        """Return the 4096 bytes."""
        body = _HEADER.pack(
            WAL_MAGIC, WAL_VERSION, self.shard, self.shards, self.n, self.incarnation, self.salt,
            self.boot_id, self.engine_id, self.created_us, self.file_bytes, self.prev_file,
            self.prev_stop, self.prev_seal, self.flags,
        ).ljust(WAL_HEADER_BYTES - 8, b"\0")  # fmt: skip
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def header_verifies(data: bytes) -> bool:
    """Return whether the header is complete. It is blank if the file was created and never written."""
    if len(data) < WAL_HEADER_BYTES:
        return False
    body, stored = data[: WAL_HEADER_BYTES - 8], data[WAL_HEADER_BYTES - 8 : WAL_HEADER_BYTES]
    return xxhash.xxh3_64_intdigest(body) == int.from_bytes(stored, "little")


def decode_wal_header(data: bytes, path: str) -> WalHeader:
    """Decode and verify a header. Raise CorruptData with the path and the reason."""
    if len(data) < WAL_HEADER_BYTES:
        raise CorruptData(
            f"WAL file must have at least {WAL_HEADER_BYTES} bytes, got {len(data)}",
            file=path,
            bytes=len(data),
        )
    if not header_verifies(data):
        raise CorruptData("WAL file header: checksum mismatch", file=path, offset=0)
    magic, version, *rest = _HEADER.unpack_from(data)
    if magic != WAL_MAGIC:
        raise CorruptData(f"WAL file magic must be {WAL_MAGIC!r}, got {magic!r}", file=path, offset=0)
    if version != WAL_VERSION:
        raise CorruptData(
            f"WAL file version must be {WAL_VERSION}, got {version}; upgrade ringlog",
            file=path,
            version=version,
        )
    return WalHeader(*rest)
