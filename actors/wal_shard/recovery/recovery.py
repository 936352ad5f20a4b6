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
and the new end of each. It also lists the streams of another shard count that ended in order, because their
own marks of that may not be durable. It is valid only for the topics that its shard owned under its shard
count. After a change of the shard count, several shards copy from one old file, each the frames of its own
topics, and any of them may crash before it finishes. An incarnation without this mark never served a request.
All its frames are copies of frames in earlier files, so recovery skips its files."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable

from ringlog import stop_points
from ringlog.actors.wal_shard.recovery.baseline import (
    Baseline,
    absorbed_everywhere,
    adopt_segments,
    load_baseline,
    newest_facts,
    orphans_in,
)
from ringlog.actors.wal_shard.recovery.file_ends import FileEnds
from ringlog.actors.wal_shard.recovery.file_replay import FileReplay
from ringlog.actors.wal_shard.recovery.log_chain import LogChain
from ringlog.actors.wal_shard.recovery.log_files import LogFiles, ScannedFile, StartFacts
from ringlog.actors.wal_shard.recovery.recovery_result import RecoveryResult
from ringlog.actors.wal_shard.recovery.replay import Replay
from ringlog.errors import DiskError
from ringlog.limits import WAL_FILE_BYTES_DEFAULT, WAL_HEADER_BYTES
from ringlog.logs import log_event
from ringlog.storage.disk import Disk
from ringlog.storage.layout import COLD_OWNER, META_DIR
from ringlog.storage.recovery import copied_frames
from ringlog.topic.segment_catalog import MissingSegment

log: logging.Logger = logging.getLogger("ringlog.shard")

Progress = Callable[[int, int], None]
"""Called with (bytes replayed, total bytes)."""


class Recovery:
    """One recovery run of one shard over the data directory."""

    def __init__(
        self,
        disk: Disk,
        data_dir: str,
        replay: Replay,
        start: StartFacts,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self._disk, self._data_dir, self._replay = disk, data_dir, replay
        self._start, self._shard, self._shards = start, start.shard, start.shards
        self._progress = progress
        self._total = 1
        self.found: RecoveryResult = RecoveryResult()
        self._base = Baseline(start.shard, start.shards)
        self._missing: list[MissingSegment] = []
        self._old: dict[int, str] = {}
        """Absorbed files of other shard counts, to be deleted when every shard has absorbed them."""

    def _beat(self) -> None:
        """Report progress, also within a file. The supervisor kills a process that makes no progress."""
        self._progress(self.found.bytes, self._total)

    def run(self) -> RecoveryResult:
        """Replay everything. Raise CorruptData for damage, and DiskError if a file cannot be read."""
        self._start_from_snapshots()
        replay = self._replay
        log_files = LogFiles(self._disk, self._data_dir, self._start, self._base, self.found)
        files = log_files.relevant()
        chain = LogChain(log_files, replay, self.found)
        chain.take_registers(files)
        chain.connect(files)
        if self._base.skipped and not self._base.layers and chain.known_missing:
            self._rebuild(chain)
        if self._was_resharded(files):
            self._learn_names(log_files)
        self._total = sum(file.size for file in files if not file.is_absorbed) or 1
        ends = FileEnds(log_files, replay, self.found)
        file_replay = FileReplay(log_files, replay, ends, self.found, self._beat)
        for file in files:
            chain.pass_missing(file.header.file_id)
            if file.is_absorbed:
                self._skip_absorbed(file)
                continue
            file_replay.run(file)
            self.found.bytes += file.size
            self._beat()
            stop_points.hit("recovery_mid_replay")
        if self._old:
            gone = absorbed_everywhere(self._disk, self._data_dir, self._shards, self._old)
            self.found.unused_files += [self._old[each] for each in sorted(gone)]
        chain.pass_missing(1 << 63)
        replay.held.settle_rows(self._missing)
        replay.losses.skip_lost()
        self.found.halts = replay.held.halts
        replay.topics.settle_names()
        ends.repeat_settled()
        self.found.changed = replay.touched_topics
        if self._start.is_read_only:
            file_replay.note_doubts()
            return self.found
        file_replay.copy_doubts()
        for topic in replay.topics.stage_placeholders(self.found.batch):
            log_event(
                log, logging.ERROR, "topic recovered without its name and settings", topic=topic.name,
                topic_id=topic.topic_id, epoch=topic.epoch, head_seq=topic.head_seq,
            )  # fmt: skip
        announced = replay.reservations.settle_rest(self.found.batch, ends.lost_streams)
        replay.losses.stage(self.found.batch)
        self.found.announced = announced + replay.losses.gaps
        self.found.changed = replay.touched_topics
        return self.found

    # -- snapshots and segments -----------------------------------------------------------------------

    def _start_from_snapshots(self) -> None:
        """Load the state of the snapshots, and register the segments on disk."""
        replay = self._replay
        self._base = base = load_baseline(self._disk, self._data_dir, self._shard, self._shards)
        self._beat()
        self._missing = adopt_segments(
            self._disk, self._data_dir, base, replay.held.segments, has_cold=self._has_or_had_cold(),
            beat=self._beat,
        )  # fmt: skip
        for layer in base.layers:
            replay.topics.take_facts(layer.facts, is_own=layer is base.own)
        replay.load(base.topics())
        replay.topics.is_known = base.knows_topic
        self.found.to_quarantine = (
            [each.partition(": ")[0] for each in base.skipped] if replay.losses.is_lenient else []
        )
        if base.layers:
            self.found.number = base.layers[0].snapshot.number
            self.found.listed = set(base.listed_segments())
            self.found.has_base = base.own is not None

    def _rebuild(self, chain: LogChain) -> None:
        """Restore topics from their segments if snapshots and absorbed log files are lost.

        This happens only with `wal.corruption = truncate` at this or an earlier start. Names and settings
        were only in the snapshots, unless the remaining log contains them.
        """
        replay, segments = self._replay, self._replay.held.segments
        found = orphans_in(self._disk, self._data_dir, self._base, segments)
        for topic_id, orphan in sorted(found.items()):
            self._beat()
            replay.topics.adopt_orphan(topic_id, orphan, segments.covered(topic_id))
        log_event(
            log, logging.ERROR, "no readable snapshot: topics are rebuilt from segments and log",
            skipped=self._base.skipped, topics=len(found),
        )  # fmt: skip
        if chain.lost_files:
            # The last seqs of these topics, and of topics without any remaining record, are unknown.
            replay.losses.lose_log(self._shard, self._shards, WAL_FILE_BYTES_DEFAULT)

    def _has_or_had_cold(self) -> bool:
        """Return True if there is a cold tier, or was one at an earlier start. Its segments are not lost."""
        return self._start.has_cold or self._disk.exists(f"{self._data_dir}/{META_DIR}/{COLD_OWNER}")

    def _was_resharded(self, files: Iterable[ScannedFile]) -> bool:
        """Return True if there are files or snapshots of another shard count."""
        layouts = {file.header.shards for file in files} | {layer.owner[0] for layer in self._base.layers}
        return bool(layouts - {self._shards})

    def _learn_names(self, log_files: LogFiles) -> None:
        """Find the names with this shard as home whose topics belong to other shards (C6).

        Every shard learns these names from the log under the old shard count. Frames in doubt are an
        exception. The owner of the topic has copied them, and the originals may be dead or deleted. Only the
        owner's log is then certain to contain the creation of the topic. If the home shard missed it, clients
        would not find the topic and would create the name again.

        Logs are read before snapshots. A log file that is deleted meanwhile is absorbed by a snapshot read
        later.
        """
        for file in log_files.siblings:
            try:
                fd, read = log_files.reader(file.path)
            except DiskError as e:
                if e.errno != errno.ENOENT:
                    raise
                continue  # absorbed meanwhile; the snapshot that is read below contains it
            try:
                for piece in copied_frames(file.header, file.size, read):
                    self._replay.topics.learn_names(piece, file.origin(self._shards))
            finally:
                self._disk.close(fd)
            self._beat()
        for (shards, shard), facts in newest_facts(self._disk, self._data_dir).items():
            if shards == self._shards and shard != self._shard:
                self._replay.topics.take_facts(facts, is_own=False)

    def _skip_absorbed(self, file: ScannedFile) -> None:
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
