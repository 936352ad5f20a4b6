"""Topics of one shard by id and name, and the ids and epochs of new topics."""

from __future__ import annotations

import pytest

from ringlog.placement import shard_of
from ringlog.topic.config import TopicConfig
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability


def add(directory: TopicDirectory, name: str, **config: object) -> ShardTopic:
    topic_id, epoch = directory.next_identity()
    topic = ShardTopic(topic_id, epoch, name, TopicConfig(**config))  # type: ignore[arg-type]
    directory.add(topic)
    return topic


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_ids_map_to_their_shard_and_are_never_reused(shards):
    """A topic that is created again under its name gets another id."""
    seen: set[int] = set()
    for shard in range(shards):
        directory = TopicDirectory(shard, shards)
        for i in range(20):
            topic = add(directory, f"t{i % 5}")
            assert shard_of(topic.topic_id, shards) == shard
            assert topic.topic_id not in seen
            seen.add(topic.topic_id)
        assert len(directory) == 5, "a name has one live topic"


def test_new_epochs_are_greater_than_all_known_ones():
    """Recovery reports the greatest known id and epoch."""
    directory = TopicDirectory(0, 1)
    directory.advance_identity(70, 900)
    topic = add(directory, "a")
    assert topic.epoch == 901
    assert topic.topic_id == 71


def test_remove_deletes_name_id_and_durability_class():
    directory = TopicDirectory(0, 1)
    topic = add(directory, "e", durability=Durability.EPHEMERAL)
    assert directory.ephemeral == {topic.topic_id}
    topic.config = TopicConfig(durability=Durability.FSYNC)
    directory.register_config(topic)
    assert directory.ephemeral == set()
    directory.remove(topic)
    assert directory.find("e") is None
    assert directory.page("", "", 10) == ([], False)


def test_a_placeholder_topic_can_be_renamed():
    """Recovery creates a placeholder if it finds records of a topic before the topic's creation."""
    directory = TopicDirectory(0, 1)
    topic = add(directory, "topic-1")
    directory.rename(topic, "orders")
    assert directory.find("orders") is topic
    assert directory.find("topic-1") is None
    assert [each.name for each in directory.page("", "", 9)[0]] == ["orders"]


def test_pages_cover_every_name_once_in_byte_order():
    """Each page starts after the last name of the previous one."""
    directory = TopicDirectory(0, 1)
    names = [f"{a}{b}" for a in "aAzZ09" for b in ("", ".", "-", "x")]
    for name in names:
        add(directory, name)
    found, after = [], ""
    while True:
        page, more = directory.page("", after, 3)
        found += [topic.name for topic in page]
        if not more:
            break
        after = found[-1]
    assert found == sorted(names)
    assert [topic.name for topic in directory.page("a", "", 100)[0]] == ["a", "a-", "a.", "ax"]
