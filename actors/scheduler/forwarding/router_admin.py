"""Requests to create, show, list and delete routers, in scheduler 0.

Requests are processed one at a time, so a check still holds when the change is made. Every step is
idempotent. A client that receives no reply retries, possibly at a successor of this scheduler, which
completes the steps.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple, Protocol

from ringlog import stop_points
from ringlog.actors.scheduler.forwarding.router_catalog import RouterCatalog, check_request, router_info
from ringlog.actors.scheduler.forwarding.sources import EngineConnection
from ringlog.clock import Clock
from ringlog.envelope import messages as m
from ringlog.errors import (
    InvalidRequest,
    NotReady,
    Refused,
    RinglogError,
    RouterNotFound,
    Throttled,
    TopicNotFound,
)
from ringlog.limits import INTAKE_REQUESTS_MAX, ROUTER_SETTLE_MS_MAX
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.local_links import LocalLinks
from ringlog.placement import home_shard, shard_of

_NUMBER_SHIFT = 24
_SETTLE_POLL_S = 0.005
_MODE = "create"


class FoundRouters(NamedTuple):
    """Routers of all shards that were not given up."""

    routers: list[m.RouterFacts]
    error: RinglogError | None
    """Error of a shard that was given up, whose routers are missing; None = there is none."""


class RouterAdminHost(Protocol):
    """The parts of the scheduler that router requests need."""

    links: LocalLinks
    connection: EngineConnection
    clock: Clock

    @property
    def is_loaded(self) -> bool: ...
    def load_routers(self) -> Steps[FoundRouters]: ...
    def announce_router(self, facts: m.RouterFacts, *, is_gone: bool = False) -> Steps[None]: ...
    def drop_router(self, facts: m.RouterFacts) -> Steps[bool]: ...


class RouterAdmin:
    """Router requests of one engine, in scheduler 0."""

    def __init__(self, host: RouterAdminHost, incarnation: int, routers_max: int) -> None:
        self._host = host
        self.catalog: RouterCatalog = RouterCatalog(routers_max)
        self._next_number = incarnation << _NUMBER_SHIFT
        self._is_known = False
        self._waiting: deque[tuple[m.Message, Pending[m.Message]]] = deque()
        self._is_busy = False

    def submit(self, message: m.Message) -> Pending[m.Message]:
        """Queue a request and return its pending reply.

        Fails with Refused, or with the error of a shard request.
        """
        if isinstance(message, m.RouterGet) and message.settle_ms:
            return run_steps(self._settle(message))
        pending: Pending[m.Message] = Pending()
        if len(self._waiting) >= INTAKE_REQUESTS_MAX:
            pending.fail(
                Throttled("too many router requests, retry later", limit="requests", retry_after_ms=100)
            )
            return pending
        self._waiting.append((message, pending))
        if not self._is_busy:
            self._serve_queue()
        return pending

    def _serve_queue(self) -> None:
        """Process queued requests one at a time, until one waits for a reply of a shard."""
        self._is_busy = True
        while self._waiting:
            message, pending = self._waiting.popleft()
            answer = run_steps(self._answer(message))
            answer.when_done(partial(_forward_result, pending))
            if not answer.is_done:
                answer.when_done(lambda _: self._serve_queue())
                return
        self._is_busy = False

    def _answer(self, message: m.Message) -> Steps[m.Message]:
        if not self._host.is_loaded:
            raise NotReady("routers are still being loaded, retry later", retry_after_ms=50)
        match message:
            case m.RouterCreate():
                return (yield from self._create(message))
            case m.RouterGet():
                facts = yield from self._facts(message.router)
                return router_info(facts, head=(yield from self._head(facts)))
            case m.RouterList():
                return (yield from self._list(message))
            case m.RouterDelete():
                return (yield from self._delete(message))
        raise InvalidRequest("a scheduler does not handle this kind of request", kind=type(message).__name__)

    # -- queries ----------------------------------------------------------------------------------------

    def _refresh_catalog(self) -> Steps[None]:
        """Load all routers from the shards. A router is deleted with its topic, which is not announced.

        Raises NotReady if a shard was given up: a list and the checks of a new router need its routers too.
        """
        error = yield from self._refresh_known()
        if error is not None:
            raise error

    def _refresh_known(self) -> Steps[RinglogError | None]:
        """Load the routers of all shards that were not given up. Return the error of one that was."""
        found = yield from self._host.load_routers()
        for facts in self.catalog.replace_all(found.routers):
            yield from self._host.drop_router(facts)
        self._is_known = found.error is None
        return found.error

    def _find(self, name: str) -> Steps[m.RouterFacts | None]:
        """Return a router, or None. Raises NotReady if it may be in a shard that was given up."""
        error = None
        if self.catalog.find(name) is None:
            error = yield from self._refresh_known()
        known = self.catalog.find(name)
        if known is None and error is not None:
            raise error
        return known

    def _facts(self, name: str) -> Steps[m.RouterFacts]:
        """Return a router's current facts from its shard; raise RouterNotFound."""
        known = yield from self._find(name)
        if known is None:
            raise RouterNotFound("no such router", router=name[:256])
        shard = shard_of(known.dest_id, self._host.links.shards)
        page: m.ShardRoutersReply = yield from self._host.connection.ask(
            shard, m.ListShardRouters(known.router - 1, 1)
        )
        if not page.routers or page.routers[0].router != known.router:
            self.catalog.drop(name)
            raise RouterNotFound("no such router", router=name[:256])
        return page.routers[0]

    def _head(self, facts: m.RouterFacts) -> Steps[int]:
        """Return the source's head.

        If the source was deleted, return the cursor: nothing is left to forward.
        """
        state = yield from self._source_of(facts)
        return facts.cursor if state is None else state.head_seq

    def _source_of(self, facts: m.RouterFacts) -> Steps[m.TopicStateReply | None]:
        """Return the state of the router's source, or None if it was deleted."""
        shard = shard_of(facts.source_id, self._host.links.shards)
        try:
            state: m.TopicStateReply = yield from self._host.connection.ask(shard, m.TopicState(facts.source))
        except TopicNotFound:
            return None
        return state if state.topic_id == facts.source_id else None

    def _list(self, message: m.RouterList) -> Steps[m.Message]:
        if not message.after or not self._is_known:
            yield from self._refresh_catalog()  # Later pages show the same state as the first one.
        found, has_more = self.catalog.page(message)
        heads: dict[int, int] = {}
        for facts in found:
            if facts.source_id not in heads:
                heads[facts.source_id] = yield from self._head(facts)
        return m.RouterListReply([router_info(each, head=heads[each.source_id]) for each in found], has_more)

    def _settle(self, message: m.RouterGet) -> Steps[m.Message]:
        """Wait until the router has forwarded all current records of the source, or until the timeout."""
        plain, clock = m.RouterGet(message.router), self._host.clock
        left_ms = min(max(message.settle_ms, 0), ROUTER_SETTLE_MS_MAX)
        deadline_ns = clock.monotonic_ns() + left_ms * 1_000_000
        answer = yield self.submit(plain)
        assert isinstance(answer, m.RouterInfo)
        wanted = message.until or answer.cursor + answer.lag
        while answer.cursor < wanted and clock.monotonic_ns() < deadline_ns:
            yield self._host.connection.pause(_SETTLE_POLL_S)
            answer = yield self.submit(plain)
            assert isinstance(answer, m.RouterInfo)
        return answer

    # -- creation and deletion --------------------------------------------------------------------------

    def _create(self, message: m.RouterCreate) -> Steps[m.Message]:
        flags, text = check_request(message)
        if not self._is_known:
            yield from self._refresh_catalog()
        try:
            known = self.catalog.check_create(message)
        except Refused:
            yield from self._refresh_catalog()
            known = yield from self._check_again(message)
        if known is not None:
            found = yield from self._change(message, known, flags, text)
            if found is not None:
                return found
            self.catalog.check_create(message)
        source = yield from self._topic(message.source)
        dest = yield from self._topic(message.dest)
        if dest is None and not message.create_dest:
            raise TopicNotFound("no such topic", topic=message.dest)
        # All checks have passed. From here on topics may be created.
        source = source or (yield from self._create_topic(message.source))
        dest = dest or (yield from self._create_topic(message.dest))
        state: m.TopicStateReply = yield from self._host.connection.ask(
            source.shard, m.TopicState(source.topic)
        )
        self._next_number += 1
        requested = m.RouterFacts(
            self._next_number, message.router, source.topic, source.topic_id, source.epoch, dest.topic,
            dest.topic_id, flags, text, state.head_seq,
        )  # fmt: skip
        stop_points.hit("route_before_put")
        facts: m.RouterFacts = yield from self._host.connection.ask(dest.shard, m.RouterPut(requested))
        stop_points.hit("route_after_put")
        self.catalog.put(facts)
        yield from self._host.announce_router(facts)
        return router_info(facts, created=facts.router == requested.router, head=facts.cursor)

    def _check_again(self, message: m.RouterCreate) -> Steps[m.RouterFacts | None]:
        """Check a router that the catalog refuses. Routers from deleted topics do not count.

        Their shards remove them soon after the topic, but the client that deleted it need not wait for that.
        """
        try:
            return self.catalog.check_create(message)
        except Refused as e:
            is_dropped = False
            for facts in self.catalog.opposing(message, e.detail.get("cycle", ())):
                if (yield from self._source_of(facts)) is None:
                    yield from self._drop(facts)
                    is_dropped = True
            if not is_dropped:
                raise
        return self.catalog.check_create(message)

    def _change(
        self, message: m.RouterCreate, known: m.RouterFacts, flags: int, text: str
    ) -> Steps[m.Message | None]:
        """Change the other fields of an existing router. Return None if it no longer exists."""
        source = yield from self._topic(message.source)
        if source is None or source.topic_id != known.source_id:
            yield from self._host.drop_router(known)
            self.catalog.drop(known.name)
            run_steps(self._host.announce_router(known, is_gone=True))
            return None
        try:
            current = yield from self._facts(known.name)
        except RouterNotFound:
            return None
        requested = m.RouterFacts(
            known.router, known.name, known.source, known.source_id, known.source_epoch, known.dest,
            known.dest_id, flags, text, current.cursor,
        )  # fmt: skip
        shard = shard_of(known.dest_id, self._host.links.shards)
        facts: m.RouterFacts = yield from self._host.connection.ask(shard, m.RouterPut(requested))
        self.catalog.put(facts)
        yield from self._host.announce_router(facts)
        return router_info(facts, head=(yield from self._head(facts)))

    def _topic(self, name: str) -> Steps[m.TopicInfo | None]:
        """Return the facts of a topic, or None if it does not exist."""
        try:
            return (yield from self._by_name(name, m.TopicResolve(name)))
        except TopicNotFound:
            return None

    def _create_topic(self, name: str) -> Steps[m.TopicInfo]:
        return (yield from self._by_name(name, m.TopicPut(name, {}, _MODE)))

    def _by_name(self, name: str, message: m.Message) -> Steps[m.TopicInfo]:
        """Send a request to the home shard of a name, or to the shard that the home shard names."""
        connection = self._host.connection
        info: m.TopicInfo = yield from connection.ask(home_shard(name, self._host.links.shards), message)
        if not info.topic_id:
            info = yield from connection.ask(info.shard, message)
        if not info.topic_id:
            raise NotReady("the shards do not agree on the owner of this topic: retry later", topic=name)
        return info

    def _delete(self, message: m.RouterDelete) -> Steps[m.Message]:
        known = yield from self._find(message.router)
        if known is None:
            return m.RouterDeleted(message.router, False)
        return m.RouterDeleted(message.router, (yield from self._drop(known)))

    def _drop(self, facts: m.RouterFacts) -> Steps[bool]:
        """Delete a router. Return whether its shard still had it."""
        was_there = yield from self._host.drop_router(facts)
        self.catalog.drop(facts.name)
        run_steps(self._host.announce_router(facts, is_gone=True))
        return was_there


def _forward_result(pending: Pending[m.Message], answer: Pending[m.Message]) -> None:
    if answer.error is None:
        pending.resolve(answer.result())
    else:
        pending.fail(answer.error)
