"""Snapshot files: the state of a shard's topics at a checkpoint.

`meta/snapshot-<shard:02d>.<number:016d>` has a header of 96 bytes and a body. The body has facts of the shard
and a table with one row for each topic. Both are opaque here.

byte   size  field
 0     8     magic           b"RLSNAP1\\0"
 8     4     version         1
 12    4     shard
 16    4     shards          number of shards of the engine (the layout)
 20    4     zero
 24    8     number          ascending; never used twice for a shard
 32    8     incarnation     of the shard that provided the rows
 40    8     created_us
 48    8     body_bytes      64 bits wide
 56    8     facts_bytes
 64    8     topics
 72    8     rows_bytes
 80    8     body_xxh3       XXH3-64 of the body
 88    8     header_xxh3     XXH3-64 of bytes 0..87

The body has four parts: the facts, padded with zeros to a multiple of 8; `topics` ids, ascending;
`topics` + 1 words with the start of each row and the end; the rows. Two snapshots of the same facts and rows
differ only in number, incarnation and time.

A file gets its name only after its bytes were synced and read back (D2). An invalid file was therefore
damaged later. The loader skips it, reports the reason and uses the previous one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ringlog.errors import CorruptData, DiskError
from ringlog.limits import RECOVERY_READ_BYTES
from ringlog.storage.disk import Disk
from ringlog.storage.layout import META_DIR, TMP_SUFFIX

U64 = npt.NDArray[np.uint64]

MAGIC = b"RLSNAP1\0"
VERSION = 1
HEADER_BYTES = 96
SHARD_MAX = 1 << 16
_HEADER = struct.Struct("<8sIIIIQQQQQQQQ")
_NAME = re.compile(r"^snapshot-(\d{2,5})\.(\d{16,19})$")


class Snapshot(NamedTuple):
    """One snapshot. Row i belongs to topic `ids[i]` and is `rows[starts[i] : starts[i + 1]]`."""

    number: int
    shard: int
    shards: int
    incarnation: int
    created_us: int
    facts: bytes
    ids: U64
    starts: U64
    """Start of each row, and the end of the last one: one word more than there are ids."""
    rows: bytes | memoryview

    def row(self, i: int) -> memoryview:
        """Return the bytes of row i."""
        return memoryview(self.rows)[int(self.starts[i]) : int(self.starts[i + 1])]


class SnapshotHeader(NamedTuple):
    """The fields of the header after the magic, in file order."""

    version: int
    shard: int
    shards: int
    zero: int
    number: int
    incarnation: int
    created_us: int
    body_bytes: int
    facts_bytes: int
    topics: int
    rows_bytes: int
    body_xxh3: int


def empty_snapshot(shard: int, shards: int) -> Snapshot:
    """Return the state before the first snapshot. Its number is 0, which no file has."""
    none = np.zeros(0, dtype=np.uint64)
    return Snapshot(0, shard, shards, 0, 0, b"", none, np.zeros(1, dtype=np.uint64), b"")


# -- names ------------------------------------------------------------------------------------------------


def snapshot_name(shard: int, number: int) -> str:
    """Return the file name of a snapshot below `meta/`."""
    return f"snapshot-{shard:02d}.{number:016d}"


def parse_snapshot_name(name: str) -> tuple[int, int] | None:
    """Return (shard, number) of a snapshot's file name, or None for any other name."""
    match = _NAME.match(name)
    if match is None:
        return None
    found = int(match[1]), int(match[2])
    return found if snapshot_name(*found) == name else None


# -- bytes ------------------------------------------------------------------------------------------------


def encode_snapshot(s: Snapshot) -> list[bytes]:
    """Return the file's bytes in pieces. The first piece is the header."""
    facts = s.facts + bytes(-len(s.facts) % 8)
    body = [facts, s.ids.astype("<u8").tobytes(), s.starts.astype("<u8").tobytes(), bytes(s.rows)]
    digest = xxhash.xxh3_64()
    for piece in body:
        digest.update(piece)
    head = _HEADER.pack(
        MAGIC, VERSION, s.shard, s.shards, 0, s.number, s.incarnation, s.created_us, sum(map(len, body)),
        len(s.facts), len(s.ids), len(s.rows), digest.intdigest(),
    )  # fmt: skip
    return [head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little"), *body]


def decode_header(data: bytes | memoryview, path: str) -> SnapshotHeader:
    """Decode and verify the first 96 bytes. Raise CorruptData with the path and the reason."""
    if len(data) < HEADER_BYTES:
        raise CorruptData(
            f"snapshot must have at least {HEADER_BYTES} bytes, got {len(data)}", file=path, bytes=len(data)
        )
    magic, *rest = _HEADER.unpack_from(data)
    header = SnapshotHeader(*rest)
    if magic != MAGIC:
        raise CorruptData(f"snapshot magic must be {MAGIC!r}, got {magic!r}", file=path, offset=0)
    stored = int.from_bytes(data[HEADER_BYTES - 8 : HEADER_BYTES], "little")
    if xxhash.xxh3_64_intdigest(bytes(data[: HEADER_BYTES - 8])) != stored:
        raise CorruptData("snapshot header: checksum mismatch", file=path, offset=0)
    if header.version != VERSION:
        raise CorruptData(
            f"snapshot version must be {VERSION}, got {header.version}; upgrade ringlog",
            file=path,
            version=header.version,
        )
    parts = _padded(header.facts_bytes) + 8 * (2 * header.topics + 1) + header.rows_bytes
    if header.zero or header.body_bytes != parts or not 0 <= header.shard < min(header.shards, SHARD_MAX):
        raise CorruptData("snapshot header: lengths or shard are inconsistent", file=path, offset=0)
    return header


def decode_snapshot(data: bytes | memoryview, path: str) -> Snapshot:
    """Decode and verify a whole file. The result contains views of `data`.

    Raises CorruptData with the path and the reason. Needs no more memory than the length of the file.
    """
    header = decode_header(data, path)
    view = memoryview(data)
    expected = HEADER_BYTES + header.body_bytes
    if len(view) != expected:
        raise CorruptData(
            f"snapshot must have {expected} bytes, got {len(view)}",
            file=path,
            bytes=len(view),
            expected=expected,
        )
    if xxhash.xxh3_64_intdigest(view[HEADER_BYTES:]) != header.body_xxh3:
        raise CorruptData("snapshot body: checksum mismatch", file=path, offset=HEADER_BYTES)
    n = header.topics
    ids_at = HEADER_BYTES + _padded(header.facts_bytes)
    ids = np.frombuffer(view, "<u8", n, ids_at)
    starts = np.frombuffer(view, "<u8", n + 1, ids_at + 8 * n)
    rows = view[ids_at + 8 * (2 * n + 1) :]
    if not _is_table(ids, starts, len(rows)):
        raise CorruptData("snapshot table: ids or row starts are inconsistent", file=path, offset=ids_at)
    facts = bytes(view[HEADER_BYTES : HEADER_BYTES + header.facts_bytes])
    return Snapshot(
        header.number, header.shard, header.shards, header.incarnation, header.created_us,
        facts, ids, starts, rows,
    )  # fmt: skip


def _padded(length: int) -> int:
    return (length + 7) // 8 * 8


def _is_table(ids: U64, starts: U64, rows_bytes: int) -> bool:
    is_ordered = bool((ids[1:] > ids[:-1]).all()) and bool((starts[1:] > starts[:-1]).all())
    return is_ordered and int(starts[0]) == 0 and int(starts[-1]) == rows_bytes


# -- files ------------------------------------------------------------------------------------------------


def write_snapshot(disk: Disk, data_dir: str, s: Snapshot) -> str:
    """Write, sync, read back and rename one snapshot (D2). Return its path relative to `data_dir`.

    Raises DiskError, and CorruptData if the file reads back differently. In both cases no file has the
    final name. Temporary files of this shard's earlier attempts are deleted.
    """
    meta = f"{data_dir}/{META_DIR}"
    relative = f"{META_DIR}/{snapshot_name(s.shard, s.number)}"
    path = f"{data_dir}/{relative}"
    temporary = path + TMP_SUFFIX
    disk.make_dir(meta)
    _remove_leftovers(disk, data_dir, s.shard)
    try:
        written = _write_synced(disk, temporary, encode_snapshot(s))
        _read_back(disk, temporary, written)
        disk.rename(temporary, path)
    except (DiskError, CorruptData):
        _remove_leftovers(disk, data_dir, s.shard)
        raise
    disk.sync_dir(meta)
    return relative


def _write_synced(disk: Disk, path: str, pieces: Sequence[bytes]) -> bytes:
    """Write the pieces to a new file and sync it. Return the header that was written."""
    fd = disk.create(path)
    try:
        offset = 0
        for piece in pieces:
            for start in range(0, len(piece), RECOVERY_READ_BYTES):
                offset += disk.write_at(fd, [piece[start : start + RECOVERY_READ_BYTES]], offset)
        disk.sync_file(fd)
    finally:
        disk.close(fd)
    return pieces[0]


def _read_back(disk: Disk, path: str, header: bytes) -> None:
    data = _read_whole(disk, path)
    decode_snapshot(data, path)
    if data[:HEADER_BYTES] != header:
        raise CorruptData("snapshot reads back differently than written", file=path)


def _read_whole(disk: Disk, path: str) -> bytes:
    fd = disk.open_read(path)
    try:
        return disk.read_at(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def _remove_leftovers(disk: Disk, data_dir: str, shard: int) -> None:
    for name in disk.list_dir(f"{data_dir}/{META_DIR}"):
        found = parse_snapshot_name(name.removesuffix(TMP_SUFFIX))
        if name.endswith(TMP_SUFFIX) and found is not None and found[0] == shard:
            disk.unlink(f"{data_dir}/{META_DIR}/{name}")


def snapshot_numbers(disk: Disk, data_dir: str) -> list[tuple[int, int]]:
    """Return (shard, number) of every snapshot file, sorted, including temporary and invalid files."""
    meta = f"{data_dir}/{META_DIR}"
    names = disk.list_dir(meta) if disk.exists(meta) else []
    return sorted({found for name in names if (found := parse_snapshot_name(name.removesuffix(TMP_SUFFIX)))})


def next_snapshot_number(disk: Disk, data_dir: str, shard: int, shards: int, at_least: int = 0) -> int:
    """Return a number greater than `at_least` and than all numbers that this shard has used.

    Under one layout (shard count) the numbers of a shard are consecutive. The first number under a new layout
    is greater than those of all shards under all other layouts: if two layouts have a row for a topic, the
    greater number wins.
    """
    own, foreign, unreadable = [at_least], [0], [0]
    for found in snapshot_numbers(disk, data_dir):
        try:
            is_foreign = snapshot_header(disk, data_dir, *found).shards != shards
        except (CorruptData, DiskError):
            unreadable.append(found[1] if found[0] == shard else 0)
            continue
        if is_foreign:
            foreign.append(found[1])
        elif found[0] == shard:
            own.append(found[1])
    newest = max(*own, *unreadable)
    if newest > max(foreign):
        return newest + 1
    return 1 + max([newest, *(number for _, number in snapshot_numbers(disk, data_dir))])


def load_snapshots(
    disk: Disk, data_dir: str, shard: int | None = None, *, most: int = 0
) -> tuple[list[Snapshot], list[str]]:
    """Return (valid snapshots, newest first; the skipped files as "path: reason").

    `shard` None = all shards. `most` is the number of valid snapshots after which the search ends; 0 = all. A
    file that cannot be read raises DiskError and is not skipped, because it may be readable later.
    """
    valid: list[Snapshot] = []
    skipped: list[str] = []
    for relative in _newest_first(disk, data_dir, shard):
        path = f"{data_dir}/{relative}"
        try:
            snapshot = decode_snapshot(_read_whole(disk, path), path)
            _require_named(snapshot, relative)
            valid.append(snapshot)
        except CorruptData as e:
            skipped.append(f"{relative}: {e.message}")
        if most and len(valid) == most:
            break
    return valid, skipped


def _newest_first(disk: Disk, data_dir: str, shard: int | None) -> Iterator[str]:
    meta = f"{data_dir}/{META_DIR}"
    found = [parse_snapshot_name(name) for name in (disk.list_dir(meta) if disk.exists(meta) else [])]
    named = [each for each in found if each is not None and shard in {None, each[0]}]
    for each in sorted(named, key=lambda one: (-one[1], one[0])):
        yield f"{META_DIR}/{snapshot_name(*each)}"


def _require_named(snapshot: Snapshot, relative: str) -> None:
    if relative != f"{META_DIR}/{snapshot_name(snapshot.shard, snapshot.number)}":
        raise CorruptData(
            "snapshot header does not match its file name", file=relative, number=snapshot.number
        )


def snapshot_header(disk: Disk, data_dir: str, shard: int, number: int) -> SnapshotHeader:
    """Return the verified header of one file. Raise CorruptData or DiskError."""
    path = f"{data_dir}/{META_DIR}/{snapshot_name(shard, number)}"
    fd = disk.open_read(path)
    try:
        return decode_header(disk.read_at(fd, HEADER_BYTES, 0), path)
    finally:
        disk.close(fd)


# -- rows -------------------------------------------------------------------------------------------------


def merge_rows(
    base: Snapshot, changed_ids: U64, lengths: U64, rows: bytes | memoryview
) -> tuple[U64, U64, bytes]:
    """Return (ids, starts, rows) of `base` after changes: rows are replaced, added, or removed (length 0).

    `changed_ids` may have any order. If an id occurs several times, its last row wins. Unchanged rows are
    copied in as few pieces as possible.
    """
    stops = np.cumsum(lengths, dtype=np.uint64)
    chosen = _last_of_each(changed_ids)
    kept = np.flatnonzero(~np.isin(base.ids, changed_ids[chosen], assume_unique=True))
    added = chosen[lengths[chosen] > 0]
    sizes = np.diff(base.starts)
    ids = np.concatenate([base.ids[kept], changed_ids[added]]).astype(np.uint64)
    starts = np.concatenate([base.starts[:-1][kept], (stops - lengths)[added]]).astype(np.int64)
    length = np.concatenate([sizes[kept], lengths[added]]).astype(np.int64)
    is_new = np.arange(len(ids)) >= len(kept)
    order = np.argsort(ids, kind="stable")
    merged = _gather((base.rows, rows), is_new[order], starts[order], length[order])
    return ids[order], np.concatenate([[0], np.cumsum(length[order])]).astype(np.uint64), merged


def _last_of_each(ids: U64) -> npt.NDArray[np.int64]:
    """Return the indices of the last occurrence of every id, ascending by id."""
    order = np.argsort(ids, kind="stable")
    is_last = np.ones(len(ids), dtype=bool)
    is_last[:-1] = ids[order][1:] != ids[order][:-1]
    return order[is_last]


def _gather(
    sources: tuple[Any, Any],
    is_new: npt.NDArray[np.bool_],
    starts: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
) -> bytes:
    """Concatenate rows. Rows that are adjacent in one source are copied together."""
    if not len(starts):
        return b""
    stops = starts + length
    breaks = np.flatnonzero((is_new[1:] != is_new[:-1]) | (starts[1:] != stops[:-1])) + 1
    first = np.concatenate([[0], breaks])
    last = np.concatenate([breaks, [len(starts)]]) - 1
    views = [memoryview(source) for source in sources]
    pieces = zip(is_new[first].tolist(), starts[first].tolist(), stops[last].tolist(), strict=True)
    return b"".join([views[which][start:stop] for which, start, stop in pieces])
