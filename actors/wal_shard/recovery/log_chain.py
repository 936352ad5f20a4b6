"""The chain of a shard's log files: which files must exist, and what later files state about earlier ones.

The header of each file names the previous file and its end. A MARK_COPIED lists the files whose ends were
settled. A register names the newest file, and the board the last durable one.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

from ringlog.actors.wal_shard.recovery.baseline import Owner, is_relevant_to, newest_facts
from ringlog.actors.wal_shard.recovery.log_files import CopiedFrom, LogFiles, ScannedFile, accept_damage
from ringlog.actors.wal_shard.recovery.recovery_result import RecoveryResult
from ringlog.actors.wal_shard.recovery.replay import Replay
from ringlog.actors.wal_shard.recovery.shard_facts import ShardFacts
from ringlog.errors import CorruptData
from ringlog.limits import WAL_FILE_BYTES_DEFAULT, WAL_HEADER_BYTES
from ringlog.storage.layout import (
    META_DIR,
    WAL_DIR,
    WAL_FLAG_PREV_ORDERLY,
    WAL_FLAG_REGISTERED,
    WalHeader,
    shard_dir,
    unpack_file,
    wal_name,
)
from ringlog.storage.log_register import read_register, register_name, registered_shards
from ringlog.storage.recovery import ChainMark, FileScan, copied_mark, mark_at

NO_COPIED_MARK = ChainMark(0, 0, 0, 0, 0, 0)
_WHAT_TO_DO = "restore the file, or give up its records with ringlog repair or wal.corruption = truncate"


class LogChain:
    """Connects the files of a log, and reports the missing ones."""

    def __init__(self, files: LogFiles, replay: Replay, found: RecoveryResult) -> None:
        self._files, self._losses, self._found = files, replay.losses, found
        self._directory = replay.directory
        self._disk, self._data_dir, self._start = files.disk, files.data_dir, files.start
        self._shard, self._shards = files.start.shard, files.start.shards
        self._elsewhere: dict[Owner, ShardFacts] | None = None
        self._required: list[tuple[int, int, str, Owner | None]] = []
        self.known_missing: set[int] = set()
        """Files that are missing, and were given up at this or an earlier start."""
        self.lost_files: list[tuple[int, Owner]] = []
        """Log files that are missing completely and were given up, ascending."""
        self._file_bytes = WAL_FILE_BYTES_DEFAULT
        """Largest known size of a log file, in bytes."""

    def pass_missing(self, below: int) -> None:
        """Account for the missing log files before this one, which `wal.corruption = truncate` gives up."""
        while self.lost_files and self.lost_files[0][0] < below:
            _, (shards, shard) = self.lost_files.pop(0)
            self._losses.lose_log(shard, shards, self._file_bytes)

    # -- registers ------------------------------------------------------------------------------------

    def take_registers(self, files: list[ScannedFile]) -> None:
        """Read the registers: the newest log file of each relevant stream, and the topic ids in use by then.

        No later file refers to the newest file, so only the register shows that it must exist. For a stream
        that another shard writes under the current shard count, only files of other shard counts are
        relevant.
        """
        streams = {self._shard, *registered_shards(self._disk, self._data_dir)}
        for stream in sorted(streams | {file.stream for file in files if file.stream >= self._shards}):
            name = f"{META_DIR}/{register_name(stream)}"
            try:
                entry = read_register(self._disk, self._data_dir, stream)
            except CorruptData as e:
                if stream == self._shard or stream >= self._shards:
                    accept_damage(self._losses, e.message, **e.detail)
                    self._found.to_quarantine.append(name)
                    # This shard's own register is replaced with its first file. No process writes the others.
                    self._found.unused_files += (
                        [name] if stream % self._shards == self._shard != stream else []
                    )
                continue
            if entry is None:
                self._require_unregistered([file for file in files if file.stream == stream], name)
                continue
            if entry.engine_id != self._start.engine_id:
                accept_damage(
                    self._losses, "the log register belongs to another data directory", file=name,
                    engine_id=entry.engine_id.hex(),
                )  # fmt: skip
                continue
            self._file_bytes = max(self._file_bytes, entry.file_bytes)
            is_siblings = stream != self._shard and entry.shards == self._shards
            if not is_siblings or self._losses.is_lenient:
                self._directory.advance_identity(entry.last_id, entry.last_epoch)
            for shards, file_id in entry.newest_files:
                if stream == self._shard or shards != self._shards:
                    self._required.append((file_id, WAL_HEADER_BYTES + 1, name, (shards, stream)))

    def _require_unregistered(self, files: list[ScannedFile], name: str) -> None:
        """Check a stream without a register.

        A register is missing if a file with commit batches refers to it.
        """
        for file in files:
            if not file.header.flags & WAL_FLAG_REGISTERED:
                continue
            fd, read = self._files.reader(file.path)
            try:
                has_groups = mark_at(WAL_HEADER_BYTES, FileScan(file.header, file.size, read)) is not None
            finally:
                self._disk.close(fd)
            if has_groups:
                accept_damage(
                    self._losses, "the log register is missing: the newest log file is unknown", file=name,
                    named_by=file.path, do=_WHAT_TO_DO,
                )  # fmt: skip
                return

    # -- references between files ---------------------------------------------------------------------

    def connect(self, files: list[ScannedFile]) -> None:
        """Record in each file what later files state about it, and check that no file is missing (RF-76)."""
        by_id = {file.header.file_id: file for file in files}
        newest: dict[tuple[int, int], ScannedFile] = {}
        incarnations: dict[int, tuple[WalHeader, ChainMark | None]] = {}
        for file in files:
            header = file.header
            incarnation = (file.stream, header.incarnation)
            if header.incarnation not in incarnations:
                incarnations[header.incarnation] = (
                    header,
                    self._copied_mark(file) or self._absorbed_word(header),
                )
            file.copied = incarnations[header.incarnation][1]
            newest[incarnation] = file
        for file in newest.values():
            file.is_last = True
        for header, mark in incarnations.values():
            if mark is not None:
                self._apply_copied_mark(by_id, header, mark)
        # Only files of incarnations that served are listed in a MARK_COPIED. A claim therefore proves the
        # same as the incarnation's own mark, which may not have been durable itself.
        served = {f.header.incarnation for f in files if f.copied is not None or f.claims}
        last_served: dict[tuple[int, int], int] = {}
        for file in files:
            if file.header.incarnation in served:
                file.copied = file.copied or NO_COPIED_MARK
                last_served[file.stream, file.header.shards] = file.header.incarnation
        mine = last_served.get((self._shard, self._shards), 0)
        for file in files:
            theirs = last_served.get((file.stream, file.header.shards), 0)
            file.is_superseded = file.header.incarnation < max(mine, theirs)
        for header, path in [(file.header, file.path) for file in files if _is_believed(file)]:
            self._require(header.prev_file, header.prev_stop, path, (header.shards, header.shard))
            if header.prev_file in by_id:
                before = by_id[header.prev_file]
                before.ends.append((header.prev_stop, header.prev_seal))
                before.has_orderly_end |= bool(header.flags & WAL_FLAG_PREV_ORDERLY)
        for required in self._required:
            self._require(*required)
        self._require(*self._start.durable_mark, "the board", (self._shards, self._shard))

    def _copied_mark(self, file: ScannedFile) -> ChainMark | None:
        fd, read = self._files.reader(file.path)
        try:
            return copied_mark(file.header, file.size, read)
        finally:
            self._disk.close(fd)

    def _apply_copied_mark(self, by_id: dict[int, ScannedFile], header: WalHeader, mark: ChainMark) -> None:
        for file_id, stop in mark.settled:
            self._required.append((file_id, stop, f"incarnation {header.incarnation}", None))
            if file_id in by_id:
                by_id[file_id].claims.append(CopiedFrom(header.shards, header.shard, stop))
        for file_id in mark.damaged:
            if file_id in by_id:
                by_id[file_id].is_damaged = True
            elif file_id not in self._files.present:
                self._losses.has_damage = True
                self.known_missing.add(file_id)

    def _absorbed_word(self, header: WalHeader) -> ChainMark | None:
        """Return an empty mark for an incarnation whose first files were absorbed, because it served.

        The same holds for an incarnation whose first files are missing; `_require` reports them.
        """
        before = header.prev_file
        is_gone = before >> 24 == header.incarnation and before not in self._files.present
        return NO_COPIED_MARK if is_gone else None

    def _is_absorbed_elsewhere(self, written_by: Owner | None, file_id: int) -> bool:
        """Return True if another shard absorbed this missing file."""
        if self._elsewhere is None:
            self._elsewhere = newest_facts(self._disk, self._data_dir)
        known = self._elsewhere.items()
        return any(facts.absorbs(file_id) for owner, facts in known if is_relevant_to(owner, written_by))

    def _require(self, file_id: int, stop: int, by: str, written_by: Owner | None) -> None:
        """Check that a file with durable frames exists, or was absorbed by a snapshot.

        A file that exists without a valid header counts as missing, because it may have lost its header.
        """
        if not file_id or stop <= WAL_HEADER_BYTES or file_id in self._files.present:
            return
        if self._files.base.covers_missing_file(written_by, file_id) or self._is_absorbed_elsewhere(
            written_by, file_id
        ):
            return
        if file_id not in self.known_missing:
            self.known_missing.add(file_id)
            self._found.damaged.add(file_id)
            skipped = self._files.base.skipped
            facts: dict[str, Any] = {"snapshots_skipped": skipped} if skipped else {}
            stream = shard_dir(written_by[1] if written_by else self._shard)
            accept_damage(
                self._losses, "a WAL file is missing",
                file=f"{WAL_DIR}/{stream}/{wal_name(*unpack_file(file_id))}",
                file_id=file_id, named_by=by, do=_WHAT_TO_DO, **facts,
            )  # fmt: skip
            insort(self.lost_files, (file_id, written_by or (self._shards, self._shard)))


def _is_believed(file: ScannedFile) -> bool:
    """Return True if the header's statement about the previous file is reliable.

    This holds if the file's incarnation served. A statement about a file of the same incarnation is always
    reliable, because the incarnation's first files, which prove that it served, may be the missing ones.
    """
    header = file.header
    return file.copied is not None or header.prev_file >> 24 == header.incarnation
