"""Reads of stored records for remote clients: the files, and the marks up to which they may be read."""

from __future__ import annotations

from typing import Any

from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.reads.frame_reader import read_files
from ringlog.board.board import BoardError, BoardUnstable
from ringlog.board.layout import WatermarkKind
from ringlog.board.processes import shard_slot
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import CorruptData, DiskError
from ringlog.link.local_links import LocalLinks
from ringlog.storage.extents import LogHighWatermark as ReadMark
from ringlog.storage.log_map import LogMap
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.storage.segment_cache import SegmentCache


class StoredReads:
    """The files of the data directory and of the volatile logs. Reads are served from the page cache."""

    def __init__(self, boot: ActorBoot, links: LocalLinks) -> None:
        self._boot, self._links = boot, links
        self._disk = RealDisk()
        self._segment_cache = SegmentCache(self._disk, boot.data_dir)
        self._log_map = LogMap()

    def mark(self, shard: int, *, is_volatile: bool) -> ReadMark:
        """Return the published mark of a shard's log. Raises BoardUnstable."""
        page = self._links.board.process(shard_slot(shard))
        return ReadMark(*page.watermark(WatermarkKind.VOLATILE if is_volatile else WatermarkKind.PUBLISHED))

    def marks(self, shard: int) -> Any:
        """Return the marks of both logs of a shard; None if they cannot be read at present."""
        try:
            return self.mark(shard, is_volatile=False), self.mark(shard, is_volatile=True)
        except BoardError:
            return None

    def read(self, effect: ev.ReadFiles) -> ev.FramesRead:
        """Read frames from the files."""
        shard = effect.located.shard
        try:
            return read_files(
                effect, data_dir=self._boot.data_dir, shm_dir=self._boot.shm_dir, disk=self._disk,
                segment_cache=self._segment_cache, log_map=self._log_map,
                read_watermark=lambda is_volatile: self.mark(shard, is_volatile=is_volatile),
            )  # fmt: skip
        except BoardUnstable as e:
            # The shard died while it published. Its next incarnation repairs the mark.
            return ev.FramesRead(effect.ticket, 0, 0, 0, effect.after, None, e)

    def find_time(self, effect: ev.FindTime) -> ev.TimeFound:
        """Find the position of a time."""
        shard = effect.located.shard
        ledger = StoredRecordIndex(
            self._disk, self._boot.data_dir, self._boot.shm_dir,
            lambda is_volatile: self.mark(shard, is_volatile=is_volatile),
        )  # fmt: skip
        try:
            return ev.TimeFound(effect.ticket, ledger.seek_time(effect.located, effect.ts_us))
        except (CorruptData, DiskError, BoardUnstable) as e:
            return ev.TimeFound(effect.ticket, 0, e)
        finally:
            ledger.close()

    def close(self) -> None:
        """Close the files."""
        self._segment_cache.close()
