"""Files between a Spark task and the log: staged frames, the commit plan, locks, and their cleanup.

One flat directory serves all writers of a data directory. A writer (a streaming query, an application with
txnAppId, or one batch write) has a key. `<id>` is the hash of the key, 16 hexadecimal digits:

    <id>.lock                        locked by the process that commits, aborts or recovers for that key
    <id>.plan                        current or last plan (see SinkCommitPlan), replaced atomically
    <id>-<microseconds>-<random>.frames   frames of one task attempt, synced before its commit message is sent

When a plan is durable, its batch consists of exactly the files in the plan, even if Spark runs the batch
again with other partitions. A staged file that no plan names is an orphan. The commit or abort that receives
its name deletes it; otherwise `clean` deletes it after one day. All disk changes go through a Disk. A crash
between any two of its calls leaves either the previous plan or the new one.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.clock import Clock, SystemClock
from ringlog.errors import CorruptData, DiskError, NotReady
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.vectored_write import Buffer

PLAN_VERSION = 1
PLAN_BYTES_MAX = 256 << 20
FRAMES_SUFFIX, PLAN_SUFFIX, LOCK_SUFFIX = ".frames", ".plan", ".lock"
ORPHAN_AGE_US = 24 * 3600 * 1_000_000
"""Minimum age of an orphan before its deletion, one day: its commit message may be under way."""
LOCK_WAIT_S = 30.0
LOCK_POLL_S = 0.05
WRITE_BYTES = 1 << 20
GATHER_BYTES = 64 << 10
"""Frames below this size are joined: many small pieces in one write cost more than the copy."""
_DIGEST = 16
_HELD = frozenset({errno.EAGAIN, errno.EACCES})


class StagedFile(msgspec.Struct, frozen=True):
    """Frames of one task attempt. In the file, a frame's topic_id is an index into `topics`."""

    name: str
    partition: int
    frames: int
    rows: int
    size: int
    """In bytes."""
    digest: int
    """XXH3-64 of all bytes of the file."""
    topics: tuple[str, ...]


class SinkCommitPlan(msgspec.Struct, frozen=True):
    """Appends of one batch: frame i, counted through `files` in order, has the number first + i."""

    key: str
    batch: int
    first: int
    next: int
    """Number of the first frame of the next plan, above all numbers in use."""
    files: tuple[StagedFile, ...]
    done: bool = False
    moved: dict[int, int] = {}
    """New numbers of frames, by frame index, whose original number was refused permanently."""
    fresh: bool = False
    """True if the key belongs to this write only: its state is deleted when the plan is done."""
    log: str = ""
    """Identity of the log that the plan writes to; "" if it is not known, as for remote engines."""

    @property
    def frames(self) -> int:
        """Number of frames in all files."""
        return sum(file.frames for file in self.files)

    @property
    def rows(self) -> int:
        """Number of records in all files."""
        return sum(file.rows for file in self.files)

    @property
    def topics(self) -> tuple[str, ...]:
        """Distinct names of all topics."""
        return tuple(dict.fromkeys(topic for file in self.files for topic in file.topics))

    def numbers(self) -> NDArray[np.int64]:
        """Return the number of each frame, by plan index."""
        found = np.arange(self.first, self.first + self.frames, dtype=np.int64)
        for index, number in self.moved.items():
            found[index] = number
        return found


def writer_file_id(key: str) -> str:
    """Return the file-name id of a writer's key."""
    return f"{xxhash.xxh3_64_intdigest(key.encode()):016x}"


class Staging:
    """A staging directory. `directory` or its parent exists. Every method may raise DiskError."""

    def __init__(self, directory: str, disk: Disk | None = None, clock: Clock | None = None) -> None:
        self.directory = directory
        self.disk: Disk = disk or RealDisk()
        self.clock: Clock = clock or SystemClock()

    def make(self) -> Staging:
        """Create the directory if it is missing; return self."""
        if not self.disk.exists(self.directory):
            self.disk.make_dir(self.directory)
            self.disk.sync_dir(os.path.dirname(os.path.abspath(self.directory)))
        return self

    def writer(self, key: str) -> FramesWriter:
        """Create a staged file for this key. The file appears on disk with its first write."""
        name = f"{writer_file_id(key)}-{self.clock.now_us()}-{random.getrandbits(128):032x}{FRAMES_SUFFIX}"
        return FramesWriter(self.disk, self.directory, name)

    @contextmanager
    def lock_writer(self, key: str, *, wait_s: float = LOCK_WAIT_S) -> Iterator[LockedWriter]:
        """Lock a writer's key for commits; raise NotReady with the lock's path after `wait_s` seconds."""
        with self.lock_id(writer_file_id(key), wait_s) as found:
            plan = found.plan()
            if plan is not None and plan.key != key:
                raise CorruptData(
                    "the plan file belongs to another writer", file=found.plan_path, key=plan.key
                )
            yield found

    @contextmanager
    def lock_id(self, writer_id: str, wait_s: float) -> Iterator[LockedWriter]:
        """Lock a writer by its file-name id, as lock_writer does."""
        path = os.path.join(self.directory, writer_id + LOCK_SUFFIX)
        deadline = self.clock.monotonic_ns() + int(wait_s * 1e9)
        while (fd := self._try_lock(path)) is None:
            if self.clock.monotonic_ns() >= deadline:
                raise NotReady("another process commits for this writer", lock=path, waited_s=wait_s)
            self.clock.sleep(LOCK_POLL_S)
        try:
            yield LockedWriter(self, writer_id)
        finally:
            self.disk.unlock(fd)

    def _try_lock(self, path: str) -> int | None:
        try:
            return self.disk.lock(path)
        except DiskError as e:
            if e.errno not in _HELD:
                raise
            return None

    def writers(self) -> list[str]:
        """Return the file-name ids of all writers that have a plan, open or done."""
        return [name.removesuffix(PLAN_SUFFIX) for name in self._names(PLAN_SUFFIX)]

    def plan(self, writer_id: str) -> SinkCommitPlan | None:
        """Return the last plan of a writer, or None; raise CorruptData if it is damaged.

        Without the writer's lock, the plan may be replaced at any time.
        """
        return read_plan(self.disk, os.path.join(self.directory, writer_id + PLAN_SUFFIX))

    def clean(self) -> list[str]:
        """Delete leftover files of writers whose lock is free; return the names.

        Leftovers are staged files older than a day that no open plan names, and all files of a finished write
        with a fresh key. Skips writers that are locked meanwhile, and those whose plan is damaged.
        """
        by_writer: dict[str, list[str]] = {}
        for name in self._names(FRAMES_SUFFIX, PLAN_SUFFIX):
            by_writer.setdefault(name[:_DIGEST], []).append(name)
        gone: list[str] = []
        now_us = self.clock.now_us()
        for writer_id, names in by_writer.items():
            plan_name = writer_id + PLAN_SUFFIX
            if plan_name not in names and not any(_is_old(name, now_us) for name in names):
                continue
            try:
                with self.lock_id(writer_id, 0) as locked:
                    gone += locked.clean(names, now_us)
            except (NotReady, CorruptData):
                # Its writer commits now, and cleans up itself; or it is not known which files it needs.
                continue
        return gone

    def _names(self, *suffixes: str) -> list[str]:
        if not self.disk.exists(self.directory):
            return []
        return [name for name in self.disk.list_dir(self.directory) if name.endswith(suffixes)]


@dataclass(slots=True)
class LockedWriter:
    """Plan and files of one writer, while its lock is held."""

    staging: Staging
    writer_id: str

    @property
    def plan_path(self) -> str:
        """Path of the plan."""
        return os.path.join(self.staging.directory, self.writer_id + PLAN_SUFFIX)

    def plan(self) -> SinkCommitPlan | None:
        """Return the last plan, or None; raise CorruptData if it is damaged."""
        return self.staging.plan(self.writer_id)

    def save_plan(self, plan: SinkCommitPlan) -> None:
        """Replace the plan durably and atomically."""
        replace_file(
            self.staging.disk, self.staging.directory, self.writer_id + PLAN_SUFFIX, encode_plan(plan)
        )

    def sync_names(self) -> None:
        """Make the names of staged files durable, before a plan refers to them."""
        self.staging.disk.sync_dir(self.staging.directory)

    def delete_files(self, names: Iterable[str]) -> list[str]:
        """Delete the existing files among these; return their names."""
        disk, directory = self.staging.disk, self.staging.directory
        gone = [name for name in names if disk.exists(os.path.join(directory, name))]
        for name in gone:
            disk.unlink(os.path.join(directory, name))
        return gone

    def delete_plan(self) -> list[str]:
        """Delete the plan and the lock of a finished write whose key is not used again."""
        return self.delete_files([self.writer_id + PLAN_SUFFIX, self.writer_id + LOCK_SUFFIX])

    def clean(self, names: Sequence[str], now_us: int) -> list[str]:
        """Delete the leftovers of this writer; see Staging.clean."""
        plan = self.plan()
        named = set() if plan is None or plan.done else {file.name for file in plan.files}
        gone = self.delete_files(
            name
            for name in names
            if name.endswith(FRAMES_SUFFIX) and name not in named and _is_old(name, now_us)
        )
        if plan is not None and plan.done:
            gone += self.delete_files(file.name for file in plan.files)
            if plan.fresh:
                gone += self.delete_plan()
        return gone


def _is_old(name: str, now_us: int) -> bool:
    made = name[_DIGEST + 1 :].split("-", maxsplit=1)[0]
    return name.endswith(FRAMES_SUFFIX) and made.isdigit() and int(made) + ORPHAN_AGE_US < now_us


def encode_plan(plan: SinkCommitPlan) -> bytes:
    """Encode a plan: a line with version and checksum, then JSON."""
    body = msgspec.json.encode(plan)
    return b"%d %016x\n" % (PLAN_VERSION, xxhash.xxh3_64_intdigest(body)) + body


def decode_plan(data: bytes, path: str) -> SinkCommitPlan:
    """Decode the result of `encode_plan`; raise CorruptData."""
    head, _, body = data.partition(b"\n")
    version, _, digest = head.partition(b" ")
    if digest != b"%016x" % xxhash.xxh3_64_intdigest(body):
        raise CorruptData("a plan does not match its checksum", file=path)
    if version != b"%d" % PLAN_VERSION:
        raise CorruptData("unsupported plan version: use a newer ringlog", file=path, version=str(version))
    return msgspec.json.decode(body, type=SinkCommitPlan)


def read_plan(disk: Disk, path: str) -> SinkCommitPlan | None:
    """Return the plan at this path, or None if there is none."""
    if not disk.exists(path):
        return None
    fd = disk.open_read(path)
    try:
        size = disk.size(fd)
        if size > PLAN_BYTES_MAX:
            raise CorruptData("a plan is too large", file=path, bytes=size, max=PLAN_BYTES_MAX)
        return decode_plan(disk.read_at(fd, size, 0), path)
    finally:
        disk.close(fd)


@dataclass(slots=True)
class FramesWriter:
    """Writes one staged file. The last call is either `finish` or `abandon`."""

    disk: Disk
    directory: str
    name: str
    frames: int = 0
    rows: int = 0
    size: int = 0
    _fd: int = -1
    _held: list[Buffer] = field(default_factory=list)
    _held_bytes: int = 0
    _hash: Any = field(default_factory=xxhash.xxh3_64)

    def add(self, pieces: Sequence[Buffer], size: int, rows: int) -> None:
        """Add a whole frame of `size` bytes and `rows` records. Its pieces must not change until `finish`."""
        parts = [b"".join(pieces)] if size < GATHER_BYTES else pieces
        for part in parts:
            self._hash.update(part)
        self._held += parts
        self._held_bytes += size
        self.frames += 1
        self.rows += rows
        if self._held_bytes >= WRITE_BYTES:
            self._write()

    def finish(self, partition: int, topics: Sequence[str]) -> StagedFile | None:
        """Make the file durable and return its description; without frames, return None and no file."""
        if not self.frames:
            return None
        self._write()
        self.disk.sync_file(self._fd)
        self._close()
        return StagedFile(
            self.name, partition, self.frames, self.rows, self.size, self._hash.intdigest(), tuple(topics)
        )

    def abandon(self) -> None:
        """Close and delete the file."""
        self._held.clear()
        if self._fd >= 0:
            self._close()
            self.disk.unlink(os.path.join(self.directory, self.name))

    def _write(self) -> None:
        if self._fd < 0:
            self._fd = self.disk.create(os.path.join(self.directory, self.name))
        self.disk.write_at(self._fd, self._held, self.size)
        self.size += self._held_bytes
        self._held, self._held_bytes = [], 0

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        self.disk.close(fd)
