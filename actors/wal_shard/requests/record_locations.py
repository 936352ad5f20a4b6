"""Locations of a topic's records for readers: segments, and extents of log files. Pure."""

from __future__ import annotations

from typing import Any

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.limits import DELETED_PER_LOCATE_BYTES, EXTENTS_PER_LOCATE_MAX
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.segment_catalog import SegmentCatalog
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability


class RecordLocations:
    """Knows for each topic of a shard which files contain its records."""

    def __init__(
        self, shard: int, directory: TopicDirectory, log_files: LogFileTable, segments: SegmentCatalog
    ) -> None:
        self._shard, self._directory = shard, directory
        self._log_files, self._segments = log_files, segments
        self.is_behind = False
        """True if the shard is read-only: readers may know records that it cannot read."""

    def locate(self, message: m.Locate, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        """Answer a Locate."""
        topic = self._directory.require(message.topic)
        topic.last_read_us = now_us
        recreated = bool(message.epoch and message.epoch != topic.epoch) or (
            message.after > topic.head_seq and not self.is_behind
        )
        after = 0 if recreated else message.after
        return self.locate_records(topic, after, recreated=recreated)

    def locate_records(self, topic: ShardTopic, after: int, *, recreated: bool = False) -> m.Located:
        """Return the positions of the records above `after`, with floors and deleted seqs."""
        extents = self._extents(topic, max(after, topic.earliest_seq - 1), EXTENTS_PER_LOCATE_MAX)
        return m.Located(
            topic=topic.name,
            topic_id=topic.topic_id,
            epoch=topic.epoch,
            shard=self._shard,
            slot=topic.slot,
            head_seq=topic.head_seq,
            earliest_seq=topic.earliest_seq,
            cap_floor=topic.cap_floor,
            ttl_floor=topic.ttl_floor,
            trim_floor=topic.trim_floor,
            recreated=recreated,
            extents=extents,
            lost=[n for pair in topic.lost for n in pair],
            delete_floor=topic.delete_floor,
            ttl_us=topic.config.hidden_after_us,
            version=topic.version,
            is_behind=self.is_behind,
            trimmed=[n for pair in topic.trimmed for n in pair],
            is_fed=bool(topic.routers),
            **self._deleted(topic, after),
        )

    @staticmethod
    def _deleted(topic: ShardTopic, after: int) -> dict[str, Any]:
        """Return the seqs above `after` that were deleted one by one, as many as fit into one reply."""
        if topic.dead is None:
            return {}
        # `after` comes from a client. A range is removed at the cost of what exists, not of its length.
        dead = topic.dead.copy()
        dead.remove_range(0, after + 1)
        deleted_to = 0
        while len(data := dead.serialize()) > DELETED_PER_LOCATE_BYTES:
            deleted_to = int(dead[len(dead) // 2])
            dead.remove_range(deleted_to + 1, (1 << 64) - 1)
        return {"deleted": data, "deleted_to": deleted_to} if dead else {}

    def all_extents(self, topic: ShardTopic, after: int) -> list[m.Extent]:
        """Return the positions of all records above `after`."""
        return self._extents(topic, after, 1 << 62)

    def _extents(self, topic: ShardTopic, after: int, most: int) -> list[m.Extent]:
        """Return at most `most` extents above `after`: segments first, then log files."""
        segments = self._segments.ranges(topic.topic_id, after)
        if len(segments) >= most:
            return segments[:most]
        after = max([after, *[each.last_seq for each in segments[-1:]]])
        return segments + self._in_log(topic, after, most - len(segments))

    def _in_log(self, topic: ShardTopic, after: int, most: int) -> list[m.Extent]:
        """Return the log extents with a topic's records above `after`."""
        if topic.has_index:
            topic.index.retain_files(self._log_files.paths.__contains__)
        positions = topic.index.positions_after(after)
        is_whole = len(positions) <= most
        positions = positions[:most]
        known = {file_id for file_id, _ in positions}
        # A reader of a truncated list queries again after its last extent. With the open end of the current
        # file in the list, the reader would skip the extents between.
        current = [f for f in self._log_files.paths if f not in self._log_files.stops] if is_whole else []
        wanted_volatile = topic.config.durability == Durability.EPHEMERAL
        for file_id in current:
            # The open end of the current file, where the next records will be appended.
            if file_id not in known and self._log_files.paths[file_id].startswith("@") == wanted_volatile:
                positions.append((file_id, self._log_files.starts[file_id]))
        return [
            m.Extent(
                path=self._log_files.paths[file_id],
                file_id=file_id,
                salt=self._log_files.salts[file_id],
                start=offset,
                stop=self._log_files.stops.get(file_id, 0),
            )
            for file_id, offset in positions
        ]
