"""Changes of topics' priorities while feeds wait for them: the feeds move in their ready sets. Pure."""

from __future__ import annotations

from collections import deque

from ringlog.actors.scheduler.delivery.feeds import SchedulerFeed, SchedulerTopic
from ringlog.limits import AGING_TICK_MS, REFRESHES_PER_TICK_MAX
from ringlog.topic.priority import auto_of

AUTO_STEP = AGING_TICK_MS // 10
"""Least rise of a topic's automatic priority, in points, that moves its waiting feeds in their ready sets."""


class PriorityChanges:
    """Topics whose priority changed, and the waiting feeds of theirs that were not moved yet."""

    def __init__(self) -> None:
        self._changed: dict[SchedulerTopic, None] = {}
        """Topics whose priority changed while feeds waited for them."""
        self._to_refresh: deque[SchedulerFeed] = deque()

    def add(self, topic: SchedulerTopic) -> None:
        """Add a topic whose priority changed."""
        self._changed[topic] = None

    def forget(self, topic: SchedulerTopic) -> None:
        """Remove a topic that is no longer followed."""
        self._changed.pop(topic, None)

    def record_consumption(self, topic: SchedulerTopic, now_ms: int) -> None:
        """Record that a consumer read the topic, which raises its automatic priority.

        If the rise is at least AUTO_STEP points, the topic's waiting feeds are moved at the next aging tick.
        """
        priority = topic.priority
        before, priority.consumed_ms = priority.consumed_ms, now_ms
        if not topic.waiting or not priority.is_auto or topic in self._changed:
            return
        if before is None or auto_of(0) - auto_of(now_ms - before) >= AUTO_STEP:
            self._changed[topic] = None

    def refresh(self, now_ms: int) -> None:
        """Move waiting feeds of topics whose priority changed, at most REFRESHES_PER_TICK_MAX of them."""
        if not self._to_refresh:
            lifted, self._changed = self._changed, {}
            for topic in lifted:
                self._to_refresh.extend(topic.waiting)
        for _ in range(min(len(self._to_refresh), REFRESHES_PER_TICK_MAX)):
            feed = self._to_refresh.popleft()
            if feed.subscription.ready is not None:
                feed.subscription.ready.refresh(feed, now_ms)
