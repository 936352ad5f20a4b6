"""Files of an archive: names, manifests and commit. All disk changes go through a Disk.

    topic=<name>/dt=<date>/part-<epoch>-<first_seq>-<run>-<random>.parquet    committed
    topic=<name>/dt=<date>/_part-….parquet                                    written by a task, not committed
    _ringlog/manifest-<number>.json     a committed run: its bounds and files
    _ringlog/open.json                  a run whose commit is in progress
    _ringlog/LOCK                       locked by the running archive job

Spark, Arrow and Hive ignore names that begin with `_`, so a reader of the directory never sees a row twice. A
run commits by writing open.json, which lists all its files. From then on the commit always completes, even
after a crash: the files lose their underscore, then open.json is renamed to the manifest. Partition values
are escaped as in Hive.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import msgspec
import xxhash

from ringlog.errors import CorruptData, DiskError, NotReady
from ringlog.spark.errors import OptionError
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.real_disk import RealDisk

VERSION = 1
STATE_DIR, OPEN, LOCK = "_ringlog", "open.json", "LOCK"
MANIFEST_PREFIX, JSON_SUFFIX = "manifest-", ".json"
HIDDEN = "_"
MANIFEST_BYTES_MAX = 1 << 30
_HELD = frozenset({errno.EAGAIN, errno.EACCES})
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


class ArchivedFile(msgspec.Struct, frozen=True):
    """One Parquet file: `rows` records of one epoch and one day (UTC) of a topic.

    `ts_*` are in microseconds.
    """

    file: str
    """Path relative to the archive."""
    topic: str
    epoch: int
    dt: str
    first_seq: int
    last_seq: int
    rows: int
    bytes: int
    ts_min: int
    ts_max: int
    xxh3: str
    """XXH3-64 of the file, hexadecimal."""


class ArchivedRange(msgspec.Struct, frozen=True):
    """The archive contains the live records of positions after + 1 .. until of one epoch of a topic."""

    topic: str
    epoch: int
    after: int
    until: int


class ArchivedGap(msgspec.Struct, frozen=True):
    """Positions that were lost before they were archived."""

    topic: str
    epoch: int
    gap_from: int
    gap_to: int
    reason: str


class ArchiveManifest(msgspec.Struct, frozen=True):
    """One committed run."""

    v: int
    log: str
    """Identity of the data directory."""
    number: int
    created_us: int
    bounds: tuple[ArchivedRange, ...]
    files: tuple[ArchivedFile, ...]
    gaps: tuple[ArchivedGap, ...] = ()


def directory_of(topic: str, dt: str) -> str:
    """Return the directory of a topic's day, relative to the archive."""
    return f"topic={_escaped(topic)}/dt={dt}"


def topic_of(directory: str) -> str:
    """Return the topic of a path from directory_of."""
    return unquote(directory.split("/", 1)[0].removeprefix("topic="))


def _escaped(name: str) -> str:
    return "".join(c if c in _PLAIN else "".join(f"%{byte:02X}" for byte in c.encode()) for c in name)


def hidden_name(file: str) -> str:
    """Return the name of a file before its commit."""
    directory, _, name = file.rpartition("/")
    return f"{directory}/{HIDDEN}{name}"


class Archive:
    """An archive directory. Every method may raise DiskError."""

    def __init__(self, directory: str, disk: Disk | None = None) -> None:
        self.directory: str = os.path.abspath(directory)
        self.disk: Disk = disk or RealDisk()
        self._state = os.path.join(self.directory, STATE_DIR)

    def make(self) -> Archive:
        """Create the directory if it is missing; return self. Its parent must exist."""
        for path in (self.directory, self._state):
            if not self.disk.exists(path):
                self.disk.make_dir(path)
                self.disk.sync_dir(os.path.dirname(path))
        return self

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the archive for this run; raise NotReady if another run holds the lock."""
        try:
            fd = self.disk.lock(os.path.join(self._state, LOCK))
        except DiskError as e:
            if e.errno in _HELD:
                raise NotReady("another run writes this archive", archive=self.directory) from None
            raise
        try:
            yield
        finally:
            self.disk.unlock(fd)

    # -- reading ------------------------------------------------------------------------------------

    def manifests(self) -> list[ArchiveManifest]:
        """Return all committed runs, oldest first; raise CorruptData if a manifest is damaged."""
        if not self.disk.exists(self._state):
            return []
        names = [name for name in self.disk.list_dir(self._state) if name.startswith(MANIFEST_PREFIX)]
        return [self._read(name) for name in sorted(names) if name.endswith(JSON_SUFFIX)]

    def _read(self, name: str) -> ArchiveManifest:
        path = os.path.join(self._state, name)
        fd = self.disk.open_read(path)
        try:
            data = self.disk.read_at(fd, min(self.disk.size(fd), MANIFEST_BYTES_MAX), 0)
        finally:
            self.disk.close(fd)
        try:
            found = msgspec.json.decode(data, type=ArchiveManifest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise CorruptData("a manifest of the archive is damaged", file=path, reason=str(e)) from None
        if found.v != VERSION:
            raise CorruptData("unsupported manifest version: use a newer ringlog", file=path, version=found.v)
        return found

    # -- committing ---------------------------------------------------------------------------------

    def commit(self, manifest: ArchiveManifest) -> None:
        """Commit this run. After the first step, a crash does not undo the commit."""
        replace_file(self.disk, self._state, OPEN, msgspec.json.encode(manifest))
        self._finish(manifest)

    def recover(self) -> bool:
        """Finish the commit of a run that died; return whether there was one."""
        if not self.disk.exists(os.path.join(self._state, OPEN)):
            return False
        self._finish(self._read(OPEN))
        return True

    def _finish(self, manifest: ArchiveManifest) -> None:
        directories = set()
        for each in manifest.files:
            source = os.path.join(self.directory, hidden_name(each.file))
            if self.disk.exists(source):
                self.disk.rename(source, os.path.join(self.directory, each.file))
            directories.add(os.path.dirname(os.path.join(self.directory, each.file)))
        for directory in sorted(directories):
            self.disk.sync_dir(directory)
        name = f"{MANIFEST_PREFIX}{manifest.number:012d}{JSON_SUFFIX}"
        self.disk.rename(os.path.join(self._state, OPEN), os.path.join(self._state, name))
        self.disk.sync_dir(self._state)

    def sweep(self) -> int:
        """Delete files of runs that never committed; return their number. Call only while locked."""
        count = 0
        for topic in self._directories(self.directory, "topic="):
            for day in self._directories(topic, "dt="):
                for name in self.disk.list_dir(day):
                    if name.startswith(f"{HIDDEN}part-"):
                        self.disk.unlink(os.path.join(day, name))
                        count += 1
        return count

    def _directories(self, path: str, prefix: str) -> list[str]:
        return [os.path.join(path, name) for name in self.disk.list_dir(path) if name.startswith(prefix)]

    # -- writing, in tasks --------------------------------------------------------------------------

    def create(self, topic: str, dt: str, epoch: int, first_seq: int, run: str) -> ArchiveStream:
        """Create a new hidden file. Each attempt of a task writes its own."""
        directory = directory_of(topic, dt)
        self._make_below(directory)
        file = f"{directory}/part-{epoch}-{first_seq:020d}-{run}-{secrets.token_hex(4)}.parquet"
        return ArchiveStream(self.disk, self.directory, file)

    def _make_below(self, directory: str) -> None:
        path = self.directory
        for part in directory.split("/"):
            parent, path = path, os.path.join(path, part)
            if not self.disk.exists(path):
                try:
                    self.disk.make_dir(path)
                except DiskError as e:
                    if e.errno != errno.EEXIST:  # Another task was quicker.
                        raise
                self.disk.sync_dir(parent)


class ArchiveStream(io.RawIOBase):
    """Raw file for pyarrow's writer, with a hash of all written bytes."""

    def __init__(self, disk: Disk, root: str, file: str) -> None:
        super().__init__()
        self.file = file
        """Name after the commit, relative to the archive."""
        self._disk = disk
        self._directory = os.path.dirname(os.path.join(root, file))
        self._fd = -1
        """-1: the file could not be created. The interpreter closes the object nevertheless."""
        self._fd = disk.create(os.path.join(root, hidden_name(file)))
        self._at = 0
        self._hash = xxhash.xxh3_64()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Append data; return the number of bytes. Raises DiskError."""
        view = memoryview(data).cast("B")
        self._disk.write_at(self._fd, [view], self._at)
        self._hash.update(view)
        self._at += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._at

    def finish(self) -> tuple[int, str]:
        """Make the file durable and close it; return (bytes, XXH3-64 as hexadecimal)."""
        self._disk.sync_file(self._fd)
        self.close()
        # The name must be durable too: a manifest may refer to it from now on.
        self._disk.sync_dir(self._directory)
        return self._at, self._hash.hexdigest()

    def close(self) -> None:
        """Close the file."""
        if not self.closed and self._fd >= 0:
            self._disk.close(self._fd)
        super().close()


def check_same_log(manifests: list[ArchiveManifest], log_id: str, directory: str) -> None:
    """Raise OptionError if the archive belongs to another data directory."""
    for each in manifests[-1:]:
        if each.log != log_id:
            raise OptionError(
                "the archive belongs to another data directory, or to this one before it was restored from a "
                "backup; give this one an archive of its own",
                archive=directory, archive_log=each.log, log=log_id,
            )  # fmt: skip


def archived_positions(manifests: list[ArchiveManifest]) -> dict[str, tuple[int, int]]:
    """Return topic -> (latest epoch, last archived position)."""
    found: dict[str, tuple[int, int]] = {}
    for manifest in manifests:
        for bound in manifest.bounds:
            found[bound.topic] = (bound.epoch, bound.until)
    return found
