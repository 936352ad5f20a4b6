"""Routers at work, decided: which stretch of which source is forwarded next, and to whom. Pure.

Routers of one source that wait for the same are a *flow*: those into `fsync` destinations for what a device
sync covers, the others for what is published (RT-26). A flow is told how far its source reaches, as a
watcher is. A *pass* reads one stretch of the source, once for all routers of the flow that are at its
start, and sends their shards what they copy. A router is in one pass at a time. One whose destination
refuses waits, a little longer each time, and holds up nobody else (RT-22).

Nothing is kept here: cursors are the shards', and a successor asks for them. What must hold:

- Q1 a router is in at most one pass; a flow has at most one read; passes on their way are bounded;
- Q2 a router that is behind what its flow was told is in a pass, or waits for one, or for its time;
- Q3 a flow keeps its turn exactly while some router that may go on is behind.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from msgspec import structs

from ringlog.envelope import messages as m
from ringlog.errors import InvariantViolation
from ringlog.limits import (
    ROUTE_BYTES_MAX,
    ROUTE_PASSES_MAX,
    ROUTE_PAUSE_MS_MAX,
    ROUTE_PAUSE_MS_MIN,
    ROUTE_RECORDS_MAX,
    ROUTE_ROWS_MAX,
)
from ringlog.placement import shard_of
from ringlog.topic.routers import Fate, RouterFlag
from ringlog.types import Durability

_MS = 1_000_000
_KEEPS = RouterFlag.PRESERVE_NODE | RouterFlag.PRESERVE_TAG


class FlowKey(NamedTuple):
    """Which flow: a source, and whether only what is durable counts."""

    source_id: int
    is_strong: bool


class Change(NamedTuple):
    """What a router makes of the records it copies. Those of equal changes share one frame."""

    filter: str
    keeps: int
    stamp: str
    """Name of the router, where copies say where they came from (RT-27); else empty."""


@dataclass(slots=True)
class Runner:
    """One router of a flow."""

    number: int
    dest_id: int
    shard: int
    change: Change
    cursor: int
    facts: m.RouterFacts
    is_out: bool = False
    due_ns: int = 0
    """Not before this time again; 0 = any time."""
    pause_ms: int = 0
    room: tuple[int, int] = (ROUTE_RECORDS_MAX, ROUTE_BYTES_MAX)
    """Records and bytes that its destination takes at present."""
    is_refused: bool = False
    """Its destination was full when it was last asked."""


@dataclass(slots=True)
class Flow:
    """Routers of one source that wait for the same."""

    key: FlowKey
    source: str
    epoch: int
    routers: dict[int, Runner] = field(default_factory=dict)
    until: int = 0
    """How far the source reaches, as far as it was told."""
    has_turn: bool = False
    is_reading: bool = False
    is_waiting: bool = False
    """It is in the queue of those that may go on when a pass is over."""
    due_ns: int = 0
    pause_ms: int = 0


# -- effects ----------------------------------------------------------------------------------------------


class Follow(NamedTuple):
    """Tell this flow how far its source reaches."""

    key: FlowKey
    source: str
    after: int


class Unfollow(NamedTuple):
    """Nobody wants to know any more."""

    key: FlowKey


class GiveBack(NamedTuple):
    """The turn is over: everything up to `after` is dealt with, or waits for its destination."""

    key: FlowKey
    after: int


class ReadStretch(NamedTuple):
    """Read the source behind `start` up to `until`, and make the frames of these changes of it."""

    key: FlowKey
    source: str
    epoch: int
    start: int
    until: int
    records: int
    bytes: int
    changes: tuple[Change, ...]
    numbers: tuple[int, ...]


class Send(NamedTuple):
    """Send a shard its part of a pass."""

    shard: int
    message: m.Route
    frames: tuple[bytes, ...]


Effect = Follow | Unfollow | GiveBack | ReadStretch | Send


class Stretch(NamedTuple):
    """What a ReadStretch found: the source from its start up to `stop`."""

    stop: int
    lost: int = 0
    """So many positions went before they were forwarded; then there is nothing else (RT-23)."""
    hops: int = 1
    frames: tuple[bytes, ...] = ()
    frame_of: Mapping[Change, int] = MappingProxyType({})
    """Changes that leave nothing are not in it."""


class Standing(Enum):
    """How the routers into a topic stand to a position of their source."""

    THERE = "there"
    BEHIND = "behind"
    HELD_UP = "held up"
    """The topic is full: they get there when somebody makes room."""


class Routing:
    """All flows of one scheduler. Every method adds to `effects`, which the shell takes and performs."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self.flows: dict[FlowKey, Flow] = {}
        self.effects: list[Effect] = []
        self.out = 0
        """Parts of passes on their way."""
        self.passes = 0
        self._flow_of: dict[int, FlowKey] = {}
        self._into: dict[int, set[int]] = {}
        """Routers at work here by what they lead to; all of one destination have one source."""
        self._queue: deque[FlowKey] = deque()
        self._dues: list[tuple[int, FlowKey]] = []
        self._now_ns = 0

    @property
    def routers(self) -> int:
        """Routers at work here."""
        return len(self._flow_of)

    @property
    def lag(self) -> int:
        """Positions that are not forwarded yet, of all routers."""
        flows = self.flows.values()
        return sum(max(flow.until - each.cursor, 0) for flow in flows for each in flow.routers.values())

    def next_deadline_ns(self) -> int | None:
        """When `tick` is wanted though nothing else happens."""
        return self._dues[0][0] if self._dues else None

    # -- which there are --------------------------------------------------------------------------------

    def knows(self, number: int) -> bool:
        """Is this router at work here?"""
        return number in self._flow_of

    def put(self, facts: m.RouterFacts) -> None:
        """A router is there, or is another one from here on. What is on its way of it stays so."""
        key = FlowKey(facts.source_id, facts.durability == Durability.FSYNC)
        old = self._runner(facts.router)
        if old is not None and self._flow_of[facts.router] == key:
            old.facts, old.change = facts, _change_of(facts)
            return
        if old is not None:
            self.drop(facts.router)
        runner = Runner(
            facts.router, facts.dest_id, shard_of(facts.dest_id, self._shards), _change_of(facts),
            max(facts.cursor, old.cursor if old else 0), facts,
        )  # fmt: skip
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = Flow(key, facts.source, facts.source_epoch)
            self.effects.append(Follow(key, flow.source, runner.cursor))
        flow.routers[runner.number] = runner
        self._flow_of[runner.number] = key
        self._into.setdefault(runner.dest_id, set()).add(runner.number)
        self._go_on(flow)

    def drop(self, number: int) -> None:
        """A router is no more."""
        key = self._flow_of.pop(number, None)
        flow = self.flows.get(key) if key is not None else None
        if flow is None:
            return
        dest_id = flow.routers.pop(number).dest_id
        self._into[dest_id].discard(number)
        if not self._into[dest_id]:
            del self._into[dest_id]
        if flow.routers:
            self._go_on(flow)
        else:
            del self.flows[flow.key]
            self.effects.append(Unfollow(flow.key))

    def flows_into(self, dest_id: int) -> list[Flow]:
        """The flows with routers that lead to this topic."""
        return [self.flows[key] for key in {self._flow_of[number] for number in self._into.get(dest_id, ())}]

    def standing(self, dest_id: int, until: int) -> Standing:
        """Have all routers into a topic dealt with their source up to `until`?"""
        runners = [self._runner(number) for number in self._into.get(dest_id, ())]
        behind = [each for each in runners if each is not None and each.cursor < until]
        if not behind:
            return Standing.THERE
        return Standing.HELD_UP if any(each.is_refused for each in behind) else Standing.BEHIND

    def _runner(self, number: int) -> Runner | None:
        key = self._flow_of.get(number)
        return None if key is None else self.flows[key].routers[number]

    # -- what happens -----------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Time has come this far."""
        self._now_ns = now_ns
        while self._dues and self._dues[0][0] <= now_ns:
            _, key = heapq.heappop(self._dues)
            if (flow := self.flows.get(key)) is not None:
                self._go_on(flow)

    def told(self, key: FlowKey, until: int) -> None:
        """A flow has the turn: its source reaches up to `until`."""
        flow = self.flows.get(key)
        if flow is None:
            return
        flow.until, flow.has_turn = max(flow.until, until), True
        self._go_on(flow)

    def read(self, asked: ReadStretch, found: Stretch | None) -> None:
        """A stretch was read; None = it cannot be read at present."""
        flow = self.flows.get(asked.key)
        if flow is None:
            return
        flow.is_reading = False
        runners = [flow.routers[number] for number in asked.numbers if number in flow.routers]
        runners = [each for each in runners if each.cursor == asked.start and not each.is_out]
        if found is None or found.stop <= asked.start:
            flow.pause_ms = _longer(flow.pause_ms)
            flow.due_ns = self._wait(flow, flow.pause_ms)
        else:
            flow.pause_ms = flow.due_ns = 0
            # Who was changed meanwhile has no frame here: the next pass begins where this one did.
            runners = [each for each in runners if each.change in asked.changes]
            self.passes += 1
            for send in parts_of(runners, asked.start, found):
                self.out += 1
                self.effects.append(send)
                for row in send.message.rows:
                    flow.routers[row.router].is_out = True
        self._go_on(flow)

    def answered(self, sent: m.Route, rows: Sequence[m.RoutedRow] | None) -> None:
        """What became of a part of a pass; None = nobody knows, and it will be found out."""
        self.out -= 1
        flows: dict[FlowKey, Flow] = {}
        for n, row in enumerate(sent.rows):
            runner = self._runner(row.router)
            if runner is None:
                continue
            flow = self.flows[self._flow_of[row.router]]
            flows[flow.key] = flow
            runner.is_out = False
            self._settle(flow, runner, rows[n] if rows is not None else m.RoutedRow(Fate.CLOSED))
        for flow in flows.values():
            if flow.key in self.flows:
                self._go_on(flow)
        while self._queue and self.out < ROUTE_PASSES_MAX:
            waiting = self.flows.get(self._queue.popleft())
            if waiting is not None:
                waiting.is_waiting = False
                self._go_on(waiting)

    def _settle(self, flow: Flow, runner: Runner, row: m.RoutedRow) -> None:
        if row.fate == Fate.GONE:
            self.drop(runner.number)
            return
        runner.cursor = max(runner.cursor, row.cursor)
        if row.durability not in {-1, runner.facts.durability}:
            # Its destination is of another class by now: perhaps it waits for something else (RT-26).
            self.put(structs.replace(runner.facts, durability=row.durability))
        runner.is_refused = row.fate == Fate.FULL
        if row.fate in {Fate.DONE, Fate.ELSEWHERE}:
            runner.pause_ms, runner.room = 0, (ROUTE_RECORDS_MAX, ROUTE_BYTES_MAX)
            return
        is_smaller = 0 < row.records < runner.room[0] or 0 < row.bytes < runner.room[1]
        if row.fate == Fate.FULL and row.records and row.bytes and is_smaller:
            runner.room = (min(row.records, runner.room[0]), min(row.bytes, runner.room[1]))
            runner.is_refused = False  # A part of it fits, and is tried at once.
            return
        runner.room = (ROUTE_RECORDS_MAX, ROUTE_BYTES_MAX)
        runner.pause_ms = _longer(runner.pause_ms)
        runner.due_ns = self._wait(flow, runner.pause_ms)

    def _wait(self, flow: Flow, pause_ms: int) -> int:
        due_ns = self._now_ns + pause_ms * _MS
        heapq.heappush(self._dues, (due_ns, flow.key))
        return due_ns

    # -- what is next -----------------------------------------------------------------------------------

    def _go_on(self, flow: Flow) -> None:
        """Begin the next pass of a flow, if there is one to be begun."""
        if flow.is_reading:
            return
        if flow.due_ns > self._now_ns:
            return
        ready = [
            each for each in flow.routers.values()
            if each.cursor < flow.until and not each.is_out and each.due_ns <= self._now_ns
        ]  # fmt: skip
        if not ready:
            is_over = not any(each.is_out for each in flow.routers.values())
            if flow.has_turn and is_over:
                flow.has_turn = False
                self.effects.append(GiveBack(flow.key, flow.until))
            return
        if self.out >= ROUTE_PASSES_MAX:
            if not flow.is_waiting:
                flow.is_waiting = True
                self._queue.append(flow.key)
            return
        first = min(ready, key=lambda each: each.cursor)
        group = [each for each in ready if (each.cursor, each.room) == (first.cursor, first.room)]
        flow.is_reading = True
        self.effects.append(
            ReadStretch(
                flow.key, flow.source, flow.epoch, first.cursor, flow.until, *first.room,
                tuple(dict.fromkeys(each.change for each in group)), tuple(each.number for each in group),
            )
        )  # fmt: skip

    def check(self) -> None:
        """Assert Q1 to Q3; raises InvariantViolation."""
        for flow in self.flows.values():
            may_go = [
                each for each in flow.routers.values()
                if each.cursor < flow.until and not each.is_out and each.due_ns <= self._now_ns
            ]  # fmt: skip
            is_held = flow.is_reading or flow.is_waiting or flow.due_ns > self._now_ns
            if may_go and not is_held:
                raise InvariantViolation("a router is behind and nobody goes on", routers=len(may_go))
            if any(self._flow_of.get(number) != flow.key for number in flow.routers) or not flow.routers:
                raise InvariantViolation("a router is not where it is thought to be", source=flow.source)
        if sum(map(len, self._into.values())) != len(self._flow_of):
            raise InvariantViolation("routers are not found by what they lead to", routers=self.routers)
        if not 0 <= self.out <= ROUTE_PASSES_MAX + self._shards * len(self.flows):
            raise InvariantViolation("passes on their way are not counted", out=self.out)


def parts_of(runners: Iterable[Runner], start: int, found: Stretch) -> list[Send]:
    """What each shard is sent of a pass: its routers, and the frames that they copy."""
    of_shard: dict[int, list[Runner]] = {}
    for runner in runners:
        of_shard.setdefault(runner.shard, []).append(runner)
    sends = []
    for shard, there in sorted(of_shard.items()):
        for first in range(0, len(there), ROUTE_ROWS_MAX):
            used: dict[int, int] = {}
            rows = []
            for runner in there[first : first + ROUTE_ROWS_MAX]:
                frame = found.frame_of.get(runner.change, -1)
                number = used.setdefault(frame, len(used)) if frame >= 0 else -1
                rows.append(m.RouteRow(runner.number, runner.dest_id, start, found.stop, number, found.lost))
            frames = tuple(found.frames[frame] for frame in used)
            sends.append(Send(shard, m.Route(rows, len(frames), found.hops), frames))
    return sends


def _change_of(facts: m.RouterFacts) -> Change:
    is_stamped = facts.flags & RouterFlag.EXACTLY_ONCE
    return Change(facts.filter, int(facts.flags & _KEEPS), facts.name if is_stamped else "")


def _longer(pause_ms: int) -> int:
    return min(max(2 * pause_ms, ROUTE_PAUSE_MS_MIN), ROUTE_PAUSE_MS_MAX)
