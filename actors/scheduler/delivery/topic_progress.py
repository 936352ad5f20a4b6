"""Progress of followed topics: up to where their readers may read, from what the shards publish. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ringlog.actors.scheduler.delivery.feeds import FollowedShard, SchedulerReadHint, SchedulerTopic
from ringlog.actors.scheduler.delivery.grants import GrantDispatcher
from ringlog.actors.scheduler.delivery.priority_changes import PriorityChanges
from ringlog.actors.scheduler.events import (
    BoardMark,
    DurableMarkMoved,
    NewsRows,
    ReadSlots,
    ShardGivenUp,
    SlotFacts,
    SlotFactsRead,
)
from ringlog.board.layout import SLOT_MASK, VOLATILE_BIT
from ringlog.limits import DURABLE_WAITS_MAX, SLOTS_PER_SCAN_MAX

FILTER_ROWS_MIN = 16
"""From this many rows on, numpy filters the rows of watched slots in one operation."""


class TopicProgress:
    """Processes news rows, durable marks and slots of shards, and offers grants to the readers concerned.

    `shards` are the shards of the scheduler. Requests to read slots are appended to `effects`.
    """

    def __init__(
        self, shards: Sequence[FollowedShard], grants: GrantDispatcher, priorities: PriorityChanges,
        effects: list[Any],
    ) -> None:  # fmt: skip
        self._shards, self._grants, self._priorities, self._effects = shards, grants, priorities, effects
        self.slot_read_failed: bool = False
        """True if a slot could not be read. Slots are read again from the next aging tick on."""

    def read_due_slots(self, shard: FollowedShard) -> None:
        """Request the slots that are due, at most SLOTS_PER_SCAN_MAX of them."""
        if not shard.slots_to_read:
            return
        topics = []
        for topic in shard.slots_to_read:
            topics.append(topic)
            if len(topics) == SLOTS_PER_SCAN_MAX:
                break
        for topic in topics:
            del shard.slots_to_read[topic]
        self._effects.append(ReadSlots(shard.number, tuple(topics)))

    def news_rows(self, news: NewsRows) -> None:
        """Process the news of a shard: the places of new records, and deletions."""
        shard = self._shards[news.shard]
        if not news.is_complete:
            self._reread_all_slots(shard)
        rows = news.rows
        if len(rows) >= FILTER_ROWS_MIN:
            slots = rows[:, 0] & SLOT_MASK
            rows = rows[slots < len(shard.is_watched)]
            rows = rows[shard.is_watched[(rows[:, 0] & SLOT_MASK).astype(np.intp)]]
        moved: dict[SchedulerTopic, None] = {}
        for packed, topic_id, epoch, *range_words in rows.tolist():
            key = (packed & SLOT_MASK, topic_id)
            hint = SchedulerReadHint._make(range_words)
            topic, strong = shard.topics.get(key), shard.strong_topics.get(key)
            if not hint.file_id:
                # A row without a place announces a deletion: read the slot again.
                shard.slots_to_read.update((each, None) for each in (topic, strong) if each is not None)
                continue
            if topic is not None and self._is_current_epoch(topic, epoch):
                self._extend(topic, hint)
                moved[topic] = None
            if strong is not None and self._is_current_epoch(strong, epoch):
                if packed & VOLATILE_BIT or (hint.file_id, hint.stop) <= shard.durable:
                    self._extend(strong, hint)
                    moved[strong] = None
                else:
                    shard.awaiting_durable.append((hint.file_id, hint.stop, strong, epoch, hint))
        for topic in moved:
            self._grants.wake_topic(shard, topic)
        if len(shard.awaiting_durable) > DURABLE_WAITS_MAX:
            shard.awaiting_durable.clear()
            shard.slots_to_read.update(dict.fromkeys(shard.strong_topics.values()))

    def _is_current_epoch(self, topic: SchedulerTopic, epoch: int) -> bool:
        """Return whether a row belongs to the topic's epoch or a later one. A later epoch is started here."""
        if epoch < topic.epoch:
            return False
        if epoch > topic.epoch:
            self._begin_epoch(topic, epoch)
        elif topic.is_lost:
            topic.is_lost = False
            self._grants.offer_topic(topic)
        return True

    @staticmethod
    def _extend(topic: SchedulerTopic, hint: SchedulerReadHint) -> None:
        topic.hints.append(hint)
        topic.readable_until = max(topic.readable_until, hint.last_seq)

    def _reread_all_slots(self, shard: FollowedShard) -> None:
        """Schedule a re-read of all slots, because rows of news were missed.

        The shard may have restarted, so positions that wait for its durable mark may no longer be valid.
        """
        shard.awaiting_durable.clear()
        shard.durable = (0, 0)
        for topics in (shard.topics, shard.strong_topics):
            for topic in topics.values():
                topic.hints.clear()
                shard.slots_to_read[topic] = None

    def durable_mark_moved(self, moved: DurableMarkMoved) -> None:
        """Let readers of strong subscriptions read what became durable."""
        shard = self._shards[moved.shard]
        shard.durable = moved.mark
        pending = shard.awaiting_durable
        reached: dict[SchedulerTopic, None] = {}
        while pending and pending[0][:2] <= moved.mark:
            _, _, topic, epoch, hint = pending.popleft()
            if topic.epoch != epoch or not topic.feeds:
                continue
            if hint.file_id:
                self._extend(topic, hint)
            else:
                topic.readable_until = max(topic.readable_until, hint.last_seq)
            reached[topic] = None
        for topic in reached:
            self._grants.wake_topic(shard, topic)

    def shard_given_up(self, given_up: ShardGivenUp) -> None:
        """Send recheck grants to all readers of a shard that failed permanently."""
        shard = self._shards[given_up.shard]
        shard.is_given_up = True
        for topics in (shard.topics, shard.strong_topics):
            for topic in topics.values():
                self._recheck_feeds(topic)

    def _apply_slot_facts(
        self, shard: FollowedShard, topic: SchedulerTopic, fact: SlotFacts, published: BoardMark
    ) -> None:
        if fact.topic_id != topic.topic_id or not fact.is_live:
            self._mark_lost(topic)
            return
        if fact.epoch < topic.epoch:
            return  # These facts are older than a published row that was already processed.
        priority = topic.priority
        if (priority.base, priority.is_auto) != (fact.base, fact.is_auto):
            priority.base, priority.is_auto = fact.base, fact.is_auto
            self._priorities.add(topic)
        if fact.epoch > topic.epoch:
            self._begin_epoch(topic, fact.epoch)
        topic.is_lost = False
        if not topic.is_strong or not fact.is_logged or published <= shard.durable:
            topic.readable_until = max(topic.readable_until, fact.head)
        elif fact.head > topic.readable_until:
            shard.awaiting_durable.append(
                (*published, topic, fact.epoch, SchedulerReadHint(0, fact.head, 0, 0, 0))
            )
        self._grants.offer_topic(topic)

    def _begin_epoch(self, topic: SchedulerTopic, epoch: int) -> None:
        """Start an epoch of the topic.

        If it replaces an epoch, readers of that one receive recheck grants.
        """
        is_remade = bool(topic.epoch)
        topic.epoch, topic.readable_until, topic.is_lost = epoch, 0, False
        topic.hints.clear()
        if is_remade:
            self._recheck_feeds(topic)

    def _mark_lost(self, topic: SchedulerTopic) -> None:
        if not topic.is_lost:
            topic.is_lost = True
            topic.hints.clear()
            self._recheck_feeds(topic)

    def _recheck_feeds(self, topic: SchedulerTopic) -> None:
        for feed in topic.feeds:
            feed.needs_recheck = True
        self._grants.offer_topic(topic)

    def slot_facts_read(self, result: SlotFactsRead) -> None:
        """Apply the state of topics that was read from their slots."""
        read_slots, shard = result.request, self._shards[result.request.shard]
        facts: Iterable[SlotFacts | None] = (
            result.facts if result.facts is not None else [None] * len(read_slots.topics)
        )
        for topic, fact in zip(read_slots.topics, facts, strict=True):
            if not topic.feeds:
                continue
            topic.seen_ms = self._grants.now_ms
            if fact is None and shard.is_given_up:
                continue
            if fact is None:
                shard.slots_to_read[topic] = None
                self.slot_read_failed = True
            else:
                self._apply_slot_facts(shard, topic, fact, result.published)
