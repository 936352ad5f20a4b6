"""The topics of one shard, by id and by name, and the numbers for new ones.

Ids and epochs only grow and are never reused (ST-15, E-6). A shard hands out only ids that map to
itself, so shards never collide; after a change of the shard count every shard has seen all earlier
creations and starts above them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple

from ringlog.errors import Outcome, TopicHalted
from ringlog.placement import shard_of
from ringlog.topic.config import TopicConfig
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

CONFIGS_SHARED_MAX = 4_096
"""Different configs that are remembered for sharing; beyond it they are learned anew."""


class Halt(NamedTuple):
    """Why a topic is served no more: records of it lie in a file that is missing or unreadable."""

    topic: ShardTopic
    part: str
    """The segment or the file, relative to the data directory."""
    reason: str
    first_seq: int
    """The first and the last live record that are not there."""
    last_seq: int

    def error(self, outcome: Outcome = "not_applied") -> TopicHalted:
        """What every request about the topic is answered with."""
        return TopicHalted(
            TopicHalted.TEXT, outcome=outcome, topic=self.topic.name, part=self.part, reason=self.reason,
            first_seq=self.first_seq, last_seq=self.last_seq,
        )  # fmt: skip


class TopicDirectory:
    """Topics this shard owns, and names homed here whose topic lives in another shard."""

    def __init__(self, shard: int, shards: int) -> None:
        self._shard = shard
        self._shards = shards
        self.by_id: dict[int, ShardTopic] = {}
        self.halted: dict[int, Halt] = {}
        """Topics that are not served because a part of them is missing, by id. They are not in `by_id`, so
        that nothing is done to them; their state is kept for snapshots (`find_by_id`)."""
        self._by_name: dict[str, ShardTopic] = {}
        self._names: list[str] = []
        self.delegated_names: dict[str, int] = {}
        """Names homed here that another shard looks after since the shard count changed -> that shard."""
        self.adopted: set[str] = set()
        """Names homed elsewhere that this shard looks after since the shard count changed."""
        self.foreign: dict[str, tuple[int, int]] = {}
        """Names made under other layouts -> (topic_id, epoch) of the last topic, whoever owns it."""
        self._last_id = 0
        self._last_epoch = 0
        self._configs: dict[TopicConfig, TopicConfig] = {}
        self.ephemeral: set[int] = set()
        """Ids of topics of that class; without any the volatile log is not looked after."""

    def __len__(self) -> int:
        return len(self.by_id) + len(self.halted)

    def register_config(self, topic: ShardTopic) -> None:
        """A topic was made or configured. Topics with equal configs share one object."""
        if len(self._configs) > CONFIGS_SHARED_MAX:
            self._configs.clear()
        topic.config = self._configs.setdefault(topic.config, topic.config)
        if topic.config.durability == Durability.EPHEMERAL:
            self.ephemeral.add(topic.topic_id)
        else:
            self.ephemeral.discard(topic.topic_id)

    def find(self, name: str) -> ShardTopic | None:
        """The live topic of this name, if this shard owns it and serves it."""
        topic = self._by_name.get(name)
        if self.halted and topic is not None and topic.topic_id in self.halted:
            return None
        return topic

    def halt_of(self, name: str) -> Halt | None:
        """Why the topic of this name is not served; None when it is, or when there is none."""
        topic = self._by_name.get(name)
        return None if topic is None else self.halted.get(topic.topic_id)

    def find_by_id(self, topic_id: int) -> ShardTopic | None:
        """The topic with this id, whether it is served or halted."""
        halt = self.halted.get(topic_id)
        return self.by_id.get(topic_id) if halt is None else halt.topic

    def all_topics(self) -> list[ShardTopic]:
        """All topics, served or halted."""
        return [*self.by_id.values(), *[halt.topic for halt in self.halted.values()]]

    def halt(self, halts: Iterable[Halt]) -> None:
        """Serve these topics no longer."""
        for halt in halts:
            if self.by_id.pop(halt.topic.topic_id, None) is not None:
                self.halted[halt.topic.topic_id] = halt
                self.ephemeral.discard(halt.topic.topic_id)

    def next_identity(self) -> tuple[int, int]:
        """(topic_id, epoch) for a new topic of this shard."""
        topic_id = self._last_id + 1
        while shard_of(topic_id, self._shards) != self._shard:
            topic_id += 1
        return topic_id, self._last_epoch + 1

    @property
    def last_identity(self) -> tuple[int, int]:
        """(topic_id, epoch) up to which numbers are taken."""
        return self._last_id, self._last_epoch

    def advance_identity(self, topic_id: int, epoch: int) -> None:
        """Numbers up to these are taken."""
        self._last_id = max(self._last_id, topic_id)
        self._last_epoch = max(self._last_epoch, epoch)

    def add(self, topic: ShardTopic) -> None:
        """Take in a topic; an older instance of the same name is replaced."""
        old = self._by_name.get(topic.name)
        if old is not None:
            self.remove(old)
        self.advance_identity(topic.topic_id, topic.epoch)
        self.register_config(topic)
        self.by_id[topic.topic_id] = topic
        self._by_name[topic.name] = topic
        insort(self._names, topic.name)

    def add_all(self, topics: Iterable[ShardTopic]) -> None:
        """Take in many topics with names of their own, at once."""
        for topic in topics:
            self.advance_identity(topic.topic_id, topic.epoch)
            self.register_config(topic)
            self.by_id[topic.topic_id] = topic
            self._by_name[topic.name] = topic
        self._names = sorted(self._by_name)

    def remove(self, topic: ShardTopic) -> None:
        """Forget a topic."""
        self.ephemeral.discard(topic.topic_id)
        del self.by_id[topic.topic_id]
        del self._by_name[topic.name]
        del self._names[bisect_left(self._names, topic.name)]

    def rename(self, topic: ShardTopic, name: str) -> None:
        """Give a topic the name it was found to have."""
        self.remove(topic)
        topic.name = name
        self.add(topic)

    def page(self, prefix: str, after: str, size: int) -> tuple[list[ShardTopic], bool]:
        """Up to `size` topics whose names begin with `prefix` and lie after `after`, by name; and: more?"""
        start = max(bisect_left(self._names, prefix), bisect_right(self._names, after) if after else 0)
        topics: list[ShardTopic] = []
        for name in self._names[start : start + size + 1]:
            if not name.startswith(prefix):
                return topics, False
            if len(topics) == size:
                return topics, True
            topics.append(self._by_name[name])
        return topics, False
