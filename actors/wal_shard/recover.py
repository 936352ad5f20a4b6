"""Recovery: from the files of a data directory to a core that may go on. Reads through the disk module.

Order: list the streams; learn from later files where earlier ones end; replay every file in the order
of its incarnation; judge each end; gather what is in doubt; settle reservations and names. What was in
doubt is then written again by the core into this incarnation's own file before anything else happens
(RD-2). Nothing here changes the disk, except that recovery's caller removes files that were never used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.wal_shard.group import Group
from actors.wal_shard.replay import Replay
from ringlog import stop_points
from ringlog.errors import CorruptData
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.logs import say
from ringlog.storage.disk import Disk
from ringlog.storage.layout import (
    WAL_DIR,
    WalHeader,
    decode_wal_header,
    is_blank,
    parse_shard_dir,
    parse_wal_name,
    shard_dir,
)
from ringlog.storage.recovery import FileScan, Piece, Tail, copied_pairs, judge

log = logging.getLogger("ringlog.shard")

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(slots=True)
class _File:
    path: str
    """Relative to the data directory."""
    stream: int
    header: WalHeader
    size: int


@dataclass(slots=True)
class Recovered:
    """What recovery found, for the core's `begin` and for readers."""

    group: Group = field(default_factory=Group)
    prev: tuple[int, int, int, bool] = (0, 0, 0, False)
    settled: list[tuple[int, int]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Own files whose header was never written: nothing was ever acked in them."""
    cut: list[tuple[str, int]] = field(default_factory=list)
    """Own last files and where they end: what lies behind is never read again and may be given back."""
    truncated_bytes: int = 0
    announced: list[tuple[str, int, int]] = field(default_factory=list)
    bytes: int = 0


class Recovery:
    """One run over the data directory for one shard."""

    def __init__(
        self,
        disk: Disk,
        data_dir: str,
        replay: Replay,
        *,
        shard: int,
        shards: int,
        incarnation: int,
        boot_incarnation: int,
        boot_id: bytes,
        durable_mark: tuple[int, int] = (0, 0),
        progress: Progress = lambda done, total: None,
    ) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._replay = replay
        self._shard = shard
        self._shards = shards
        self._incarnation = incarnation
        self._boot_incarnation = boot_incarnation
        self._boot_id = boot_id
        self._durable_mark = durable_mark
        self._progress = progress
        self.found = Recovered()
        self.stops: dict[int, int] = {}
        self.salts: dict[int, int] = {}
        self.paths: dict[int, str] = {}
        self._same_boot = True
        self._is_orderly = True

    def run(self) -> Recovered:
        """Replay everything; raises CorruptData for damage, DiskError when a file cannot be read (RE-3)."""
        files = self._relevant_files()
        ends = self._settled_ends(files)
        total = sum(file.size for file in files) or 1
        doubts: list[tuple[_File, Piece]] = []
        last_of_stream: dict[tuple[int, int], int] = {}
        for file in files:
            last_of_stream[(file.stream, file.header.incarnation)] = file.header.file_id
        for i, file in enumerate(files):
            is_last = last_of_stream[(file.stream, file.header.incarnation)] == file.header.file_id
            doubts += self._replay_file(file, ends.get(file.header.file_id, 0), is_last, _successor(files, i))
            self.found.bytes += file.size
            self._progress(self.found.bytes, total)
            stop_points.hit("recovery_mid_replay")
        self._replay.settle_names()
        for file, piece in doubts:
            self._replay.copy(piece, self.found.group, other_layout=file.header.shards != self._shards)
        something_lost = not self._is_orderly and not self._same_boot
        self.found.announced = self._replay.jump_heads(self.found.group, something_lost=something_lost)
        self.found.announced += self._replay.gaps
        return self.found

    # -- which files ----------------------------------------------------------------------------------

    def _relevant_files(self) -> list[_File]:
        """Files that may hold frames of ours, oldest incarnation first."""
        files: list[_File] = []
        wal = f"{self._data_dir}/{WAL_DIR}"
        for directory in sorted(self._disk.list_dir(wal)):
            stream = parse_shard_dir(directory)
            if stream is None:
                continue
            for name in self._disk.list_dir(f"{wal}/{directory}"):
                parsed = parse_wal_name(name)
                if parsed is None or not self._is_history(stream, parsed[0]):
                    continue
                file = self._open(f"{WAL_DIR}/{directory}/{name}", stream)
                if file is not None:
                    files.append(file)
        files.sort(key=lambda file: file.header.file_id)
        return files

    def _is_history(self, stream: int, incarnation: int) -> bool:
        if stream == self._shard:
            return incarnation < self._incarnation
        return incarnation < self._boot_incarnation

    def _open(self, path: str, stream: int) -> _File | None:
        """Read a file's header; None for a file that is not ours to read or was never used."""
        fd = self._disk.open_read(f"{self._data_dir}/{path}")
        try:
            size = self._disk.size(fd)
            data = self._disk.read_at(fd, WAL_HEADER_BYTES, 0)
            if is_blank(data):
                if stream == self._shard and self._is_all_zero(fd, size):
                    self.found.unused.append(path)
                    return None
                if size <= WAL_HEADER_BYTES or self._is_all_zero(fd, size):
                    return None
                raise CorruptData("WAL file has frames but no header", file=path, offset=0)
            header = decode_wal_header(data, path)
        finally:
            self._disk.close(fd)
        if (header.incarnation, header.n) != parse_wal_name(path.rsplit("/", 1)[1]) or header.shard != stream:
            raise CorruptData(
                "WAL file lies under another file's name", file=path, shard=header.shard,
                incarnation=header.incarnation, n=header.n,
            )  # fmt: skip
        if stream != self._shard and header.shards == self._shards:
            return None
        return _File(path, stream, header, size)

    def _is_all_zero(self, fd: int, size: int) -> bool:
        step = 8 << 20
        return all(is_blank(self._disk.read_at(fd, min(step, size - at), at)) for at in range(0, size, step))

    def _reader(self, path: str) -> tuple[int, Callable[[int, int], bytes]]:
        fd = self._disk.open_read(f"{self._data_dir}/{path}")
        return fd, lambda offset, length: self._disk.read_at(fd, length, offset)

    def _settled_ends(self, files: list[_File]) -> dict[int, int]:
        """Where earlier files end, by the word of incarnations that copied what was in doubt in them.

        Several shards may speak of one file of an old layout; they say the same, because the doubt in
        a foreign file is judged by that file alone.
        """
        ends: dict[int, int] = {}
        for file in files:
            if file.header.n:
                continue
            fd, read = self._reader(file.path)
            try:
                pairs = copied_pairs(file.header, file.size, read)
            finally:
                self._disk.close(fd)
            for file_id, stop in pairs or ():
                ends.setdefault(file_id, stop)
        return ends

    # -- one file -------------------------------------------------------------------------------------

    def _replay_file(
        self, file: _File, limit: int, is_last: bool, successor: _File | None
    ) -> list[tuple[_File, Piece]]:
        """Replay one file; returns its doubtful pieces, which the index does not lead to."""
        fd, read = self._reader(file.path)
        try:
            scan = FileScan(file.header, limit or file.size, read, limit=limit)
            other_layout = file.header.shards != self._shards
            for piece in scan.pieces():
                self._replay.apply(piece, file.header.file_id, file.path, other_layout=other_layout)
            known = self._evidence(file, limit, successor)
            tail = judge(scan, known)
            self._accept(file, scan, tail, max(known, scan.durable))
            in_doubt = is_last and not limit and not scan.orderly
            stop = max(known, scan.durable) if in_doubt else scan.stop
            pieces = (
                [(file, piece) for piece in self._doubtful(file, stop, scan.stop, read)] if in_doubt else []
            )
        finally:
            self._disk.close(fd)
        self._note(file, scan, stop, is_last=is_last, in_doubt=in_doubt, limit=limit)
        return pieces

    def _evidence(self, file: _File, limit: int, successor: _File | None) -> int:
        """How far this file is known to be durable by what others say of it."""
        known = limit
        if successor is not None and successor.header.incarnation == file.header.incarnation:
            # Rolling syncs the old file before the new one's header is written (WC-8).
            known = max(known, successor.header.prev_stop)
        marked_file, marked = self._durable_mark
        if marked_file == file.header.file_id:
            known = max(known, marked)
        return known

    def _accept(self, file: _File, scan: FileScan, tail: Tail, known: int) -> None:
        if tail is Tail.CORRUPT:
            if not self._replay.is_lenient:
                raise CorruptData(
                    "the log is damaged below what was durable", file=file.path, offset=scan.stop,
                    durable=known, reason=scan.reason or "zeros",
                )  # fmt: skip
            say(log, logging.ERROR, "log cut at damage", file=file.path, offset=scan.stop, reason=scan.reason)
            self._same_boot = False
        elif tail is Tail.TORN:
            self.found.truncated_bytes += max(file.size - scan.stop, 0)
            say(log, logging.WARNING, "torn tail cut", file=file.path, offset=scan.stop, reason=scan.reason)

    def _doubtful(self, file: _File, start: int, stop: int, read: Callable[[int, int], bytes]) -> list[Piece]:
        if start >= stop:
            return []
        rest = FileScan(file.header, stop, read, limit=stop, stop=start)
        return list(rest.plain_pieces())

    def _note(
        self, file: _File, scan: FileScan, stop: int, *, is_last: bool, in_doubt: bool, limit: int
    ) -> None:
        header = file.header
        if in_doubt:
            for topic in self._replay.directory.by_id.values():
                topic.index.cut(header.file_id, stop)
            self.found.settled.append((header.file_id, stop))
        if scan.orderly:
            self._replay.settle_reservations(header.shard, header.shards)
        if is_last and not limit:
            self._is_orderly &= scan.orderly
            self._same_boot &= header.boot_id == self._boot_id
        self.paths[header.file_id], self.salts[header.file_id] = file.path, header.salt
        self.stops[header.file_id] = stop
        if file.stream == self._shard:
            self.found.prev = (header.file_id, stop, scan.last_seal, scan.orderly)
            if is_last and file.size > scan.stop:
                self.found.cut.append((file.path, stop if in_doubt else scan.stop))


def _successor(files: list[_File], i: int) -> _File | None:
    """The next file of the same stream."""
    for later in files[i + 1 :]:
        if later.stream == files[i].stream:
            return later
    return None


def stream_directory(data_dir: str, shard: int) -> str:
    """Absolute path of a shard's own stream."""
    return f"{data_dir}/{WAL_DIR}/{shard_dir(shard)}"
