"""Topics of the configuration file: created at the start if absent. Differences are only reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import xxhash

from ringlog.envelope.messages import ErrorReply, Message, TopicInfo, TopicPut
from ringlog.errors import Status
from ringlog.logs import log_event
from ringlog.supervision.sockets import ShardControlLink

log: logging.Logger = logging.getLogger("ringlog.supervision")


class ConfiguredTopics:
    """Creates the topics of the `[topics."name"]` tables at the shards that own their names."""

    def __init__(self, tables: Mapping[str, Mapping[str, Any]], shards: int) -> None:
        self._tables = tables
        self._missing: list[set[str]] = [set() for _ in range(shards)]
        self._requests: list[dict[int, str]] = [{} for _ in range(shards)]
        self._redirects: dict[str, int] = dict.fromkeys(tables, 0)
        for name in tables:
            # The home shard of the name creates the topic, with an id that hashes to the same shard. A topic
            # of an earlier number of shards may belong to another one: the home shard then names that one.
            home = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) % shards
            self._missing[home].add(name)

    def shard_ready(self, shard: int, link: ShardControlLink) -> None:
        """Send a new incarnation the create requests of its topics that are not confirmed yet."""
        self._requests[shard] = {
            link.send(self._request(name)): name for name in sorted(self._missing[shard])
        }

    def handle_reply(
        self, shard: int, corr: int, message: Message, links: Mapping[int, ShardControlLink]
    ) -> None:
        """Handle a shard's reply. Replies to other requests are ignored.

        `links` are those of the shards that serve.
        """
        name = self._requests[shard].pop(corr, "")
        if not name:
            return
        if isinstance(message, ErrorReply) and message.status == Status.STORAGE_READ_ONLY:
            return  # The next incarnation gets the request again.
        self._missing[shard].discard(name)
        if isinstance(message, TopicInfo) and not message.topic_id:
            self._follow(name, message.shard, links)
            return
        if isinstance(message, ErrorReply):
            log_event(log, logging.ERROR, "configured topic not created", topic=name,
            reason=message.message,
                detail=message.detail)  # fmt: skip
        elif isinstance(message, TopicInfo) and not message.created:
            self._report_drift(name, message.config)

    def _follow(self, name: str, owner: int, links: Mapping[int, ShardControlLink]) -> None:
        """Repeat the request at the shard that owns the name, now or when it is ready."""
        self._redirects[name] += 1
        if not 0 <= owner < len(self._missing) or self._redirects[name] > len(self._missing):
            log_event(log, logging.ERROR, "configured topic not created", topic=name,
            reason="no shard owns the name", detail={"shard": owner})  # fmt: skip
            return
        self._missing[owner].add(name)
        if owner in links:
            self._requests[owner][links[owner].send(self._request(name))] = name

    def _request(self, name: str) -> TopicPut:
        return TopicPut(name, dict(self._tables[name]), mode="create")

    def _report_drift(self, name: str, now: Mapping[str, Any]) -> None:
        wanted = self._tables[name]
        drift = {key: now.get(key) for key, value in wanted.items() if now.get(key) != value}
        if drift:
            log_event(
                log, logging.WARNING, "topic differs from the configuration file", topic=name, is_now=drift
            )
