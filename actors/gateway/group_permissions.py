"""Groups that hold records back: on a topic with `retain_until_acked`, a group in mode queue decides what
caps and TTL may take. So making or moving one needs the scope of who may configure the topic. Pure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import msgspec

from actors.gateway.append_admission import Flow
from actors.gateway.auth import Principal
from actors.gateway.permissions import ADMIN
from ringlog.envelope import messages as m
from ringlog.errors import Forbidden, GroupNotFound
from ringlog.leases.change import Mode


class GroupFlows:
    """Requests that may make or move a group, as flows."""

    def __init__(self, at_home: Callable[[Any], Flow], at_shard: Callable[[Any], Flow]) -> None:
        """`at_home` asks the shard itself about a name, `at_shard` the shard that holds the topic."""
        self._at_home, self._at_shard = at_home, at_shard

    def open_group(self, message: m.GroupOpen, principal: Principal) -> Flow:
        """Open a group, or make it. Raises Forbidden."""
        if message.mode != Mode.QUEUE or not (yield from self._needs_admin(message.topic, principal)):
            return (yield from self._at_shard(message))
        try:
            return (yield from self._at_shard(msgspec.structs.replace(message, make=False)))
        except GroupNotFound:
            if not message.make:
                raise
            raise _retention_forbids(message.topic, "make") from None

    def seek_group(self, message: m.GroupSeek, principal: Principal) -> Flow:
        """Move a group. Raises Forbidden."""
        if (yield from self._needs_admin(message.topic, principal)):
            state, _ = yield from self._at_shard(m.LeaseStats(message.topic, group=message.group))
            assert isinstance(state, m.LeaseStatsReply)
            if state.info.mode == Mode.QUEUE:
                raise _retention_forbids(message.topic, "move")
        return (yield from self._at_shard(message))

    def _needs_admin(self, topic: str, principal: Principal) -> Generator[Any, Any, bool]:
        """Does retention wait for groups of this topic, and may the key not configure it?"""
        if ADMIN in principal.scopes:
            return False
        # What is remembered of the topic may be older than the setting.
        info, _ = yield from self._at_home(m.TopicResolve(topic))
        assert isinstance(info, m.TopicInfo)
        return bool(info.config.get("retain_until_acked"))


def _retention_forbids(topic: str, what: str) -> Forbidden:
    return Forbidden(
        f"retention of this topic waits for its groups: to {what} one in mode queue needs a scope",
        topic=topic, required_scope=ADMIN, setting="retain_until_acked",
    )  # fmt: skip
