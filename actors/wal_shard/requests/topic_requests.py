"""Requests about topics: creation, configuration, state, deletion. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.control_records import (
    HeadReserved,
    TopicRemoved,
    config_frame,
    create_frame,
    frame_of,
)
from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases
from ringlog.actors.wal_shard.retention.idle_topic_expiry import IdleTopicExpiry
from ringlog.actors.wal_shard.retention.removal import Removals
from ringlog.actors.wal_shard.routing import ShardRouters
from ringlog.actors.wal_shard.shard_state import ShardIdentity
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, NotReady, Throttled, TopicNotEmpty, TopicNotFound
from ringlog.limits import DURABLE_RETRY_MS, LIST_PAGE_MAX
from ringlog.names import check_topic_name
from ringlog.placement import home_shard
from ringlog.topic.config import TopicConfig
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.retention import retained_from
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

_MODES = ("upsert", "create", "merge", "update")


class TopicRequests:
    """Handles requests about topics, and stages their changes into the commit batch."""

    def __init__(
        self, identity: ShardIdentity, directory: TopicDirectory, removals: Removals, routing: ShardRouters,
        leases: ShardLeases, idle_topic_expiry: IdleTopicExpiry, publish_topic_count: Callable[[int], int],
    ) -> None:  # fmt: skip
        """Set up the handlers. `publish_topic_count` is as in Requests."""
        self._me = identity
        self._directory, self._removals, self._routing, self._leases = directory, removals, routing, leases
        self._idle_topic_expiry = idle_topic_expiry
        self._publish_topic_count = publish_topic_count
        self.free_slots = 1 << 32
        """Number of free topic slots in shared memory, as last counted by the shell."""
        self._without_slot: list[ShardTopic] = []
        """New topics that have no slot yet."""
        self.retired: list[ShardTopic] = []
        """Topics whose deletion is staged. The core releases their slots when the batch is committed."""
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message]
        ] = {
            m.TopicPut: self._put,
            m.TopicResolve: self._resolve,
            m.TopicState: self._state,
            m.TopicList: self._list,
            m.TopicDelete: self._delete,
        }

    def _put(self, message: m.TopicPut, event: ControlReceived, batch: CommitBatch, now_us: int) -> m.Message:
        if message.mode not in _MODES:
            raise InvalidRequest("unknown mode", field="mode", found=message.mode, known=list(_MODES))
        check_topic_name(message.topic)
        topic = self._directory.find(message.topic)
        if topic is None and (redirect := self.redirect(message.topic)):
            return redirect
        if topic is None:
            if message.mode == "merge":
                raise TopicNotFound("no such topic", topic=message.topic)
            created = self.create(message.topic, message.config, batch, allow_inert=message.allow_inert)
            return self.topic_info(created, created=True)
        if message.mode in {"merge", "update"}:
            config = topic.config.merged(message.config, topic.name, allow_inert=message.allow_inert)
        else:
            config = TopicConfig.parse(message.config, topic.name, allow_inert=message.allow_inert)
        if message.mode != "create":
            config.require_type_of(topic.config, topic.name)
            if config != topic.config:
                config.require_lifetime_of(topic.config, topic.name)
                if self._removals.schedule.is_postponed(topic):
                    # A longer TTL would bring back what has expired.
                    raise NotReady(
                        "the disk is full, so that expired records cannot be removed yet", topic=topic.name,
                        retry_after_ms=DURABLE_RETRY_MS,
                    )  # fmt: skip
                self._leases.registry.require_room(topic, config)
                self._reconfigure(topic, config, batch, now_us)
        return self.topic_info(topic, created=False)

    def _reconfigure(self, topic: ShardTopic, config: TopicConfig, batch: CommitBatch, now_us: int) -> None:
        old, topic.config = topic.config.durability, config
        # A smaller cap or TTL takes effect after the config frame, in the same commit batch.
        self._removals.schedule.request(topic)
        self._directory.register_config(topic)
        batch.add_control(config_frame(topic), topic)
        self._idle_topic_expiry.start_period(topic)
        self._leases.apply_config(topic, batch, now_us)
        was_volatile = old == Durability.EPHEMERAL and config.durability != Durability.EPHEMERAL
        ends_reserving = topic.is_reserving and config.durability == Durability.FSYNC
        if was_volatile or ends_reserving:
            # The log lacks the ephemeral records so far, so their last seq becomes the base for the following
            # appends. Earlier records of class `disk` are synced with this frame and need no reservation.
            batch.add_control(_head_base_frame(topic), topic)
            topic.reservation.settle(topic.next_seq - 1)
            topic.is_reserving = False

    def create(
        self, name: str, config: dict[str, Any] | None, batch: CommitBatch, *, allow_inert: bool = False
    ) -> ShardTopic:
        """Create a topic and stage its creation."""
        check_topic_name(name)
        parsed = TopicConfig.parse(config or {}, name, allow_inert=allow_inert)
        if (halt := self._directory.halt_of(name)) is not None:
            raise halt.error()
        self._require_slot()
        self._require_room()
        topic_id, epoch = self._directory.next_identity()
        topic = ShardTopic(topic_id, epoch, name, parsed)
        self._directory.add(topic)
        self._without_slot.append(topic)
        self._idle_topic_expiry.start_period(topic)
        batch.add_control(create_frame(topic), topic)
        return topic

    def _require_room(self) -> None:
        """Raise Throttled if the engine has reached `limits.max_topics`.

        The shard first publishes its new count and then adds up the counts of all shards. If several shards
        create the last allowed topic at the same time, at most one of them succeeds.
        """
        most, own = self._me.topics_max, len(self._directory)
        if not most or own + 1 + self._publish_topic_count(own + 1) <= most:
            return
        self._publish_topic_count(own)
        raise Throttled(
            f"the engine has as many topics as limits.max_topics allows ({most})", limit="max_topics",
            max=most, retry_after_ms=1_000,
        )  # fmt: skip

    def _require_slot(self) -> None:
        """Raise Throttled if shared memory has no slot for one more topic."""
        if len(self._without_slot) < self.free_slots:
            return
        by_id = self._directory.by_id
        self._without_slot = [t for t in self._without_slot if t.slot < 0 and t.topic_id in by_id]
        if len(self._without_slot) >= self.free_slots:
            raise Throttled(
                "shared memory has no room for one more topic: enlarge /dev/shm or delete topics",
                limit="shared_memory", topics=len(self._directory), retry_after_ms=1_000,
            )  # fmt: skip

    def redirect(self, name: str) -> m.TopicInfo | None:
        """Return a redirect if another shard owns this name; None if this shard owns it."""
        if name in self._directory.delegated_names:
            shard = self._directory.delegated_names[name]
        else:
            shard = home_shard(name, self._me.shards)
            if name in self._directory.adopted:
                shard = self._me.shard
        if shard == self._me.shard:
            return None
        return m.TopicInfo(name, 0, 0, shard, -1, False, {})

    def _resolve(
        self, message: m.TopicResolve, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        halt = self._directory.halt_of(message.topic)
        topic = self._directory.find(message.topic) if halt is None else halt.topic
        if topic is not None:
            return self.topic_info(topic, created=False)
        redirect = self.redirect(message.topic)
        if redirect is not None:
            return redirect
        raise TopicNotFound("no such topic", topic=message.topic)

    def topic_info(self, topic: ShardTopic, *, created: bool) -> m.TopicInfo:
        """Return a topic's identity, slot and config for a reply."""
        return m.TopicInfo(
            topic.name,
            topic.topic_id,
            topic.epoch,
            self._me.shard,
            topic.slot,
            created,
            topic.config.to_dict(),
        )

    def _state(
        self, message: m.TopicState, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        halt = self._directory.halt_of(message.topic)
        topic = self._directory.require(message.topic) if halt is None else halt.topic
        if message.touch:
            topic.last_read_us = now_us
        return self._state_of(topic)

    def _state_of(self, topic: ShardTopic) -> m.TopicStateReply:
        keys, keys_forgotten = topic.keys_counted()
        return m.TopicStateReply(
            topic=topic.name,
            topic_id=topic.topic_id,
            epoch=topic.epoch,
            shard=self._me.shard,
            type=topic.config.type,
            head_seq=topic.head_seq,
            earliest_seq=topic.earliest_seq,
            count=topic.count,
            bytes=topic.bytes,
            evict_floor=topic.evict_floor,
            last_write_ts=topic.last_ts // 1000 or None,
            last_read_ts=topic.last_read_us // 1000 or None,
            config=topic.config.to_dict(),
            held_by=retained_from(topic)[1] if topic.retained_at else "",
            is_fed=bool(topic.routers),
            keys=keys,
            keys_forgotten=keys_forgotten,
            missing_part=halt.part if (halt := self._directory.halted.get(topic.topic_id)) else "",
        )

    def _list(
        self, message: m.TopicList, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        size = min(max(message.page_size, 1), LIST_PAGE_MAX)
        topics, more = self._directory.page(message.prefix, message.after, size)
        return m.TopicListReply([self._state_of(topic) for topic in topics], more)

    def _delete(
        self, message: m.TopicDelete, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        topic = self._directory.find(message.topic)
        if topic is None:
            return m.TopicDeleted(message.topic, False)
        if message.if_empty and topic.staged_count > 0:
            raise TopicNotEmpty(
                f"topic is not empty, it has {topic.staged_count} records", topic=topic.name,
                count=topic.staged_count,
            )  # fmt: skip
        self._remove(topic, batch)
        return m.TopicDeleted(topic.name, True, [each.name for each in topic.routers.values()])

    def expire_idle(self, batch: CommitBatch, now_us: int) -> None:
        """Delete topics that were idle for their `expire_unused_ms`."""
        self._idle_topic_expiry.expire_idle(now_us, lambda topic: self._remove(topic, batch))

    def _remove(self, topic: ShardTopic, batch: CommitBatch) -> None:
        """Stage the deletion of a topic."""
        batch.add_control(frame_of(TopicRemoved(topic.epoch), topic.topic_id, topic.epoch))
        batch.dirty_topics.pop(topic.topic_id, None)
        self._directory.remove(topic)
        self._removals.forget_topic(topic)
        self._routing.forget(topic)
        self._leases.forget_topic(topic)
        self._idle_topic_expiry.forget(topic)
        self.retired.append(topic)
        self._publish_topic_count(len(self._directory))


def _head_base_frame(topic: ShardTopic) -> bytearray:
    """Build the frame that makes the topic's head so far a durable base for the following appends."""
    return frame_of(HeadReserved(topic.next_seq - 1, settled=True), topic.topic_id, topic.epoch)
