"""Virtual time, and the tasks that live in it: greenlets of one thread, one of which runs at a time.

Production code of the background actors asks and waits in straight lines; here it does so in a greenlet, and
the loop decides who goes on. A process is a set of tasks that dies as one: each of them is unwound with
Halted wherever it waits, and whatever it tries on its way out to a disk is refused.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from ringlog.testing.disk import FaultyDisk, Halted
from ringlog.testing.shard_world import SHM

NS = 1_000_000_000
EVENTS_MAX = 2_000_000
"""A world that has not ended after so many events turns in circles."""
_JITTER_NS = 40_000
_START_US = 1_700_000_000_000_000

__all__ = ["NS", "SHM", "Halted", "Loop", "Process", "Signal", "Task"]


class Stuck(AssertionError):
    """Virtual time does not come to an end."""


class Signal:
    """Something to wait for. Setting it wakes those who wait now."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.waiting: list[Task] = []

    def set(self) -> None:
        """Wake everybody who waits, soon."""
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            self._loop.wake(task)


class Process:
    """What dies as one. `fuse`: so many scheduling points from now something happens to it."""

    def __init__(self, loop: Loop, name: str, kind: str, incarnation: int) -> None:
        self.loop, self.name, self.kind, self.incarnation = loop, name, kind, incarnation
        self.is_dead = False
        self.paused_until_ns = 0
        self.fuse = 0
        self.at_fuse: Callable[[], None] | None = None
        self.ended = Signal(loop)
        """Set when it dies."""
        self.tasks: list[Task] = []
        self.disks: list[FaultyDisk] = []

    def spawn(self, run: Callable[[], None], delay_s: float = 0.0) -> Task:
        """Begin a task of this process."""
        task = Task(self, run)
        self.tasks.append(task)
        self.loop.schedule(task, round(delay_s * NS))
        return task

    def point(self) -> None:
        """A place where the process may be killed, paused or overtaken. Raises Halted when it is dead."""
        if self.is_dead:
            raise Halted(f"{self.name} is dead")
        if self.fuse:
            self.fuse -= 1
            if not self.fuse and self.at_fuse is not None:
                self.loop.urgent.append(self.at_fuse)
                self.at_fuse = None
                self.loop.pause(1e-6)
        if self.paused_until_ns > self.loop.now_ns or self.loop.rng.random() < self.loop.switching:
            self.loop.pause(0.0)


class Task:
    """One line of work of a process."""

    def __init__(self, process: Process, run: Callable[[], None]) -> None:
        self.process = process
        self.greenlet = greenlet(run)
        self.ticket = 0
        """Of the wake-up that counts; earlier ones are void."""
        self.is_timeout = False


class Loop:
    """Who runs when. All chance comes from one generator; nothing here reads a real clock."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_ns = NS
        self.wall_us = _START_US
        self.switching = 0.05
        """How likely another task gets its turn at a scheduling point."""
        self.urgent: list[Callable[[], None]] = []
        """Done before anything else, outside all tasks."""
        self.events = 0
        self._heap: list[tuple[int, int, Task | Callable[[], None], int]] = []
        self._order = 0
        self._hub = getcurrent()
        self._wall_base_ns = NS

    # -- the clock that production code sees ------------------------------------------------------------

    def now_us(self) -> int:
        """Wall clock, microseconds; it may be stepped."""
        return self.wall_us + (self.now_ns - self._wall_base_ns) // 1_000

    def monotonic_ns(self) -> int:
        """Monotonic clock."""
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        """Wait, in a task."""
        self.pause(seconds)

    def sleep_ns(self, nanoseconds: int) -> None:
        """Wait a little, in a task."""
        self.pause(nanoseconds / NS)

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self.wall_us += round(seconds * 1_000_000)

    # -- scheduling ---------------------------------------------------------------------------------------

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something outside all tasks, later."""
        self._push(self.now_ns + round(delay_s * NS), act, 0)

    def schedule(self, task: Task, delay_ns: int) -> None:
        """Let a task go on after this time, unless something wakes it before."""
        task.ticket += 1
        self._push(self.now_ns + delay_ns + self.rng.randrange(_JITTER_NS), task, task.ticket)

    def wake(self, task: Task) -> None:
        """Let a waiting task go on now."""
        task.is_timeout = False
        self.schedule(task, 0)

    def _push(self, at_ns: int, what: Task | Callable[[], None], ticket: int) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at_ns, self._order, what, ticket))

    def current(self) -> Task:
        """The task that runs."""
        task: Task = getcurrent().task
        return task

    def pause(self, seconds: float) -> None:
        """Wait so long; in a task. Raises Halted when its process died meanwhile."""
        self._leave(self.current(), round(seconds * NS))

    def wait(self, signal: Signal, seconds: float, other: Signal | None = None) -> bool:
        """Wait for a signal, or another one, at most so long; False when none came."""
        task = self.current()
        signals = (signal,) if other is None else (signal, other)
        for each in signals:
            each.waiting.append(task)
        self._leave(task, round(seconds * NS))
        for each in signals:
            if task in each.waiting:
                each.waiting.remove(task)
        return not task.is_timeout

    def _leave(self, task: Task, delay_ns: int) -> None:
        if task.process.is_dead:
            raise Halted(f"{task.process.name} is dead")
        task.is_timeout = True
        self.schedule(task, delay_ns)
        self._hub.switch()
        if task.process.is_dead:
            raise Halted(f"{task.process.name} is dead")

    def run(self, until_ns: int, is_done: Callable[[], bool] = lambda: False) -> None:
        """Let the world go on up to a moment. Raises what a task raises, and Stuck."""
        while not is_done():
            while self.urgent:
                self.urgent.pop(0)()
            if not self._heap or self._heap[0][0] > until_ns:
                self.now_ns = max(self.now_ns, until_ns)
                return
            at_ns, _, what, ticket = heapq.heappop(self._heap)
            self.now_ns = max(self.now_ns, at_ns)
            self.events += 1
            if self.events > EVENTS_MAX:
                raise Stuck(f"{EVENTS_MAX} events and no end at {self.now_ns / NS:.3f} s")
            if isinstance(what, Task):
                self._resume(what, ticket)
            else:
                what()

    def _resume(self, task: Task, ticket: int) -> None:
        process = task.process
        if ticket != task.ticket or process.is_dead or task.greenlet.dead:
            return
        if process.paused_until_ns > self.now_ns:
            self.schedule(task, process.paused_until_ns - self.now_ns)
            return
        self._switch(task, task.greenlet.switch)

    def _switch(self, task: Task, into: Callable[..., Any], *args: Any) -> None:
        task.greenlet.task = task
        task.greenlet.parent = self._hub
        into(*args)

    def kill(self, process: Process) -> None:
        """Unwind every task of a process; outside all tasks."""
        process.is_dead = True
        for disk in process.disks:
            disk.halted = True
        for task in process.tasks:
            if task.greenlet:
                try:
                    self._switch(task, task.greenlet.throw, Halted(f"{process.name} is killed"))
                except Halted:
                    continue
        process.tasks.clear()
        process.ended.set()
