"""SchedulerRequests: what a client asks of the scheduler that runs routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringlog.envelope.messages import Message, RouterList, RoutesSettle
from ringlog.errors import ConnectionTrouble, InvalidRequest, Refused
from ringlog.limits import LIST_PAGE_MAX, READ_CATCH_UP_MS
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.local_links import LocalLinks
from ringlog.link.peer import MS

if TYPE_CHECKING:
    from ringlog.client.connection.session import Session

_SETTLE_ANSWER_MS = 250
"""Extra time in milliseconds to wait for a scheduler's reply, beyond the time limit in the request."""


class SchedulerRequests:
    """Requests about routers, of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def ask(self, message: Message, *, extra_ms: int = 0) -> Pending[Any]:
        """Send a request to the scheduler that runs routers. Resolves with the message of the reply."""
        return run_steps(self._ask_steps(message, extra_ms))

    def _ask_steps(self, message: Message, extra_ms: int) -> Steps[Any]:
        yield self._session.wait_connected()
        links, deadline_ns = self._session.links, self._session.deadline_ns(extra_ms)
        if not isinstance(links, LocalLinks):
            reply = yield links.request(0, message, deadline_ns)
        elif links.schedulers:
            reply = yield links.scheduler(0).request(message, deadline_ns)
        else:
            raise InvalidRequest("this engine runs no routers: delivery.schedulers is 0, expected >= 1")
        return reply.message

    def routers_from(self, topic: str) -> Pending[list[str]]:
        """Return the names of the routers from a topic. Never fails: routers that are not known in time are
        omitted."""
        return run_steps(self._routers_from_steps(topic))

    def _routers_from_steps(self, topic: str) -> Steps[list[str]]:
        names: list[str] = []
        routers_request, has_more = RouterList(source=topic, page_size=LIST_PAGE_MAX), True
        while has_more:
            try:
                page = yield from self._ask_bounded(routers_request)
            except (ConnectionTrouble, Refused) as e:
                self._session.record_event("routers_not_known", topic=topic, reason=str(e))
                break
            if page is None:
                break
            names += [each.router for each in page.routers]
            has_more = page.more and bool(page.routers)
            routers_request = RouterList(
                source=topic, after=names[-1] if names else "", page_size=LIST_PAGE_MAX
            )
        return names

    def _ask_bounded(self, message: Message) -> Steps[Any]:
        """Send a request with a short deadline to the scheduler that runs routers. None if the engine has no
        scheduler.

        Raises ConnectionTrouble, Refused.
        """
        links = self._session.links
        deadline_ns = self._session.clock.monotonic_ns() + (READ_CATCH_UP_MS + _SETTLE_ANSWER_MS) * MS
        if not isinstance(links, LocalLinks):
            reply = yield links.request(0, message, deadline_ns)
        elif links.schedulers:
            reply = yield links.scheduler(0).request(message, deadline_ns)
        else:
            return None
        return reply.message

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Have the routers to a topic forward all records that their sources contain. See Connection."""
        return run_steps(self._catch_up_steps(RoutesSettle(topic, topic_id, READ_CATCH_UP_MS)))

    def _catch_up_steps(self, request: RoutesSettle) -> Steps[None]:
        try:
            yield from self._ask_bounded(request)
        except (ConnectionTrouble, Refused) as e:
            self._session.record_event("routers_not_settled", topic=request.topic, reason=str(e))
