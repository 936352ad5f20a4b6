"""Reliable copies of data files: content, sizes, checksums and syncs.

A copy is never a hard link: the engine rejects files with two names, because another process could change
them through the second name. All writes go through a Disk, so that tests can make every call fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from ringlog.errors import CorruptData, UsageError
from ringlog.storage.disk import Disk
from ringlog.storage.identity_file import decode_identity, encode_identity
from ringlog.storage.log_register import decode_register, encode_register, parse_register_name

MANIFEST = "manifest.json"
ENGINE_FILE = "meta/engine"
COLD = "cold/"
"""Prefix of cold tier files in a backup."""
_PIECE_BYTES = 1 << 22


class ManifestEntry(msgspec.Struct, frozen=True):
    """One file of a backup."""

    path: str
    """Relative to the data directory; with the prefix `cold/`, relative to the cold tier."""
    bytes: int
    xxh3_128: str


class BackupManifest(msgspec.Struct, frozen=True):
    """Content of a backup."""

    format: int
    engine_id: str
    version: str
    created_us: int
    is_online: bool
    files: list[ManifestEntry]

    @property
    def total(self) -> int:
        """Size of all files in bytes."""
        return sum(entry.bytes for entry in self.files)


def make_empty(disk: Disk, directory: Path) -> None:
    """Create a directory with mode 0700; raise UsageError if it is not empty, and DiskError."""
    make_dirs(disk, directory)
    if any(directory.iterdir()):
        raise UsageError("the target directory must be new or empty", path=str(directory))


def make_dirs(disk: Disk, directory: Path) -> None:
    """Create a directory and its missing parents with mode 0700."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        disk.make_dir(str(each))


def copy_file(disk: Disk, source: Path, target: Path) -> ManifestEntry:
    """Copy one file with mode 0600 and sync it; return the entry of the copy, read back. Raise DiskError."""
    with source.open("rb") as reading:
        return copy_open_file(disk, reading, target)


def copy_open_file(disk: Disk, reading: BinaryIO, target: Path) -> ManifestEntry:
    """Copy a file that is open, and may have lost its name, as `copy_file` does."""
    _write_pieces(disk, target, iter(partial(reading.read, _PIECE_BYTES), b""))
    return entry_of(target, target.name)


def _write_pieces(disk: Disk, path: Path, pieces: Iterable[bytes]) -> None:
    make_dirs(disk, path.parent)
    fd = disk.create(str(path))
    try:
        at = 0
        for piece in pieces:
            at += disk.write_at(fd, [piece], at)
        disk.sync_file(fd)
    finally:
        disk.close(fd)


def copy_identity(disk: Disk, source: Path, target: Path) -> ManifestEntry:
    """Copy `meta/engine` without the path of its shared memory: an engine on the copy must not delete it."""
    try:
        facts = decode_identity((source / ENGINE_FILE).read_bytes())
    except ValueError as e:
        raise CorruptData("meta/engine is damaged", file=ENGINE_FILE, reason=str(e)) from None
    write_synced(disk, target / ENGINE_FILE, encode_identity(facts.engine_id, facts.next_incarnation, ""))
    return entry_of(target / ENGINE_FILE, ENGINE_FILE)


def read_registers(source: Path) -> dict[str, bytes]:
    """Return the current content of the registers by path; an engine may write to them meanwhile.

    Raises CorruptData."""
    meta = (source / ENGINE_FILE).parent
    names = sorted(path.name for path in meta.iterdir()) if meta.is_dir() else []
    paths = [f"{meta.name}/{name}" for name in names if parse_register_name(name) is not None]
    return {path: encode_register(decode_register((source / path).read_bytes(), path)) for path in paths}


def truncate_file(disk: Disk, path: Path, length: int) -> None:
    """Truncate a file to `length` bytes and sync it."""
    fd = disk.open_for_truncate(str(path))
    try:
        disk.truncate(fd, length)
        disk.sync_file(fd)
    finally:
        disk.close(fd)


def entry_of(path: Path, name: str) -> ManifestEntry:
    """Return the size and checksum of a file on disk, under a given name."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return ManifestEntry(name, size, digest.hexdigest())


def sync_tree(disk: Disk, root: Path) -> None:
    """Make the names of `root` and of all files below it durable."""
    for directory in [root.parent, root, *(path for path in root.rglob("*") if path.is_dir())]:
        disk.sync_dir(str(directory))


def write_manifest(disk: Disk, root: Path, manifest: BackupManifest) -> None:
    """Write the manifest last, when all listed files are durable. A directory without one is no backup."""
    sync_tree(disk, root)
    unfinished = root / f"{MANIFEST}.tmp"
    write_synced(disk, unfinished, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    disk.rename(str(unfinished), str(root / MANIFEST))
    disk.sync_dir(str(root))


def write_synced(disk: Disk, path: Path, data: bytes) -> None:
    """Create a file with mode 0600 and these bytes, and sync it."""
    _write_pieces(disk, path, [data])


def read_manifest(root: Path) -> BackupManifest:
    """Read the manifest; raise UsageError if the directory is no backup, CorruptData if it is damaged."""
    try:
        manifest = msgspec.json.decode((root / MANIFEST).read_bytes(), type=BackupManifest)
    except FileNotFoundError:
        raise UsageError("not a backup, or one that was not finished: no manifest", path=str(root)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CorruptData("the manifest cannot be read", file=str(root / MANIFEST), reason=str(e)) from None
    if manifest.format != 1:
        raise UsageError("unsupported backup format: use a newer ringlog", format=manifest.format)
    for entry in manifest.files:
        parts = Path(entry.path).parts
        if not parts or ".." in parts or os.path.isabs(entry.path):
            raise CorruptData("the manifest names a path outside of the backup", path=entry.path)
    return manifest


def changed_files(root: Path, entries: Iterable[ManifestEntry]) -> list[str]:
    """Return the files that differ from the manifest, as "path: reason"."""
    wrong = []
    for entry in entries:
        try:
            found = entry_of(root / entry.path, entry.path)
        except OSError as e:
            wrong.append(f"{entry.path}: {e.strerror}")
            continue
        if found.bytes != entry.bytes:
            wrong.append(f"{entry.path}: {found.bytes} bytes, the manifest says {entry.bytes}")
        elif found != entry:
            wrong.append(f"{entry.path}: checksum differs from the manifest's")
    return wrong


def with_path(entry: ManifestEntry, path: str) -> ManifestEntry:
    """Return a copy of the entry with another path."""
    return ManifestEntry(path, entry.bytes, entry.xxh3_128)
