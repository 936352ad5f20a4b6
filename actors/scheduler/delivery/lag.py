"""Consumer lag: the age of the oldest record that a consumer could read and has not read. Pure.

A reader that returns its grants but never catches up lags as well. A reader that starts with a backlog lags
from its subscription on. A reader without unread records does not lag, even if it is silent.

The work is bounded by LAG_CHECKS_MAX. In a subscription with more feeds than the rest of this budget, only
waiting feeds count, not granted ones. When the budget is used up, the remaining subscriptions are not
checked.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from ringlog.actors.scheduler.delivery.feeds import FeedGrantState, Link, SchedulerSubscription
from ringlog.limits import LAG_CHECKS_MAX


class Lag(NamedTuple):
    """The lag of one subscription."""

    lag_ms: int
    link: bytes
    number: int
    feeds: int
    waiting: int
    """Number of feeds that wait for a grant."""
    granted: int
    """Number of outstanding grants."""
    credit: int


def largest_lags(links: Iterable[Link], now_ms: int, most: int) -> list[Lag]:
    """Return at most `most` subscriptions with the largest lags, the largest first."""
    budget, found = LAG_CHECKS_MAX, []
    for subscription in (each for link in links for each in link.subscriptions.values()):
        if not budget:
            break
        budget -= 1
        since_ms = subscription.ready.oldest_ms if subscription.ready is not None else None
        if len(subscription.feeds) <= budget:
            budget -= len(subscription.feeds)
            since_ms = _earliest(since_ms, _oldest_ms(subscription))
        waiting = len(subscription.ready) if subscription.ready is not None else 0
        found.append(
            Lag(
                max(now_ms - since_ms, 0) if since_ms is not None else 0, subscription.link.id,
                subscription.number, len(subscription.feeds), waiting,
                subscription.credit - subscription.free, subscription.credit,
            )
        )  # fmt: skip
    return heapq.nlargest(most, found)


def _oldest_ms(subscription: SchedulerSubscription) -> int | None:
    """Return the start of the oldest backlog of a feed, in ms, or None if no feed has a grant or waits."""
    if subscription.free == subscription.credit and subscription.ready is None:
        return None
    behind = (feed.since_ms for feed in subscription.feeds.values() if feed.state is not FeedGrantState.IDLE)
    return min(behind, default=None)


def _earliest(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
