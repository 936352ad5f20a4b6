"""Explores all schedules of a sleeping shard and a client that wakes it up, with the code of both (RF-35).

The sleeper is the shard's `IdleWait.sleep`. The ringer is `ClientRing.wake_shard` of the client, or
`CallLink.send` if requests use a call ring. This module models the state that both access, one access for
each step: the head, the asleep word, the bell, the wait. A bell may be lost or rung twice. The other side may
see a store late; on a real CPU this is how a wake-up gets lost.

Guarantee: while nothing is lost or late, the shard never sleeps with pending work and no rung bell. After any
loss, the next backup poll finds the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from chaos.schedules.stepping import Stepped, Suspended, count_states
from ringlog.actors.wal_shard.io.idle_wait import IdleWait
from ringlog.board.layout import ProcessField
from ringlog.drill.checks import GuaranteeBroken
from ringlog.link.channel.call_link import CallLink
from ringlog.link.channel.client_ring import ClientRing

TURNS_MAX = 4
"""Passes of the loop within which a sleeper without a ringer must see all frames."""
STEPS_PER_TURN_MAX = 16


class Blocked(BaseException):
    """The access is a wait that does not end without another step."""


class World(NamedTuple):
    """State of the shared memory, the operations in progress, and the remaining faults."""

    head: int = 0
    asleep: int = 0
    bell: int = 0
    sleeper: tuple[Any, ...] = ()
    ringer: tuple[Any, ...] = ()
    seen: int = 0
    published: int = 0
    """Number of frames that the ringer has published and rung for."""
    late_head: int = -1
    """Store of the ringer that the sleeper does not see yet; -1 = none."""
    late_asleep: int = -1
    lost: int = 0
    """Number of bells that may still be lost."""
    doubled: int = 0
    had_loss: bool = False


@dataclass(frozen=True)
class Plan:
    """Bounds and faults of one exploration."""

    frames: int = 3
    lost: int = 0
    doubled: int = 0
    is_late: bool = False
    sleep: Callable[[Any], None] = IdleWait.sleep
    wake: Callable[[Any], None] = ClientRing.wake_shard
    polls: bool = True
    through_calls: bool = False
    """Whether work arrives through a call ring."""


class Memory(Stepped):
    """Access of one side to the shared state."""

    def __init__(
        self, world: World, done: tuple[Any, ...], adds: int = 1, *, timed_out: bool = False
    ) -> None:
        super().__init__(done)
        self.world, self.adds, self.timed_out = world, adds, timed_out

    def set(self, **changes: Any) -> None:
        """Change fields of the world."""
        self.world = self.world._replace(**changes)


@dataclass
class BellExplorer:
    """Visits every state.

    `states`, `steps` and `missed` (waits with pending work) count the work done.
    """

    plan: Plan
    states: int = 0
    steps: int = 0
    missed: int = 0

    def run(self) -> BellExplorer:
        """Visit every state. Raises GuaranteeBroken."""
        self.states = count_states(World(lost=self.plan.lost, doubled=self.plan.doubled), self._next)
        return self

    def _next(self, world: World) -> list[World]:
        found = [*self._ringer_steps(world), *self._flushes(world)]
        step = self._sleeper_step(world)
        if step is not None:
            return [*found, step]
        # The sleeper waits and no bell was rung.
        if not found and world.seen != self.plan.frames:
            self._judge_miss(world)
        after = self._sleeper_step(world, timed_out=True) if self.plan.polls else None
        return found if after is None else [*found, after]

    def _judge_miss(self, world: World) -> None:
        self.missed += 1
        if not world.had_loss and not self.plan.is_late:
            raise GuaranteeBroken(
                f"the shard sleeps with {self.plan.frames - world.seen} pending frames, "
                f"although no bell was lost: {world}"
            )
        for _ in range(TURNS_MAX * STEPS_PER_TURN_MAX):
            after = self._sleeper_step(world) or (
                self._sleeper_step(world, timed_out=True) if self.plan.polls else None
            )
            if after is None:
                break
            world = next(iter(self._flushes(after)), after)
            if world.seen == self.plan.frames:
                return
        raise GuaranteeBroken(f"pending frames are never read: {world}")

    def _flushes(self, world: World) -> Iterator[World]:
        if world.late_head >= 0:
            yield world._replace(head=world.late_head, late_head=-1)
        if world.late_asleep >= 0:
            yield world._replace(asleep=world.late_asleep, late_asleep=-1)

    def _ringer_steps(self, world: World) -> Iterator[World]:
        if world.published == self.plan.frames:
            return
        for adds in (1, 0, 2):
            if (adds == 0 and not world.lost) or (adds == 2 and not world.doubled):
                continue
            after, rang = self._ringer_step(world, adds)
            if adds == 1 or rang:
                yield after

    def _ringer_step(self, world: World, adds: int) -> tuple[World, bool]:
        memory = Memory(world, world.ringer)
        rang = False

        def ring() -> None:
            nonlocal rang
            rang = True
            memory.set(
                bell=memory.world.bell + adds, lost=world.lost - (adds == 0),
                had_loss=world.had_loss or adds == 0, doubled=world.doubled - (adds == 2),
            )  # fmt: skip

        self.steps += 1
        client: Any = SimpleNamespace(
            _location=SimpleNamespace(is_asleep=lambda: memory.access(lambda: memory.world.asleep)),
            _shard_bell=SimpleNamespace(ring=lambda: memory.access(ring)),
            publish=lambda: memory.access(lambda: self._publish(memory)),
        )  # fmt: skip
        try:
            if self.plan.through_calls:
                self._call(memory, client)
            else:
                if self.plan.wake is ClientRing.wake_shard:
                    client.publish()
                self.plan.wake(client)
        except Suspended:
            return memory.world._replace(ringer=tuple(memory.done)), rang
        return memory.world._replace(ringer=(), published=world.published + 1), rang

    def _call(self, memory: Memory, client: Any) -> None:
        def publish(_: bytes) -> bool:
            client.publish()
            return True

        caller: Any = SimpleNamespace(
            _ring=SimpleNamespace(send=publish), _is_asleep=client._location.is_asleep,
            _shard_bell=client._shard_bell,
        )  # fmt: skip
        CallLink.send(caller, b"a request")

    def _publish(self, memory: Memory) -> None:
        world = memory.world
        if self.plan.is_late and world.late_head < 0:
            memory.set(late_head=world.published + 1)
        else:
            memory.set(head=world.published + 1, late_head=-1)

    def _sleeper_step(self, world: World, *, timed_out: bool = False) -> World | None:
        memory = Memory(world, world.sleeper, timed_out=timed_out)
        self.steps += 1
        try:
            head = memory.access(lambda: memory.world.head)
            if head == world.seen:
                self.plan.sleep(self._shard(memory, world.seen))
        except Suspended:
            return memory.world._replace(sleeper=tuple(memory.done))
        except Blocked:
            return None
        return memory.world._replace(sleeper=(), seen=head)

    def _shard(self, memory: Memory, seen: int) -> Any:
        """Return a fake shard with the attributes that `sleep` uses."""

        def set_word(word: int, value: int) -> None:
            if word != ProcessField.ASLEEP:
                return
            if self.plan.is_late and memory.world.late_asleep < 0:
                memory.access(lambda: memory.set(late_asleep=value))
            else:
                memory.access(lambda: memory.set(asleep=value, late_asleep=-1))

        def poll(_: float) -> list[tuple[int, int]]:
            memory.access(wait)
            return []

        def wait() -> None:
            if not memory.world.bell and not memory.timed_out:
                raise Blocked

        def has_come() -> bool:
            return bool(memory.access(lambda: memory.world.head) != seen)

        def nothing() -> bool:
            return False

        is_called = self.plan.through_calls
        shard: Any = SimpleNamespace(
            _slot=SimpleNamespace(set=set_word, add=lambda word, value: None),
            _has_pending=lambda: IdleWait._has_pending(shard),
            _rings=_Rings(nothing if is_called else has_come),
            _calls=_Rings(has_come if is_called else nothing),
            _socket=SimpleNamespace(has_input=lambda is_readable: False),
            _clock=SimpleNamespace(monotonic_ns=lambda: 0),
            _core=SimpleNamespace(next_deadline_ns=lambda: None, wants_intake=True),
            _load_monitor=SimpleNamespace(
                window=SimpleNamespace(is_holding=False), idle_ns=0, wait_ms=lambda longest: longest
            ),
            _idle_sleeps=0,
            _poll=SimpleNamespace(poll=poll),
            _bell=SimpleNamespace(drain=lambda: memory.access(lambda: memory.set(bell=0))),
        )  # fmt: skip
        return shard


class _Rings:
    def __init__(self, has_pending: Callable[[], bool]) -> None:
        self.has_pending = has_pending

    def __len__(self) -> int:
        return 1


def explore(plan: Plan, **changes: Any) -> BellExplorer:
    """Explore a plan with some fields changed."""
    return BellExplorer(replace(plan, **changes)).run()
