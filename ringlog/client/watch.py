# Generated from ringlog/aio/watch.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Watch: `for event in client.watch([...])`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ringlog.client.connection.ref_count import open_ref_counted
from ringlog.client.connection.shell import CANCELLED
from ringlog.client.requests.topic_requests import list_topic_names
from ringlog.client.requests.validation import check_timeout
from ringlog.client.watches.events import WatchEvent
from ringlog.client.watches.shared_reads import SharedReads
from ringlog.client.watches.watch_core import GrantResult, WatchCore, WatchedTopic, WatchOptions
from ringlog.errors import is_shard_failed
from ringlog.link.delivery import ClientSubscription, Delivery, ReadGrant
from ringlog.link.futures import run_steps

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell
    from ringlog.client.operations import Operations


class Watch:
    """Follows topics: gives Page, Tombstone, CaughtUp, TopicDeleted and Lagged items as there are any.

    Of one topic they come in order; among topics in order of value when there is more than the reader takes,
    and no topic waits for another's backlog. One thread at a time.
    """

    def __init__(
        self, client: Operations, shell: ThreadedShell, options: WatchOptions, shared: SharedReads
    ) -> None:
        self._client, self._shell, self._shared = client, shell, shared
        self._core = core = WatchCore(options, shared)
        self._files = open_ref_counted(lambda: core)
        self._subscription: ClientSubscription | None = None
        self._grant: ReadGrant | None = None
        """Taken and not over: its topic has no other until it is, whatever interrupts us meanwhile."""
        self._is_closed = False

    @property
    def cursor(self) -> str:
        """Where to go on later, behind the last event given: `client.watch(..., cursor=watch.cursor)`."""
        return self._core.cursor

    @property
    def topics(self) -> list[str]:
        """The topics that are followed now; patterns may bring more."""
        return self._core.topics

    @property
    def has_news(self) -> bool:
        """`next(0)` has something to look at. Costs next to nothing."""
        subscription = self._subscription
        if subscription is None:
            return bool(self._core.events)
        is_lined_up = subscription.ready or self._core.events or self._grant is not None
        return bool(is_lined_up) or subscription.has_work

    def open(self) -> Watch:
        """Find the topics and subscribe; done by the first `next` otherwise. Raises TopicNotFound."""
        if self._subscription is None:
            self._begin()
        return self

    def next(self, timeout: float | None = None) -> WatchEvent | None:
        """The next event; None after `timeout` seconds without one, or when no topic is left to follow.

        Raises CorruptData for damage, TopicHalted for a topic of which a file is missing, and NotReady for
        one whose shard was given up (reason shard_failed): once for each topic; the other topics go on.
        """
        timeout = check_timeout(timeout, "timeout")
        deadline = self._shell.now_s() + timeout if timeout else None
        self.open()
        core, subscription = self._core, self.subscription
        while not self._is_closed:
            if core.events:
                return core.pop_event()
            if core.is_over:
                return None
            turn = self._grant
            if turn is None:
                turn = self._grant = self._take_grant(subscription)
            if turn is not None:
                self._read(turn)
                continue
            left = timeout if deadline is None else max(0.0, deadline - self._shell.now_s())
            if not self._shell.wait_for_news(subscription, left):
                return None
        return None

    def __iter__(self) -> Iterator[WatchEvent]:
        while (event := self.next()) is not None:
            yield event

    def close(self) -> None:
        """End the subscription and let go of files. What was handed out stays valid."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._subscription is not None:
            self._shell.close_subscription(self._subscription)
        self._files.close_when_unused()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def subscription(self) -> ClientSubscription:
        """What it has at the schedulers, once it is open."""
        assert self._subscription is not None
        return self._subscription

    # -- inside -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        options = self._core.options
        with self._shell.checked_lock, self._shell.guarded_session as session:
            session.forget_all(options.exact)
            subscription = self._subscription = session.delivery.open_subscription(
                credit=options.credit, strong=options.consistency == "strong", names=bool(options.patterns)
            )
        try:
            if options.patterns:
                # First: a topic created from here on is listed below, or reported as a change of names.
                self._shell.ask(lambda session: session.delivery.add_feeds(subscription, []))
            with self._files.use() as core:
                steps = core.begin_steps(self._client.connection)
                self._follow(self._shell.run_then(steps, partial(self._found, core)))
                if options.patterns:
                    self._look_for_names(is_new=False)
        except CANCELLED:
            # Who waits no longer has not said that he wants no events: the next call begins anew.
            self._shell.close_subscription(subscription)
            self._subscription = None
            self._core.close()
            self._core = anew = WatchCore(options, self._shared)
            self._files = open_ref_counted(lambda: anew)
            raise
        except BaseException:
            self.close()
            raise

    def _found(self, core: WatchCore, topics: list[WatchedTopic] | None, _: BaseException | None) -> None:
        """What was begun goes on without who waited for it, and nobody follows what it finds."""
        if core is not self._core:
            for topic in topics or ():
                topic.source.close()

    def _follow(self, topics: list[WatchedTopic]) -> None:
        """Subscribe to them, and say at once which have nothing new."""
        subscription = self._subscription
        if not topics or subscription is None:
            return
        wanted = [(topic.info, topic.cursor.seq) for topic in topics]
        feeds = self._shell.ask(lambda session: session.delivery.add_feeds(subscription, wanted))
        self._core.follow(topics, feeds)
        for topic in topics:
            self._look_at_start(subscription, topic)

    def _look_at_start(self, subscription: ClientSubscription, topic: WatchedTopic) -> None:
        connection = self._client.connection
        facts = connection.facts(topic.info) if connection.transport == "ring" else None
        if facts is not None and facts.head_seq == topic.cursor.seq:
            topic.head_seq = facts.head_seq
            self._core.enqueue_events([self._core.caught_up_event(topic)])
        elif facts is None:
            with self._shell.checked_lock, self._shell.guarded_session as session:
                session.delivery.self_grant(subscription, topic.feed)

    def _look_for_names(self, *, is_new: bool) -> None:
        core = self._core
        found = core.matching(
            self._shell.ask(lambda session: run_steps(list_topic_names(session, core.prefixes)))
        )
        if found:
            with self._shell.checked_lock, self._shell.guarded_session as session:
                session.forget_all(found)
            steps = core.open_matching_steps(self._client.connection, found, is_new=is_new)
            self._follow(self._shell.run(steps))

    def _take_grant(self, subscription: ClientSubscription) -> ReadGrant | None:
        if not subscription.has_work:
            self._shell.require_open()
            if self._shell.session.delivery.is_return_overdue:
                with self._shell.checked_lock, self._shell.guarded_session as session:
                    session.delivery.send_returns()
            return None
        if subscription.failure is None and not subscription.names_changed:
            self._shell.require_open()
            return Delivery.take_grant(subscription)
        if subscription.failure is not None:
            raise subscription.failure
        subscription.names_changed = False  # First: who sets it again meanwhile has us look again.
        try:
            with self._files.use():
                self._look_for_names(is_new=True)
        except BaseException as e:
            # A shard that was given up would be asked again and again: new names come with the next start.
            subscription.names_changed |= not is_shard_failed(e)
            raise
        return Delivery.take_grant(subscription)

    def _read(self, turn: ReadGrant) -> None:
        files = self._files
        if not files.has_detached_run and turn.hint is not None and self._core.take_shared_frame(turn):
            self._finish(turn, turn.hint.last_seq, is_consumed=True)
            self._grant = None
            return
        with files.use() as core:
            result = None if files.has_detached_run else core.read_at_hint(turn)
            if result is None:
                result = files.run(self._shell, lambda: core.grant_steps(turn, self._shell.now_s))
        self._core.enqueue_events(result.events)
        if result.is_topic_ended or result.retry_after_s:
            self._end_or_look_again(turn, result)
        else:
            self._finish(turn, result.after, is_consumed=result.is_consumed)
        self._grant = None
        if result.error is not None:
            raise result.error

    def _finish(self, turn: ReadGrant, after: int, *, is_consumed: bool) -> None:
        subscription = self._subscription
        if subscription is None or self._is_closed:
            return
        # The lock is for who has to arrange something; with hundreds of watches that is seldom.
        delivery = self._shell.session.delivery
        if not delivery.return_grant_unlocked(subscription, turn, after, is_consumed=is_consumed):
            with self._shell.checked_lock, self._shell.guarded_session:
                delivery.collect_returns()

    def _end_or_look_again(self, turn: ReadGrant, result: GrantResult) -> None:
        subscription = self._subscription
        if subscription is None or self._is_closed:
            return
        with self._shell.checked_lock, self._shell.guarded_session as session:
            if result.is_topic_ended:
                session.delivery.drop_feed(subscription, turn.feed)
                subscription.names_changed |= subscription.names  # The topic may have been created again.
            else:
                session.delivery.return_grant(
                    subscription, turn, result.after, is_consumed=result.is_consumed
                )
                session.delivery.self_grant(subscription, turn.feed, after_ns=int(result.retry_after_s * 1e9))
