"""Reservations of seqs that no frame of the log has settled yet. Pure."""

from __future__ import annotations

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.control_records import HeadReserved, RangeLost, frame_of
from ringlog.placement import shard_of
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability


class OpenReservations:
    """The topics whose reservation of seqs is not settled."""

    def __init__(self, touched_topics: set[int]) -> None:
        self._touched = touched_topics
        self._topics: dict[int, ShardTopic] = {}
        self._reserved_in: dict[int, int] = {}
        """Topic -> incarnation that wrote its snapshot row, for those with an open reservation in it."""
        self._to_repeat: set[int] = set()
        """Topics whose reservation ended in order, as only a mark shows that may be lost."""

    def load(self, topic: ShardTopic, incarnation: int) -> None:
        """Add a topic from a snapshot row of this incarnation, if its reservation is open."""
        if topic.has_reservation and topic.reservation.reserved > topic.head_seq:
            self._topics[topic.topic_id] = topic
            self._reserved_in[topic.topic_id] = incarnation

    def discard(self, topic_id: int) -> None:
        """Remove a deleted topic."""
        self._topics.pop(topic_id, None)

    def apply(self, topic: ShardTopic, body: HeadReserved) -> None:
        """Apply a frame that reserves seqs or settles a reservation."""
        if body.settled:
            topic.skip_to(body.reserved)
            topic.reservation.settle(topic.head_seq)
            self._topics.pop(topic.topic_id, None)
        else:
            self._to_repeat.discard(topic.topic_id)
            topic.reservation.restore(body.reserved)
            topic.is_reserving = True
            self._topics[topic.topic_id] = topic

    def settle_orderly(self, shard: int, shards: int, incarnation: int, *, is_repeated: bool = False) -> None:
        """Settle reservations after an orderly end of a shard's stream.

        This incarnation and earlier ones acknowledged no seq above the heads. A reservation that a later
        incarnation made, according to a snapshot, stays open. So do those of ephemeral topics, whose records
        are in no stream. With `is_repeated`, `settle_rest` writes the end into the log of this shard.
        """
        for topic in list(self._topics.values()):
            is_its_own = shard_of(topic.topic_id, shards) == shard
            is_its_own &= topic.config.durability != Durability.EPHEMERAL
            if not is_its_own or self._reserved_in.get(topic.topic_id, 0) > incarnation:
                continue
            if is_repeated:
                self._to_repeat.add(topic.topic_id)
            else:
                topic.reservation.settle(topic.head_seq)
                self._touched.add(topic.topic_id)
                del self._topics[topic.topic_id]

    def settle_rest(
        self, batch: CommitBatch, lost_streams: list[tuple[int, int]]
    ) -> list[tuple[str, int, int]]:
        """Settle the reservations that a crash left open. Stage the control frames for this.

        If a topic's stream is in `lost_streams`, seqs above the head may have been acknowledged. These
        reserved seqs are skipped and reported as lost. For other topics the kernel kept all written frames,
        so the reservation is reduced to the head. The records of ephemeral topics are always lost, and their
        reserved seqs are skipped too.

        Return the skipped ranges as (topic name, first, last).
        """
        announced = []
        for topic in self._topics.values():
            reserved = topic.reservation.reserved
            is_lossy = topic.topic_id not in self._to_repeat and any(
                shard_of(topic.topic_id, shards) == shard for shards, shard in lost_streams
            )
            is_lossy |= topic.config.durability == Durability.EPHEMERAL
            lost = topic.skip_to(reserved) if is_lossy else None
            if lost is not None:
                announced.append((topic.name, *lost))
                batch.add_control(frame_of(RangeLost(*lost), topic.topic_id, topic.epoch), topic)
            settled = frame_of(HeadReserved(topic.head_seq, True), topic.topic_id, topic.epoch)
            batch.add_control(settled, topic)
            topic.reservation.settle(topic.head_seq)
        self._topics.clear()
        return announced
