"""The topics of a shard during replay: created, deleted, and named. Pure.

A topic whose creation was lost to damage gets a placeholder. The names of other shards' topics are recorded,
because they decide which shard owns a name (topic/directory.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from pyroaring import BitMap64

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.control_records import TopicCreated, create_frame
from ringlog.actors.wal_shard.recovery.losses import ReplayLosses
from ringlog.actors.wal_shard.recovery.open_reservations import OpenReservations
from ringlog.actors.wal_shard.recovery.replay_rows import ReplayedFile, RowSource
from ringlog.actors.wal_shard.recovery.shard_facts import ShardFacts
from ringlog.actors.wal_shard.shard_state import ShardIdentity
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.layout import FrameType
from ringlog.placement import home_shard, shard_of
from ringlog.storage.recovery import WalScanChunk
from ringlog.topic.config import TopicConfig
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.state import ShardTopic, with_range


@dataclass(slots=True)
class Orphan:
    """State of a topic from its segments, for topics without snapshot and perhaps without log."""

    epoch: int = 0
    records: int = 0
    bytes: int = 0
    last_ts: int = 0
    due_us: int = 0
    """Earliest expiry time of its records in microseconds; 0 if no record has its own expiry."""
    dead: BitMap64 = field(default_factory=BitMap64)


class ReplayedTopics:
    """Decides which topics exist, and which shard owns their names."""

    def __init__(
        self, identity: ShardIdentity, directory: TopicDirectory, losses: ReplayLosses,
        reservations: OpenReservations, touched_topics: set[int],
    ) -> None:  # fmt: skip
        self.identity: ShardIdentity = identity
        self.directory: TopicDirectory = directory
        self._losses, self._reservations, self._touched = losses, reservations, touched_topics
        self.is_known: Callable[[int], bool] = lambda topic_id: False
        """Returns True if the topic's governing snapshot knew it. Without a row it was deleted then."""
        self._gone: set[int] = set()
        self._placeholders: set[int] = set()
        """Topics whose creation was lost to damage."""

    def is_mine(self, topic_id: int) -> bool:
        """Return True if the topic belongs to this shard under the current shard count."""
        return shard_of(topic_id, self.identity.shards) == self.identity.shard

    def is_home(self, name: str) -> bool:
        """Return True if this shard decides which shard owns the name."""
        return home_shard(name, self.identity.shards) == self.identity.shard

    def is_gone(self, topic_id: int) -> bool:
        """Return True if the topic was deleted, as far as the log and the snapshots say so by now."""
        return topic_id in self._gone or self.is_known(topic_id)

    def load(self, ours: list[ShardTopic]) -> list[ShardTopic]:
        """Add this shard's topics from snapshot rows. Return those that exist.

        Snapshots of different times may contain two topics of one name. The one with the greater epoch is
        valid.
        """
        self.directory.adopted.update(topic.name for topic in ours if not self.is_home(topic.name))
        latest = {topic.name: topic for topic in sorted(ours, key=lambda each: each.epoch)}
        if len(latest) < len(ours):
            for each in ours:
                if latest[each.name] is not each:
                    self._gone.add(each.topic_id)
                    self._touched.add(each.topic_id)
                    self._reservations.discard(each.topic_id)
            ours = list(latest.values())
        self.directory.add_all(ours)
        return ours

    # -- names ----------------------------------------------------------------------------------------

    def take_facts(self, facts: ShardFacts, *, is_own: bool) -> None:
        """Load the state of the shard itself from a snapshot."""
        self.directory.advance_identity(facts.last_id, facts.last_epoch)
        for name, (topic_id, epoch) in facts.remote_names.items():
            self.note_name(topic_id, TopicCreated(name, epoch, b""))
        if is_own:
            self.directory.adopted.update(facts.adopted)

    def learn_names(self, piece: WalScanChunk, origin: ReplayedFile) -> None:
        """Record the topic names in the log of another shard, and the ids of their topics."""
        source = RowSource(piece, origin)
        for row in np.flatnonzero(frames.is_of_type(piece.batch.words, FrameType.TOPIC_CREATE)).tolist():
            body = source.body(row)
            assert isinstance(body, TopicCreated)
            self.note_name(int(piece.batch.words[row, layout.W_TOPIC]), body)

    def note_name(self, topic_id: int, body: TopicCreated) -> None:
        """Record the latest creation of a name.

        Deletions are not recorded: the same shard keeps owning the name.
        """
        remote_names = self.directory.remote_names
        if body.epoch > remote_names.get(body.name, (0, 0))[1]:
            remote_names[body.name] = (topic_id, body.epoch)
        self.directory.advance_identity(topic_id, body.epoch)

    def settle_names(self) -> None:
        """Decide which shard owns the names of topics that other shards created (C6)."""
        for name, (topic_id, epoch) in list(self.directory.remote_names.items()):
            here = self.directory.find(name)
            if here is not None and here.epoch > epoch:
                # The name was created again here. After a deletion of that topic, this shard still owns the
                # name.
                del self.directory.remote_names[name]
                continue
            owner = shard_of(topic_id, self.identity.shards)
            if owner != self.identity.shard and self.is_home(name):
                self.directory.delegated_names[name] = owner
            elif owner == self.identity.shard and not self.is_home(name):
                # The home shard redirects to this shard, even if the topic is deleted by now.
                self.directory.adopted.add(name)

    # -- creation and deletion ------------------------------------------------------------------------

    def of_rows(self, source: RowSource, row: int, words: frames.U64) -> ShardTopic | None:
        """Return the topic of these rows, or None if it was deleted later.

        Rows of a topic that was never created are damage: raise CorruptData, or create a placeholder if
        damage is accepted.
        """
        topic_id = int(words[0, layout.W_TOPIC])
        topic = self.directory.by_id.get(topic_id)
        if topic is not None or self.is_gone(topic_id):
            return topic
        if not self._losses.may_be_missing():
            raise CorruptData(
                "records of a topic that was never created", topic_id=topic_id, file=source.origin.path,
                offset=source.offset(row),
            )  # fmt: skip
        return self.create_placeholder(topic_id, int(frames.epochs_of(words)[0]))

    def create_placeholder(self, topic_id: int, epoch: int) -> ShardTopic:
        """Create a topic for records whose topic creation was lost. It gets an unused name, `topic-<id>`."""
        names = (f"topic-{topic_id}" + (f"-{n}" if n else "") for n in itertools.count())
        name = next(each for each in names if self.is_home(each) and self.directory.find(each) is None)
        topic = ShardTopic(topic_id, epoch, name, TopicConfig())
        self._placeholders.add(topic_id)
        self._losses.see(topic_id)
        self.directory.add(topic)
        self._touched.add(topic_id)
        return topic

    def create(self, topic_id: int, body: TopicCreated, topic: ShardTopic | None) -> None:
        """Apply the creation of a topic. `topic` is the topic with this id, if it exists."""
        config = TopicConfig.from_bytes(body.config)
        there = self.directory.find(body.name)
        if there is not None and there.epoch > body.epoch:
            self._lived_before(topic_id, topic)
        elif topic_id in self._placeholders and topic is not None:
            self._placeholders.discard(topic_id)
            self.directory.rename(topic, body.name)
            topic.config = config
        elif topic is None and self.is_known(topic_id):
            self._gone.add(topic_id)  # deleted before the rows of its snapshot were captured
        elif topic_id not in self._gone and topic is None:
            if there is not None:
                self._gone.add(there.topic_id)
                self._reservations.discard(there.topic_id)
            self.directory.add(ShardTopic(topic_id, body.epoch, body.name, config))
            self._losses.see(topic_id)

    def _lived_before(self, topic_id: int, topic: ShardTopic | None) -> None:
        """Handle the creation of a topic whose name has a later topic already. The earlier topic is deleted.

        This happens because snapshot rows are loaded before the log is replayed. The later topic may be in a
        snapshot of another shard count that does not govern the earlier one.
        """
        self._gone.add(topic_id)
        if topic is not None:
            self._placeholders.discard(topic_id)
            self._reservations.discard(topic_id)
            self.directory.remove(topic)

    def remove(self, topic_id: int, topic: ShardTopic | None) -> None:
        """Apply the deletion of a topic."""
        self._gone.add(topic_id)
        if topic is not None:
            self._reservations.discard(topic_id)
            self.directory.remove(topic)

    def adopt_orphan(self, topic_id: int, orphan: Orphan, ranges: Sequence[tuple[int, int]]) -> ShardTopic:
        """Restore a topic that only exists in segments, which contain these ranges of seqs.

        Seqs that are missing in the segments were deleted or lost, which cannot be distinguished. They are
        reported as lost.
        """
        topic = self.create_placeholder(topic_id, orphan.epoch)
        topic.next_seq = ranges[-1][1] + 1
        reached = 0
        for first, last in ranges:
            if first > reached + 1:
                topic.lost = with_range(topic.lost, reached + 1, first - 1)
                self._losses.gaps.append((topic.name, reached + 1, first - 1))
            reached = last
        topic.dead = orphan.dead or None
        held = sum(last - first + 1 for first, last in ranges)
        topic.staged_count = max(held - len(orphan.dead), 0)
        topic.staged_bytes = orphan.bytes * topic.staged_count // max(orphan.records, 1)
        topic.last_ts, topic.due_us, topic.own_due_us = orphan.last_ts, orphan.due_us, orphan.due_us
        topic.attributes_to = topic.next_seq - 1
        topic.publish()
        return topic

    def stage_placeholders(self, batch: CommitBatch) -> list[ShardTopic]:
        """Stage the creation of the placeholder topics, and return them."""
        found = [self.directory.by_id[each] for each in self._placeholders if each in self.directory.by_id]
        for topic in found:
            batch.add_control(create_frame(topic), topic)
        return found
