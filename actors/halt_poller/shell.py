"""Keeps processors awake while there is traffic, at a priority at which everybody else comes first.

One thread for each processor that the engine may use, pinned to it, and a main one that looks at what the
shards count. All are SCHED_IDLE, as the supervisor has it (tree.LOWERED): whoever wakes up on such a
processor has it at once, and finds it running.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from pathlib import Path

from actors.halt_poller.policy import Traffic, group_with_quota, obstacle
from ringlog import compiled
from ringlog.board.board import Board
from ringlog.board.layout import P, ProcessState, Q
from ringlog.clock import Clock, SystemClock
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import ExitCode
from ringlog.limits import HEARTBEAT_INTERVAL_MS
from ringlog.logs import say
from ringlog.runtime.wakeup import Wakeup
from ringlog.runtime.workers import Loop
from ringlog.signals import StopFlag

log = logging.getLogger("ringlog.halt_poller")

LINGER_NS = 1_000_000
"""A thread looks this often whether it is still to stay awake."""
STOP_S = 1.0
_NS_PER_MS = 1_000_000


class Shell:
    """One incarnation of the poller."""

    def __init__(self, boot: ActorBoot, window_us: int, *, clock: Clock | None = None) -> None:
        self._boot = boot
        self._clock = clock or SystemClock()
        board = Board.open(boot.shm_dir, writable=True)
        self._slot = board.process(boot.slot)
        self._shards = [board.process(1 + shard) for shard in range(boot.shards)]
        self._traffic = Traffic(window_us * 1_000)
        self._wakeup = Wakeup()
        self._is_awake = threading.Event()
        self._is_ending = False
        self._turns = 0

    def run(self, stop: StopFlag) -> int:
        """Look for traffic until stopped; returns the exit code."""
        cpus = sorted(os.sched_getaffinity(0))
        limited = group_with_quota(_read("/proc/self/cgroup"), _read)
        reason = obstacle(len(cpus), compiled.can_linger(), limited)
        loops = [] if reason else [self._loop(cpu) for cpu in cpus]
        poll = select.poll()
        poll.register(stop.fileno(), select.POLLIN)
        poll.register(self._wakeup.fileno(), select.POLLIN)
        self._slot.set(P.STATE, ProcessState.READY)
        if reason:
            say(log, logging.WARNING, "processors are not kept from halting", reason=reason)
        else:
            say(log, logging.INFO, "ready", processors=len(cpus))
        while not stop.is_set():
            self._wakeup.clear()
            for loop in loops:
                loop.check()
            poll.poll(self.turn() if loops else self._beat())
        self._slot.set(P.STATE, ProcessState.DRAINING)
        self._is_ending = True
        self._is_awake.set()
        for loop in loops:
            loop.join(STOP_S)
        self._wakeup.close()
        return ExitCode.OK

    def turn(self) -> int:
        """One look; returns for how many milliseconds to rest."""
        self._beat()
        now_ns = self._clock.monotonic_ns()
        counters = [page.get(word) for page in self._shards for word in (P.GROUPS, Q.CLAIMED)]
        if self._traffic.is_there(counters, now_ns):
            self._is_awake.set()
        else:
            self._is_awake.clear()
        return self._traffic.rest_ns(now_ns) // _NS_PER_MS

    def _beat(self) -> int:
        self._turns += 1
        self._slot.set(P.TURNS, self._turns)
        self._slot.set(P.HEARTBEAT_NS, self._clock.monotonic_ns())
        return HEARTBEAT_INTERVAL_MS

    def _loop(self, cpu: int) -> Loop:
        return Loop(f"cpu-{cpu}", lambda: self._stay_awake(cpu), self._wakeup.wake)

    def _stay_awake(self, cpu: int) -> None:
        # One that was taken away since we looked: then this thread may run wherever the others do.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {cpu})
        while not self._is_ending:
            self._is_awake.wait()
            while self._is_awake.is_set() and not self._is_ending:
                compiled.linger(LINGER_NS)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
