"""Replay of one log file after the other: scans a file, applies its frames, and finds damage in it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ringlog.actors.wal_shard.recovery.copy_forward import CopyForward
from ringlog.actors.wal_shard.recovery.file_ends import FileEnds
from ringlog.actors.wal_shard.recovery.log_chain import NO_COPIED_MARK
from ringlog.actors.wal_shard.recovery.log_files import LogFiles, ScannedFile, accept_damage
from ringlog.actors.wal_shard.recovery.recovery_result import RecoveryResult
from ringlog.actors.wal_shard.recovery.replay import Replay
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.logs import log_event
from ringlog.placement import shard_of, shards_of
from ringlog.storage.recovery import (
    FileScan,
    ReadBytes,
    WalScanChunk,
    WalTailState,
    classify_tail,
    frames_after_damage,
    last_nonzero_byte,
)

log: logging.Logger = logging.getLogger("ringlog.shard")


class FileReplay:
    """Replays the log files that no snapshot absorbed, oldest first, and keeps their frames in doubt."""

    def __init__(
        self, files: LogFiles, replay: Replay, ends: FileEnds, found: RecoveryResult,
        beat: Callable[[], None],
    ) -> None:  # fmt: skip
        self._files, self._replay, self._ends, self._found = files, replay, ends, found
        self._shards, self._shard = files.start.shards, files.start.shard
        self._is_read_only = files.start.is_read_only
        self._beat = beat
        self._doubts: list[tuple[ScannedFile, list[WalScanChunk]]] = []

    def run(self, file: ScannedFile) -> None:
        """Replay one file. Its chunks in doubt are not in the index."""
        fd, read = self._files.reader(file.path)
        try:
            scan, pieces = self._scan(file, read, is_applied=file.copied is not None)
            tail = classify_tail(scan, file.evidence)
            if tail is WalTailState.CORRUPT and file.copied is None and self._replay.losses.is_lenient:
                # The damage may have hit its MARK_COPIED.
                scan, pieces = self._scan(file, read, is_applied=True)
                file.copied = NO_COPIED_MARK
            self._require_same_lineage(file, scan)
            was_damaged = file.is_damaged
            self._accept(file, scan, tail)
            if self._is_read_only and file.copied is not None:
                file.is_synced_read_only = self._ends.is_in_doubt(file, scan) and self._ends.can_sync(fd)
                self._scan(file, read, is_applied=True, up_to=self._ends.sure_stop(file, scan))
            if file.is_damaged:
                if file.stream % self._shards == self._shard:
                    self._found.to_quarantine.append(file.path)
                behind = FileScan(file.header, file.size, read, stop=scan.stop)
                is_new = not was_damaged
                end = self._replay.scan_behind_damage(
                    frames_after_damage(behind), file.origin(self._shards), scan.stop, is_new=is_new
                )
                behind = FileScan(file.header, file.size, read, stop=end)
                last = max(file.evidence, scan.durable, last_nonzero_byte(behind)) if is_new else 0
                if last > end:
                    self._replay.losses.lose_log(file.stream, file.header.shards, last - end)
        finally:
            self._files.disk.close(fd)
        self._doubts.append((file, self._ends.close(file, scan, tail, pieces)))

    def _scan(
        self, file: ScannedFile, read: ReadBytes, *, is_applied: bool, up_to: int = 0
    ) -> tuple[FileScan, list[WalScanChunk]]:
        """Scan a file and apply its chunks.

        Return the chunks that extend beyond the durable end in its marks. A read-only recovery scans twice:
        first without applying, then it applies the file up to `up_to`, its certain end.
        """
        scan = FileScan(file.header, up_to or file.limit or file.size, read, known_durable=file.evidence)
        self._replay.losses.has_damage |= file.is_damaged
        origin = file.origin(self._shards)
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

    def _give_up(self, file: ScannedFile, scan: FileScan) -> None:
        """Report damaged records that the scan skipped, unless they are absorbed or were copied."""
        file_id = file.header.file_id
        for lost in scan.skipped_appends[len(file.given_up) :]:
            file.given_up.append(lost)
            self._found.log_files.holes.setdefault(file_id, []).append((lost.offset, lost.stop))
            absorbed = self._files.base.absorbed(file_id, np.array([lost.topic_id], dtype=np.uint64))
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
            self._replay.announce_loss(lost, file.origin(self._shards))

    def _excluded(self, file: ScannedFile, piece: WalScanChunk) -> NDArray[np.bool_] | None:
        """Return a mask (n,) of frames that a shard copied to its own file or a snapshot absorbed.

        None means no frame.
        """
        topics = piece.batch.words[:, layout.W_TOPIC]
        absorbed = self._files.base.absorbed(file.header.file_id, topics)
        if file.limit or not file.claims or piece.stop <= min(c.stop for c in file.claims):
            return absorbed
        offsets = piece.batch.offsets + piece.file_offset
        excluded = np.zeros(len(offsets), dtype=np.bool_) if absorbed is None else absorbed
        for claim in file.claims:
            excluded |= (offsets >= claim.stop) & (shards_of(topics, claim.shards) == claim.shard)
        return excluded

    def _require_same_lineage(self, file: ScannedFile, scan: FileScan) -> None:
        """Check that the next file was written after exactly these frames, by the seal of the last one."""
        for stop, seal in file.ends:
            found = scan.seal_at(stop)
            if found and seal and found != seal:
                accept_damage(
                    self._replay.losses, "the log file was replaced after the next file was created",
                    file=file.path, offset=stop,
                )  # fmt: skip

    def _accept(self, file: ScannedFile, scan: FileScan, tail: WalTailState) -> None:
        if tail is WalTailState.CORRUPT and not file.is_damaged:
            accept_damage(
                self._replay.losses, "the log is damaged below its durable end", file=file.path,
                offset=scan.stop, durable=max(file.evidence, scan.durable), reason=scan.reason or "zeros",
            )  # fmt: skip
            file.is_damaged = True
            self._ends.lost_streams.append((file.header.shards, file.stream))
        elif tail is WalTailState.TORN:
            self._found.truncated_bytes += max(file.size - scan.stop, 0)
            log_event(
                log, logging.WARNING, "torn log tail truncated", file=file.path, offset=scan.stop,
                reason=scan.reason,
            )  # fmt: skip

    # -- frames in doubt ------------------------------------------------------------------------------

    def note_doubts(self) -> None:
        """Record which numbers producers used in the frames in doubt, which a read-only shard cannot copy."""
        for _, pieces in self._doubts:
            for piece in pieces:
                _note_doubt(self._found.in_doubt, piece)

    def copy_doubts(self) -> None:
        """Stage the frames in doubt to be written again."""
        copies = CopyForward(self._replay.topics, self._found.batch)
        for file, pieces in self._doubts:
            left = deque(file.given_up)
            for piece in pieces:
                while left and left[0].offset < piece.stop:
                    copies.copy_loss(left.popleft())
                excluded = self._excluded(file, piece)
                copies.copy(piece, file.origin(self._shards), excluded=excluded)


def _note_doubt(in_doubt: dict[tuple[int, int], int], piece: WalScanChunk) -> None:
    """Record the highest producer number of each (topic, producer) in a chunk."""
    words = piece.batch.words[frames.is_of_type(piece.batch.words, layout.FrameType.APPEND)]
    columns = (layout.W_TOPIC, layout.W_PRODUCER_ID, layout.W_PRODUCER_SEQ)
    for topic, producer, number in words[:, columns].tolist():
        in_doubt[topic, producer] = max(number, in_doubt.get((topic, producer), 0))
