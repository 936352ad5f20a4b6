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
    """Creates the topics of the `[topics."name"]` tables at their home shards."""

    def __init__(self, tables: Mapping[str, Mapping[str, Any]], shards: int) -> None:
        self._tables = tables
        self._missing: list[set[str]] = [set() for _ in range(shards)]
        self._requests: list[dict[int, str]] = [{} for _ in range(shards)]
        for name in tables:
            # The home shard of the name creates the topic, with an id that hashes to the same shard.
            home = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) % shards
            self._missing[home].add(name)

    def shard_ready(self, shard: int, link: ShardControlLink) -> None:
        """Send a new incarnation the create requests of its topics that are not confirmed yet."""
        requests = {
            name: TopicPut(name, dict(self._tables[name]), mode="create") for name in self._missing[shard]
        }
        self._requests[shard] = {link.send(request): name for name, request in sorted(requests.items())}

    def handle_reply(self, shard: int, corr: int, message: Message) -> None:
        """Handle a shard's reply. Replies to other requests are ignored."""
        name = self._requests[shard].pop(corr, "")
        if not name:
            return
        if isinstance(message, ErrorReply) and message.status == Status.STORAGE_READ_ONLY:
            return  # The next incarnation gets the request again.
        self._missing[shard].discard(name)
        if isinstance(message, ErrorReply):
            log_event(log, logging.ERROR, "configured topic not created", topic=name,
            reason=message.message,
                detail=message.detail)  # fmt: skip
        elif isinstance(message, TopicInfo) and not message.created:
            self._report_drift(name, message.config)

    def _report_drift(self, name: str, now: Mapping[str, Any]) -> None:
        wanted = self._tables[name]
        drift = {key: now.get(key) for key, value in wanted.items() if now.get(key) != value}
        if drift:
            log_event(
                log, logging.WARNING, "topic differs from the configuration file", topic=name, is_now=drift
            )
