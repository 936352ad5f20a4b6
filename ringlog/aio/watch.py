"""Watch: follows many topics, `for event in client.watch([...])`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Generic, Self

from ringlog.aio.ref_count import open_ref_counted
from ringlog.aio.shell import CANCELLED
from ringlog.client.read.pages import Page
from ringlog.client.requests.topic_requests import list_topic_names
from ringlog.client.requests.validation import check_payload_codec, check_timeout
from ringlog.client.watches.events import WatchEvent
from ringlog.client.watches.shared_reads import SharedReads
from ringlog.client.watches.watch_core import LIST_RETRY_S, WatchCore
from ringlog.client.watches.watch_options import WatchOptions
from ringlog.client.watches.watched_topic import GrantResult, WatchedTopic
from ringlog.errors import RinglogError, UsageError, is_shard_failed
from ringlog.link.futures import run_steps
from ringlog.link.subscription import ClientSubscription, ReadGrant
from ringlog.payload import RAW, PayloadCodec, V

if TYPE_CHECKING:
    from ringlog.aio.operations import Operations
    from ringlog.aio.shell import LoopShell


class Watch(Generic[V]):
    """Follows many topics and returns Page, Tombstone, CaughtUp, TopicDeleted and Lagged items as they occur.

    Items of one topic arrive in order. If the reader is slower than the topics, schedulers grant topics in
    order of priority. No topic waits for the backlog of another. One task at a time may use a watch.

    Example:
        async for event in client.watch(["orders", "prices.*"], start=LATEST):
            if isinstance(event, Page):
                process(event.topic, event.bytes())
    """

    def __init__(
        self, client: Operations, shell: LoopShell, options: WatchOptions, shared: SharedReads,
        payload: PayloadCodec[Any] = RAW,
    ) -> None:  # fmt: skip
        self._client, self._shell, self._shared = client, shell, shared
        self._codec: PayloadCodec[V] = check_payload_codec(payload)
        self._core = core = WatchCore(options, shared)
        self._files = open_ref_counted(lambda: core)
        self._subscription: ClientSubscription | None = None
        self._grant: ReadGrant | None = None
        """Grant that this watch has taken and not returned, also after an interruption. Its topic gets no
        other grant until it is returned."""
        self._is_closed = False

    @property
    def cursor(self) -> str:
        """Position after the last returned event of each topic. Resume with `client.watch(...,
        cursor=watch.cursor)`."""
        return self._core.cursor

    @property
    def topics(self) -> list[str]:
        """Topics that the watch follows now. Patterns may add topics later."""
        return self._core.topics

    @property
    def has_news(self) -> bool:
        """True if `next(0)` has an event to return or a grant to read. This test costs almost nothing."""
        subscription = self._subscription
        if subscription is None:
            return bool(self._core.events)
        is_lined_up = subscription.ready or self._core.events or self._grant is not None
        return bool(is_lined_up) or subscription.has_work

    async def open(self) -> Self:
        """Resolve the topics and subscribe to them. Otherwise the first `next` does this.

        Returns:
            The watch itself.

        Raises:
            TopicNotFound: A named topic does not exist, and the watch is not lenient.
        """
        if self._subscription is None:
            await self._begin()
        return self

    async def next(self, timeout: float | None = None) -> WatchEvent[V] | None:
        """Wait for the next event.

        Args:
            timeout: Longest time to wait, in seconds. None waits without a limit.

        Returns:
            The next event; None if `timeout` passed, or no topic is left to follow.

        Raises:
            CorruptData: Data of a topic is damaged. The watch drops this topic.
            TopicHalted: A file of a topic is missing. Raised once for each topic; the watch retries the
                topic.
            NotReady: The shard of a topic was given up (reason `shard_failed`). Raised once for each topic.
                After any of these errors the next call continues with the other topics.
        """
        timeout = check_timeout(timeout, "timeout")
        deadline = self._shell.now_s() + timeout if timeout else None
        await self.open()
        core, subscription = self._core, self.subscription
        while not self._is_closed:
            if core.events:
                event = core.pop_event()
                return event.with_payload(self._codec) if isinstance(event, Page) else event
            if core.is_over:
                return None
            grant = self._grant
            if grant is None:
                grant = self._grant = await self._take_grant(subscription)
            if grant is not None:
                await self._read(grant)
                continue
            left = timeout if deadline is None else max(0.0, deadline - self._shell.now_s())
            if not await self._shell.wait_for_news(subscription, left):
                return None
        return None

    async def __aiter__(self) -> AsyncIterator[WatchEvent[V]]:
        while (event := await self.next()) is not None:
            yield event

    def close(self) -> None:
        """End the subscription and release the files. Returned pages stay valid."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._subscription is not None:
            self._shell.close_subscription(self._subscription)
        self._files.close_when_unused()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def subscription(self) -> ClientSubscription:
        """Subscription at the schedulers. Only after `open`."""
        assert self._subscription is not None
        return self._subscription

    # -- internals --------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        options = self._core.options
        with self._shell.checked_lock, self._shell.guarded_session as session:
            session.topics.forget_all(options.exact)
            subscription = self._subscription = session.delivery.open_subscription(
                credit=options.credit, strong=options.consistency == "strong", names=bool(options.patterns)
            )
        try:
            if options.patterns:
                # Subscribe to changes of names first. A topic created from now on is then listed below, or
                # reported as a change.
                await self._shell.ask(lambda session: session.delivery.add_feeds(subscription, []))
            with self._files.use() as core:
                await self._shell.run_reading(core.begin_steps(self._client.connection))
                await self._follow()
                if options.patterns:
                    await self._list_names(is_new=False)
        except CANCELLED:
            # An interruption does not close the watch. Discard the partial state, so that the next call
            # starts from the beginning.
            self._shell.close_subscription(subscription)
            self._subscription = None
            self._core.close()
            self._core = new_core = WatchCore(options, self._shared)
            self._files = open_ref_counted(lambda: new_core)
            raise
        except BaseException:
            self.close()
            raise

    async def _follow(self) -> None:
        """Subscribe to the opened topics, and report at once which of them have no new records."""
        core, subscription = self._core, self._subscription
        topics, numbers = core.opened, list[int]()
        if not topics or subscription is None:
            return
        wanted = [(topic.info, topic.cursor.seq) for topic in topics]
        try:
            feeds = await self._shell.ask(
                lambda session: session.delivery.add_feeds(subscription, wanted, numbers.extend)
            )
        except CANCELLED:
            if not self._shell.is_closed:
                # The request continues. No topic of the watch belongs to its feeds.
                with self._shell.checked_lock, self._shell.guarded_session as session:
                    session.delivery.drop_feeds(subscription, numbers)
            raise
        core.follow(feeds)
        for topic in topics:
            self._check_backlog(subscription, topic)

    def _check_backlog(self, subscription: ClientSubscription, topic: WatchedTopic) -> None:
        connection, cursor = self._client.connection, topic.cursor
        facts = connection.facts(topic.info) if connection.transport == "ring" else None
        is_other_life = cursor.epoch not in {0, topic.info.epoch}
        if facts is None or is_other_life or facts.head_seq < cursor.seq:
            # The scheduler grants only what is after the position. If that is no position of this life, the
            # reader has to find out.
            with self._shell.checked_lock, self._shell.guarded_session as session:
                session.delivery.self_grant(subscription, topic.feed)
        elif facts.head_seq == cursor.seq:
            topic.head_seq = facts.head_seq
            self._core.enqueue_events([topic.caught_up_event()])

    async def _list_names(self, *, is_new: bool) -> None:
        core = self._core
        found = core.matching(
            await self._shell.ask(lambda session: run_steps(list_topic_names(session, core.prefixes)))
        )
        if found:
            with self._shell.checked_lock, self._shell.guarded_session as session:
                session.topics.forget_all(found)
            steps = core.open_matching_steps(self._client.connection, found, is_new=is_new)
            try:
                await self._shell.run_reading(steps)
                await self._follow()
            except BaseException:
                core.discard_opened()
                raise

    def _list_again(self, subscription: ClientSubscription, error: BaseException) -> None:
        """List the names again after `error`: a call that was left may have found new topics."""
        if not isinstance(error, RinglogError):
            subscription.names_changed = True
        elif not (is_shard_failed(error) or isinstance(error, UsageError) or self._shell.is_closed):
            # Not at once, so that the next call continues with the other topics. A shard that was given up,
            # and a limit of the watch, stay as they are until the schedulers report new names.
            with self._shell.checked_lock, self._shell.guarded_session as session:
                session.delivery.check_names(subscription, after_ns=int(LIST_RETRY_S * 1e9))

    async def _take_grant(self, subscription: ClientSubscription) -> ReadGrant | None:
        if not subscription.has_work:
            self._shell.require_open()
            if self._shell.session.delivery.returns.is_overdue:
                with self._shell.checked_lock, self._shell.guarded_session as session:
                    session.delivery.returns.send()
            return None
        if subscription.failure is None and not subscription.names_changed:
            self._shell.require_open()
            return subscription.take_grant()
        if subscription.failure is not None:
            raise subscription.failure
        # Clear the flag before listing, so that a change during the listing sets it again.
        subscription.names_changed = False
        try:
            with self._files.use():
                await self._list_names(is_new=True)
        except BaseException as e:
            self._list_again(subscription, e)
            raise
        return subscription.take_grant()

    async def _read(self, grant: ReadGrant) -> None:
        files = self._files
        if not files.has_detached_run and grant.hint is not None and self._core.take_shared_frame(grant):
            self._finish(grant, grant.hint.last_seq, is_consumed=True)
            self._grant = None
            return
        with files.use() as core:
            result = None if files.has_detached_run else core.read_at_hint(grant)
            if result is None:
                result = await files.run(self._shell, lambda: core.grant_steps(grant, self._shell.now_s))
        self._core.enqueue_events(result.events)
        if result.is_topic_ended or result.retry_after_s:
            self._end_or_retry(grant, result)
        else:
            self._finish(grant, result.after, is_consumed=result.is_consumed)
        self._grant = None
        if result.error is not None:
            raise result.error

    def _finish(self, grant: ReadGrant, after: int, *, is_consumed: bool) -> None:
        subscription = self._subscription
        if subscription is None or self._is_closed:
            return
        # Take the lock only when returns must be collected. With hundreds of watches that is rare.
        delivery = self._shell.session.delivery
        if not delivery.returns.add_unlocked(subscription, grant, after, is_consumed=is_consumed):
            with self._shell.checked_lock, self._shell.guarded_session:
                delivery.returns.collect()

    def _end_or_retry(self, grant: ReadGrant, result: GrantResult) -> None:
        subscription = self._subscription
        if subscription is None or self._is_closed:
            return
        with self._shell.checked_lock, self._shell.guarded_session as session:
            if result.is_topic_ended:
                session.delivery.drop_feeds(subscription, [grant.feed])
                subscription.names_changed |= subscription.names  # The topic may exist again.
            else:
                session.delivery.returns.add(
                    subscription, grant, result.after, is_consumed=result.is_consumed
                )
                session.delivery.self_grant(
                    subscription, grant.feed, after_ns=int(result.retry_after_s * 1e9)
                )
