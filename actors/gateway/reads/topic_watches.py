"""Watches of topics for requests that wait for records: a topic is compared when its shard publishes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringlog.actors.gateway import events as ev
from ringlog.board.topics import TOPIC_LIVE
from ringlog.clock import Clock
from ringlog.errors import RinglogError, is_shard_failed
from ringlog.link.futures import Pending
from ringlog.link.local_links import LocalLinks

WATCH_NS = 60_000_000_000


class TopicWatches:
    """The watched topics. Events are passed to `emit`."""

    def __init__(
        self, links: LocalLinks, clock: Clock, read_marks: Callable[[int], Any], emit: Callable[[Any], None]
    ) -> None:
        self._links, self._clock, self._read_marks, self._emit = links, clock, read_marks, emit
        self._watches: dict[int, ev.WatchTopic] = {}
        self._waits: dict[int, Pending[bool]] = {}

    def watch(self, effect: ev.WatchTopic) -> None:
        """Emit TopicHeadChanged once when the head of a topic differs from that of the effect."""
        self._watches[effect.ticket] = effect
        # Read the marks before the slot: a publication in between then ends the wait at once.
        self._await_publication(effect.shard)
        self._check_watch(effect)

    def unwatch(self, effect: ev.UnwatchTopic) -> None:
        """End a watch."""
        self._watches.pop(effect.ticket, None)

    def _await_publication(self, shard: int) -> None:
        """Wait for a publication of the shard, once, while any of its topics is watched."""
        if shard in self._waits:
            return
        deadline_ns = self._clock.monotonic_ns() + WATCH_NS
        waiting = self._links.published_since(
            shard, lambda: self._read_marks(shard), self._read_marks(shard), deadline_ns
        )
        self._waits[shard] = waiting
        waiting.when_done(lambda done: self._published(shard, done))

    def _published(self, shard: int, waiting: Pending[bool]) -> None:
        self._waits.pop(shard, None)
        watched = [watch for watch in self._watches.values() if watch.shard == shard]
        if waiting.error is not None and is_shard_failed(waiting.error):
            # The shard will publish nothing. A reader that requests the shard again receives the reason.
            for watch in watched:
                del self._watches[watch.ticket]
                self._emit(ev.TopicHeadChanged(watch.ticket))
            return
        if watched:
            self._await_publication(shard)
        for watch in watched:
            self._check_watch(watch)

    def _check_watch(self, watch: ev.WatchTopic) -> None:
        try:
            facts = self._links.board.topic_table(watch.shard).read(watch.slot)
        except RinglogError:
            return  # Not readable at present: wait for the next publication.
        is_same = facts.state == TOPIC_LIVE and (facts.topic_id, facts.epoch) == (watch.topic_id, watch.epoch)
        has_moved = not is_same or facts.head_seq != watch.head_seq
        if has_moved and self._watches.pop(watch.ticket, None) is not None:
            self._emit(ev.TopicHeadChanged(watch.ticket))
