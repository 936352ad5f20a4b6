"""Explores all schedules of one producer and one consumer with the real ring classes, and their crashes.

A step is one access to shared memory (a load, a store, 8 bytes of a frame, half a settle entry) or to the
consumer's durable log. Between any two steps the other side may run, or either side may die and be replaced.
All states are explored and remembered; nothing is sampled.

A suspended operation is stored as the private state at its start and the results of its accesses
(stepping.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from chaos.schedules.ring_memory import (
    WORDS,
    Frozen,
    Side,
    StepMemory,
    World,
    changed,
    drained,
    let_go,
)
from chaos.schedules.stepping import Suspended
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RingError
from ringlog.ring.consumer import RingConsumer
from ringlog.ring.layout import PAD_WORD, RingIdentity, RingProducerState, RingWord
from ringlog.ring.producer import RingProducer
from ringlog.ring.region import ProducerLock

FRAME_BYTES = 16


@dataclass(frozen=True)
class Plan:
    """Bounds and faults of one exploration."""

    capacity: int
    frames: int
    settle_entries: int = 2
    producer_crashes: int = 1
    consumer_crashes: int = 1
    push: str = "push_run"
    """Method that publishes: push_one, push_run or push_buffer."""
    batch: int = 1
    """Maximum number of frames in one push."""
    late: int = 0
    """Number of stores of a side that may be invisible to the other side; 0 = visible at once (RF-34)."""
    is_ordered: bool = True
    """Whether late stores become visible in the order of their execution, as on x86-64."""
    resend: bool = False
    """Whether a new producer pushes unsettled frames again.

    Otherwise it continues after the published frames.
    """
    producer: type[RingProducer] = RingProducer
    consumer: type[RingConsumer] = RingConsumer


_NOT_STATE = {"_memory", "identity", "_lock"}
_NO_LOCK = ProducerLock()


def frame_of(number: int) -> bytes:
    """Return a frame that contains its number."""
    return (FRAME_BYTES - 4).to_bytes(8, "little") + number.to_bytes(8, "little")


def freeze(end: Any) -> Frozen:
    """Return the private state of one side as a hashable value."""
    return tuple(sorted((name, value) for name, value in vars(end).items() if name not in _NOT_STATE))


def thaw(kind: type[Any], memory: StepMemory, frozen: Frozen) -> Any:
    """Return one side with this private state."""
    end = object.__new__(kind)
    vars(end).update(frozen)
    end._memory, end.identity, end._lock = memory, memory.identity, _NO_LOCK
    return end


@dataclass
class Explorer:
    """Visits every state that the plan permits. `states` and `schedules` count the work done."""

    plan: Plan
    states: int = 0
    schedules: int = 0
    steps: int = 0
    identity: RingIdentity = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.identity = RingIdentity(0, plan.capacity, plan.settle_entries, 0, 0, 0, 0)

    # -- operations of each side -----------------------------------------------------------------------------

    def producer_attach(self, memory: Any, _: None) -> tuple[RingProducer, None]:
        memory.load(RingWord.PRODUCER_STATE)
        producer = self.plan.producer(memory)
        producer.frame_bytes_max = self.plan.capacity
        memory.store(RingWord.PRODUCER_STATE, RingProducerState.ATTACHED)
        return producer, None

    def producer_push(self, memory: StepMemory, producer: RingProducer) -> Any:
        frames = [frame_of(number) for number in self._world.intended[self._published(producer.head) :]]
        if self.plan.push == "push_one":
            taken = sum(producer.push_one(frame) is not None for frame in frames)
        elif self.plan.push == "push_run":
            taken, _ = producer.push_run(b"".join(frames), FRAME_BYTES)
        else:
            offsets = np.arange(len(frames), dtype=np.int64) * FRAME_BYTES
            taken, _ = producer.push_buffer(b"".join(frames), offsets)
        if taken != len(frames):
            raise GuaranteeBroken(f"only {taken} of {len(frames)} frames were taken although they fit")
        return producer, None

    def producer_settled(self, memory: StepMemory, producer: RingProducer) -> Any:
        return producer, [(int(e[0]), int(e[7]), int(e[1])) for e in producer.take_settlements()]

    def consumer_attach(self, memory: Any, _: None) -> tuple[RingConsumer, None]:
        return self.plan.consumer(memory), None

    def consumer_turn(self, memory: StepMemory, consumer: RingConsumer) -> tuple[RingConsumer, None]:
        free = consumer.settle_free
        got = consumer.copy_pending(1 << 20) if free else None
        if got is None:
            return consumer, None
        position, data = got
        entries: list[list[int]] = []
        offset, is_padded = 0, False
        while offset < len(data) and len(entries) < free:
            length = int.from_bytes(data[offset : offset + 4], "little")
            if length == PAD_WORD:
                is_padded = True
                break
            number = self._verified(position + offset, bytes(data[offset : offset + FRAME_BYTES]))
            first_seq = memory.commit(number)
            entries.append([position + offset, first_seq, 0, 1, 0, 0, 0, number])
            offset += FRAME_BYTES
        consumer.advance(offset)
        if is_padded:
            consumer.skip_padding()
        if entries:
            consumer.settle(np.array(entries, dtype=np.uint64), position + offset)
        return consumer, None

    def _verified(self, position: int, frame: bytes) -> int:
        number = self._world.intended[self._place_of(position)]
        if frame != frame_of(number):
            raise GuaranteeBroken(f"published bytes at {position} are not frame {number}: {frame!r}")
        return number

    # -- possible next steps ---------------------------------------------------------------------------------

    def first(self) -> World:
        plan = self.plan
        return World(
            words=(0,) * len(WORDS), data=bytes(plan.capacity),
            entries=bytes(64 * self.identity.settle_slots),
            log=(), producer=Side(None), consumer=Side(None), intended=(), told=(),
            producer_crashes=plan.producer_crashes, consumer_crashes=plan.consumer_crashes,
        )  # fmt: skip

    def next_worlds(self, world: World) -> Iterator[World]:
        """Yield every world after one step, one late store that becomes visible, or one crash."""
        for who, op in (("producer", self._producer_op(world)), ("consumer", self._consumer_op(world))):
            waiting = len(getattr(world, f"{who}_buffer"))
            if op and waiting <= self.plan.late - 1 + (not self.plan.late):
                yield self._step(world, who, op)
            for index in range(waiting if not self.plan.is_ordered else min(waiting, 1)):
                yield let_go(world, who, index)
        for who in ("producer", "consumer"):
            side, left = getattr(world, who), getattr(world, f"{who}_crashes")
            if left and (side.private is not None or side.op):
                after = drained(world, who)
                yield changed(after, **{who: Side(None), f"{who}_crashes": left - 1})

    def _producer_op(self, world: World) -> str:
        side = world.producer
        if side.op:
            return side.op
        if side.private is None:
            return "producer_attach"
        mine = dict(side.private)
        if world.words[WORDS.index(RingWord.SETTLE_HEAD)] != mine["_settle_tail"]:
            return "producer_settled"
        return "producer_push" if self._fitting(world, mine) else ""

    def _fitting(self, world: World, mine: dict[str, Any]) -> int:
        """Return the number of frames in the next push: at most the plan's batch, and as many as fit."""
        left = self.plan.frames - self._number_after(world, mine) + 1
        most = min(self.plan.batch, left, self.plan.settle_entries - mine["_in_flight"])
        limit = world.words[WORDS.index(RingWord.TAIL)] + self.plan.capacity
        count, stop = 0, self._place_stop(mine["_head"])
        while count < most and stop <= limit:
            count, stop = count + 1, self._place_stop(stop)
        return count

    def _consumer_op(self, world: World) -> str:
        side = world.consumer
        if side.op:
            return side.op
        if side.private is None:
            return "consumer_attach"
        mine = dict(side.private)
        settle_tail = world.words[WORDS.index(RingWord.SETTLE_TAIL)]
        has_room = mine["_settle_head"] - settle_tail < self.plan.settle_entries
        has_work = world.words[WORDS.index(RingWord.HEAD)] != mine["_read"]
        return "consumer_turn" if has_work and has_room else ""

    def _step(self, world: World, who: str, op: str) -> World:
        side: Side = getattr(world, who)
        kind = self.plan.producer if who == "producer" else self.plan.consumer
        if not side.op:
            world, side = self._begin(world, side, op)
        self._world = world
        memory = StepMemory(world, who, self.identity, self.plan.late, side.done)
        end = None if side.private is None else thaw(kind, memory, side.start)
        self.steps += 1
        try:
            end, result = getattr(self, op)(memory, end)
        except RingError as e:
            raise GuaranteeBroken(f"a live side finds its ring corrupt: {e}") from e
        except Suspended:
            after = side._replace(op=op, done=tuple(memory.done))
        else:
            after = Side(freeze(end), settled=side.settled, base=side.base)
            if op == "producer_attach":
                after = after._replace(base=self._base_of(world, end.head))
            if op == "producer_settled":
                world, after = self._take(world, after, result)
        memory.world = world
        return changed(memory.after(), **{who: after})

    def _begin(self, world: World, side: Side, op: str) -> tuple[World, Side]:
        side = side._replace(op=op, start=side.private or ())
        if op == "producer_push":
            mine = dict(side.start)
            place, number = self._published(mine["_head"]), self._number_after(world, mine)
            numbers = range(number, number + self._fitting(world, mine))
            world = world._replace(intended=(*world.intended[:place], *numbers))
        self._world = world
        return world, side

    # -- state of the checker --------------------------------------------------------------------------------

    def _number_after(self, world: World, mine: dict[str, Any]) -> int:
        """Return the number of the next frame that this life of the producer pushes."""
        place, number = world.producer.base
        return number + self._published(mine["_head"]) - place

    def _base_of(self, world: World, head: int) -> tuple[int, int]:
        """Return the (place, number) from which a new life of the producer continues."""
        place = self._published(head)
        if not self.plan.resend:
            return place, place + 1
        return place, max((number for number, _ in world.told), default=0) + 1

    def _published(self, head: int) -> int:
        """Return the number of frames before `head`, pushed by any life."""
        place, position = 0, 0
        while position < head:
            position = self._place_stop(position)
            place += 1
        return place

    def _place_stop(self, head: int) -> int:
        """Return the position after the frame that a push at `head` publishes."""
        capacity = self.plan.capacity
        left = capacity - head % capacity
        return head + FRAME_BYTES if left >= FRAME_BYTES else head + left + FRAME_BYTES

    def _place_of(self, position: int) -> int:
        """Return the number of frame-sized places before `position`."""
        per_lap = self.plan.capacity // FRAME_BYTES
        lap, index = divmod(position, self.plan.capacity)
        return lap * per_lap + index // FRAME_BYTES

    def _take(self, world: World, side: Side, result: list[tuple[int, int, int]]) -> tuple[World, Side]:
        for position, number, first_seq in result:
            if side.settled and position <= side.settled[-1]:
                raise GuaranteeBroken(f"position {position} was settled twice in one life: {side.settled}")
            if world.intended[self._place_of(position)] != number:
                raise GuaranteeBroken(f"settlement at {position} speaks of frame {number}")
            if any(n == number and s != first_seq for n, s in world.told):
                raise GuaranteeBroken(f"frame {number} has two first seqs")
            side = side._replace(settled=(*side.settled, position))
            told = tuple(sorted({*world.told, (number, first_seq)}))
            world = world._replace(told=told)
        return world, side

    def check_log(self, world: World) -> None:
        if world.log != tuple(range(1, len(world.log) + 1)):
            raise GuaranteeBroken(f"lost, doubled or out of order: {world.log}")

    def check_end(self, world: World) -> None:
        if len(world.log) != self.plan.frames:
            raise GuaranteeBroken(f"frames missing from the log at the end: {world.log}")
        if tuple(n for n, _ in world.told) != tuple(range(1, self.plan.frames + 1)):
            raise GuaranteeBroken(f"frames never settled: settlements at the end: {world.told}")
        if dict(world.producer.private or ()).get("_in_flight") != 0:
            raise GuaranteeBroken("the producer still waits for settlements at the end")

    # -- the walk ---------------------------------------------------------------------------------------

    def run(self) -> Explorer:
        """Visit every state once. Raises GuaranteeBroken for the first schedule that breaks a guarantee."""
        first = self.first()
        counts: dict[World, int] = {}
        came: dict[World, tuple[World, int]] = {}
        stack: list[tuple[World, list[World] | None]] = [(first, None)]
        while stack:
            world, successors = stack.pop()
            if successors is not None:
                counts[world] = sum(counts[after] for after in successors)
                continue
            if world in counts:
                continue
            successors = self._successors(world, came)
            if not successors:
                counts[world] = 1
                continue
            stack.append((world, successors))
            for index, after in enumerate(successors):
                if after not in counts:
                    came.setdefault(after, (world, index))
                    stack.append((after, None))
        self.states, self.schedules = len(counts), counts[first]
        return self

    def _successors(self, world: World, came: dict[World, tuple[World, int]]) -> list[World]:
        found: list[World] = []
        try:
            self._check(world)
            found.extend(self.next_worlds(world))
        except GuaranteeBroken as e:
            path = [len(found)]
            while world in came:
                world, index = came[world]
                path.append(index)
            raise GuaranteeBroken(str(e), path=path[::-1]) from e
        return found

    def _check(self, world: World) -> None:
        self.check_log(world)
        if not self._has_steps(world):
            self.check_end(world)

    def walk(self, choose: Callable[[list[World]], int], tell: Callable[[World], None] | None = None) -> int:
        """Execute one schedule without remembered states; return its length.

        Raises GuaranteeBroken with the choices made.
        """
        path: list[int] = []
        world = self.first()
        while True:
            if tell is not None:
                tell(world)
            try:
                self._check(world)
                successors = list(self.next_worlds(world))
            except GuaranteeBroken as e:
                raise GuaranteeBroken(str(e), path=path) from e
            if not successors:
                return len(path)
            path.append(choose(successors))
            world = successors[path[-1]]

    def _has_steps(self, world: World) -> bool:
        waits = bool(world.producer_buffer or world.consumer_buffer)
        return waits or bool(self._producer_op(world) or self._consumer_op(world))


def explore(plan: Plan, **changes: Any) -> Explorer:
    """Explore a plan with some fields changed."""
    return Explorer(replace(plan, **changes)).run()
