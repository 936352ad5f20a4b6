"""The forwarding core copies every record once and in order, under any history."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ringlog.actors.scheduler.forwarding import forwarding_core
from ringlog.actors.scheduler.forwarding.forwarding_core import (
    ActiveRouter,
    CatchUpState,
    CopyTransform,
    ForwardBatch,
    ForwardingCore,
    SourceFlowKey,
    split_by_shard,
)
from ringlog.actors.scheduler.forwarding.router_catalog import RouterCatalog, find_cycle
from ringlog.envelope import messages as m
from ringlog.errors import RouterCycle, TopicIncompatible
from ringlog.limits import FORWARD_REQUESTS_MAX, ROUTE_PAUSE_MS_MAX, ROUTE_RECORDS_MAX, ROUTE_ROWS_MAX
from ringlog.topic.routers import Router, RouterFlag, RouterPassOutcome

MS = 1_000_000
PLAIN = int(RouterFlag.PRESERVE_NODE | RouterFlag.PRESERVE_TAG)


def facts(number: int, *, source: int = 1, cursor: int = 0, durability: int = 2, **more) -> m.RouterFacts:
    return m.RouterFacts(
        number, more.pop("name", f"r{number}"), f"s{source}", source, 1, f"d{number}", 100 + number,
        more.pop("flags", PLAIN), more.pop("filter", ""), cursor, 0, durability,
    )  # fmt: skip


def batch(request: forwarding_core.ReadForwardBatch, stop: int) -> ForwardBatch:
    """Return a batch of one frame with records of one byte."""
    count = stop - request.start
    return ForwardBatch(stop, 0, 1, (b"x",), {request.transforms[0]: 0}, count, count, (count,))


def dest_of(number: int) -> int:
    return facts(number).dest_id


# -- the shard's rule ---------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 50))
def test_a_forward_request_is_applied_only_at_the_cursor_of_its_router(cursor, start, length):
    """The shard compares the start of the request with the router's cursor (F2)."""
    router = Router(1, "r", "s", 1, 1, PLAIN, "", cursor)
    stop = start + length
    fate = router.outcome_of(start, stop)
    if cursor >= stop:
        assert fate is RouterPassOutcome.DONE
    elif cursor == start:
        assert fate is None
    else:
        assert fate is RouterPassOutcome.ELSEWHERE


# -- creation of routers ------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14))
def test_a_cycle_is_found_exactly_when_there_is_one(wanted):
    """Compared with a search of everything that can be reached."""
    edges: list[tuple[str, str]] = []
    for a, b in wanted:
        source, dest = f"t{a}", f"t{b}"
        if a == b:
            continue
        reached, ahead = {dest}, [dest]
        while ahead:
            at = ahead.pop()
            for x, y in edges:
                if x == at and y not in reached:
                    reached.add(y)
                    ahead.append(y)
        onward: dict[str, list[str]] = {}
        for x, y in edges:
            onward.setdefault(x, []).append(y)
        cycle = find_cycle(onward, source, dest)
        assert bool(cycle) == (source in reached)
        if cycle:
            assert cycle[0] == cycle[-1] == source
            assert cycle[1] == dest
            assert all(pair in edges for pair in itertools.pairwise(cycle[1:]))
        else:
            edges.append((source, dest))


def test_the_catalog_decides_which_routers_may_be_created():
    """The catalog also lists routers in pages, by name."""
    known = RouterCatalog(10)
    doubled = known.replace_all([facts(3), facts(2, name="r1"), facts(1)])
    assert [each.router for each in doubled] == [2]
    assert known.check_create(m.RouterCreate("r1", "s1", "d1")) is known.find("r1")
    with pytest.raises(TopicIncompatible):
        known.check_create(m.RouterCreate("r1", "s1", "d9"))
    with pytest.raises(TopicIncompatible):
        known.check_create(m.RouterCreate("new", "other", "d1"))
    with pytest.raises(RouterCycle):
        known.check_create(m.RouterCreate("new", "d1", "s1"))
    assert known.check_create(m.RouterCreate("new", "d1", "s1", allow_cycle=True)) is None
    known.drop("r1")
    assert known.check_create(m.RouterCreate("new", "d1", "s1")) is None
    found, more = known.page(m.RouterList(page_size=1))
    assert ([each.name for each in found], more) == (["r3"], False)


# -- parts of a forward request -----------------------------------------------------------------------------


def test_each_shard_receives_the_frames_that_its_routers_copy_once():
    plain, hot, none = (
        CopyTransform("", PLAIN, ""),
        CopyTransform("=hot", PLAIN, ""),
        CopyTransform("=none", PLAIN, ""),
    )
    runners = [
        ActiveRouter(n, n, n % 2, change, 5, facts(n))
        for n, change in enumerate([plain, hot, none, plain, hot, plain])
    ]
    found = ForwardBatch(9, 0, 3, (b"plain", b"hot"), {plain: 0, hot: 1})
    first, second = split_by_shard(runners, 5, found)
    assert (first.shard, first.frames) == (0, (b"plain", b"hot"))
    assert [(row.router, row.frame) for row in first.message.rows] == [(0, 0), (2, -1), (4, 1)]
    assert (second.shard, second.frames) == (1, (b"hot", b"plain"))
    assert [(row.router, row.frame) for row in second.message.rows] == [(1, 0), (3, 1), (5, 1)]
    assert first.message.hops == 3
    many = [ActiveRouter(n, n, 0, plain, 5, facts(n)) for n in range(2 * ROUTE_ROWS_MAX + 1)]
    assert [len(each.message.rows) for each in split_by_shard(many, 5, found)] == [ROUTE_ROWS_MAX] * 2 + [1]


# -- histories ----------------------------------------------------------------------------------------------


@dataclass
class Dest:
    """The state that a shard keeps of one router, and the copies that arrived."""

    cursor: int = 0
    copies: list[int] = field(default_factory=list)
    cap: int = 0
    is_gone: bool = False


class Engine:
    """Sources and shards around a ForwardingCore, in one process. Replies are late, repeated or lost."""

    def __init__(self, seed: int, shards: int = 3) -> None:
        self.random = random.Random(seed)
        self.core = ForwardingCore(shards)
        self.now_ns = 1
        self.heads: dict[SourceFlowKey, int] = {}
        self.turns: dict[SourceFlowKey, int] = {}
        self.dests: dict[int, Dest] = {}
        self.reads: list[forwarding_core.ReadForwardBatch] = []
        self.sent: list[forwarding_core.SendRoute] = []

    def put(self, number: int, source: int, durability: int = 2) -> None:
        dest = self.dests.setdefault(number, Dest())
        self.core.put_router(facts(number, source=source, cursor=dest.cursor, durability=durability))
        self.settle()

    def publish(self, source: int, count: int) -> None:
        for is_strong in (False, True):
            key = SourceFlowKey(source, is_strong)
            self.heads[key] = self.heads.get(key, 0) + count
        self.settle()

    def settle(self) -> None:
        """Perform all effects that need no delay, and offer grants as the scheduler's core does."""
        while True:
            effects, self.core.effects = self.core.effects, []
            for effect in effects:
                if isinstance(effect, forwarding_core.FollowSource):
                    self.turns[effect.key] = effect.after
                elif isinstance(effect, forwarding_core.UnfollowSource):
                    self.turns.pop(effect.key, None)
                elif isinstance(effect, forwarding_core.ReturnSourceGrant):
                    self.turns[effect.key] = effect.after
                elif isinstance(effect, forwarding_core.ReadForwardBatch):
                    self.reads.append(effect)
                else:
                    self.sent.append(effect)
            for key, after in list(self.turns.items()):
                if after >= 0 and after < self.heads.get(key, 0):
                    self.turns[key] = -1
                    self.core.grant_received(key, self.heads[key])
            if not self.core.effects:
                break
        self.core.check()
        out = [row.router for send in self.sent for row in send.message.rows]
        assert len(out) == len(set(out)), "a router is in two forward requests"
        assert len(self.sent) <= FORWARD_REQUESTS_MAX + 3

    def step(self) -> None:
        """Perform one random step."""
        what = self.random.random()
        if self.reads and what < 0.4:
            asked = self.reads.pop(self.random.randrange(len(self.reads)))
            if self.random.random() < 0.1:
                self.core.batch_read(asked, None)
            else:
                length = self.random.randint(1, min(asked.records, asked.until - asked.start))
                frame_of = {change: n for n, change in enumerate(asked.transforms)}
                frames = tuple(b"x" for _ in asked.transforms)
                stop, sizes = asked.start + length, (length,) * len(frames)
                found = ForwardBatch(stop, 0, 1, frames, frame_of, length, length, sizes)
                self.core.batch_read(asked, found)
        elif self.sent and what < 0.9:
            send = self.sent.pop(self.random.randrange(len(self.sent)))
            rows = [self.apply(row) for row in send.message.rows]
            if self.random.random() < 0.1:
                rows = [self.apply(row) for row in send.message.rows]
            self.core.route_answered(send.message, None if self.random.random() < 0.1 else rows)
        else:
            self.now_ns += self.random.randint(0, 2 * ROUTE_PAUSE_MS_MAX) * MS
            self.core.tick(self.now_ns)
        self.settle()

    def apply(self, row: m.RouteRow) -> m.RoutedRow:
        dest = self.dests[row.router]
        if dest.is_gone:
            return m.RoutedRow(RouterPassOutcome.GONE)
        if dest.cursor >= row.stop:
            return m.RoutedRow(RouterPassOutcome.DONE, dest.cursor)
        if dest.cursor != row.start:
            return m.RoutedRow(RouterPassOutcome.ELSEWHERE, dest.cursor)
        wanted = row.stop - row.start
        if dest.cap and wanted > dest.cap:
            return m.RoutedRow(RouterPassOutcome.FULL, dest.cursor, -1, dest.cap, 1_000)
        if self.random.random() < 0.1:
            return m.RoutedRow(RouterPassOutcome.CLOSED, dest.cursor)
        dest.copies += range(row.start + 1, row.stop + 1)
        dest.cursor = row.stop
        return m.RoutedRow(RouterPassOutcome.DONE, dest.cursor)

    def end(self) -> None:
        """Run steps until every router has caught up."""
        for _ in range(20_000):
            alive = [n for n, dest in self.dests.items() if not dest.is_gone]
            if all(self.dests[n].cursor >= self.heads.get(self.key_of(n), 0) for n in alive):
                return
            self.step()
        raise AssertionError("a router was forgotten")

    def key_of(self, number: int) -> SourceFlowKey:
        return self.core._flow_of.get(number, SourceFlowKey(0, False))


def some_routers(seed: int) -> Engine:
    """Return an engine with routers, of which some lead to a topic with a cap."""
    engine = Engine(seed)
    pick = engine.random
    for number in range(1, pick.randint(2, 8)):
        engine.put(number, pick.randint(1, 3), pick.choice([2, 3]))
        engine.dests[number].cap = pick.choice([0, 0, 1, 7])
    return engine


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_every_router_copies_every_record_once_and_in_order(seed):
    """FW1 to FW3 hold under any history, also with late, repeated and lost replies."""
    engine = some_routers(seed)
    pick = engine.random
    for _ in range(60):
        if pick.random() < 0.3:
            engine.publish(pick.randint(1, 3), pick.randint(1, 40))
        if pick.random() < 0.03:
            engine.dests[pick.choice(list(engine.dests))].is_gone = True
        engine.step()
    engine.end()
    for dest in engine.dests.values():
        assert dest.copies == list(range(1, len(dest.copies) + 1))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_catch_up_is_reported_neither_too_early_nor_never(seed):
    """A topic has caught up when all routers into it have. It is blocked only if a destination is full."""
    engine = some_routers(seed)
    pick = engine.random
    for _ in range(60):
        if pick.random() < 0.3:
            engine.publish(pick.randint(1, 3), pick.randint(1, 40))
        engine.step()
        for number, dest in engine.dests.items():
            until = pick.randint(0, 60)
            standing = engine.core.catch_up_state(dest_of(number), until)
            assert (standing != CatchUpState.CAUGHT_UP) or dest.cursor >= until
            assert (standing != CatchUpState.BLOCKED) or dest.cap
            [flow] = engine.core.flows_to_dest(dest_of(number))
            assert flow.key == engine.key_of(number)
    engine.end()
    for number in engine.dests:
        head = engine.heads.get(engine.key_of(number), 0)
        for _ in range(1_000):  # The last reply may be lost; a retry finds that out.
            if engine.core.catch_up_state(dest_of(number), head) == CatchUpState.CAUGHT_UP:
                break
            engine.step()
        else:
            raise AssertionError("the waiting request is forgotten")
        engine.core.drop_router(number)
        assert engine.core.flows_to_dest(dest_of(number)) == []
        assert engine.core.catch_up_state(dest_of(number), head + 1) == CatchUpState.CAUGHT_UP, (
            "no router leads to the topic"
        )


def test_all_routers_into_a_topic_must_catch_up():
    """Several filters may lead from one source to one destination."""
    core = ForwardingCore(3)
    core.put_router(facts(1))
    core.put_router(structs.replace(facts(2, cursor=5), dest_id=dest_of(1)))
    assert core.catch_up_state(dest_of(1), 5) == CatchUpState.BEHIND
    core.put_router(structs.replace(facts(1, cursor=5), durability=3))
    assert core.catch_up_state(dest_of(1), 5) == CatchUpState.CAUGHT_UP
    assert len(core.flows_to_dest(dest_of(1))) == 2, "one of them reads only synced records"
    core.drop_router(1)
    core.check()
    assert core.catch_up_state(dest_of(1), 6) == CatchUpState.BEHIND


def test_a_full_destination_blocks_until_it_has_space():
    """A closed destination lags, but does not block."""
    engine = Engine(3)
    engine.put(1, 1)
    engine.publish(1, 3)
    expected = {
        RouterPassOutcome.FULL: CatchUpState.BLOCKED,
        RouterPassOutcome.CLOSED: CatchUpState.BEHIND,
        RouterPassOutcome.DONE: CatchUpState.CAUGHT_UP,
    }
    for fate, standing in expected.items():
        asked = engine.reads.pop()
        engine.core.batch_read(asked, batch(asked, 3))
        engine.settle()
        engine.core.route_answered(
            engine.sent.pop().message, [m.RoutedRow(fate, 3 * (fate == RouterPassOutcome.DONE))]
        )
        assert engine.core.catch_up_state(dest_of(1), 3) == standing
        engine.now_ns += 2 * ROUTE_PAUSE_MS_MAX * MS
        engine.core.tick(engine.now_ns)
        engine.settle()


def test_one_read_serves_all_routers_with_the_same_cursor():
    """The read has a maximum number of records."""
    engine = Engine(1)
    for number in range(1, 6):
        engine.put(number, 1)
    engine.publish(1, 5_000)
    (asked,) = engine.reads
    assert asked.routers == (1, 2, 3, 4, 5)
    assert (asked.start, asked.until, asked.records) == (0, 5_000, ROUTE_RECORDS_MAX)
    assert engine.core.lag == 25_000


def test_a_destination_that_becomes_fsync_waits_for_synced_records():
    """Its router moves to the flow of synced records."""
    engine = Engine(2)
    engine.put(1, 1)
    engine.publish(1, 3)
    asked = engine.reads.pop()
    engine.core.batch_read(asked, batch(asked, 1))
    engine.settle()
    send = engine.sent.pop()
    engine.dests[1].cursor = 1
    engine.core.route_answered(send.message, [m.RoutedRow(RouterPassOutcome.DONE, 1, 3)])
    assert set(engine.core.flows) == {SourceFlowKey(1, True)}
    engine.settle()
    assert engine.reads[-1].key == SourceFlowKey(1, True)
    assert engine.reads[-1].start == 1


def test_a_flow_whose_source_cannot_be_read_keeps_no_grant():
    """All flows share the credit of one subscription. The flow continues at its retry time."""
    engine = Engine(4)
    engine.put(1, 1)
    engine.publish(1, 2)
    key = engine.key_of(1)
    for _ in range(3):
        engine.core.batch_read(engine.reads.pop(), None)
        engine.settle()
        assert engine.turns[key] == engine.heads[key], "it has returned its grant"
        engine.publish(1, 2)
        assert engine.turns[key] == engine.heads[key], "it returns each further grant"
        assert not engine.reads
        engine.now_ns = engine.core.next_deadline_ns()
        engine.core.tick(engine.now_ns)
        engine.settle()
    asked = engine.reads.pop()
    assert (asked.start, asked.until) == (0, 8)
    engine.core.batch_read(asked, batch(asked, 8))
    engine.settle()
    assert len(engine.sent) == 1
