"""Router and redrive requests of clients, with the checks that need facts beyond the request. Pure.

The checks themselves are in ringlog/access/engine_facts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ringlog.access.engine_facts import (
    covers_router,
    require_dead_letters,
    require_router,
    without_hidden_names,
)
from ringlog.access.keys import Principal
from ringlog.actors.gateway.flows import ResolveTopic
from ringlog.actors.gateway.requests.append_admission import Flow
from ringlog.envelope import messages as m
from ringlog.errors import RouterCycle, RouterNotFound, TopicIncompatible
from ringlog.limits import LIST_PAGE_MAX


class RouterRequestFlows:
    """Flows of requests that a scheduler serves."""

    def __init__(
        self, ask: Callable[[m.Message], Any], forget: Callable[[str], object],
        ask_home: Callable[[Any], Flow], ask_owner: Callable[[Any], Flow],
    ) -> None:  # fmt: skip
        """Create the flows.

        `ask` sends a request to a scheduler and raises ShuttingDown during a drain. `forget` drops a cached
        topic. `ask_home` sends a request to the home shard of a name, `ask_owner` to the owner of the topic.
        """
        self._ask, self._forget = ask, forget
        self._ask_home, self._ask_owner = ask_home, ask_owner

    def handle_one(
        self, message: m.RouterCreate | m.RouterGet | m.RouterDelete, principal: Principal
    ) -> Flow:
        """Create, show or delete one router. Raises Forbidden or RouterNotFound."""
        if isinstance(message, m.RouterCreate):
            try:
                answer = yield self._ask(message)
            except (TopicIncompatible, RouterCycle) as e:
                raise without_hidden_names(principal, e) from None
            # The request may have created either topic.
            for topic in (message.source, message.dest):
                self._forget(topic)
            return answer, None
        try:
            found: m.RouterInfo = yield self._ask(m.RouterGet(message.router))
        except RouterNotFound:
            if isinstance(message, m.RouterDelete):
                return m.RouterDeleted(message.router, False), None
            raise
        require_router(principal, found.router, found.source, found.dest)
        if isinstance(message, m.RouterGet) and not message.settle_ms:
            return found, None
        return (yield self._ask(message)), None

    def settle_routes(self, message: m.RoutesSettle) -> Flow:
        """Have the routers into a topic catch up. The topic is resolved by its name, which was authorised."""
        info: m.TopicInfo = yield ResolveTopic(message.topic)
        return (yield self._ask(m.RoutesSettle(info.topic, info.topic_id, message.within_ms))), None

    def redrive(self, message: m.RedriveDeadLetters, principal: Principal) -> Flow:
        """Redrive dead letters. They are deleted from the dead-letter topic, so the key must cover it, too.

        Raises Forbidden.
        """
        if principal.prefixes:
            require_dead_letters(principal, (yield from self._dead_letter_topic(message)))
        return (yield self._ask(message)), None

    def _dead_letter_topic(self, message: m.RedriveDeadLetters) -> Generator[Any, Any, str]:
        """Return the name of the dead-letter topic of a queue or a group; "" if there is none."""
        if message.group:
            state, _ = yield from self._ask_owner(m.LeaseStats(message.topic, group=message.group))
            assert isinstance(state, m.LeaseStatsReply)
            return state.info.dead_letter
        info, _ = yield from self._ask_home(m.TopicResolve(message.topic))
        assert isinstance(info, m.TopicInfo)
        return str(info.config.get("dead_letter") or "")

    def list_page(self, message: m.RouterList, principal: Principal) -> Flow:
        """Return one page of the routers whose names and topics the key covers."""
        size = max(1, min(message.page_size, LIST_PAGE_MAX))
        found: list[m.RouterInfo] = []
        after, has_more = message.after, True
        while has_more and len(found) <= size:
            request = m.RouterList(message.prefix, message.source, message.dest, after, LIST_PAGE_MAX)
            page: m.RouterListReply = yield self._ask(request)
            found += [
                each for each in page.routers
                if covers_router(principal, each.router, each.source, each.dest)
            ]  # fmt: skip
            has_more = page.more and bool(page.routers)
            after = page.routers[-1].router if page.routers else after
        return m.RouterListReply(found[:size], len(found) > size), None
