"""The ends of log files: how far a file is durable, and which frames after that are in doubt."""

from __future__ import annotations

import logging

from ringlog.actors.wal_shard.recovery.log_files import LogFiles, ScannedFile
from ringlog.actors.wal_shard.recovery.recovery_result import RecoveryResult
from ringlog.actors.wal_shard.recovery.replay import Replay
from ringlog.errors import DiskError
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.logs import log_event
from ringlog.storage.recovery import FileScan, WalScanChunk, WalTailState

log: logging.Logger = logging.getLogger("ringlog.shard")


class FileEnds:
    """Decides where each replayed file ends for this shard, and what a later start has to know about it."""

    def __init__(self, files: LogFiles, replay: Replay, found: RecoveryResult) -> None:
        self._replay, self._found = replay, found
        self._disk, self._data_dir, self._start = files.disk, files.data_dir, files.start
        self._shard, self._shards = files.start.shard, files.start.shards
        self._last_served_file = 0
        """Last file of this shard whose incarnation certainly served.
        Its statements about earlier files are durable and need not be repeated."""
        self._last_closed: dict[int, dict[int, int]] = {}
        """Incarnation -> its second last file and the end of that file."""
        self._settled_before: list[tuple[int, int]] = []
        """(file, end) as recorded by earlier incarnations."""
        self.lost_streams: list[tuple[int, int]] = []
        """(shards, shard) of streams whose end may have lost acknowledged frames."""

    def close(
        self, file: ScannedFile, scan: FileScan, tail: WalTailState, pieces: list[WalScanChunk]
    ) -> list[WalScanChunk]:
        """Evaluate the end of a file. Return the chunks in doubt."""
        header, is_own = file.header, file.stream == self._shard
        if file.copied is None:
            if is_own and header.shards == self._shards and file.size > WAL_HEADER_BYTES:
                self._found.truncations.append((file.path, WAL_HEADER_BYTES))
            return []
        durable, in_doubt = self._durable_stop(file, scan), self.is_in_doubt(file, scan)
        stop, is_unconfirmed = self.sure_stop(file, scan), False
        if in_doubt:
            # The header of this file may not be durable. Without it, the previous file would be the last one.
            self._found.settled.update(self._last_closed.get(header.incarnation, {}))
            self._doubt(file, stop)
            self._judge_loss(file, scan, tail)
            if header.shards != self._shards and not self._start.is_read_only:
                self._sync(file)
        elif self._is_unconfirmed(file, scan):
            is_unconfirmed = True
            self._found.settled[header.file_id] = durable
        if not file.is_last:
            self._last_closed[header.incarnation] = {header.file_id: durable}
        if file.is_damaged and not file.limit:
            self._found.settled[header.file_id] = stop
        elif said := file.limit or file.claim_of(self._shards, self._shard):
            self._settled_before.append((header.file_id, said))
        if file.is_damaged or self._replay.losses.has_skipped:
            # Otherwise a later start would refuse the damage that this start gives up.
            self._found.damaged.add(header.file_id)
            self._replay.losses.has_skipped = False
        if scan.orderly or file.has_orderly_end:
            self._replay.reservations.settle_orderly(
                header.shard, header.shards, header.incarnation, is_repeated=is_unconfirmed
            )
        table = self._found.log_files
        table.paths[header.file_id], table.salts[header.file_id] = file.path, header.salt
        table.stops[header.file_id] = stop
        if header.shards != self._shards:
            table.other_layout_files.add(header.file_id)
        if is_own:
            self._found.prev = (header.file_id, durable, scan.seal_at(durable), scan.orderly)
            end = max(stop, file.copied.prev_stop + file.copied.group_bytes)
            if durable >= end and header.shards == self._shards:
                self._last_served_file = header.file_id
            if file.is_last and header.shards == self._shards and file.size > end and not file.is_damaged:
                self._found.truncations.append((file.path, end))
        return [piece.from_offset(stop) for piece in pieces if piece.stop > stop] if in_doubt else []

    def _durable_stop(self, file: ScannedFile, scan: FileScan) -> int:
        return min(max(file.evidence, scan.durable), scan.stop)

    def is_in_doubt(self, file: ScannedFile, scan: FileScan) -> bool:
        """Return True if the frames after `_durable_stop` are in doubt: they may not be durable."""
        is_open = file.is_last and not (
            file.limit or file.is_superseded or file.is_synced_read_only or scan.orderly
        )
        return is_open and not file.claim_of(self._shards, self._shard)

    def _is_unconfirmed(self, file: ScannedFile, scan: FileScan) -> bool:
        """Return True if only the orderly mark of a stream of another shard count shows the end of the file.

        The mark is not durable if its sync failed. After a power loss, a later start would doubt frames that
        this incarnation continues, and copy them behind its frames. This incarnation therefore states the end
        in its own MARK_COPIED.
        """
        is_other = file.header.shards != self._shards and scan.orderly and file.is_last
        return is_other and not (
            file.limit or file.is_superseded or self._start.is_read_only
            or file.claim_of(self._shards, self._shard)
        )  # fmt: skip

    def sure_stop(self, file: ScannedFile, scan: FileScan) -> int:
        """Return the offset up to which the file's frames are not in doubt."""
        return self._durable_stop(file, scan) if self.is_in_doubt(file, scan) else scan.stop

    def _doubt(self, file: ScannedFile, stop: int) -> None:
        """Mark the frames from `stop` on as in doubt: they are written again into a new file.

        The MARK_COPIED of the file's incarnation may not be durable either, so its statements are repeated.
        """
        for topic in self._replay.directory.by_id.values():
            if topic.has_index:
                topic.index.truncate_file(file.header.file_id, stop)
        if file.copied is not None and (file.header.shards, file.stream) == (self._shards, self._shard):
            for earlier, end in file.copied.settled:
                self._found.settled.setdefault(earlier, end)
            self._found.damaged.update(file.copied.damaged)
        self._found.settled[file.header.file_id] = stop

    def can_sync(self, fd: int) -> bool:
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

    def _sync(self, file: ScannedFile) -> None:
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

    def _judge_loss(self, file: ScannedFile, scan: FileScan, tail: WalTailState) -> None:
        """Record the stream if acknowledged frames may be lost.

        Nothing is lost if the host did not reboot and the log is complete up to its published mark.
        """
        published_file, published = self._start.published_mark
        is_whole = tail is WalTailState.CLEAN
        if published_file == file.header.file_id:
            is_whole = scan.stop >= published
        if not is_whole or file.header.boot_id != self._start.boot_id:
            self.lost_streams.append((file.header.shards, file.stream))

    def repeat_settled(self) -> None:
        """Repeat the end of each file, because the earlier statement may not be durable."""
        for file_id, stop in self._settled_before:
            if file_id >= self._last_served_file:
                self._found.settled.setdefault(file_id, stop)
