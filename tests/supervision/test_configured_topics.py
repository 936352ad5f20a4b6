"""Topics of the configuration file: which shards are asked, and what is reported."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ringlog.envelope.messages import Message, TopicInfo, TopicPut
from ringlog.supervision.topics import ConfiguredTopics

NAME, SHARDS = "orders", 3


class SentRequests:
    """The sending side of the link to one shard."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> int:
        self.sent.append(message)
        return len(self.sent)


def redirect(owner: int) -> TopicInfo:
    return TopicInfo(NAME, 0, 0, owner, -1, False, {})


def existing(shard: int, **config: Any) -> TopicInfo:
    return TopicInfo(NAME, 5, 1, shard, 0, False, config)


@pytest.fixture
def started() -> tuple[ConfiguredTopics, dict[int, Any], int]:
    """The topics, the links of the shards, and the shard that was asked first."""
    topics = ConfiguredTopics({NAME: {"cap_records": 7}}, SHARDS)
    links: dict[int, Any] = {shard: SentRequests() for shard in range(SHARDS)}
    for shard, link in links.items():
        topics.shard_ready(shard, link)
    (home,) = [shard for shard, link in links.items() if link.sent]
    return topics, links, home


def test_the_owner_of_the_name_is_asked_and_compared(
    started: tuple[ConfiguredTopics, dict[int, Any], int], caplog: pytest.LogCaptureFixture
) -> None:
    topics, links, home = started
    owner = (home + 1) % SHARDS
    topics.handle_reply(home, 1, redirect(owner), links)
    assert links[owner].sent == links[home].sent == [TopicPut(NAME, {"cap_records": 7}, mode="create")]
    topics.handle_reply(owner, 1, existing(owner, cap_records=7), links)
    assert not caplog.records
    for shard in range(SHARDS):
        links[shard] = SentRequests()
        topics.shard_ready(shard, links[shard])
        assert not links[shard].sent


def test_an_owner_that_is_down_is_asked_when_it_is_ready(
    started: tuple[ConfiguredTopics, dict[int, Any], int], caplog: pytest.LogCaptureFixture
) -> None:
    topics, links, home = started
    owner = (home + 1) % SHARDS
    del links[owner]
    topics.handle_reply(home, 1, redirect(owner), links)
    links[owner] = SentRequests()
    topics.shard_ready(owner, links[owner])
    topics.handle_reply(owner, 1, existing(owner, cap_records=8), links)
    (warning,) = caplog.records
    assert warning.getMessage() == "topic differs from the configuration file"


@pytest.mark.parametrize("owners", [[1, 2, 0, 1, 2, 0, 1, 2], [7], [-1]])
def test_redirects_that_lead_nowhere_end_with_an_error(
    started: tuple[ConfiguredTopics, dict[int, Any], int],
    owners: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topics, links, shard = started
    for owner in owners:
        before = len(links[shard].sent)
        topics.handle_reply(shard, before, redirect(owner), links)
        shard = owner if owner in links else shard
    assert sum(len(link.sent) for link in links.values()) <= 1 + SHARDS
    (error,) = caplog.records
    assert (error.levelno, error.getMessage()) == (logging.ERROR, "configured topic not created")
