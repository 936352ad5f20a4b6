"""Publishes what readers of a shard see in shared memory: its topics, and the marks of its log.

Part of the shell; it decides nothing about topics.
"""

from __future__ import annotations

import threading

from ringlog import stop_points
from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.commit.scheduler_notifier import SchedulerNotifier
from ringlog.actors.wal_shard.core import ShardCore
from ringlog.actors.wal_shard.requests.request_transport import REQUESTS_PER_PASS
from ringlog.board.board import Board, ProcessSlot
from ringlog.board.layout import ProcessField, WatermarkKind
from ringlog.board.topics import TopicFacts, TopicTable, encode_priority
from ringlog.envelope.boot import ActorBoot
from ringlog.storage.extents import LogHighWatermark as ReadMark
from ringlog.topic.state import ShardTopic

SLOTS_AHEAD = 4 * REQUESTS_PER_PASS
"""The topic table grows if it has fewer free slots. If shared memory has no room, new topics are refused."""


class EngineTotal:
    """A number of each shard on the board, with which all shards together keep to a limit of the engine."""

    def __init__(self, board: Board, slot: ProcessSlot, field: ProcessField) -> None:
        self._board, self._slot, self._field = board, slot, field
        self._order = threading.Lock()

    def publish(self, own: int) -> int:
        """Publish the number of this shard, and return the total of all other shards.

        A shard that has not recovered since the start of the engine counts as 0.
        """
        self._slot.set(self._field, own)
        # The lock is a memory barrier between the write and the reads: of two shards, at least one sees the
        # other's count.
        with self._order:
            pages = map(self._board.process, range(self._board.processes))
            return sum(
                page.get(self._field)
                for page in pages
                if page is not self._slot and page.get(ProcessField.SHARD)
            )


class ReaderBoard:
    """The topic table of one shard, and the watermarks on its board page."""

    def __init__(
        self, boot: ActorBoot, slot: ProcessSlot, core: ShardCore, scheduler_notifier: SchedulerNotifier
    ) -> None:
        self._slot, self._core = slot, core
        self._table = TopicTable.create(boot.shm_dir, boot.shard)
        self._scheduler_notifier = scheduler_notifier
        self._durable_shown = 0, 0
        """The durable mark (file, offset) that was last written to the board."""
        self.has_published: bool = False
        """True if anything was published since the shell last woke the clients that wait for it."""

    # -- topics ---------------------------------------------------------------------------------------

    def reset(self) -> dict[int, int]:
        """Empty the table before recovery. Return the slots of the previous incarnation by topic id."""
        return self._table.reset()

    def keep_slots(self, had: dict[int, int]) -> None:
        """Keep the slots of the previous incarnation, because readers know topics by their slot."""
        for topic in self._core.directory.by_id.values():
            topic.slot = had.get(topic.topic_id, topic.slot)
        self._table.reserve_slots([topic.slot for topic in self._core.directory.by_id.values()])

    def publish_recovered(self) -> None:
        """Publish all topics after recovery."""
        self.publish_topics(ev.PublishTopics(self._core.directory.all_topics()))
        self._count_slots()

    def publish_topics(self, effect: ev.PublishTopics) -> None:
        """Publish new and changed topics, and the news of their records."""
        has_new = False
        for topic in effect.topics:
            if topic.slot < 0:
                topic.slot = self._table.allocate()
                has_new = True
            self._table.publish(topic.slot, _facts(topic, 1))
        if has_new:
            self._slot.add(ProcessField.TOPICS_CHANGED, 1)
            self._count_slots()
        if has_new or effect.news:
            self._scheduler_notifier.publish_news(effect.news)
        self._slot.set(ProcessField.LIVE_BYTES, self._core.directory.live_bytes)
        self.has_published = True

    def retire_topic(self, topic: ShardTopic) -> None:
        """Release the slot of a deleted topic."""
        self._slot.set(ProcessField.LIVE_BYTES, self._core.directory.live_bytes)
        if topic.slot >= 0:
            self._table.publish(topic.slot, _facts(topic, 2))
            self._table.release(topic.slot)
            self._count_slots()
            self._slot.add(ProcessField.TOPICS_CHANGED, 1)
            self._scheduler_notifier.announce_deletion(topic)

    def _count_slots(self) -> None:
        """Ensure free slots for new topics of the next passes. A committed topic must be published."""
        self._core.requests.topics.free_slots = self._table.ensure_free_slots(SLOTS_AHEAD)

    # -- marks ----------------------------------------------------------------------------------------

    def published_mark(self, is_volatile: bool) -> ReadMark:
        """Return the position up to which readers may read the log, or the volatile log."""
        return ReadMark(
            *self._slot.watermark(WatermarkKind.VOLATILE if is_volatile else WatermarkKind.PUBLISHED)
        )

    def publish_marks(self, effect: ev.PublishMarks) -> None:
        """Publish the ends of the log and of the volatile log."""
        slot = self._slot
        slot.set_watermark(WatermarkKind.PUBLISHED, effect.file_id, effect.published)
        durable = effect.file_id, effect.durable
        if durable != self._durable_shown:
            self._durable_shown = durable
            slot.set_watermark(WatermarkKind.DURABLE, *durable)
        if effect.volatile_file:
            slot.set_watermark(WatermarkKind.VOLATILE, effect.volatile_file, effect.volatile)
        self.has_published = True
        stop_points.hit("log_after_publish")


def _facts(topic: ShardTopic, state: int) -> TopicFacts:
    return TopicFacts(
        topic_id=topic.topic_id,
        epoch=topic.epoch,
        state=state,
        head_seq=topic.head_seq,
        earliest_seq=topic.earliest_seq,
        cap_floor=topic.cap_floor,
        ttl_floor=topic.ttl_floor,
        trim_floor=topic.trim_floor,
        count=topic.count,
        bytes=topic.bytes,
        last_write_us=topic.last_ts,
        durability_bits=int(topic.config.durability),
        version=topic.version,
        due_us=topic.due_us,
        ttl_us=topic.config.hidden_after_us,
        priority_word=encode_priority(topic.config.priority, is_auto=topic.config.auto_priority),
    )
