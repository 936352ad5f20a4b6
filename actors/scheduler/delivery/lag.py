"""How far consumers are behind: how old the oldest is that they could have and do not. Pure.

A reader that takes turn after turn and never has everything is behind as well; one that begins with a
backlog, since it began. A reader that has nothing to take is not, however quiet it is. Looking is bounded: of
a subscription that is too large only who waits counts, not who was told, and beyond the bound nobody is
looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from actors.scheduler.delivery.feeds import FeedGrantState, Link, SchedulerSubscription
from ringlog.limits import LAG_CHECKS_MAX


class Lag(NamedTuple):
    """One subscription."""

    lag_ms: int
    link: bytes
    number: int
    feeds: int
    waiting: int
    """Feeds that wait for credit."""
    granted: int
    """Turns that were not given back."""
    credit: int


def largest_lags(links: Iterable[Link], now_ms: int, most: int) -> list[Lag]:
    """The subscriptions that are furthest behind, at most `most`, the furthest first."""
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
    """Since when the feed that is furthest behind has lacked something."""
    if subscription.free == subscription.credit and subscription.ready is None:
        return None
    behind = (feed.since_ms for feed in subscription.feeds.values() if feed.state is not FeedGrantState.IDLE)
    return min(behind, default=None)


def _earliest(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
