"""Simulated shards and links around the core of a scheduler. The World sends facts as events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlog.actors.scheduler import events as ev
from ringlog.actors.scheduler.core import Scheduler
from ringlog.actors.scheduler.delivery.grants import UNTIL_RECHECK
from ringlog.contract import Tick
from ringlog.envelope import messages as m

A, B = b"a", b"b"
"""Names of links."""
MS = 1_000_000


@dataclass
class WorldTopic:
    """A slot of a shard's topic table, and the topic that is published there."""

    shard: int
    slot: int
    topic_id: int
    epoch: int = 1
    is_live: bool = True
    head: int = 0
    durable: int = 0
    base: int = 0
    is_auto: bool = False


@dataclass
class WorldShard:
    """A shard with one log file."""

    written: int = 0
    durable: int = 0
    marks: list[tuple[int, WorldTopic, int, int]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    is_complete: bool = True


@dataclass
class WorldLink:
    """The state of one client of the scheduler."""

    out: set[tuple[int, int]] = field(default_factory=set)
    credits: dict[int, int] = field(default_factory=dict)
    is_deaf: bool = False
    is_gone: bool = False
    turns: list[list[int]] = field(default_factory=list)
    messages: list[m.Message] = field(default_factory=list)


class World:
    """A scheduler core with a shell that performs effects at once and checks every grant."""

    def __init__(self, shards: int = 2) -> None:
        self.is_checked = True
        """Check all invariants of the core after each pass. Off where a test creates thousands of feeds."""
        self.core = Scheduler(0, 7, shards)
        self.now_ms = 1_000
        self.shards = [WorldShard() for _ in range(shards)]
        self.topics: dict[tuple[int, int], WorldTopic] = {}
        self.links: dict[bytes, WorldLink] = {}
        self.feeds: dict[tuple[bytes, int, int], tuple[WorldTopic, int, int]] = {}
        """(topic, after, epoch at subscription) of every feed of a link."""
        self.changed: set[tuple[int, int]] = set()
        """Topics that were deleted or recreated. Only their readers may receive a recheck."""
        self.is_shard_down = False

    def topic(self, shard: int, slot: int, topic_id: int = 0) -> WorldTopic:
        """Return the topic of a slot. Create it if it does not exist."""
        key = (shard, slot)
        if key not in self.topics:
            self.topics[key] = WorldTopic(shard, slot, topic_id or 100 * shard + slot + 1)
        return self.topics[key]

    # -- events -----------------------------------------------------------------------------------------

    def append(self, topic: WorldTopic, count: int = 1, *, loses: bool = False) -> None:
        """Publish `count` records. With `loses`, the news overruns and contains no row for them."""
        shard = self.shards[topic.shard]
        first, topic.head = topic.head + 1, topic.head + count
        offset, shard.written = shard.written, shard.written + 10 * count
        shard.marks.append((shard.written, topic, topic.epoch, topic.head))
        row = [topic.slot, topic.topic_id, topic.epoch, first, topic.head, 1, offset, shard.written]
        if loses:
            shard.is_complete = False
        else:
            shard.rows.append(row)

    def sync(self, number: int) -> None:
        """Make the complete log of a shard durable."""
        shard = self.shards[number]
        shard.durable = shard.written
        for _, topic, epoch, head in shard.marks:
            if topic.epoch == epoch:
                topic.durable = max(topic.durable, head)
        shard.marks.clear()

    def delete(self, topic: WorldTopic) -> None:
        """Delete the topic. Its slot becomes empty."""
        topic.is_live = False
        self.changed.add((topic.shard, topic.slot))
        head = topic.head
        row = [topic.slot, topic.topic_id, topic.epoch, head, head, 0, 0, 0]
        self.shards[topic.shard].rows.append(row)

    def remake(self, topic: WorldTopic) -> None:
        """Recreate the topic with the next epoch."""
        topic.epoch, topic.is_live, topic.head, topic.durable = topic.epoch + 1, True, 0, 0
        self.changed.add((topic.shard, topic.slot))

    # -- links ------------------------------------------------------------------------------------------

    def subscribe(
        self, link: bytes, subscription: int, feeds: Iterable[tuple[int, WorldTopic, int]], *,
        credit: int = 32, strong: bool = False, names: bool = False,
    ) -> m.Message:  # fmt: skip
        """Send Subscribe and return the reply."""
        known = self.links.setdefault(link, WorldLink())
        feeds = list(feeds)
        told = [m.Feed(n, f"t{t.topic_id}", t.topic_id, t.shard, t.slot, after) for n, t, after in feeds]
        before, feeds_before = known.credits.get(subscription), dict(self.feeds)
        known.credits[subscription] = credit
        for number, topic, after in feeds:
            self.feeds[link, subscription, number] = (topic, after, topic.epoch)
        answer = self.ask(link, m.Subscribe(subscription, told, credit, strong, names))
        if isinstance(answer, m.ErrorReply):
            self.feeds = feeds_before
            if before is None:
                del known.credits[subscription]
            else:
                known.credits[subscription] = before
        return answer

    def unsubscribe(self, link: bytes, subscription: int, feeds: Iterable[int] = ()) -> m.Message:
        """Send Unsubscribe and return the reply."""
        numbers = list(feeds)
        known = self.links.setdefault(link, WorldLink())
        # From here on these grants are void, and their credit is free.
        known.out -= {
            (sub, n) for sub, n in known.out if sub == subscription and (n in numbers or not numbers)
        }
        answer = self.ask(link, m.Unsubscribe(subscription, numbers))
        for key in [k for k in self.feeds if k[:2] == (link, subscription)]:
            if not numbers or key[2] in numbers:
                del self.feeds[key]
                known.out.discard(key[1:])
        if not numbers:
            known.credits.pop(subscription, None)
        return answer

    def take(self, link: bytes, *rows: tuple[int, int, int], is_consumed: bool = True) -> None:
        """Return grants, each as (subscription, feed, after)."""
        known = self.links[link]
        for subscription, feed, after in rows:
            known.out.discard((subscription, feed))
            found = self.feeds.get((link, subscription, feed))
            if found is not None:
                self.feeds[link, subscription, feed] = (found[0], after, found[2])
        words = np.array([(*row, is_consumed) for row in rows], dtype=np.uint64)
        self.turn(ev.LinkRequestReceived(link, 0, m.GrantsReturned(len(rows)), bytearray(words.tobytes())))

    def ask(self, link: bytes, message: m.Message) -> m.Message:
        """Send a request and return its reply."""
        known = self.links.setdefault(link, WorldLink())
        before = len(known.messages)
        self.turn(ev.LinkRequestReceived(link, 5, message))
        assert len(known.messages) == before + 1, known.messages[before:]
        return known.messages[-1]

    # -- the shell --------------------------------------------------------------------------------------

    def turn(self, *events: Any, is_silent: bool = False) -> None:
        """Run one pass of the shell: first the events of links, then those of the shards."""
        now: list[Any] = [Tick(0, self.now_ms * MS), *events]
        for number, shard in enumerate([] if is_silent else self.shards):
            rows = np.array(shard.rows, dtype=np.uint64).reshape(-1, 8)
            if len(rows) or not shard.is_complete:
                now.append(ev.NewsRows(number, rows, shard.is_complete))
                shard.rows, shard.is_complete = [], True
            now.append(ev.DurableMarkMoved(number, (1, shard.durable)))
        effects = deque(self.core.handle(now))
        while effects:
            done = [event for effect in list(effects) if (event := self._perform(effect)) is not None]
            effects = deque(self.core.handle(done)) if done else deque()
        if self.is_checked:
            self.core.check()

    def wait(self, ms: int) -> None:
        """Advance the clock, and run a pass at each deadline of the core."""
        until = self.now_ms + ms
        while self.now_ms < until:
            due = self.core.next_deadline_ns()
            step = until if due is None else min(max(-(-due // MS), self.now_ms + 1), until)
            self.now_ms = step
            self.turn()

    def _perform(self, effect: Any) -> Any:
        if isinstance(effect, ev.ReadSlots):
            return self._look(effect)
        link = self.links.setdefault(effect.link, WorldLink())
        if isinstance(effect.message, m.Grants):
            if link.is_deaf or link.is_gone:
                return ev.GrantsUnsent(effect, link.is_gone)
            self._judge(effect.link, link, effect)
        elif not link.is_gone:
            link.messages.append(effect.message)
        return None

    def _look(self, look: ev.ReadSlots) -> ev.SlotFactsRead:
        if self.is_shard_down:
            return ev.SlotFactsRead(look, None)
        facts: list[ev.SlotFacts | None] = []
        for each in look.topics:
            found = self.topics[each.shard, each.slot]
            facts.append(
                ev.SlotFacts(
                    found.topic_id, found.epoch, found.is_live, found.head, found.base, found.is_auto
                )
            )
        return ev.SlotFactsRead(look, facts, (1, self.shards[look.shard].written))

    def _judge(self, id: bytes, link: WorldLink, tell: ev.SendToLink) -> None:
        rows = np.frombuffer(tell.rows, dtype=np.uint64).reshape(-1, 8).tolist()
        assert tell.message == m.Grants(len(rows))
        for row in rows:
            subscription, feed, until, first, last, file_id, offset, stop = row
            known = self.feeds.get((id, subscription, feed))
            assert known is not None, "an ended feed received a grant (T5)"
            assert (subscription, feed) not in link.out, "a feed holds more than one grant (T2)"
            link.out.add((subscription, feed))
            topic, after, _ = known
            if until == UNTIL_RECHECK:
                assert (topic.shard, topic.slot) in self.changed, "recheck of a topic that did not change"
                assert not file_id
            else:
                is_strong = self.core.subscriptions.links[id].subscriptions[subscription].is_strong
                most = topic.durable if is_strong else topic.head
                assert after < until <= most or (topic.shard, topic.slot) in self.changed, row
            if file_id:
                assert first == after + 1 <= last, "the position hint must begin at the reader's position"
                assert stop - offset == 10 * (last - first + 1)
            link.turns.append(row)
        for number, credit in link.credits.items():
            out = sum(sub == number for sub, _ in link.out)
            assert out <= max(credit, 0) or not any(row[0] == number for row in rows), (
                "the grants exceed the credit (T1)"
            )


def publish(world: World, topic: WorldTopic, count: int = 1) -> None:
    """Append records, and let the scheduler notice them."""
    world.append(topic, count)
    world.turn()


def untils(world: World, link: bytes = A) -> list[tuple[int, int]]:
    """Return feed and last seq of each grant of the link."""
    return [(row[1], row[2]) for row in world.links[link].turns]


def followed(world: World) -> WorldTopic:
    """Return a new topic that link A follows from its beginning."""
    topic = world.topic(0, 0)
    world.subscribe(A, 1, [(1, topic, 0)])
    return topic
