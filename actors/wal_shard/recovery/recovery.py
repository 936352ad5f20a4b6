"""Recovery: restores the state of a shard from the files of a data directory. Reads through the disk module.

Steps, in this order:

1. Load the state of the snapshots, and register the segments on disk.
2. List the log files. Learn from later files where earlier files end.
3. Replay every file that no snapshot absorbed, in order of incarnations. Classify the end of each file.
4. Collect the frames in doubt: frames after the last position that is known to be durable.
5. Settle reservations of seqs, and the names of topics.

The core then writes the frames in doubt again, into the first file of this incarnation, before it does
anything else. Only `clean_up` changes the log, afterwards.

An incarnation that finished its recovery writes a MARK_COPIED. The mark lists the files with frames in doubt,
and the new end of each. It is valid only for the topics that its shard owned under its shard count. After a
change of the shard count, several shards copy from one old file, each the frames of its own topics, and any
of them may crash before it finishes. An incarnation without this mark never served a request. All its frames
are copies of frames in earlier files, so recovery skips its files.
"""

from __future__ import annotations

import errno
import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog import stop_points
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.recovery.baseline import (
    Baseline,
    Owner,
    absorbed_everywhere,
    adopt_segments,
    is_relevant_to,
    load_baseline,
    newest_facts,
    orphans_in,
)
from ringlog.actors.wal_shard.recovery.replay import Replay, ReplayedFile
from ringlog.actors.wal_shard.recovery.shard_facts import ShardFacts
from ringlog.errors import CorruptData, DiskError
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.limits import WAL_FILE_BYTES_DEFAULT, WAL_HEADER_BYTES
from ringlog.logs import log_event
from ringlog.placement import shard_of, shards_of
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.layout import (
    COLD_OWNER,
    META_DIR,
    QUARANTINE_DIR,
    WAL_DIR,
    WAL_FLAG_REGISTERED,
    WalHeader,
    decode_wal_header,
    header_verifies,
    pack_file,
    parse_shard_dir,
    parse_wal_name,
    shard_dir,
    unpack_file,
    wal_name,
)
from ringlog.storage.log_register import read_register, register_name, registered_shards
from ringlog.storage.recovery import (
    ChainMark,
    FileScan,
    ReadBytes,
    SkippedAppend,
    WalScanChunk,
    WalTailState,
    classify_tail,
    copied_frames,
    copied_mark,
    frames_after_damage,
    holds_marks,
    last_nonzero_byte,
    mark_at,
)
from ringlog.topic.directory import Halt
from ringlog.topic.segment_catalog import MissingSegment

log = logging.getLogger("ringlog.shard")

Progress = Callable[[int, int], None]
"""Called with (bytes replayed, total bytes)."""


_NO_COPIED_MARK = ChainMark(0, 0, 0, 0, 0, 0)
_WHAT_TO_DO = "restore the file, or give up its records with ringlog repair or wal.corruption = truncate"


@dataclass(frozen=True, slots=True)
class _CopiedFrom:
    """Shard `shard` of `shards` copied the frames of its topics from offset `stop` on.

    The originals are dead.
    """

    shards: int
    shard: int
    stop: int


@dataclass(slots=True)
class _ScannedFile:
    path: str
    """Relative to the data directory."""
    stream: int
    header: WalHeader
    size: int
    is_last: bool = False
    """True for the last file of its incarnation."""
    copied: ChainMark | None = None
    """MARK_COPIED of its incarnation.
    None if the incarnation did not finish recovery; the file is skipped then."""
    is_superseded: bool = False
    """True if a later incarnation of the same stream or of this shard served.
    It has copied the frames in doubt."""
    claims: list[_CopiedFrom] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(offset, seal of the frame that ends there): ends that the next file records as durable."""
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


@dataclass(slots=True)
class RecoveryResult:
    """Result of recovery, for the core's `begin` and for readers."""

    batch: CommitBatch = field(default_factory=CommitBatch)
    prev: tuple[int, int, int, bool] = (0, 0, 0, False)
    settled: dict[int, int] = field(default_factory=dict)
    """File -> its new end offset for the topics of this shard."""
    damaged: set[int] = field(default_factory=set)
    """Files that were cut at damage or are missing."""
    unused_files: list[str] = field(default_factory=list)
    """Paths to delete: files without durable header, absorbed files, damaged registers."""
    truncations: list[tuple[str, int]] = field(default_factory=list)
    """(path, end) of own last files. The space after the end is never read again and may be freed."""
    to_quarantine: list[str] = field(default_factory=list)
    """Damaged files of which a copy is kept, because their valid parts may be of use."""
    halts: list[Halt] = field(default_factory=list)
    """Topics that are not served because a part of their records is missing."""
    truncated_bytes: int = 0
    announced: list[tuple[str, int, int]] = field(default_factory=list)
    bytes: int = 0
    number: int = 0
    """Number of the snapshot that recovery started from; 0 if there was none."""
    has_base: bool = False
    """True if that snapshot is this shard's own.
    Its rows of topics that are not in `changed` are still valid."""
    listed: set[int] = field(default_factory=set)
    """Numbers of the segments that the snapshot lists."""
    waiting: list[tuple[int, str]] = field(default_factory=list)
    """(file, path) of absorbed files that are kept until the next snapshot."""
    changed: set[int] = field(default_factory=set)
    """Ids of topics that the replayed log changed."""
    other_layout_files: set[int] = field(default_factory=set)
    """Replayed files that were written under another shard count."""
    in_doubt: dict[tuple[int, int], int] = field(default_factory=dict)
    """(topic, producer) -> highest producer number among the frames in doubt, which are not applied.
    Filled only in read-only mode."""


class Recovery:
    """One recovery run of one shard over the data directory."""

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
        engine_id: bytes,
        durable_mark: tuple[int, int] = (0, 0),
        published_mark: tuple[int, int] = (0, 0),
        progress: Progress = lambda done, total: None,
        has_cold: bool = False,
        is_read_only: bool = False,
    ) -> None:
        """Set up the recovery of one shard.

        With `is_read_only`, nothing on the disk is changed. Frames in doubt are then applied from their file
        if the file can be synced, and otherwise not at all.
        """
        self._disk = disk
        self._is_read_only = is_read_only
        self._has_cold = has_cold
        self._data_dir = data_dir
        self._replay = replay
        self._shard = shard
        self._shards = shards
        self._incarnation = incarnation
        self._boot_incarnation = boot_incarnation
        self._boot_id = boot_id
        self._engine_id = engine_id
        self._durable_mark = durable_mark
        self._published_mark = published_mark
        self._progress = progress
        self._total = 1
        self.found = RecoveryResult()
        self.stops: dict[int, int] = {}
        self.salts: dict[int, int] = {}
        self.paths: dict[int, str] = {}
        self.holes: dict[int, list[tuple[int, int]]] = {}
        self._base = Baseline(shard, shards)
        self._missing: list[MissingSegment] = []
        self._siblings: list[_ScannedFile] = []
        """First files of earlier incarnations of the other shards under the current shard count."""
        self._elsewhere: dict[Owner, ShardFacts] | None = None
        self._old: dict[int, str] = {}
        """Absorbed files of other shard counts, to be deleted when every shard has absorbed them."""
        self._present: set[int] = set()
        self._last_served_file = 0
        """Last file of this shard whose incarnation certainly served.
        Its statements about earlier files are durable and need not be repeated."""
        self._last_closed: dict[int, dict[int, int]] = {}
        """Incarnation -> its second last file and the end of that file."""
        self._settled_before: list[tuple[int, int]] = []
        """(file, end) as recorded by earlier incarnations."""
        self._known_missing: set[int] = set()
        self._required: list[tuple[int, int, str, Owner | None]] = []
        self._lost_files: list[tuple[int, Owner]] = []
        """Log files that are missing completely and were given up, ascending."""
        self._file_bytes = WAL_FILE_BYTES_DEFAULT
        """Largest known size of a log file, in bytes."""
        self._lost_streams: list[tuple[int, int]] = []
        """(shards, shard) of streams whose end may have lost acknowledged frames."""

    def _beat(self) -> None:
        """Report progress, also within a file. The supervisor kills a process that makes no progress."""
        self._progress(self.found.bytes, self._total)

    def run(self) -> RecoveryResult:
        """Replay everything. Raise CorruptData for damage, and DiskError if a file cannot be read."""
        self._start_from_snapshots()
        files = self._relevant_files()
        self._take_registers(files)
        self._connect(files)
        if self._base.skipped and not self._base.layers and self._known_missing:
            self._rebuild()
        if self._was_resharded(files):
            self._learn_names()
        self._total = sum(file.size for file in files if not file.is_absorbed) or 1
        doubts: list[tuple[_ScannedFile, list[WalScanChunk]]] = []
        for file in files:
            self._pass_missing(file.header.file_id)
            if file.is_absorbed:
                self._skip_absorbed(file)
                continue
            doubts.append((file, self._replay_file(file)))
            self.found.bytes += file.size
            self._beat()
            stop_points.hit("recovery_mid_replay")
        if self._old:
            gone = absorbed_everywhere(self._disk, self._data_dir, self._shards, self._old)
            self.found.unused_files += [self._old[each] for each in sorted(gone)]
        self._pass_missing(1 << 63)
        self._replay.settle_rows(self._missing)
        self._replay.skip_lost()
        self.found.halts = self._replay.halts
        self._replay.settle_names()
        for file_id, stop in self._settled_before:
            # Repeat the end of each file, because the earlier statement may not be durable.
            if file_id >= self._last_served_file:
                self.found.settled.setdefault(file_id, stop)
        self.found.changed = self._replay.touched_topics
        if self._is_read_only:
            for _, pieces in doubts:
                for piece in pieces:
                    _note_doubt(self.found.in_doubt, piece)
            return self.found
        for file, pieces in doubts:
            left = deque(file.given_up)
            for piece in pieces:
                while left and left[0].offset < piece.stop:
                    self._replay.copy_loss(left.popleft(), self.found.batch)
                excluded = self._excluded(file, piece)
                self._replay.copy(piece, self.found.batch, self._origin(file), excluded=excluded)
        for topic in self._replay.stage_placeholders(self.found.batch):
            log_event(
                log, logging.ERROR, "topic recovered without its name and settings", topic=topic.name,
                topic_id=topic.topic_id, epoch=topic.epoch, head_seq=topic.head_seq,
            )  # fmt: skip
        announced = self._replay.settle_open_reservations(self.found.batch, self._lost_streams)
        self.found.announced = announced + self._replay.gaps
        self.found.changed = self._replay.touched_topics
        return self.found

    def _pass_missing(self, below: int) -> None:
        """Account for the missing log files before this one, which `wal.corruption = truncate` gives up."""
        while self._lost_files and self._lost_files[0][0] < below:
            _, (shards, shard) = self._lost_files.pop(0)
            self._replay.lose_log(shard, shards, self._file_bytes)

    # -- snapshots and segments -----------------------------------------------------------------------

    def _start_from_snapshots(self) -> None:
        """Load the state of the snapshots, and register the segments on disk."""
        replay = self._replay
        self._base = base = load_baseline(self._disk, self._data_dir, self._shard, self._shards)
        self._beat()
        self._missing = adopt_segments(
            self._disk, self._data_dir, base, replay.segments, has_cold=self._has_or_had_cold(),
            beat=self._beat,
        )  # fmt: skip
        for layer in base.layers:
            replay.take_facts(layer.facts, is_own=layer is base.own)
        replay.load(base.topics())
        replay.is_known = base.knows_topic
        self.found.to_quarantine = (
            [each.partition(": ")[0] for each in base.skipped] if replay.is_lenient else []
        )
        if base.layers:
            self.found.number = base.layers[0].snapshot.number
            self.found.listed = set(base.listed_segments())
            self.found.has_base = base.own is not None

    def _rebuild(self) -> None:
        """Restore topics from their segments if snapshots and absorbed log files are lost.

        This happens only with `wal.corruption = truncate` at this or an earlier start. Names and settings
        were only in the snapshots, unless the remaining log contains them.
        """
        found = orphans_in(self._disk, self._data_dir, self._base, self._replay.segments)
        for topic_id, orphan in sorted(found.items()):
            self._beat()
            self._replay.adopt_orphan(topic_id, orphan)
        log_event(
            log, logging.ERROR, "no readable snapshot: topics are rebuilt from segments and log",
            skipped=self._base.skipped, topics=len(found),
        )  # fmt: skip
        if self._lost_files:
            # The last seqs of these topics, and of topics without any remaining record, are unknown.
            self._replay.lose_log(self._shard, self._shards, WAL_FILE_BYTES_DEFAULT)

    def _has_or_had_cold(self) -> bool:
        """Return True if there is a cold tier, or was one at an earlier start. Its segments are not lost."""
        return self._has_cold or self._disk.exists(f"{self._data_dir}/{META_DIR}/{COLD_OWNER}")

    def _was_resharded(self, files: Iterable[_ScannedFile]) -> bool:
        """Return True if there are files or snapshots of another shard count."""
        layouts = {file.header.shards for file in files} | {layer.owner[0] for layer in self._base.layers}
        return bool(layouts - {self._shards})

    def _learn_names(self) -> None:
        """Find the names with this shard as home whose topics belong to other shards (C6).

        Every shard learns these names from the log under the old shard count. Frames in doubt are an
        exception. The owner of the topic has copied them, and the originals may be dead or deleted. Only the
        owner's log is then certain to contain the creation of the topic. If the home shard missed it, clients
        would not find the topic and would create the name again.

        Logs are read before snapshots. A log file that is deleted meanwhile is absorbed by a snapshot read
        later.
        """
        for file in self._siblings:
            try:
                fd, read = self._reader(file.path)
            except DiskError as e:
                if e.errno != errno.ENOENT:
                    raise
                continue  # absorbed meanwhile; the snapshot that is read below contains it
            try:
                for piece in copied_frames(file.header, file.size, read):
                    self._replay.learn_names(piece, self._origin(file))
            finally:
                self._disk.close(fd)
            self._beat()
        for (shards, shard), facts in newest_facts(self._disk, self._data_dir).items():
            if shards == self._shards and shard != self._shard:
                self._replay.take_facts(facts, is_own=False)

    def _skip_absorbed(self, file: _ScannedFile) -> None:
        """Handle a file that this shard's snapshot absorbed: it waits for its deletion, or is deleted now."""
        header = file.header
        if header.shards != self._shards and file.stream % self._shards == self._shard:
            self._old[header.file_id] = file.path
        if file.stream != self._shard:
            return
        if header.file_id > self.found.prev[0]:
            self.found.prev = (header.file_id, WAL_HEADER_BYTES, 0, False)
        if header.shards != self._shards or self._base.own is None:
            return
        if (header.file_id, file.path) in self._base.own.facts.waiting:
            self.found.waiting.append((header.file_id, file.path))
        else:
            self.found.unused_files.append(file.path)

    # -- selection of files ---------------------------------------------------------------------------

    def _relevant_files(self) -> list[_ScannedFile]:
        """Return the files that may contain frames of this shard, oldest incarnation first."""
        files: list[_ScannedFile] = []
        wal = f"{self._data_dir}/{WAL_DIR}"
        for directory in sorted(self._disk.list_dir(wal)):
            stream = parse_shard_dir(directory)
            if stream is None:
                continue
            for name in self._disk.list_dir(f"{wal}/{directory}"):
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
        if incarnation >= self._incarnation:
            raise CorruptData(
                "the log has files of a later incarnation than meta/engine: restore meta/engine", file=path,
                incarnation=self._incarnation,
            )  # fmt: skip

    def _is_history(self, stream: int, incarnation: int) -> bool:
        if stream == self._shard:
            return incarnation < self._incarnation
        return incarnation < self._boot_incarnation

    def _open(self, path: str, stream: int) -> _ScannedFile | None:
        """Read the header of a file. Return None if the file belongs to another shard or was never used."""
        try:
            fd, read = self._reader(path)
        except DiskError as e:
            if e.errno != errno.ENOENT:
                raise
            return None  # absorbed and deleted since it was listed; otherwise `_require` reports it
        try:
            size = self._disk.size(fd)
            data = read(0, WAL_HEADER_BYTES)
            if not header_verifies(data):
                incarnation, n = parse_wal_name(path.rsplit("/", 1)[1]) or (0, 0)
                # The header is durable before the first commit batch is written. A file without valid header
                # and without batches was never used; with batches it is damaged.
                if not self._base.absorbs(pack_file(incarnation, n)) and holds_marks(read, size):
                    raise CorruptData("WAL file has frames but no header", file=path, offset=0)
                if stream % self._shards == self._shard:  # includes streams of shards that no longer exist
                    self.found.unused_files.append(path)
                return None
            header = decode_wal_header(data, path)
        finally:
            self._disk.close(fd)
        named = parse_wal_name(path.rsplit("/", 1)[1])
        if (header.incarnation, header.n) != named or header.shard != stream:
            raise CorruptData(
                "WAL file header does not match its name", file=path, shard=header.shard,
                incarnation=header.incarnation, n=header.n,
            )  # fmt: skip
        if header.engine_id != self._engine_id:
            raise CorruptData(
                "WAL file belongs to another data directory", file=path, engine_id=header.engine_id.hex()
            )
        self._present.add(header.file_id)
        if stream != self._shard and header.shards == self._shards:
            if header.n == 0:
                self._siblings.append(_ScannedFile(path, stream, header, size))
            return None
        return _ScannedFile(path, stream, header, size, is_absorbed=self._base.absorbs(header.file_id))

    def _reader(self, path: str) -> tuple[int, ReadBytes]:
        fd = self._disk.open_read(f"{self._data_dir}/{path}")
        return fd, lambda offset, length: self._disk.read_at(fd, length, offset)

    # -- registers ------------------------------------------------------------------------------------

    def _take_registers(self, files: list[_ScannedFile]) -> None:
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
                    self._damage(e.message, **e.detail)
                    self.found.to_quarantine.append(name)
                    # This shard's own register is replaced with its first file. No process writes the others.
                    self.found.unused_files += (
                        [name] if stream % self._shards == self._shard != stream else []
                    )
                continue
            if entry is None:
                self._require_unregistered([file for file in files if file.stream == stream], name)
                continue
            if entry.engine_id != self._engine_id:
                self._damage(
                    "the log register belongs to another data directory", file=name,
                    engine_id=entry.engine_id.hex(),
                )  # fmt: skip
                continue
            self._file_bytes = max(self._file_bytes, entry.file_bytes)
            is_siblings = stream != self._shard and entry.shards == self._shards
            if not is_siblings or self._replay.is_lenient:
                self._replay.directory.advance_identity(entry.last_id, entry.last_epoch)
            for shards, file_id in entry.newest_files:
                if stream == self._shard or shards != self._shards:
                    self._required.append((file_id, WAL_HEADER_BYTES + 1, name, (shards, stream)))

    def _require_unregistered(self, files: list[_ScannedFile], name: str) -> None:
        """Check a stream without a register.

        A register is missing if a file with commit batches refers to it.
        """
        for file in files:
            if not file.header.flags & WAL_FLAG_REGISTERED:
                continue
            fd, read = self._reader(file.path)
            try:
                has_groups = mark_at(WAL_HEADER_BYTES, FileScan(file.header, file.size, read)) is not None
            finally:
                self._disk.close(fd)
            if has_groups:
                self._damage(
                    "the log register is missing: the newest log file is unknown", file=name,
                    named_by=file.path, do=_WHAT_TO_DO,
                )  # fmt: skip
                return

    # -- references between files ---------------------------------------------------------------------

    def _connect(self, files: list[_ScannedFile]) -> None:
        """Record in each file what later files state about it, and check that no file is missing (RF-76)."""
        by_id = {file.header.file_id: file for file in files}
        newest: dict[tuple[int, int], _ScannedFile] = {}
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
                file.copied = file.copied or _NO_COPIED_MARK
                last_served[file.stream, file.header.shards] = file.header.incarnation
        mine = last_served.get((self._shard, self._shards), 0)
        for file in files:
            theirs = last_served.get((file.stream, file.header.shards), 0)
            file.is_superseded = file.header.incarnation < max(mine, theirs)
        for header, path in [(file.header, file.path) for file in files if _is_believed(file)]:
            self._require(header.prev_file, header.prev_stop, path, (header.shards, header.shard))
            if header.prev_file in by_id:
                by_id[header.prev_file].ends.append((header.prev_stop, header.prev_seal))
        for required in self._required:
            self._require(*required)
        self._require(*self._durable_mark, "the board", (self._shards, self._shard))

    def _copied_mark(self, file: _ScannedFile) -> ChainMark | None:
        fd, read = self._reader(file.path)
        try:
            return copied_mark(file.header, file.size, read)
        finally:
            self._disk.close(fd)

    def _apply_copied_mark(self, by_id: dict[int, _ScannedFile], header: WalHeader, mark: ChainMark) -> None:
        for file_id, stop in mark.settled:
            self._required.append((file_id, stop, f"incarnation {header.incarnation}", None))
            if file_id in by_id:
                by_id[file_id].claims.append(_CopiedFrom(header.shards, header.shard, stop))
        for file_id in mark.damaged:
            if file_id in by_id:
                by_id[file_id].is_damaged = True
            elif file_id not in self._present:
                self._replay.has_damage = True
                self._known_missing.add(file_id)

    def _absorbed_word(self, header: WalHeader) -> ChainMark | None:
        """Return an empty mark for an incarnation whose first files were absorbed, because it served.

        The same holds for an incarnation whose first files are missing; `_require` reports them.
        """
        before = header.prev_file
        is_gone = before >> 24 == header.incarnation and before not in self._present
        return _NO_COPIED_MARK if is_gone else None

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
        if not file_id or stop <= WAL_HEADER_BYTES or file_id in self._present:
            return
        if self._base.covers_missing_file(written_by, file_id) or self._is_absorbed_elsewhere(
            written_by, file_id
        ):
            return
        if file_id not in self._known_missing:
            self._known_missing.add(file_id)
            self.found.damaged.add(file_id)
            facts: dict[str, Any] = {"snapshots_skipped": self._base.skipped} if self._base.skipped else {}
            stream = shard_dir(written_by[1] if written_by else self._shard)
            self._damage(
                "a WAL file is missing", file=f"{WAL_DIR}/{stream}/{wal_name(*unpack_file(file_id))}",
                file_id=file_id, named_by=by, do=_WHAT_TO_DO, **facts,
            )  # fmt: skip
            insort(self._lost_files, (file_id, written_by or (self._shards, self._shard)))

    def _damage(self, text: str, **facts: Any) -> None:
        """Raise CorruptData. With `wal.corruption = truncate`, log an error instead."""
        if not self._replay.is_lenient:
            raise CorruptData(text, **facts)
        self._replay.has_damage = True
        log_event(log, logging.ERROR, text, **facts)

    # -- one file -------------------------------------------------------------------------------------

    def _replay_file(self, file: _ScannedFile) -> list[WalScanChunk]:
        """Replay one file. Return its chunks in doubt, which are not in the index."""
        fd, read = self._reader(file.path)
        try:
            scan, pieces = self._scan(file, read, is_applied=file.copied is not None)
            tail = classify_tail(scan, self._evidence(file))
            if tail is WalTailState.CORRUPT and file.copied is None and self._replay.is_lenient:
                # The damage may have hit its MARK_COPIED.
                scan, pieces = self._scan(file, read, is_applied=True)
                file.copied = _NO_COPIED_MARK
            self._require_same_lineage(file, scan)
            was_damaged = file.is_damaged
            self._accept(file, scan, tail)
            if self._is_read_only and file.copied is not None:
                file.is_synced_read_only = self._is_in_doubt(file, scan) and self._can_sync(fd)
                self._scan(file, read, is_applied=True, up_to=self._sure_stop(file, scan))
            if file.is_damaged:
                if file.stream % self._shards == self._shard:
                    self.found.to_quarantine.append(file.path)
                behind = FileScan(file.header, file.size, read, stop=scan.stop)
                is_new = not was_damaged
                end = self._replay.scan_behind_damage(
                    frames_after_damage(behind), self._origin(file), scan.stop, is_new=is_new
                )
                behind = FileScan(file.header, file.size, read, stop=end)
                last = max(self._evidence(file), scan.durable, last_nonzero_byte(behind)) if is_new else 0
                if last > end:
                    self._replay.lose_log(file.stream, file.header.shards, last - end)
        finally:
            self._disk.close(fd)
        return self._end(file, scan, tail, pieces)

    def _scan(
        self, file: _ScannedFile, read: ReadBytes, *, is_applied: bool, up_to: int = 0
    ) -> tuple[FileScan, list[WalScanChunk]]:
        """Scan a file and apply its chunks.

        Return the chunks that extend beyond the durable end in its marks. A read-only recovery scans twice:
        first without applying, then it applies the file up to `up_to`, its certain end.
        """
        scan = FileScan(
            file.header, up_to or file.limit or file.size, read, known_durable=self._evidence(file)
        )
        self._replay.has_damage |= file.is_damaged
        origin = self._origin(file)
        pieces: list[WalScanChunk] = []
        for piece in scan.iter_chunks():
            self._beat()
            if not is_applied:
                continue
            if up_to or not self._is_read_only:
                self._give_up(file, scan)
                self._replay.apply(piece, origin, excluded=self._excluded(file, piece))
            pieces = [each for each in [*pieces, piece] if each.stop > scan.durable]
        if is_applied and (up_to or not self._is_read_only):
            self._give_up(file, scan)
        return scan, pieces

    def _give_up(self, file: _ScannedFile, scan: FileScan) -> None:
        """Report damaged records that the scan skipped, unless they are absorbed or were copied."""
        file_id = file.header.file_id
        for lost in scan.skipped_appends[len(file.given_up) :]:
            file.given_up.append(lost)
            self.holes.setdefault(file_id, []).append((lost.offset, lost.stop))
            absorbed = self._base.absorbed(file_id, np.array([lost.topic_id], dtype=np.uint64))
            is_copied = not file.limit and any(
                lost.offset >= claim.stop and shard_of(lost.topic_id, claim.shards) == claim.shard
                for claim in file.claims
            )
            if is_copied or (absorbed is not None and bool(absorbed[0])):
                continue
            log_event(
                log, logging.ERROR, "damaged records of class memory are lost", file=file.path,
                offset=lost.offset, topic_id=lost.topic_id, first_seq=lost.first_seq, last_seq=lost.last_seq,
            )  # fmt: skip
            self._replay.announce_loss(lost, self._origin(file))

    def _origin(self, file: _ScannedFile) -> ReplayedFile:
        header = file.header
        return ReplayedFile(
            header.file_id, file.path, header.shard, header.shards, header.shards != self._shards
        )

    def _excluded(self, file: _ScannedFile, piece: WalScanChunk) -> NDArray[np.bool_] | None:
        """Return a mask (n,) of frames that a shard copied to its own file or a snapshot absorbed.

        None means no frame.
        """
        topics = piece.batch.words[:, layout.W_TOPIC]
        absorbed = self._base.absorbed(file.header.file_id, topics)
        if file.limit or not file.claims or piece.stop <= min(c.stop for c in file.claims):
            return absorbed
        offsets = piece.batch.offsets + piece.file_offset
        excluded = np.zeros(len(offsets), dtype=np.bool_) if absorbed is None else absorbed
        for claim in file.claims:
            excluded |= (offsets >= claim.stop) & (shards_of(topics, claim.shards) == claim.shard)
        return excluded

    def _evidence(self, file: _ScannedFile) -> int:
        """Return the offset up to which other files and marks prove that this file is durable."""
        if file.limit:
            return file.limit
        known = [claim.stop for claim in file.claims]
        if not file.is_damaged:
            known += [stop for stop, _ in file.ends]
            marked_file, marked = self._durable_mark
            known += [marked] if marked_file == file.header.file_id else []
        return max(known, default=0)

    def _require_same_lineage(self, file: _ScannedFile, scan: FileScan) -> None:
        """Check that the next file was written after exactly these frames, by the seal of the last one."""
        for stop, seal in file.ends:
            found = scan.seal_at(stop)
            if found and seal and found != seal:
                self._damage(
                    "the log file was replaced after the next file was created", file=file.path, offset=stop
                )

    def _accept(self, file: _ScannedFile, scan: FileScan, tail: WalTailState) -> None:
        if tail is WalTailState.CORRUPT and not file.is_damaged:
            self._damage(
                "the log is damaged below its durable end", file=file.path, offset=scan.stop,
                durable=max(self._evidence(file), scan.durable), reason=scan.reason or "zeros",
            )  # fmt: skip
            file.is_damaged = True
            self._lost_streams.append((file.header.shards, file.stream))
        elif tail is WalTailState.TORN:
            self.found.truncated_bytes += max(file.size - scan.stop, 0)
            log_event(
                log, logging.WARNING, "torn log tail truncated", file=file.path, offset=scan.stop,
                reason=scan.reason,
            )  # fmt: skip

    def _end(
        self, file: _ScannedFile, scan: FileScan, tail: WalTailState, pieces: list[WalScanChunk]
    ) -> list[WalScanChunk]:
        """Evaluate the end of a file. Return the chunks in doubt."""
        header, is_own = file.header, file.stream == self._shard
        if file.copied is None:
            if is_own and header.shards == self._shards and file.size > WAL_HEADER_BYTES:
                self.found.truncations.append((file.path, WAL_HEADER_BYTES))
            return []
        durable, in_doubt = self._durable_stop(file, scan), self._is_in_doubt(file, scan)
        stop = self._sure_stop(file, scan)
        if in_doubt:
            # The header of this file may not be durable. Without it, the previous file would be the last one.
            self.found.settled.update(self._last_closed.get(header.incarnation, {}))
            self._doubt(file, stop)
            self._judge_loss(file, scan, tail)
            if header.shards != self._shards and not self._is_read_only:
                self._sync(file)
        if not file.is_last:
            self._last_closed[header.incarnation] = {header.file_id: durable}
        if file.is_damaged and not file.limit:
            self.found.settled[header.file_id] = stop
        elif said := file.limit or file.claim_of(self._shards, self._shard):
            self._settled_before.append((header.file_id, said))
        if file.is_damaged or self._replay.has_skipped:
            # Otherwise a later start would refuse the damage that this start gives up.
            self.found.damaged.add(header.file_id)
            self._replay.has_skipped = False
        if scan.orderly:
            self._replay.settle_reservations(header.shard, header.shards, header.incarnation)
        self.paths[header.file_id], self.salts[header.file_id] = file.path, header.salt
        self.stops[header.file_id] = stop
        if header.shards != self._shards:
            self.found.other_layout_files.add(header.file_id)
        if is_own:
            self.found.prev = (header.file_id, durable, scan.seal_at(durable), scan.orderly)
            end = max(stop, file.copied.prev_stop + file.copied.group_bytes)
            if durable >= end and header.shards == self._shards:
                self._last_served_file = header.file_id
            if file.is_last and header.shards == self._shards and file.size > end and not file.is_damaged:
                self.found.truncations.append((file.path, end))
        return [piece.from_offset(stop) for piece in pieces if piece.stop > stop] if in_doubt else []

    def _durable_stop(self, file: _ScannedFile, scan: FileScan) -> int:
        return min(max(self._evidence(file), scan.durable), scan.stop)

    def _is_in_doubt(self, file: _ScannedFile, scan: FileScan) -> bool:
        """Return True if the frames after `_durable_stop` are in doubt: they may not be durable."""
        is_open = file.is_last and not (
            file.limit or file.is_superseded or file.is_synced_read_only or scan.orderly
        )
        return is_open and not file.claim_of(self._shards, self._shard)

    def _sure_stop(self, file: _ScannedFile, scan: FileScan) -> int:
        return self._durable_stop(file, scan) if self._is_in_doubt(file, scan) else scan.stop

    def _doubt(self, file: _ScannedFile, stop: int) -> None:
        """Mark the frames from `stop` on as in doubt: they are written again into a new file.

        The MARK_COPIED of the file's incarnation may not be durable either, so its statements are repeated.
        """
        for topic in self._replay.directory.by_id.values():
            if topic.has_index:
                topic.index.truncate_file(file.header.file_id, stop)
        if file.copied is not None and (file.header.shards, file.stream) == (self._shards, self._shard):
            for earlier, end in file.copied.settled:
                self.found.settled.setdefault(earlier, end)
            self.found.damaged.update(file.copied.damaged)
        self.found.settled[file.header.file_id] = stop

    def _can_sync(self, fd: int) -> bool:
        """Sync the file for a read-only shard, which cannot copy frames. Return False if the sync fails.

        Acknowledged records must be readable, and readable records must survive a power loss.
        """
        try:
            self._disk.sync_file(fd)
        except DiskError as e:
            log_event(
                log, logging.ERROR, "latest records are not readable: the log cannot be synced", reason=str(e)
            )
            return False
        return True

    def _sync(self, file: _ScannedFile) -> None:
        """Sync a file of another shard count, so that all shards that read its end see the same frames.

        After a power loss during recovery, shards that read the file later could miss frames that other
        shards have used. The sync does not replace the copy. If an earlier sync of this file failed, this
        sync may succeed without the data being durable.
        """
        fd = self._disk.open_for_truncate(f"{self._data_dir}/{file.path}")
        try:
            self._disk.sync_file(fd)
        finally:
            self._disk.close(fd)

    def _judge_loss(self, file: _ScannedFile, scan: FileScan, tail: WalTailState) -> None:
        """Record the stream if acknowledged frames may be lost.

        Nothing is lost if the host did not reboot and the log is complete up to its published mark.
        """
        published_file, published = self._published_mark
        is_whole = tail is WalTailState.CLEAN
        if published_file == file.header.file_id:
            is_whole = scan.stop >= published
        if not is_whole or file.header.boot_id != self._boot_id:
            self._lost_streams.append((file.header.shards, file.stream))


def _is_believed(file: _ScannedFile) -> bool:
    """Return True if the header's statement about the previous file is reliable.

    This holds if the file's incarnation served. A statement about a file of the same incarnation is always
    reliable, because the incarnation's first files, which prove that it served, may be the missing ones.
    """
    header = file.header
    return file.copied is not None or header.prev_file >> 24 == header.incarnation


def _note_doubt(in_doubt: dict[tuple[int, int], int], piece: WalScanChunk) -> None:
    """Record the highest producer number of each (topic, producer) in a chunk."""
    words = piece.batch.words[frames.types_of(piece.batch.words) == layout.FrameType.APPEND]
    columns = (layout.W_TOPIC, layout.W_PRODUCER_ID, layout.W_PRODUCER_SEQ)
    for topic, producer, number in words[:, columns].tolist():
        in_doubt[topic, producer] = max(number, in_doubt.get((topic, producer), 0))


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


def quarantine_file(disk: Disk, data_dir: str, path: str) -> None:
    """Copy a damaged file to `quarantine/`, which no process reads as data. Raise DiskError.

    An existing copy is complete, since it is renamed into place last. It is not written again.
    """
    target = f"{data_dir}/{QUARANTINE_DIR}/{path}"
    if disk.exists(target) or not disk.exists(f"{data_dir}/{path}"):
        return
    directory = data_dir
    for part in f"{QUARANTINE_DIR}/{path}".split("/")[:-1]:
        disk.make_dir(f"{directory}/{part}")
        disk.sync_dir(directory)
        directory = f"{directory}/{part}"
    source = disk.open_read(f"{data_dir}/{path}")
    try:
        copied = disk.read_at(source, disk.size(source), 0)
    finally:
        disk.close(source)
    replace_file(disk, directory, path.rpartition("/")[2], copied)
    log_event(
        log, logging.WARNING, "damaged file copied to quarantine", file=path, copy=f"{QUARANTINE_DIR}/{path}"
    )


def clean_up(disk: Disk, data_dir: str, found: RecoveryResult) -> None:
    """Copy damaged files to quarantine, delete unused files and truncate own files. Raise DiskError.

    Call this only after the MARK_COPIED of this incarnation is durable.
    """
    for path in found.to_quarantine:
        quarantine_file(disk, data_dir, path)
    for path in found.unused_files:
        disk.unlink(f"{data_dir}/{path}")
    for path, stop in found.truncations:
        fd = disk.open_for_truncate(f"{data_dir}/{path}")
        try:
            disk.truncate(fd, stop)
            disk.sync_file(fd)
        finally:
            disk.close(fd)
