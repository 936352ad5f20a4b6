"""Topics of the configuration file: made at start when absent; drift is reported, never applied."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import xxhash

from ringlog.envelope.messages import ErrorReply, Message, TopicInfo, TopicPut
from ringlog.logs import say
from ringlog.supervision.sockets import ShardLink

log = logging.getLogger("ringlog.supervision")


class TopicsAtStart:
    """The `[topics."name"]` tables on their way to the shards."""

    def __init__(self, tables: Mapping[str, Mapping[str, Any]], shards: int) -> None:
        self._tables = tables
        self._missing: list[set[str]] = [set() for _ in range(shards)]
        for name in tables:
            # A topic is made at its name's home shard, which gives it an id that maps to itself.
            home = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) % shards
            self._missing[home].add(name)

    def shard_ready(self, shard: int, link: ShardLink) -> None:
        """Ask the shard for those of its topics that nobody confirmed yet."""
        for name in sorted(self._missing[shard]):
            link.send(TopicPut(name, dict(self._tables[name]), mode="create"))

    def take_reply(self, shard: int, message: Message) -> None:
        """A shard answered; replies about anything else are none of ours."""
        if isinstance(message, ErrorReply) and message.detail.get("topic") in self._missing[shard]:
            self._missing[shard].discard(str(message.detail["topic"]))
            say(
                log,
                logging.ERROR,
                "topic of the configuration not made",
                reason=message.message,
                **message.detail,
            )
        if not isinstance(message, TopicInfo) or message.topic not in self._missing[shard]:
            return
        self._missing[shard].discard(message.topic)
        wanted = self._tables[message.topic]
        drift = {
            key: message.config.get(key) for key, value in wanted.items() if message.config.get(key) != value
        }
        if drift and not message.created:
            say(
                log,
                logging.WARNING,
                "topic differs from the configuration file",
                topic=message.topic,
                is_now=drift,
            )
