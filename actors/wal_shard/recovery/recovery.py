"""Recovery: from the files of a data directory to a core that may go on. Reads through the disk module.

Order: take over what the snapshots say, and the segments that are there; list the streams; learn from
later files where earlier ones end; replay every file that no snapshot stands for, in the order of its
incarnation; judge each end; gather what is in doubt; settle reservations and names. What was in doubt is
then written again by the core into this incarnation's own file before anything else happens (RD-2).
Nothing here changes the log but `tidy`, afterwards.

Who copied what. An incarnation that got through its recovery says so with a MARK_COPIED, which names
the files that held doubtful frames and where each ends from now on. It speaks for the topics that its
shard owned under its shard count, and only for them: after a change of the count several shards copy
from one old file, each its own topics, and any of them may crash before it is done. An incarnation
without that mark never served anybody: whatever it wrote is a copy of what still lies in earlier files,
so its files are passed over.
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

from actors.wal_shard.commit.commit_batch import CommitBatch
from actors.wal_shard.recovery.baseline import (
    Baseline,
    Owner,
    absorbed_everywhere,
    adopt_segments,
    is_relevant_to,
    load_baseline,
    newest_facts,
    orphans_in,
)
from actors.wal_shard.recovery.replay import Replay, ReplayedFile
from actors.wal_shard.recovery.shard_facts import ShardFacts
from ringlog import stop_points
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
"""(bytes done, bytes in all)."""


_NO_COPIED_MARK = ChainMark(0, 0, 0, 0, 0, 0)
_WHAT_TO_DO = "put it back, or give up what it held: ringlog repair, or wal.corruption = truncate"


@dataclass(frozen=True, slots=True)
class _CopiedFrom:
    """What shard `shard` of `shards` copied: the frames of its topics from `stop` on are dead."""

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
    """The last of its incarnation."""
    copied: ChainMark | None = None
    """MARK_COPIED of its incarnation; None when it did not get that far: the file is passed over."""
    is_followed: bool = False
    """A later incarnation of the same shard served, or one of ours: it has copied what was in doubt here."""
    claims: list[_CopiedFrom] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(offset, seal of the frame that ends there), known to be durable by the word of the next file."""
    is_kept: bool = False
    """A life that serves reads alone synced it: all of it is shown, though no later file repeats it."""
    is_absorbed: bool = False
    """A snapshot stands for it: nothing in it is replayed."""
    given_up: list[SkippedAppend] = field(default_factory=list)
    """Damaged frames of class memory in it, ascending."""
    is_damaged: bool = False
    """Cut at damage by an earlier recovery; what lies behind is looked at only to know what was lost."""

    @property
    def limit(self) -> int:
        """Where the file ends for everybody; 0 = wherever its frames end."""
        own = [c.stop for c in self.claims if (c.shards, c.shard) == (self.header.shards, self.stream)]
        if own:
            return max(own)
        for count in {c.shards for c in self.claims}:
            stops = {c.shard: c.stop for c in self.claims if c.shards == count}
            if len(stops) == count:
                return max(stops.values())
        return 0

    def claim_of(self, shards: int, shard: int) -> int:
        """Where this shard, under this count, began to copy its part; 0 = it did not."""
        return max((c.stop for c in self.claims if (c.shards, c.shard) == (shards, shard)), default=0)


@dataclass(slots=True)
class RecoveryResult:
    """What recovery found, for the core's `begin` and for readers."""

    group: CommitBatch = field(default_factory=CommitBatch)
    prev: tuple[int, int, int, bool] = (0, 0, 0, False)
    settled: dict[int, int] = field(default_factory=dict)
    """file -> where it ends for our topics from now on."""
    damaged: set[int] = field(default_factory=set)
    """Those of them that were cut at damage."""
    unused_files: list[str] = field(default_factory=list)
    """Own files whose header was never durable: nothing was ever acked in them."""
    truncations: list[tuple[str, int]] = field(default_factory=list)
    """Own last files and where they end: what lies behind is never read again and may be given back."""
    to_quarantine: list[str] = field(default_factory=list)
    """Damaged files, of which a copy is kept: what is whole in them may be wanted."""
    halts: list[Halt] = field(default_factory=list)
    """Topics that are not served because a part of them is missing."""
    truncated_bytes: int = 0
    announced: list[tuple[str, int, int]] = field(default_factory=list)
    bytes: int = 0
    number: int = 0
    """The snapshot that everything started from; 0 = none."""
    has_base: bool = False
    """It is this shard's own: what it says of a topic that is not in `changed` is still true."""
    listed: set[int] = field(default_factory=set)
    """Segments that the snapshot names."""
    waiting: list[tuple[int, str]] = field(default_factory=list)
    """(file, path) of absorbed files that are kept until the next snapshot."""
    changed: set[int] = field(default_factory=set)
    """Topics of which the log said more."""
    foreign: set[int] = field(default_factory=set)
    """Files replayed that were written under another shard count."""
    in_doubt: dict[tuple[int, int], int] = field(default_factory=dict)
    """(topic, producer) -> highest producer number of what was not applied, being in doubt; read-only."""


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
        engine_id: bytes,
        durable_mark: tuple[int, int] = (0, 0),
        published_mark: tuple[int, int] = (0, 0),
        progress: Progress = lambda done, total: None,
        has_cold: bool = False,
        is_read_only: bool = False,
    ) -> None:
        """With `is_read_only` nothing on the disk is changed. What is in doubt is applied as it lies there if
        its file can be synced, else not at all."""
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
        """First files of earlier incarnations of this layout's other shards."""
        self._elsewhere: dict[Owner, ShardFacts] | None = None
        self._old: dict[int, str] = {}
        """Absorbed files of other layouts that are ours to unlink, once every shard has absorbed them."""
        self._present: set[int] = set()
        self._last_served_file = 0
        """Our last file whose incarnation surely served: what it said of earlier files needs no repeating."""
        self._last_closed: dict[int, dict[int, int]] = {}
        """Incarnation -> its last file but one, and where that ends."""
        self._settled_before: list[tuple[int, int]] = []
        """(file, stop) as earlier incarnations said."""
        self._known_missing: set[int] = set()
        self._required: list[tuple[int, int, str, Owner | None]] = []
        self._lost_files: list[tuple[int, Owner]] = []
        """Log files that are given up though nothing of them is there, ascending."""
        self._file_bytes = WAL_FILE_BYTES_DEFAULT
        """No log file is larger, as far as that is known."""
        self._lost_streams: list[tuple[int, int]] = []
        """(shards, shard) of streams whose end may have lost something that was acknowledged."""

    def _beat(self) -> None:
        """Say that it gets on, within a file too: it is judged by that (RD-18)."""
        self._progress(self.found.bytes, self._total)

    def run(self) -> RecoveryResult:
        """Replay everything; raises CorruptData for damage, DiskError when a file cannot be read (RE-3)."""
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
            # Said again, since that word may be as little durable as the rest.
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
                    self._replay.copy_loss(left.popleft(), self.found.group)
                excluded = self._excluded(file, piece)
                self._replay.copy(piece, self.found.group, self._origin(file), excluded=excluded)
        for topic in self._replay.stage_placeholders(self.found.group):
            log_event(
                log, logging.ERROR, "a topic was recovered and its name and settings were not",
                topic=topic.name, topic_id=topic.topic_id, epoch=topic.epoch, head_seq=topic.head_seq,
            )  # fmt: skip
        announced = self._replay.jump_heads(self.found.group, self._lost_streams)
        self.found.announced = announced + self._replay.gaps
        self.found.changed = self._replay.touched_topics
        return self.found

    def _pass_missing(self, below: int) -> None:
        """Lose the log files that are missing and lay before this one, as the operator said (RE-6)."""
        while self._lost_files and self._lost_files[0][0] < below:
            _, (shards, shard) = self._lost_files.pop(0)
            self._replay.lose_log(shard, shards, self._file_bytes)

    # -- snapshots and segments -----------------------------------------------------------------------

    def _start_from_snapshots(self) -> None:
        """Take over what the snapshots say, and the segments that are there."""
        replay = self._replay
        self._base = base = load_baseline(self._disk, self._data_dir, self._shard, self._shards)
        self._beat()
        self._missing = adopt_segments(
            self._disk, self._data_dir, base, replay.sealed, has_cold=self._has_or_had_cold(), beat=self._beat
        )
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
        """With no snapshot to tell of them, and the log that it absorbed gone, take topics over as their
        segments have them, by the operator's word of this start or of one before (RE-6). Names and settings
        were in the snapshots alone; the log may have them again."""
        found = orphans_in(self._disk, self._data_dir, self._base, self._replay.sealed)
        for topic_id, orphan in sorted(found.items()):
            self._beat()
            self._replay.adopt_orphan(topic_id, orphan)
        log_event(
            log, logging.ERROR, "no snapshot can be read: what lies in segments and in the log is kept",
            skipped=self._base.skipped, topics=len(found),
        )  # fmt: skip
        if self._lost_files:
            # How far they, and others of which no record is left, had got is not known.
            self._replay.lose_log(self._shard, self._shards, WAL_FILE_BYTES_DEFAULT)

    def _has_or_had_cold(self) -> bool:
        """Is there a cold tier, or was there one at an earlier start? What it holds is not lost."""
        return self._has_cold or self._disk.exists(f"{self._data_dir}/{META_DIR}/{COLD_OWNER}")

    def _was_resharded(self, files: Iterable[_ScannedFile]) -> bool:
        """Is there still something of another layout?"""
        layouts = {file.header.shards for file in files} | {layer.owner[0] for layer in self._base.layers}
        return bool(layouts - {self._shards})

    def _learn_names(self) -> None:
        """Learn which names that are at home here are those of topics of our siblings.

        Every shard reads that from the log of the layout under which they were made. But what was in doubt
        there has been copied by the topics' owner, and may be dead or gone in the original; nobody else reads
        the owner's log. Without its home pointing to it a topic is lost, and the name made anew.

        Logs first: a file that goes meanwhile is said in a snapshot by then, which is read behind it.
        """
        for file in self._siblings:
            try:
                fd, read = self._reader(file.path)
            except DiskError as e:
                if e.errno != errno.ENOENT:
                    raise
                continue  # absorbed meanwhile: a snapshot says it
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
        """A file that our snapshot stands for: it waits to be unlinked, or was forgotten (SH-7)."""
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

    # -- which files ----------------------------------------------------------------------------------

    def _relevant_files(self) -> list[_ScannedFile]:
        """Files that may hold frames of ours, oldest incarnation first."""
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
        """Our number is above all that this stream has seen (RD-5): else what a later life acknowledged would
        be passed over, and what we write be taken for absorbed."""
        if incarnation >= self._incarnation:
            raise CorruptData(
                "the log has files of a later incarnation: the counter in meta/engine went back",
                file=path, incarnation=self._incarnation,
            )  # fmt: skip

    def _is_history(self, stream: int, incarnation: int) -> bool:
        if stream == self._shard:
            return incarnation < self._incarnation
        return incarnation < self._boot_incarnation

    def _open(self, path: str, stream: int) -> _ScannedFile | None:
        """Read a file's header; None for a file that is not ours to read or was never used."""
        try:
            fd, read = self._reader(path)
        except DiskError as e:
            if e.errno != errno.ENOENT:
                raise
            return None  # absorbed, and unlinked since it was listed; if it was not, it will be missed
        try:
            size = self._disk.size(fd)
            data = read(0, WAL_HEADER_BYTES)
            if not header_verifies(data):
                incarnation, n = parse_wal_name(path.rsplit("/", 1)[1]) or (0, 0)
                # The header is durable before the first group is written, so without groups this is a
                # file that nobody ever used; with them it is damage.
                if not self._base.absorbs(pack_file(incarnation, n)) and holds_marks(read, size):
                    raise CorruptData("WAL file has frames but no header", file=path, offset=0)
                if stream % self._shards == self._shard:  # a stream that nobody has any more, too
                    self.found.unused_files.append(path)
                return None
            header = decode_wal_header(data, path)
        finally:
            self._disk.close(fd)
        named = parse_wal_name(path.rsplit("/", 1)[1])
        if (header.incarnation, header.n) != named or header.shard != stream:
            raise CorruptData(
                "WAL file lies under another file's name", file=path, shard=header.shard,
                incarnation=header.incarnation, n=header.n,
            )  # fmt: skip
        if header.engine_id != self._engine_id:
            raise CorruptData(
                "WAL file of another data directory", file=path, engine_id=header.engine_id.hex()
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

    # -- what registers say of files ------------------------------------------------------------------

    def _take_registers(self, files: list[_ScannedFile]) -> None:
        """Which file is the newest of each stream that may hold something of ours, and which topic ids were
        given out by then. No later file speaks of that one: what is said here alone knows of it.

        A stream that another shard of this layout writes is that shard's business, but for what was written
        there under other layouts.
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
                    # Our own is replaced when our first file is begun; of others nobody writes one.
                    self.found.unused_files += (
                        [name] if stream % self._shards == self._shard != stream else []
                    )
                continue
            if entry is None:
                self._require_unregistered([file for file in files if file.stream == stream], name)
                continue
            if entry.engine_id != self._engine_id:
                self._damage(
                    "the log's register is of another data directory", file=name,
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
        """No register says which of these files of one stream is the newest: right only if none with groups
        was begun when there was one."""
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
                    "the log's register is missing: nothing says which log file is the newest", file=name,
                    named_by=file.path, do=_WHAT_TO_DO,
                )  # fmt: skip
                return

    # -- what files say of one another ----------------------------------------------------------------

    def _connect(self, files: list[_ScannedFile]) -> None:
        """Note in each file what later ones say of it, and that none is missing (RF-76)."""
        by_id = {file.header.file_id: file for file in files}
        newest: dict[tuple[int, int], _ScannedFile] = {}
        speakers: dict[int, tuple[WalHeader, ChainMark | None]] = {}
        for file in files:
            header = file.header
            incarnation = (file.stream, header.incarnation)
            if header.incarnation not in speakers:
                speakers[header.incarnation] = header, self._copied_mark(file) or self._absorbed_word(header)
            file.copied = speakers[header.incarnation][1]
            newest[incarnation] = file
        for file in newest.values():
            file.is_last = True
        for speaker, mark in speakers.values():
            if mark is not None:
                self._apply_copied_mark(by_id, speaker, mark)
        # Only files of incarnations that served are ever settled, so a claim is as good as the mark, which
        # may itself have been beyond what was durable.
        served = {f.header.incarnation for f in files if f.copied is not None or f.claims}
        last_served: dict[tuple[int, int], int] = {}
        for file in files:
            if file.header.incarnation in served:
                file.copied = file.copied or _NO_COPIED_MARK
                last_served[file.stream, file.header.shards] = file.header.incarnation
        mine = last_served.get((self._shard, self._shards), 0)
        for file in files:
            theirs = last_served.get((file.stream, file.header.shards), 0)
            file.is_followed = file.header.incarnation < max(mine, theirs)
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

    def _apply_copied_mark(self, by_id: dict[int, _ScannedFile], speaker: WalHeader, mark: ChainMark) -> None:
        for file_id, stop in mark.settled:
            self._required.append((file_id, stop, f"incarnation {speaker.incarnation}", None))
            if file_id in by_id:
                by_id[file_id].claims.append(_CopiedFrom(speaker.shards, speaker.shard, stop))
        for file_id in mark.damaged:
            if file_id in by_id:
                by_id[file_id].is_damaged = True
            elif file_id not in self._present:
                self._replay.has_damage = True
                self._known_missing.add(file_id)

    def _absorbed_word(self, header: WalHeader) -> ChainMark | None:
        """An incarnation whose first files were absorbed served, whatever is left of it. So did one whose
        first files are missing, which `_require` judges."""
        before = header.prev_file
        is_gone = before >> 24 == header.incarnation and before not in self._present
        return _NO_COPIED_MARK if is_gone else None

    def _is_absorbed_elsewhere(self, written_by: Owner | None, file_id: int) -> bool:
        """Did another shard of this layout absorb it? Looked up only for a file that is not there."""
        if self._elsewhere is None:
            self._elsewhere = newest_facts(self._disk, self._data_dir)
        known = self._elsewhere.items()
        return any(facts.absorbs(file_id) for owner, facts in known if is_relevant_to(owner, written_by))

    def _require(self, file_id: int, stop: int, by: str, written_by: Owner | None) -> None:
        """A file that held something durable must be there, or its shard's snapshot stand for it.

        One that is there without a header may have lost it.
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
        """Damage: the end of this start, or a line in the log if the operator said so (RE-6)."""
        if not self._replay.is_lenient:
            raise CorruptData(text, **facts)
        self._replay.has_damage = True
        log_event(log, logging.ERROR, text, **facts)

    # -- one file -------------------------------------------------------------------------------------

    def _replay_file(self, file: _ScannedFile) -> list[WalScanChunk]:
        """Replay one file; returns its doubtful pieces, which the index does not lead to."""
        fd, read = self._reader(file.path)
        try:
            scan, pieces = self._scan(file, read, is_applied=file.copied is not None)
            tail = classify_tail(scan, self._evidence(file))
            if tail is WalTailState.CORRUPT and file.copied is None and self._replay.is_lenient:
                # Its MARK_COPIED may be what is damaged.
                scan, pieces = self._scan(file, read, is_applied=True)
                file.copied = _NO_COPIED_MARK
            self._require_same_lineage(file, scan)
            was_damaged = file.is_damaged
            self._accept(file, scan, tail)
            if self._is_read_only and file.copied is not None:
                file.is_kept = self._is_in_doubt(file, scan) and self._can_sync(fd)
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
        """Scan a file and apply it; returns the pieces that reach behind what its marks call durable.

        A read-only recovery looks first and applies then, `up_to` where the file is surely durable.
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
        """Announce as lost what the scan passed over, as far as it is ours and lies nowhere else."""
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
                log, logging.ERROR, "a damaged record of class memory is given up", file=file.path,
                offset=lost.offset, topic_id=lost.topic_id, first_seq=lost.first_seq, last_seq=lost.last_seq,
            )  # fmt: skip
            self._replay.announce_loss(lost, self._origin(file))

    def _origin(self, file: _ScannedFile) -> ReplayedFile:
        header = file.header
        return ReplayedFile(
            header.file_id, file.path, header.shard, header.shards, header.shards != self._shards
        )

    def _excluded(self, file: _ScannedFile, piece: WalScanChunk) -> NDArray[np.bool_] | None:
        """(n,) True for frames that lie again in the file of a shard that copied them, or that a snapshot
        stands for; None = no frame."""
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
        """How far this file is known to be durable by what others say of it."""
        if file.limit:
            return file.limit
        known = [claim.stop for claim in file.claims]
        if not file.is_damaged:
            known += [stop for stop, _ in file.ends]
            marked_file, marked = self._durable_mark
            known += [marked] if marked_file == file.header.file_id else []
        return max(known, default=0)

    def _require_same_lineage(self, file: _ScannedFile, scan: FileScan) -> None:
        """The next file was written behind exactly these frames."""
        for stop, seal in file.ends:
            found = scan.seal_at(stop)
            if found and seal and found != seal:
                self._damage("another file was here when the next was begun", file=file.path, offset=stop)

    def _accept(self, file: _ScannedFile, scan: FileScan, tail: WalTailState) -> None:
        if tail is WalTailState.CORRUPT and not file.is_damaged:
            self._damage(
                "the log is damaged below what was durable", file=file.path, offset=scan.stop,
                durable=max(self._evidence(file), scan.durable), reason=scan.reason or "zeros",
            )  # fmt: skip
            file.is_damaged = True
            self._lost_streams.append((file.header.shards, file.stream))
        elif tail is WalTailState.TORN:
            self.found.truncated_bytes += max(file.size - scan.stop, 0)
            log_event(
                log, logging.WARNING, "torn tail cut", file=file.path, offset=scan.stop, reason=scan.reason
            )

    def _end(
        self, file: _ScannedFile, scan: FileScan, tail: WalTailState, pieces: list[WalScanChunk]
    ) -> list[WalScanChunk]:
        """Draw the conclusions from a file's end; returns the pieces of its doubtful part."""
        header, is_own = file.header, file.stream == self._shard
        if file.copied is None:
            if is_own and header.shards == self._shards and file.size > WAL_HEADER_BYTES:
                self.found.truncations.append((file.path, WAL_HEADER_BYTES))
            return []
        durable, in_doubt = self._durable_stop(file, scan), self._is_in_doubt(file, scan)
        stop = self._sure_stop(file, scan)
        if in_doubt:
            # The header of this file may not be durable: without it the file before would be the last.
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
            # Or a later start would refuse what this one gives up.
            self.found.damaged.add(header.file_id)
            self._replay.has_skipped = False
        if scan.orderly:
            self._replay.settle_reservations(header.shard, header.shards, header.incarnation)
        self.paths[header.file_id], self.salts[header.file_id] = file.path, header.salt
        self.stops[header.file_id] = stop
        if header.shards != self._shards:
            self.found.foreign.add(header.file_id)
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
        """Is it open at its end, so that what lies behind `_durable_stop` may or may not be there?"""
        is_open = file.is_last and not (file.limit or file.is_followed or file.is_kept or scan.orderly)
        return is_open and not file.claim_of(self._shards, self._shard)

    def _sure_stop(self, file: _ScannedFile, scan: FileScan) -> int:
        return self._durable_stop(file, scan) if self._is_in_doubt(file, scan) else scan.stop

    def _doubt(self, file: _ScannedFile, stop: int) -> None:
        """What lies from `stop` on is written again; the word of the file's own incarnation goes with it.

        Its MARK_COPIED may be as little durable as the rest, so what it said is said again.
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
        """Can what this file says be shown without being copied? For a life that serves reads alone: what was
        acknowledged before must be seen, and what is seen must not go with the power."""
        try:
            self._disk.sync_file(fd)
        except DiskError as e:
            log_event(log, logging.ERROR,
            "records that were written last are not shown: the log cannot be synced",
                reason=str(e))  # fmt: skip
            return False
        return True

    def _sync(self, file: _ScannedFile) -> None:
        """Several shards draw conclusions from this file's doubtful end: let them all see the same.

        If power were lost when some have, the others would not find it any more. It is no substitute for
        copying: if a sync of this file failed before, this one may succeed and mean nothing (RD-2).
        """
        fd = self._disk.open_cut(f"{self._data_dir}/{file.path}")
        try:
            self._disk.sync_file(fd)
        finally:
            self._disk.close(fd)

    def _judge_loss(self, file: _ScannedFile, scan: FileScan, tail: WalTailState) -> None:
        """May something acknowledged be gone? Not if the kernel stayed up and the log is whole (D-19)."""
        published_file, published = self._published_mark
        is_whole = tail is WalTailState.CLEAN
        if published_file == file.header.file_id:
            is_whole = scan.stop >= published
        if not is_whole or file.header.boot_id != self._boot_id:
            self._lost_streams.append((file.header.shards, file.stream))


def _is_believed(file: _ScannedFile) -> bool:
    """Is what it says of the file before it to be believed? Of its own incarnation's always: whether that
    one served is said in its first files, and they may be what is missing."""
    header = file.header
    return file.copied is not None or header.prev_file >> 24 == header.incarnation


def _note_doubt(in_doubt: dict[tuple[int, int], int], piece: WalScanChunk) -> None:
    """Note which producers' frames a piece holds."""
    words = piece.batch.words[frames.types_of(piece.batch.words) == layout.FrameType.APPEND]
    columns = (layout.W_TOPIC, layout.W_PRODUCER_ID, layout.W_PRODUCER_SEQ)
    for topic, producer, number in words[:, columns].tolist():
        in_doubt[topic, producer] = max(number, in_doubt.get((topic, producer), 0))


def stream_directory(data_dir: str, shard: int) -> str:
    """Absolute path of a shard's own stream."""
    return f"{data_dir}/{WAL_DIR}/{shard_dir(shard)}"


def make_stream(disk: Disk, data_dir: str, shard: int) -> str:
    """Make a shard's stream directory, with a durable name; returns its path. Raises DiskError.

    A file in it is only as durable as the names on the way to it.
    """
    directory = stream_directory(data_dir, shard)
    disk.make_dir(f"{data_dir}/{WAL_DIR}")
    disk.sync_dir(data_dir)
    disk.make_dir(directory)
    disk.sync_dir(f"{data_dir}/{WAL_DIR}")
    return directory


def quarantine_file(disk: Disk, data_dir: str, path: str) -> None:
    """Keep a copy of a damaged file below `quarantine/`, where nobody looks for data; raises DiskError.

    It is made once: a copy that is there is whole, since its name is given last.
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
        log, logging.WARNING, "a damaged file was put aside", file=path, copy=f"{QUARANTINE_DIR}/{path}"
    )


def clean_up(disk: Disk, data_dir: str, found: RecoveryResult) -> None:
    """Give back what is never read again, and put damaged files aside. Only once MARK_COPIED is durable.
    Raises DiskError."""
    for path in found.to_quarantine:
        quarantine_file(disk, data_dir, path)
    for path in found.unused_files:
        disk.unlink(f"{data_dir}/{path}")
    for path, stop in found.truncations:
        fd = disk.open_cut(f"{data_dir}/{path}")
        try:
            disk.truncate(fd, stop)
            disk.sync_file(fd)
        finally:
            disk.close(fd)
