"""The topics of one shard, by id and by name, and the ids for new topics.

Ids and epochs only grow and are never reused. A shard assigns only ids that hash to itself, so the ids of two
shards never collide. After a change of the number of shards, every shard has seen all earlier creations and
continues above them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple

from ringlog.errors import Outcome, TopicHalted, TopicNotFound
from ringlog.placement import shard_of
from ringlog.topic.config import TopicConfig
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

CONFIGS_SHARED_MAX = 4_096
"""Number of different configs that topics share. Beyond it the table is cleared and filled again."""


class Halt(NamedTuple):
    """Reason why a topic is not served: a file with some of its records is missing or unreadable."""

    topic: ShardTopic
    part: str
    """Path of the segment or file, relative to the data directory."""
    reason: str
    first_seq: int
    """First and last live record in that file."""
    last_seq: int

    def error(self, outcome: Outcome = "not_applied") -> TopicHalted:
        """Return the error for every request about the topic."""
        return TopicHalted(
            TopicHalted.TEXT, outcome=outcome, topic=self.topic.name, part=self.part, reason=self.reason,
            first_seq=self.first_seq, last_seq=self.last_seq,
        )  # fmt: skip


class TopicDirectory:
    """Topics of this shard, and names whose home is this shard but whose topic is on another one."""

    def __init__(self, shard: int, shards: int) -> None:
        self._shard = shard
        self._shards = shards
        self.by_id: dict[int, ShardTopic] = {}
        self.halted: dict[int, Halt] = {}
        """Topics with a missing part, by id; they are not served. They are not in `by_id`, so that nothing
        changes them. Their state is kept for snapshots (`find_by_id`)."""
        self._by_name: dict[str, ShardTopic] = {}
        self._names: list[str] = []
        self.delegated_names: dict[str, int] = {}
        """Names whose home is this shard -> the shard that has the topic, since the number of shards
        changed."""
        self.adopted: set[str] = set()
        """Names whose home is another shard, and whose topic is here, since the number of shards changed."""
        self.remote_names: dict[str, tuple[int, int]] = {}
        """Names that were created under other numbers of shards -> (topic_id, epoch) of the last topic, on
        any shard."""
        self._last_id = 0
        self._last_epoch = 0
        self._configs: dict[TopicConfig, TopicConfig] = {}
        self.ephemeral: set[int] = set()
        """Ids of topics of class `ephemeral`. If there are none, the shard ignores the volatile log."""
        self.live_bytes: int = 0
        """Accounted bytes of the live records of all topics, including staged ones. It is exact from the end
        of recovery on (`count_bytes`)."""

    def __len__(self) -> int:
        return len(self.by_id) + len(self.halted)

    def register_config(self, topic: ShardTopic) -> None:
        """Register a created or configured topic. Topics with equal configs share one object."""
        if len(self._configs) > CONFIGS_SHARED_MAX:
            self._configs.clear()
        topic.config = self._configs.setdefault(topic.config, topic.config)
        if topic.config.durability == Durability.EPHEMERAL:
            self.ephemeral.add(topic.topic_id)
        else:
            self.ephemeral.discard(topic.topic_id)

    def find(self, name: str) -> ShardTopic | None:
        """Return the live topic of this name, if this shard owns and serves it."""
        topic = self._by_name.get(name)
        if self.halted and topic is not None and topic.topic_id in self.halted:
            return None
        return topic

    def require(self, name: str) -> ShardTopic:
        """Return the live topic of this name. Raise TopicNotFound."""
        topic = self.find(name)
        if topic is None:
            raise TopicNotFound("no such topic", topic=name)
        return topic

    def halt_of(self, name: str) -> Halt | None:
        """Return why the topic of this name is not served; None if it is served or does not exist."""
        topic = self._by_name.get(name)
        return None if topic is None else self.halted.get(topic.topic_id)

    def find_by_id(self, topic_id: int) -> ShardTopic | None:
        """Return the topic with this id, served or halted."""
        halt = self.halted.get(topic_id)
        return self.by_id.get(topic_id) if halt is None else halt.topic

    def all_topics(self) -> list[ShardTopic]:
        """Return all topics, served and halted."""
        return [*self.by_id.values(), *[halt.topic for halt in self.halted.values()]]

    def halt(self, halts: Iterable[Halt]) -> None:
        """Stop serving these topics."""
        for halt in halts:
            if self.by_id.pop(halt.topic.topic_id, None) is not None:
                self.halted[halt.topic.topic_id] = halt
                self.ephemeral.discard(halt.topic.topic_id)

    def next_identity(self) -> tuple[int, int]:
        """Return (topic_id, epoch) for a new topic of this shard."""
        topic_id = self._last_id + 1
        while shard_of(topic_id, self._shards) != self._shard:
            topic_id += 1
        return topic_id, self._last_epoch + 1

    @property
    def last_identity(self) -> tuple[int, int]:
        """Highest (topic_id, epoch) in use."""
        return self._last_id, self._last_epoch

    def advance_identity(self, topic_id: int, epoch: int) -> None:
        """Mark ids and epochs up to these as used."""
        self._last_id = max(self._last_id, topic_id)
        self._last_epoch = max(self._last_epoch, epoch)

    def add(self, topic: ShardTopic) -> None:
        """Add a topic. It replaces an older one of the same name."""
        old = self._by_name.get(topic.name)
        if old is not None:
            self.remove(old)
        self.advance_identity(topic.topic_id, topic.epoch)
        self.register_config(topic)
        self.live_bytes += topic.staged_bytes
        self.by_id[topic.topic_id] = topic
        self._by_name[topic.name] = topic
        insort(self._names, topic.name)

    def add_all(self, topics: Iterable[ShardTopic]) -> None:
        """Add many topics at once. Their names must differ and must be new."""
        for topic in topics:
            self.advance_identity(topic.topic_id, topic.epoch)
            self.register_config(topic)
            self.by_id[topic.topic_id] = topic
            self._by_name[topic.name] = topic
        self._names = sorted(self._by_name)

    def count_bytes(self) -> None:
        """Add up the bytes of all topics."""
        self.live_bytes = sum(topic.staged_bytes for topic in self.all_topics())

    def remove(self, topic: ShardTopic) -> None:
        """Remove a topic."""
        self.live_bytes -= topic.staged_bytes
        self.ephemeral.discard(topic.topic_id)
        del self.by_id[topic.topic_id]
        del self._by_name[topic.name]
        del self._names[bisect_left(self._names, topic.name)]

    def rename(self, topic: ShardTopic, name: str) -> None:
        """Change the name of a topic that was found under another name."""
        self.remove(topic)
        topic.name = name
        self.add(topic)

    def page(self, prefix: str, after: str, size: int) -> tuple[list[ShardTopic], bool]:
        """Return up to `size` topics by name, and whether there are more.

        The names have this prefix and follow `after`.
        """
        start = max(bisect_left(self._names, prefix), bisect_right(self._names, after) if after else 0)
        topics: list[ShardTopic] = []
        for name in self._names[start : start + size + 1]:
            if not name.startswith(prefix):
                return topics, False
            if len(topics) == size:
                return topics, True
            topics.append(self._by_name[name])
        return topics, False
