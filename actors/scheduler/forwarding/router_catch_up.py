"""Lets a reader of a destination wait until the routers into it have caught up.

A reader that saw the ack of a source record must find the copy. Before it reads to the head of a destination,
it requests a catch-up. The topic's routers then forward the records that their source has at that moment. The
routers into the source catch up first.

Under load the scheduler gives grants to routers late, or not at all (grants.py). A catch-up does not wait for
the grant of a flow that may read all that is published. It waits for the grant of a flow of synced records.

A catch-up does not wait for a full destination, a deleted source, or a source that cannot be located because
its shard was given up. Waiters are checked in each pass of the scheduler's loop, because cursors move only in
passes. No shard is queried for that.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple, Protocol

from ringlog.actors.scheduler.forwarding.forwarding_core import (
    CatchUpState,
    ForwardingCore,
    SourceFlow,
    SourceFlowKey,
)
from ringlog.actors.scheduler.forwarding.sources import EngineConnection
from ringlog.clock import Clock
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError, Throttled, TopicNotFound, is_shard_failed
from ringlog.limits import INTAKE_REQUESTS_MAX, READ_CATCH_UP_MS, ROUTER_HOPS_MAX
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.local_links import LocalLinks
from ringlog.link.peer import Peer
from ringlog.link.timers import Timers

_MS = 1_000_000
_POLL_S = 0.005


class CatchUpHost(Protocol):
    """The parts of the scheduler that a catch-up needs."""

    links: LocalLinks
    connection: EngineConnection
    clock: Clock
    timers: Timers
    forwarding: ForwardingCore

    @property
    def is_loaded(self) -> bool:
        """Whether the routers are loaded."""
        ...

    @property
    def other_schedulers(self) -> list[int]:
        """Numbers of the other schedulers."""
        ...

    def scheduler_peer(self, number: int) -> Peer:
        """Return the connection to one of them."""
        ...

    def source_location(self, key: SourceFlowKey) -> m.TopicInfo | None:
        """Return the last known place of a source's slot, or None."""
        ...


class _CatchUpWaiter(NamedTuple):
    dest_id: int
    until: int
    pending: Pending[None]


class RouterCatchUp:
    """Catch-up requests at one scheduler."""

    def __init__(self, host: CatchUpHost) -> None:
        self._host = host
        self._open = 0
        self._waiting: list[_CatchUpWaiter] = []

    def submit(self, message: m.RoutesSettle) -> Pending[m.Message]:
        """Start a catch-up and return its pending reply. Fails with Throttled if too many are in progress."""
        if self._open >= INTAKE_REQUESTS_MAX:
            pending: Pending[m.Message] = Pending()
            pending.fail(
                Throttled("too many catch-up requests, retry later", limit="requests", retry_after_ms=100)
            )
            return pending
        self._open += 1
        answer = run_steps(self._catch_up_topic(message))
        answer.when_done(self._answered)
        return answer

    def resolve_waiters(self) -> None:
        """Resolve the waiters whose routers have caught up or are blocked by a full destination."""
        if not self._waiting:
            return
        state_of = self._host.forwarding.catch_up_state
        done = [each for each in self._waiting if state_of(each.dest_id, each.until) != CatchUpState.BEHIND]
        if done:
            self._waiting = [each for each in self._waiting if each not in done]
            for each in done:
                each.pending.resolve(None)

    def _answered(self, _: Pending[m.Message]) -> None:
        self._open -= 1

    def _catch_up_topic(self, message: m.RoutesSettle) -> Steps[m.Message]:
        host = self._host
        within_ms = min(max(message.within_ms, 0), READ_CATCH_UP_MS)
        deadline_ns = host.clock.monotonic_ns() + within_ms * _MS
        while not host.is_loaded and host.clock.monotonic_ns() < deadline_ns:
            yield host.connection.pause(_POLL_S)
        for flow in host.forwarding.flows_to_dest(message.topic_id):
            yield from self._catch_up_flow(flow, message, deadline_ns)
        for number in () if message.is_own else host.other_schedulers:
            peer_request = m.RoutesSettle(
                message.topic, message.topic_id, self._left_ms(deadline_ns), message.hops, is_own=True
            )
            # A scheduler that is being restarted does not reply. The reader then reads the existing copies.
            with contextlib.suppress(RinglogError):
                yield host.scheduler_peer(number).request(peer_request, deadline_ns)
        return m.RoutesSettled(message.topic)

    def _catch_up_flow(self, flow: SourceFlow, message: m.RoutesSettle, deadline_ns: int) -> Steps[None]:
        """Wait until one flow into the topic has caught up, at most until the deadline."""
        hops = max(message.hops, 0) + 1
        if hops <= ROUTER_HOPS_MAX:
            left_ms = self._left_ms(deadline_ns)
            yield from self._catch_up_topic(m.RoutesSettle(flow.source, flow.key.source_id, left_ms, hops))
        head = yield from self._head(flow, deadline_ns)
        if self._host.forwarding.catch_up_state(message.topic_id, head) != CatchUpState.BEHIND:
            return
        if flow.until < head and not flow.key.is_strong:
            self._host.forwarding.grant_received(flow.key, head)
        wait = _CatchUpWaiter(message.topic_id, head, Pending())
        self._waiting.append(wait)
        timer = self._host.timers.call_at(deadline_ns, lambda: wait.pending.resolve(None))
        yield wait.pending
        timer.cancel()
        self._waiting = [each for each in self._waiting if each is not wait]

    def _head(self, flow: SourceFlow, deadline_ns: int) -> Steps[int]:
        """Return the source's current head.

        0 if it was deleted, if its shard was given up, or if no reply comes before the deadline.
        """
        host = self._host
        place = host.source_location(flow.key)
        while True:
            facts = None if place is None else host.links.board.topic_facts(place)
            if facts is not None:
                return facts.head_seq
            if host.clock.monotonic_ns() >= deadline_ns:
                return 0
            try:
                place = yield host.connection.for_topic(flow.key.source_id).resolve(flow.source)
            except TopicNotFound:
                return 0
            except RinglogError as e:
                if is_shard_failed(e):
                    return 0
                yield host.connection.pause(_POLL_S)

    def _left_ms(self, deadline_ns: int) -> int:
        return max(deadline_ns - self._host.clock.monotonic_ns(), 0) // _MS
