"""All schedules of one producer and one consumer over the real ring classes, with crashes at every step.

A step is one access to shared memory (a load, a store, 8 bytes of a frame, half a settle entry) or to the
consumer's durable log. Between any two steps the other side may run, or either side may die and be
replaced. States are explored exhaustively and remembered, so nothing is sampled.

A Python call cannot be suspended in the middle and copied, so a suspended operation is kept as the private
state it began with and the results of the accesses it has made. To take one step further the operation
runs again from its beginning: recorded accesses give their recorded results and touch nothing, the next one
is made for real, the one after that ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ringlog.errors import RingError
from ringlog.ring.consumer import RingConsumer
from ringlog.ring.layout import PAD_WORD, ProducerState, RingIdentity, Word
from ringlog.ring.producer import RingProducer

FRAME_BYTES = 16
WORDS = tuple(Word)
Frozen = tuple[tuple[str, Any], ...]


class Broken(AssertionError):
    """A promise of the ring was broken in some schedule."""


class Suspended(BaseException):
    """An operation made its one access and wants another. Nothing in the ring may catch it."""


class Side(NamedTuple):
    """One end: `private` is None while it is dead; `done` holds the accesses of the operation under way."""

    private: Frozen | None
    op: str = ""
    start: Frozen = ()
    done: tuple[Any, ...] = ()
    settled: tuple[int, ...] = ()
    """Producer only: positions this life was told about, in order."""
    base: tuple[int, int] = (0, 1)
    """Producer only: (frames in the ring's past, number of the next frame) when this life began."""


class World(NamedTuple):
    """Everything: shared memory, the durable log, both ends, and what the checker knows (ghosts)."""

    words: tuple[int, ...]
    data: bytes
    entries: bytes
    log: tuple[int, ...]
    producer: Side
    consumer: Side
    intended: tuple[int, ...]
    """Ghost: number of the frame last meant to be pushed at each frame-sized place, by position order."""
    told: tuple[tuple[int, int], ...]
    """Ghost: (frame, first_seq) of every settlement any life of the producer took."""
    producer_crashes: int
    consumer_crashes: int


@dataclass(frozen=True)
class Plan:
    """What to explore."""

    capacity: int
    frames: int
    settle_entries: int = 2
    producer_crashes: int = 1
    consumer_crashes: int = 1
    push: str = "push"
    """Which call publishes: push, push_run or push_buffer."""
    batch: int = 1
    """Frames pushed at once, when as many fit."""
    resend: bool = False
    """A new producer pushes again what it was not told about; else it goes on after what is published."""
    producer: type[RingProducer] = RingProducer
    consumer: type[RingConsumer] = RingConsumer


class StepMemory:
    """Stands where RingMemory does; makes one real access, then suspends."""

    closed = False

    def __init__(self, world: World, identity: RingIdentity, done: tuple[Any, ...]) -> None:
        self.identity = identity
        self.words, self.data, self.entries, self.log = (
            list(world.words), bytearray(world.data), bytearray(world.entries), list(world.log),
        )  # fmt: skip
        self.done = list(done)
        self.cursor = 0
        self.fresh = False

    def access(self, perform: Callable[[], Any]) -> Any:
        if self.cursor == len(self.done):
            if self.fresh:
                raise Suspended
            self.fresh = True
            self.done.append(perform())
        result = self.done[self.cursor]
        self.cursor += 1
        return result

    def load(self, word: int) -> int:
        return self.access(lambda: self.words[WORDS.index(word)])

    def store(self, word: int, value: int) -> None:
        self.access(lambda: self.words.__setitem__(WORDS.index(word), int(value)))

    def read(self, index: int, length: int) -> bytearray:
        return bytearray(self.access(lambda: bytes(self.data[index : index + length])))

    def write(self, index: int, data: Any) -> None:
        for at in range(0, len(data), 8):
            piece = bytes(data[at : at + 8])
            self.access(lambda at=at, piece=piece: self._put(self.data, index + at, piece))

    def read_entries(self, slot: int, count: int) -> bytearray:
        return bytearray(self.access(lambda: bytes(self.entries[slot * 64 : (slot + count) * 64])))

    def write_entries(self, slot: int, entries: Any) -> None:
        for at in range(0, len(entries), 32):
            piece = bytes(entries[at : at + 32])
            self.access(lambda at=at, piece=piece: self._put(self.entries, slot * 64 + at, piece))

    def commit(self, number: int) -> int:
        """Append a frame to the durable log unless it is there; returns its first_seq."""
        return self.access(lambda: self._commit(number))

    def _commit(self, number: int) -> int:
        if number not in self.log:
            self.log.append(number)
        return self.log.index(number) + 1

    @staticmethod
    def _put(target: bytearray, at: int, piece: bytes) -> None:
        target[at : at + len(piece)] = piece


def frame_of(number: int) -> bytes:
    return (FRAME_BYTES - 4).to_bytes(8, "little") + number.to_bytes(8, "little")


def freeze(end: Any) -> Frozen:
    return tuple(
        sorted((name, value) for name, value in vars(end).items() if name not in {"_memory", "identity"})
    )


def thaw(kind: type[Any], memory: StepMemory, frozen: Frozen) -> Any:
    end = object.__new__(kind)
    vars(end).update(frozen)
    end._memory, end.identity = memory, memory.identity
    return end


@dataclass
class Explorer:
    """Walks every state the plan allows; `states` and `schedules` say how much that was."""

    plan: Plan
    states: int = 0
    schedules: int = 0
    steps: int = 0
    identity: RingIdentity = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.identity = RingIdentity(0, plan.capacity, plan.settle_entries, 0, 0, 0, 0)

    # -- what each end does -----------------------------------------------------------------------------

    def producer_attach(self, memory: StepMemory, _: None) -> tuple[RingProducer, None]:
        memory.load(Word.PRODUCER_STATE)
        producer = self.plan.producer(memory)
        producer.frame_bytes_max = self.plan.capacity
        memory.store(Word.PRODUCER_STATE, ProducerState.ATTACHED)
        return producer, None

    def producer_push(self, memory: StepMemory, producer: RingProducer) -> Any:
        frames = [frame_of(number) for number in self._world.intended[self._published(producer.head) :]]
        if self.plan.push == "push":
            taken = len(producer.push(frames) or [])
        elif self.plan.push == "push_run":
            taken, _ = producer.push_run(b"".join(frames), FRAME_BYTES)
        else:
            offsets = np.arange(len(frames), dtype=np.int64) * FRAME_BYTES
            taken, _ = producer.push_buffer(b"".join(frames), offsets)
        if taken != len(frames):
            raise Broken(f"only {taken} of {len(frames)} frames were taken although they fit")
        return producer, None

    def producer_settled(self, memory: StepMemory, producer: RingProducer) -> Any:
        return producer, [(int(e[0]), int(e[7]), int(e[1])) for e in producer.settled()]

    def consumer_attach(self, memory: StepMemory, _: None) -> tuple[RingConsumer, None]:
        return self.plan.consumer(memory), None

    def consumer_turn(self, memory: StepMemory, consumer: RingConsumer) -> tuple[RingConsumer, None]:
        free = consumer.settle_free
        got = consumer.copy(1 << 20) if free else None
        if got is None:
            return consumer, None
        position, data = got
        entries, offset, is_padded = [], 0, False
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
            consumer.skip_lap()
        if entries:
            consumer.settle(np.array(entries, dtype=np.uint64), position + offset)
        return consumer, None

    def _verified(self, position: int, frame: bytes) -> int:
        number = self._world.intended[self._place_of(position)]
        if frame != frame_of(number):
            raise Broken(f"published bytes at {position} are not frame {number}: {frame!r}")
        return number

    # -- which step may come next -------------------------------------------------------------------------

    def first(self) -> World:
        plan = self.plan
        return World(
            words=(0,) * len(WORDS), data=bytes(plan.capacity),
            entries=bytes(64 * self.identity.settle_slots),
            log=(), producer=Side(None), consumer=Side(None), intended=(), told=(),
            producer_crashes=plan.producer_crashes, consumer_crashes=plan.consumer_crashes,
        )  # fmt: skip

    def next_worlds(self, world: World) -> Iterator[World]:
        producer_op, consumer_op = self._producer_op(world), self._consumer_op(world)
        if producer_op:
            yield self._step(world, "producer", producer_op)
        if consumer_op:
            yield self._step(world, "consumer", consumer_op)
        if world.producer_crashes and (world.producer.private is not None or world.producer.op):
            yield world._replace(producer=Side(None), producer_crashes=world.producer_crashes - 1)
        if world.consumer_crashes and (world.consumer.private is not None or world.consumer.op):
            yield world._replace(consumer=Side(None), consumer_crashes=world.consumer_crashes - 1)

    def _producer_op(self, world: World) -> str:
        side = world.producer
        if side.op:
            return side.op
        if side.private is None:
            return "producer_attach"
        mine = dict(side.private)
        if world.words[WORDS.index(Word.SETTLE_HEAD)] != mine["_settle_tail"]:
            return "producer_settled"
        return "producer_push" if self._fitting(world, mine) else ""

    def _fitting(self, world: World, mine: dict[str, Any]) -> int:
        """How many frames the next push pushes: up to the plan's batch, as far as there is room."""
        left = self.plan.frames - self._number_after(world, mine) + 1
        most = min(self.plan.batch, left, self.plan.settle_entries - mine["_in_flight"])
        limit = world.words[WORDS.index(Word.TAIL)] + self.plan.capacity
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
        settle_tail = world.words[WORDS.index(Word.SETTLE_TAIL)]
        has_room = mine["_settle_head"] - settle_tail < self.plan.settle_entries
        has_work = world.words[WORDS.index(Word.HEAD)] != mine["_read"]
        return "consumer_turn" if has_work and has_room else ""

    def _step(self, world: World, who: str, op: str) -> World:
        side: Side = getattr(world, who)
        kind = self.plan.producer if who == "producer" else self.plan.consumer
        if not side.op:
            world, side = self._begin(world, side, op)
        self._world = world
        memory = StepMemory(world, self.identity, side.done)
        end = None if side.private is None else thaw(kind, memory, side.start)
        self.steps += 1
        try:
            end, result = getattr(self, op)(memory, end)
        except RingError as e:
            raise Broken(f"a live end calls its ring nonsense: {e}") from e
        except Suspended:
            after = side._replace(op=op, done=tuple(memory.done))
        else:
            after = Side(freeze(end), settled=side.settled, base=side.base)
            if op == "producer_attach":
                after = after._replace(base=self._base_of(world, end.head))
            if op == "producer_settled":
                world, after = self._take(world, after, result)
        return world._replace(
            words=tuple(memory.words), data=bytes(memory.data), entries=bytes(memory.entries),
            log=tuple(memory.log), **{who: after},
        )  # fmt: skip

    def _begin(self, world: World, side: Side, op: str) -> tuple[World, Side]:
        side = side._replace(op=op, start=side.private or ())
        if op == "producer_push":
            mine = dict(side.start)
            place, number = self._published(mine["_head"]), self._number_after(world, mine)
            numbers = range(number, number + self._fitting(world, mine))
            world = world._replace(intended=(*world.intended[:place], *numbers))
        self._world = world
        return world, side

    # -- what the checker knows -----------------------------------------------------------------------------

    def _number_after(self, world: World, mine: dict[str, Any]) -> int:
        """Number of the next frame this life pushes."""
        place, number = world.producer.base
        return number + self._published(mine["_head"]) - place

    def _base_of(self, world: World, head: int) -> tuple[int, int]:
        """(place, number) a new life of the producer goes on from."""
        place = self._published(head)
        if not self.plan.resend:
            return place, place + 1
        return place, max((number for number, _ in world.told), default=0) + 1

    def _published(self, head: int) -> int:
        """How many frames lie before `head`, whatever lives pushed them."""
        place, position = 0, 0
        while position < head:
            position = self._place_stop(position)
            place += 1
        return place

    def _place_stop(self, head: int) -> int:
        """Position after the frame that a push at `head` publishes."""
        capacity = self.plan.capacity
        left = capacity - head % capacity
        return head + FRAME_BYTES if left >= FRAME_BYTES else head + left + FRAME_BYTES

    def _place_of(self, position: int) -> int:
        """How many frames lie before `position`."""
        per_lap = self.plan.capacity // FRAME_BYTES
        lap, index = divmod(position, self.plan.capacity)
        return lap * per_lap + index // FRAME_BYTES

    def _take(self, world: World, side: Side, result: list[tuple[int, int, int]]) -> tuple[World, Side]:
        for position, number, first_seq in result:
            if side.settled and position <= side.settled[-1]:
                raise Broken(f"position {position} was settled twice in one life: {side.settled}")
            if world.intended[self._place_of(position)] != number:
                raise Broken(f"settlement at {position} speaks of frame {number}")
            if any(n == number and s != first_seq for n, s in world.told):
                raise Broken(f"frame {number} was given two numbers")
            side = side._replace(settled=(*side.settled, position))
            told = tuple(sorted({*world.told, (number, first_seq)}))
            world = world._replace(told=told)
        return world, side

    def check_log(self, world: World) -> None:
        if world.log != tuple(range(1, len(world.log) + 1)):
            raise Broken(f"lost, doubled or out of order: {world.log}")

    def check_end(self, world: World) -> None:
        if len(world.log) != self.plan.frames:
            raise Broken(f"frames missing from the log at the end: {world.log}")
        if tuple(n for n, _ in world.told) != tuple(range(1, self.plan.frames + 1)):
            raise Broken(f"frames never settled: told {world.told} at the end")
        if dict(world.producer.private or ()).get("_in_flight") != 0:
            raise Broken("the producer still waits for settlements at the end")

    # -- the walk ---------------------------------------------------------------------------------------

    def run(self) -> Explorer:
        """Visit every state once; raises Broken for the first schedule that breaks a promise."""
        first = self.first()
        counts: dict[World, int] = {}
        stack: list[tuple[World, list[World] | None]] = [(first, None)]
        while stack:
            world, successors = stack.pop()
            if successors is not None:
                counts[world] = sum(counts[after] for after in successors)
                continue
            if world in counts:
                continue
            self.check_log(world)
            successors = list(self.next_worlds(world))
            if not self._has_steps(world):
                self.check_end(world)
            if not successors:
                counts[world] = 1
                continue
            stack.append((world, successors))
            stack.extend((after, None) for after in successors if after not in counts)
        self.states, self.schedules = len(counts), counts[first]
        return self

    def _has_steps(self, world: World) -> bool:
        return bool(self._producer_op(world) or self._consumer_op(world))


def explore(plan: Plan, **changes: Any) -> Explorer:
    """Explore a plan with some fields changed."""
    return Explorer(replace(plan, **changes)).run()
