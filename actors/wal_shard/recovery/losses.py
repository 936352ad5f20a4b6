"""Losses of the log: gaps that replay found, and numbers that lost parts may have assigned. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.control_records import RangeLost, frame_of
from ringlog.limits import RECORDS_PER_BYTE_MAX
from ringlog.placement import shard_of
from ringlog.storage.layout import ids_upper_bound
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability


@dataclass(frozen=True, slots=True)
class _LostLog:
    """A part of a shard's log with unknown content."""

    lost_parts: int
    shard: int
    shards: int
    bytes: int


class ReplayLosses:
    """What replay found to be lost, and whether it may accept that."""

    def __init__(self, directory: TopicDirectory, touched_topics: set[int], *, is_lenient: bool) -> None:
        self._directory, self._touched = directory, touched_topics
        self.is_lenient = is_lenient
        """True with `wal.corruption = truncate`: damage is cut off and reported, and the start continues."""
        self.has_damage = False
        """True if an earlier file was cut at damage. Later gaps are then expected and reported as losses."""
        self.has_skipped: bool = False
        """True if `is_lenient` accepted a gap in a log without visible damage.
        The file is then recorded as damaged, so that later starts accept the gap too."""
        self.gaps: list[tuple[str, int, int]] = []
        self._lost_parts = 0
        """Number of lost parts of the log so far."""
        self._last_seen: dict[int, int] = {}
        """Topic -> value of `_lost_parts` when its last records were found."""
        self._unknown: list[_LostLog] = []

    def see(self, topic_id: int) -> None:
        """Note that the log has the topic's latest records or its creation at this point."""
        self._last_seen[topic_id] = self._lost_parts

    def may_be_missing(self) -> bool:
        """Return True if records may be missing: damage was found before, or `is_lenient` accepts losses."""
        self.has_skipped |= self.is_lenient and not self.has_damage
        return self.has_damage or self.is_lenient

    def lose(self, topic: ShardTopic, last: int) -> None:
        """Skip the seqs up to `last`, and report them."""
        lost = topic.skip_to(last)
        if lost is not None:
            self.gaps.append((topic.name, *lost))

    def lose_below(self, topic: ShardTopic, first: int, last: int) -> None:
        """Mark a range below the head as lost, and report it."""
        topic.mark_lost(first, last)
        self._touched.add(topic.topic_id)
        self.gaps.append((topic.name, first, last))

    def confirm(self, topic: ShardTopic, body: RangeLost) -> None:
        """Remove a gap that a frame of the log states already."""
        self.gaps = [gap for gap in self.gaps if gap != (topic.name, body.first, body.last)]

    def lose_log(self, shard: int, shards: int, size: int) -> None:
        """Record that `size` bytes of a shard's log are lost at this point, with unknown content.

        Later log shows how far some topics had advanced. The lost bytes may have contained further seqs of
        all other topics, and new topics. `skip_lost` makes sure that none of these numbers is assigned
        again."""
        self._unknown.append(_LostLog(self._lost_parts, shard, shards, size))
        self._lost_parts += 1

    def skip_lost(self) -> None:
        """Skip all seqs, topic ids and epochs that may have been assigned in lost parts of the log."""
        if not self._unknown:
            return
        for topic in list(self._directory.by_id.values()):
            last_seen = self._last_seen.get(topic.topic_id, 0)
            if topic.config.durability < Durability.FSYNC:
                last_seen = 0  # the lost log may have contained a reservation of seqs
            size = sum(
                each.bytes
                for each in self._unknown
                if last_seen <= each.lost_parts and shard_of(topic.topic_id, each.shards) == each.shard
            )
            if size:
                self._touched.add(topic.topic_id)
                self.lose(topic, topic.next_seq - 1 + size * RECORDS_PER_BYTE_MAX)
        size = sum(each.bytes for each in self._unknown)
        shards = max(each.shards for each in self._unknown)
        self._directory.advance_identity(*ids_upper_bound(self._directory.last_identity, size, shards))

    def stage(self, batch: CommitBatch) -> None:
        """Stage the control frames for the gaps."""
        for name, first, last in self.gaps:
            gapped = self._directory.find(name)
            if gapped is not None and any(a <= first and last <= b for a, b in gapped.lost):
                batch.add_control(frame_of(RangeLost(first, last), gapped.topic_id, gapped.epoch), gapped)
