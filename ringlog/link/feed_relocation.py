"""FeedRelocation: find topics again that a restarted shard may have moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ringlog.envelope.messages import TopicInfo, TopicResolve
from ringlog.errors import (
    ConnectionTrouble,
    NotConnected,
    NotReady,
    RinglogError,
    ShuttingDown,
    is_shard_failed,
)
from ringlog.link.futures import Steps, run_steps
from ringlog.link.peer import MS
from ringlog.link.protocol import DeliveryHost
from ringlog.link.subscription import ClientSubscription, FeedState

RETRY_PAUSE_NS = 100 * MS
"""Pause before the next request to a scheduler that refused."""
TEMPORARY = (NotReady, NotConnected, ShuttingDown)
"""Refusals after which the request is repeated."""
RELOCATIONS_AT_ONCE = 64
"""Number of topics that are located at the same time, to limit the load on a restarted shard."""


class FeedRelocation:
    """Feeds of one host whose topics must be located again."""

    def __init__(
        self, host: DeliveryHost, resubscribe: Callable[[ClientSubscription, int, list[int]], Steps[None]]
    ) -> None:
        """`resubscribe` sends moved feeds to their scheduler."""
        self._host = host
        self._resubscribe = resubscribe
        self._to_locate: deque[tuple[ClientSubscription, int]] = deque()
        self._is_locating = False

    def relocate(self, subscription: ClientSubscription, feed: int, state: FeedState) -> None:
        """Locate a topic again: a restarted shard may have moved it.

        If the topic is deleted, its reader detects that.
        """
        if state.is_relocating:
            state.must_relocate_again = True
            return
        state.is_relocating = True
        self._to_locate.append((subscription, feed))
        if not self._is_locating:
            self._is_locating = True
            run_steps(self._relocate_steps())

    def _relocate_steps(self) -> Steps[None]:
        """Locate topics, some at a time, and send moved feeds to their schedulers."""
        host = self._host
        while self._to_locate:
            lookups = []
            for _ in range(min(len(self._to_locate), RELOCATIONS_AT_ONCE)):
                subscription, feed = self._to_locate.popleft()
                state = subscription.feeds.get(feed)
                if state is None:
                    continue
                state.must_relocate_again = False
                lookups.append((subscription, feed, state, run_steps(self._ask_location(state))))
            moved: dict[tuple[ClientSubscription, int], list[int]] = {}
            to_retry = []
            for subscription, feed, state, lookup in lookups:
                try:
                    info = yield lookup
                except (*TEMPORARY, ConnectionTrouble) as e:
                    if is_shard_failed(e):
                        state.is_relocating = False
                        subscription.report_error(feed, state, e, host.clock.monotonic_ns())
                        continue
                    # A timeout does not come from the shard: no process would report the move later.
                    to_retry.append((subscription, feed))
                    continue
                except RinglogError:
                    info = state.info
                state.is_relocating = state.must_relocate_again
                if state.must_relocate_again:
                    to_retry.append((subscription, feed))
                is_it = info.topic_id == state.info.topic_id and info.epoch == state.info.epoch
                if is_it and (info.shard, info.slot) != (state.info.shard, state.info.slot):
                    state.info = info
                    moved.setdefault((subscription, state.scheduler), []).append(feed)
            for (subscription, number), feeds in moved.items():
                yield run_steps(self._resubscribe(subscription, number, feeds))
            if to_retry:
                self._to_locate.extend(to_retry)
                yield host.pause(RETRY_PAUSE_NS / 1e9)
        self._is_locating = False

    def _ask_location(self, state: FeedState) -> Steps[TopicInfo]:
        """Query the home shard of the name, and then the shard that it names."""
        links, request = self._host.links, TopicResolve(state.topic)
        shard = links.home_shard(state.topic)
        info: TopicInfo = (yield links.request(shard, request, self._host.deadline_ns())).message
        if not info.topic_id:
            info = (yield links.request(info.shard, request, self._host.deadline_ns())).message
        return info
