"""Permissions for consumer groups that delay retention. Pure.

On a topic with `retain_until_acked`, a queue-mode group determines which records caps and TTL may remove. To
create or seek such a group, a key therefore needs the scope for configuring the topic.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import msgspec

from ringlog.actors.gateway.append_admission import Flow
from ringlog.actors.gateway.auth import Principal
from ringlog.actors.gateway.permissions import ADMIN
from ringlog.envelope import messages as m
from ringlog.errors import Forbidden, GroupNotFound
from ringlog.leases.change import Mode


class GroupFlows:
    """Flows of requests that may create or seek a group."""

    def __init__(self, ask_home: Callable[[Any], Flow], ask_owner: Callable[[Any], Flow]) -> None:
        """Create the flows.

        `ask_home` sends a request to the home shard of a name, `ask_owner` to the topic's owner.
        """
        self._ask_home, self._ask_owner = ask_home, ask_owner

    def open_group(self, message: m.GroupOpen, principal: Principal) -> Flow:
        """Open or create a group. Raises Forbidden if the key may not create it."""
        if message.mode != Mode.QUEUE or not (yield from self._needs_admin(message.topic, principal)):
            return (yield from self._ask_owner(message))
        try:
            return (yield from self._ask_owner(msgspec.structs.replace(message, make=False)))
        except GroupNotFound:
            if not message.make:
                raise
            raise _retention_forbids(message.topic, "create") from None

    def seek_group(self, message: m.GroupSeek, principal: Principal) -> Flow:
        """Move the position of a group. Raises Forbidden if the key may not do that."""
        if (yield from self._needs_admin(message.topic, principal)):
            state, _ = yield from self._ask_owner(m.LeaseStats(message.topic, group=message.group))
            assert isinstance(state, m.LeaseStatsReply)
            if state.info.mode == Mode.QUEUE:
                raise _retention_forbids(message.topic, "move")
        return (yield from self._ask_owner(message))

    def _needs_admin(self, topic: str, principal: Principal) -> Generator[Any, Any, bool]:
        """Return whether the topic's retention waits for groups and the key lacks the admin scope."""
        if ADMIN in principal.scopes:
            return False
        # Not from the cache, which may be older than the setting.
        info, _ = yield from self._ask_home(m.TopicResolve(topic))
        assert isinstance(info, m.TopicInfo)
        return bool(info.config.get("retain_until_acked"))


def _retention_forbids(topic: str, what: str) -> Forbidden:
    return Forbidden(
        f"retain_until_acked is set: the key needs scope {ADMIN} to {what} a group in mode queue",
        topic=topic, required_scope=ADMIN, setting="retain_until_acked",
    )  # fmt: skip
