"""Virtual time and its tasks: greenlets of one thread, of which one runs at a time.

Production code of the background actors sends requests and waits in sequential code. Here it runs in a
greenlet, and the loop selects the next task. A process is a set of tasks that die together. Each task is
unwound with Halted at the place where it waits, and every disk call that it makes while it unwinds is
refused.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from ringlog.testing.disk import FaultyDisk, Halted
from tests.support.shard_world import SHM

NS = 1_000_000_000
EVENTS_MAX = 2_000_000
"""Maximum number of events in a world. A world with more makes no progress."""
_JITTER_NS = 40_000
_START_US = 1_700_000_000_000_000

__all__ = ["NS", "SHM", "Halted", "Loop", "Process", "Signal", "Task"]


class Stuck(AssertionError):
    """The maximum number of events was reached before the end of the run."""


class Signal:
    """An event to wait for. `set` wakes up the tasks that wait at that time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.waiting: list[Task] = []

    def set(self) -> None:
        """Schedule all waiting tasks."""
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            self._loop.wake(task)


class Process:
    """A set of tasks that die together.

    `fuse` is the number of scheduling points before `at_fuse` is called.
    """

    def __init__(self, loop: Loop, name: str, kind: str, incarnation: int) -> None:
        self.loop, self.name, self.kind, self.incarnation = loop, name, kind, incarnation
        self.is_dead = False
        self.paused_until_ns = 0
        self.fuse = 0
        self.at_fuse: Callable[[], None] | None = None
        self.ended = Signal(loop)
        """Set when the process dies."""
        self.tasks: list[Task] = []
        self.disks: list[FaultyDisk] = []

    def spawn(self, run: Callable[[], None], delay_s: float = 0.0) -> Task:
        """Start a task of this process."""
        task = Task(self, run)
        self.tasks.append(task)
        self.loop.schedule(task, round(delay_s * NS))
        return task

    def point(self) -> None:
        """Mark a place where the process may be killed or paused, or another task may run.

        Raises Halted if the process is dead.
        """
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
    """One thread of control of a process."""

    def __init__(self, process: Process, run: Callable[[], None]) -> None:
        self.process = process
        self.greenlet = greenlet(run)
        self.ticket = 0
        """Number of the valid wake-up. Wake-ups with other numbers are ignored."""
        self.is_timeout = False


class Loop:
    """The scheduler of tasks. All random choices come from one generator; no real clock is read."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_ns = NS
        self.wall_us = _START_US
        self.switching = 0.05
        """Probability that another task may run at a scheduling point."""
        self.urgent: list[Callable[[], None]] = []
        """Calls that run before any other event, outside all tasks."""
        self.events = 0
        self._heap: list[tuple[int, int, Task | Callable[[], None], int]] = []
        self._order = 0
        self._hub = getcurrent()
        self._wall_base_ns = NS

    # -- the clock that production code sees ------------------------------------------------------------

    def now_us(self) -> int:
        """Return the wall clock (us since the epoch). It may be stepped."""
        return self.wall_us + (self.now_ns - self._wall_base_ns) // 1_000

    def monotonic_ns(self) -> int:
        """Return the monotonic clock (ns)."""
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        """Pause the current task."""
        self.pause(seconds)

    def sleep_ns(self, nanoseconds: int) -> None:
        """Pause the current task."""
        self.pause(nanoseconds / NS)

    def step_wall(self, seconds: float) -> None:
        """Step the wall clock forward or back."""
        self.wall_us += round(seconds * 1_000_000)

    # -- scheduling ---------------------------------------------------------------------------------------

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call `act` after a delay, outside all tasks."""
        self._push(self.now_ns + round(delay_s * NS), act, 0)

    def schedule(self, task: Task, delay_ns: int) -> None:
        """Resume a task after this delay, unless `wake` resumes it earlier."""
        task.ticket += 1
        self._push(self.now_ns + delay_ns + self.rng.randrange(_JITTER_NS), task, task.ticket)

    def wake(self, task: Task) -> None:
        """Resume a waiting task now."""
        task.is_timeout = False
        self.schedule(task, 0)

    def _push(self, at_ns: int, what: Task | Callable[[], None], ticket: int) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at_ns, self._order, what, ticket))

    def current(self) -> Task:
        """Return the running task."""
        task: Task = getcurrent().task
        return task

    def pause(self, seconds: float) -> None:
        """Pause the current task. Raises Halted if its process dies in the meantime."""
        self._leave(self.current(), round(seconds * NS))

    def wait(self, signal: Signal, seconds: float, other: Signal | None = None) -> bool:
        """Wait for either signal, at most `seconds`; return False after a timeout."""
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
        """Run the world until `until_ns` or until `is_done`. Raises the errors of tasks, and Stuck."""
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
                raise Stuck(f"no end after {EVENTS_MAX} events, at {self.now_ns / NS:.3f} s of virtual time")
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
        """Unwind every task of a process. Call it outside all tasks."""
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
