"""Watch with asyncio: `async for event in client.watch([...])`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from ringlog.aio.shell import LoopShell, running_loop
from ringlog.client.checks import seconds
from ringlog.client.events import WatchEvent
from ringlog.client.shared_reads import SharedReads
from ringlog.client.topic_requests import TopicMerge
from ringlog.client.watching import TurnResult, WatchCore, WatchedTopic, WatchOptions
from ringlog.errors import is_shard_failed
from ringlog.limits import LIST_PAGE_MAX
from ringlog.link.delivery import Subscription, Turn
from ringlog.link.pending import Pending, start


class Watch:
    """Follows topics: gives Page, Tombstone, CaughtUp, TopicDeleted and Lagged items; see client.Watch."""

    def __init__(self, client: object, shell: LoopShell, options: WatchOptions, shared: SharedReads) -> None:
        self._client = client
        """Lasts as long as it is of use."""
        self._shell = shell
        self._shared = shared
        self._core = WatchCore(options, shared)
        self._subscription: Subscription | None = None
        self._turn: Turn | None = None
        """Taken and not over: its topic has no other until it is, even if a task is cancelled meanwhile."""
        self._reading: Pending[TurnResult] | None = None
        """Of that turn. It goes on when who waits for it is cancelled, and what it found is given then."""
        self._is_closed = False

    @property
    def cursor(self) -> str:
        """Where to go on later, behind the last event given: `client.watch(..., cursor=watch.cursor)`."""
        return self._core.cursor

    @property
    def topics(self) -> list[str]:
        """The topics that are followed now; patterns may bring more."""
        return self._core.topics

    async def open(self) -> Watch:
        """Find the topics and subscribe; done by the first `next` otherwise. Raises TopicNotFound."""
        if self._subscription is None:
            await self._begin()
        return self

    async def next(self, timeout: float | None = None) -> WatchEvent | None:
        """The next event; None after `timeout` seconds without one, or when no topic is left to follow.

        Raises CorruptData for damage, TopicHalted for a topic of which a file is missing, and NotReady for
        one whose shard was given up (reason shard_failed): once for each topic; the other topics go on.
        """
        timeout, loop = seconds(timeout, "timeout"), running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        await self.open()
        while not self._is_closed:
            if self._core.events:
                return self._core.give()
            if self._core.is_over:
                return None
            turn = self._turn
            if turn is None:
                turn = self._turn = await self._take_turn()
            if turn is not None:
                await self._read(turn)
                continue
            subscription = self._opened()
            left = None if deadline is None else max(0.0, deadline - loop.time())
            try:
                await self._shell.result(self._shell.session.delivery.waits(subscription), left)
            except TimeoutError:
                return None
        return None

    async def __aiter__(self) -> AsyncIterator[WatchEvent]:
        while (event := await self.next()) is not None:
            yield event

    def close(self) -> None:
        """End the subscription and let go of files. What was handed out stays valid."""
        if self._is_closed:
            return
        self._is_closed = True
        session = self._shell.session_or_none
        if self._subscription is not None and session is not None and not self._shell.is_closed:
            session.delivery.close(self._subscription)
        if self._reading is None or self._reading.is_done:
            self._core.close()

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------

    def _opened(self) -> Subscription:
        assert self._subscription is not None
        return self._subscription

    async def _begin(self) -> None:
        options, session = self._core.options, self._shell.session
        session.forget_all(options.exact)
        self._subscription = session.delivery.open(
            credit=options.credit, strong=options.consistency == "strong", names=bool(options.patterns)
        )
        beginning: Pending[list[WatchedTopic]] | None = None
        try:
            if options.patterns:
                # First: a topic created from here on is listed below, or reported as a change of names.
                await self._shell.result(session.delivery.add(self._subscription, []))
            beginning = start(self._core.begin_steps(session))
            await self._follow(await self._shell.result(beginning))
            if options.patterns:
                await self._look_for_names(is_new=False)
        except asyncio.CancelledError:
            # Who waits no longer has not said that he wants no events: the next call begins anew. What was
            # begun goes on without him, and nobody follows what it finds.
            if beginning is not None:
                beginning.when_done(_let_go)
            session.delivery.close(self._subscription)
            self._subscription = None
            self._core.close()
            self._core = WatchCore(options, self._shared)
            raise
        except BaseException:
            self.close()
            raise

    async def _follow(self, topics: list[WatchedTopic]) -> None:
        """Subscribe to them, and say at once which have nothing new."""
        if not topics:
            return
        session, subscription = self._shell.session, self._opened()
        wanted = [(topic.info, topic.cursor.seq) for topic in topics]
        feeds: list[int] = await self._shell.result(session.delivery.add(subscription, wanted))
        self._core.follow(topics, feeds)
        for topic in topics:
            facts = session.facts(topic.info) if session.transport == "ring" else None
            if facts is None:
                session.delivery.look(subscription, topic.feed)
            elif facts.head_seq == topic.cursor.seq:
                topic.head_seq = facts.head_seq
                self._core.line_up([self._core.caught_up(topic)])

    async def _look_for_names(self, *, is_new: bool) -> None:
        core, session = self._core, self._shell.session
        found = core.matching(await self._names(core.prefixes))
        if found:
            session.forget_all(found)
            await self._follow(await self._shell.run(core.more_steps(session, found, is_new=is_new)))

    async def _names(self, prefixes: Iterable[str]) -> list[str]:
        names = []
        for prefix in prefixes:
            merge = TopicMerge(prefix, LIST_PAGE_MAX)
            while page := await self._shell.result(start(merge.next_page(self._shell.session))):
                names += [summary.topic for summary in page]
        return names

    async def _take_turn(self) -> Turn | None:
        subscription = self._opened()
        if subscription.failure is not None:
            raise subscription.failure
        if subscription.names_changed:
            subscription.names_changed = False  # First: who sets it again meanwhile has us look again.
            try:
                await self._look_for_names(is_new=True)
            except BaseException as e:
                # As in the watch for threads: what a shard that was given up has would never be told.
                subscription.names_changed |= not is_shard_failed(e)
                raise
        return self._shell.session.delivery.take(subscription)

    async def _read_on(self, turn: Turn, now_s: Callable[[], float]) -> TurnResult:
        if self._reading is None:
            self._reading = start(self._core.turn_steps(turn, now_s))
            self._reading.when_done(lambda _: self._core.close() if self._is_closed else None)
        try:
            result = await self._shell.result(self._reading)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._reading = None
            raise
        self._reading = None
        return result

    async def _read(self, turn: Turn) -> None:
        loop, subscription = running_loop(), self._opened()
        result = None
        if self._reading is None:
            if turn.hint is not None and self._core.shared(turn):
                self._turn = None
                if not self._is_closed:
                    delivery = self._shell.session.delivery
                    delivery.finished(subscription, turn, turn.hint.last_seq, is_consumed=True)
                return
            result = self._core.straight(turn)
        if result is None:
            result = await self._read_on(turn, loop.time)
        self._core.line_up(result.events)
        self._turn = None
        if self._is_closed:
            return
        delivery = self._shell.session.delivery
        if result.is_over:
            delivery.drop(subscription, turn.feed)
            subscription.names_changed |= subscription.names  # The topic may have been created again.
        else:
            delivery.finished(subscription, turn, result.after, is_consumed=result.is_consumed)
            if result.again_s:
                delivery.look(subscription, turn.feed, after_ns=int(result.again_s * 1e9))
        if result.error is not None:
            raise result.error


def _let_go(found: Pending[list[WatchedTopic]]) -> None:
    """Close the files of topics that nobody follows."""
    if found.error is None:
        for topic in found.take():
            topic.source.close()
