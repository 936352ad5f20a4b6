"""Requests that may create or seek a consumer group, with the checks that need facts of the engine. Pure.

The checks themselves are in ringlog/access/engine_facts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import msgspec

from ringlog.access.engine_facts import group_forbidden, needs_group_admin
from ringlog.access.keys import Principal
from ringlog.access.permissions import ADMIN
from ringlog.actors.gateway.requests.append_admission import Flow
from ringlog.envelope import messages as m
from ringlog.errors import GroupNotFound
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
            raise group_forbidden(message.topic, "create") from None

    def seek_group(self, message: m.GroupSeek, principal: Principal) -> Flow:
        """Move the position of a group. Raises Forbidden if the key may not do that."""
        if (yield from self._needs_admin(message.topic, principal)):
            state, _ = yield from self._ask_owner(m.LeaseStats(message.topic, group=message.group))
            assert isinstance(state, m.LeaseStatsReply)
            if state.info.mode == Mode.QUEUE:
                raise group_forbidden(message.topic, "move")
        return (yield from self._ask_owner(message))

    def _needs_admin(self, topic: str, principal: Principal) -> Generator[Any, Any, bool]:
        """Return whether the key may neither create nor move a group in mode queue of this topic."""
        if ADMIN in principal.scopes:
            return False
        # Not from the cache, which may be older than the setting.
        info, _ = yield from self._ask_home(m.TopicResolve(topic))
        assert isinstance(info, m.TopicInfo)
        return needs_group_admin(principal, info.config)
