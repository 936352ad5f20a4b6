"""The log files that one start of a shard reads: how they are found, and what is known of each."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from typing import Any

from ringlog.actors.wal_shard.recovery.baseline import Baseline
from ringlog.actors.wal_shard.recovery.losses import ReplayLosses
from ringlog.actors.wal_shard.recovery.recovery_result import RecoveryResult
from ringlog.actors.wal_shard.recovery.replay_rows import ReplayedFile
from ringlog.errors import CorruptData, DiskError
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.logs import log_event
from ringlog.storage.disk import Disk
from ringlog.storage.layout import (
    WAL_DIR,
    WalHeader,
    decode_wal_header,
    header_verifies,
    pack_file,
    parse_shard_dir,
    parse_wal_name,
    shard_dir,
)
from ringlog.storage.recovery import ChainMark, ReadBytes, SkippedAppend, holds_marks

log: logging.Logger = logging.getLogger("ringlog.shard")


@dataclass(frozen=True, slots=True)
class StartFacts:
    """One start of a shard: its place among the shards, and what earlier incarnations left on the board."""

    shard: int
    shards: int
    incarnation: int
    boot_incarnation: int
    boot_id: bytes
    engine_id: bytes
    durable_mark: tuple[int, int] = (0, 0)
    published_mark: tuple[int, int] = (0, 0)
    """(file, offset) up to which frames were published."""
    has_cold: bool = False
    is_read_only: bool = False
    """True if nothing on the disk may change. Frames in doubt are then applied from their file if the file
    can be synced, and otherwise not at all."""


@dataclass(frozen=True, slots=True)
class CopiedFrom:
    """Shard `shard` of `shards` copied the frames of its topics from offset `stop` on.

    The originals are dead.
    """

    shards: int
    shard: int
    stop: int


@dataclass(slots=True)
class ScannedFile:
    """One log file, with what marks and other files state about it."""

    path: str
    """Relative to the data directory."""
    stream: int
    header: WalHeader
    size: int
    durable_mark: int = 0
    """End of its durable frames according to the board; 0 if the board's mark is in another file."""
    is_last: bool = False
    """True for the last file of its incarnation."""
    copied: ChainMark | None = None
    """MARK_COPIED of its incarnation.
    None if the incarnation did not finish recovery; the file is skipped then."""
    is_superseded: bool = False
    """True if a later incarnation of the same stream or of this shard served.
    It has copied the frames in doubt."""
    claims: list[CopiedFrom] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(offset, seal of the frame that ends there): ends that the next file records as durable."""
    has_orderly_end: bool = False
    """True if the next file states that an orderly stop ended this one. Its own mark of that may be lost."""
    is_synced_read_only: bool = False
    """True if a read-only incarnation synced the file.
    All of it is readable, although no later file repeats it."""
    is_absorbed: bool = False
    """True if a snapshot absorbed the file. Nothing in it is replayed."""
    given_up: list[SkippedAppend] = field(default_factory=list)
    """Damaged frames of class `memory` in the file, ascending."""
    is_damaged: bool = False
    """True if the file was cut at damage. Frames after the cut are read only to find out what was lost."""

    @property
    def limit(self) -> int:
        """End offset of the file for all shards. 0 means that the file ends where its valid frames end."""
        own = [c.stop for c in self.claims if (c.shards, c.shard) == (self.header.shards, self.stream)]
        if own:
            return max(own)
        for count in {c.shards for c in self.claims}:
            stops = {c.shard: c.stop for c in self.claims if c.shards == count}
            if len(stops) == count:
                return max(stops.values())
        return 0

    def claim_of(self, shards: int, shard: int) -> int:
        """Return the offset from which this shard copied its frames, under this count.

        0 if it did not copy.
        """
        return max((c.stop for c in self.claims if (c.shards, c.shard) == (shards, shard)), default=0)

    @property
    def evidence(self) -> int:
        """The offset up to which other files and marks prove that this file is durable."""
        if self.limit:
            return self.limit
        known = [claim.stop for claim in self.claims]
        if not self.is_damaged:
            known += [self.durable_mark, *(stop for stop, _ in self.ends)]
        return max(known, default=0)

    def origin(self, shards: int) -> ReplayedFile:
        """Return the origin of the file's frames for a replay under this shard count."""
        header = self.header
        return ReplayedFile(header.file_id, self.path, header.shard, header.shards, header.shards != shards)


class LogFiles:
    """The log directories of all shards, as one start of a shard reads them."""

    def __init__(
        self, disk: Disk, data_dir: str, start: StartFacts, base: Baseline, found: RecoveryResult
    ) -> None:
        self.disk: Disk = disk
        self.data_dir: str = data_dir
        self.start: StartFacts = start
        self.base: Baseline = base
        self._shard, self._shards = start.shard, start.shards
        self.siblings: list[ScannedFile] = []
        """First files of earlier incarnations of the other shards under the current shard count."""
        self.present: set[int] = set()
        """Files with a valid header."""
        self._found = found

    def relevant(self) -> list[ScannedFile]:
        """Return the files that may contain frames of this shard, oldest incarnation first."""
        files: list[ScannedFile] = []
        wal = f"{self.data_dir}/{WAL_DIR}"
        for directory in sorted(self.disk.list_dir(wal)):
            stream = parse_shard_dir(directory)
            if stream is None:
                continue
            for name in self.disk.list_dir(f"{wal}/{directory}"):
                parsed = parse_wal_name(name)
                if parsed is not None and stream == self._shard:
                    self._require_new(parsed[0], f"{WAL_DIR}/{directory}/{name}")
                if parsed is None or not self._is_history(stream, parsed[0]):
                    continue
                file = self._open(f"{WAL_DIR}/{directory}/{name}", stream)
                if file is not None:
                    files.append(file)
        files.sort(key=lambda file: file.header.file_id)
        return files

    def _require_new(self, incarnation: int, path: str) -> None:
        """Check that this incarnation is greater than all incarnations in the stream (P1). Raise CorruptData.

        Otherwise frames acknowledged by a later incarnation would be skipped, and new files would count as
        absorbed.
        """
        if incarnation >= self.start.incarnation:
            raise CorruptData(
                "the log has files of a later incarnation than meta/engine: restore meta/engine", file=path,
                incarnation=self.start.incarnation,
            )  # fmt: skip

    def _is_history(self, stream: int, incarnation: int) -> bool:
        if stream == self._shard:
            return incarnation < self.start.incarnation
        return incarnation < self.start.boot_incarnation

    def _open(self, path: str, stream: int) -> ScannedFile | None:
        """Read the header of a file. Return None if the file belongs to another shard or was never used."""
        try:
            fd, read = self.reader(path)
        except DiskError as e:
            if e.errno != errno.ENOENT:
                raise
            return None  # absorbed and deleted since it was listed; otherwise `_require` reports it
        try:
            size = self.disk.size(fd)
            data = read(0, WAL_HEADER_BYTES)
            if not header_verifies(data):
                incarnation, n = parse_wal_name(path.rsplit("/", 1)[1]) or (0, 0)
                # The header is durable before the first commit batch is written. A file without valid header
                # and without batches was never used; with batches it is damaged.
                if not self.base.absorbs(pack_file(incarnation, n)) and holds_marks(read, size):
                    raise CorruptData("WAL file has frames but no header", file=path, offset=0)
                if stream % self._shards == self._shard:  # includes streams of shards that no longer exist
                    self._found.unused_files.append(path)
                return None
            header = decode_wal_header(data, path)
        finally:
            self.disk.close(fd)
        named = parse_wal_name(path.rsplit("/", 1)[1])
        if (header.incarnation, header.n) != named or header.shard != stream:
            raise CorruptData(
                "WAL file header does not match its name", file=path, shard=header.shard,
                incarnation=header.incarnation, n=header.n,
            )  # fmt: skip
        if header.engine_id != self.start.engine_id:
            raise CorruptData(
                "WAL file belongs to another data directory", file=path, engine_id=header.engine_id.hex()
            )
        self.present.add(header.file_id)
        if stream != self._shard and header.shards == self._shards:
            if header.n == 0:
                self.siblings.append(ScannedFile(path, stream, header, size))
            return None
        marked_file, marked = self.start.durable_mark
        return ScannedFile(
            path, stream, header, size, marked if marked_file == header.file_id else 0,
            is_absorbed=self.base.absorbs(header.file_id),
        )  # fmt: skip

    def reader(self, path: str) -> tuple[int, ReadBytes]:
        """Open a file. Return its descriptor and a function that reads it."""
        fd = self.disk.open_read(f"{self.data_dir}/{path}")
        return fd, lambda offset, length: self.disk.read_at(fd, length, offset)


def accept_damage(losses: ReplayLosses, text: str, **facts: Any) -> None:
    """Raise CorruptData. With `wal.corruption = truncate`, log an error instead."""
    if not losses.is_lenient:
        raise CorruptData(text, **facts)
    losses.has_damage = True
    log_event(log, logging.ERROR, text, **facts)


def stream_directory(data_dir: str, shard: int) -> str:
    """Return the absolute path of a shard's log directory."""
    return f"{data_dir}/{WAL_DIR}/{shard_dir(shard)}"


def make_stream(disk: Disk, data_dir: str, shard: int) -> str:
    """Create a shard's log directory and return its path. Raise DiskError.

    All directory entries on the path are synced, because a file is only as durable as they are.
    """
    directory = stream_directory(data_dir, shard)
    disk.make_dir(f"{data_dir}/{WAL_DIR}")
    disk.sync_dir(data_dir)
    disk.make_dir(directory)
    disk.sync_dir(f"{data_dir}/{WAL_DIR}")
    return directory
