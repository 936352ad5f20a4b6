"""Orderly stop: processes that accept work stop first, then the shards, which settle what they accepted."""

from __future__ import annotations

import logging
import signal

from ringlog.clock import Clock
from ringlog.limits import BACKGROUND_DRAIN_S
from ringlog.logs import log_event
from ringlog.supervision.children import Children, ChildState
from ringlog.supervision.restart import NS_PER_S
from ringlog.supervision.tree import BACKGROUND, LOW_PRIORITY

log: logging.Logger = logging.getLogger("ringlog.supervision")


class EngineDrain:
    """One orderly stop. Call `advance` once a pass of the loop, after dead children were reaped."""

    def __init__(self, children: Children, *, drain_s: float, clock: Clock) -> None:
        self._children = children
        self._drain_ns = round(drain_s * NS_PER_S)
        self._clock = clock
        # A child that is down or given up at the start of the drain did not end in good order. Exception: it
        # received a signal to stop, because some service managers signal every process of a service.
        self._is_degraded = any(
            child.starts
            and child.process is None
            and (child.give_up_reason or not self._exited_cleanly(child))
            for child in children.states
        )
        children.stop_restarting()
        orders = {child.spec.stop_order for child in children.states}
        self._stages = [self._of(order) for order in sorted(orders)]
        self._stage = -1
        self._deadline_ns: int | None = None
        self._lowered_deadline_ns: int | None = None

    def _of(self, order: int) -> list[ChildState]:
        return [w for w in self._children.states if w.spec.stop_order == order and w.process is not None]

    def advance(self) -> bool:
        """Take the next step that is due. Returns True when every child is dead."""
        if not self._is_stage_over():
            now_ns = self._clock.monotonic_ns()
            if self._lowered_deadline_ns is not None and now_ns >= self._lowered_deadline_ns:
                self._lowered_deadline_ns = None
                self._kill_lowered()
            if self._deadline_ns is not None and now_ns >= self._deadline_ns:
                self._kill_stage()
            return False
        while self._stage + 1 < len(self._stages):
            self._begin(self._stage + 1)
            if not self._is_stage_over():
                return False
        return True

    def force(self) -> None:
        """Kill all children at once. The engine calls this on the second signal to stop."""
        for child in self._children.states:
            self._children.kill(child, "second stop signal")

    def is_orderly(self) -> bool:
        """Return whether every started child ended by itself and cleanly. Call it after the drain."""
        return not self._is_degraded and all(self._exited_cleanly(w) for stage in self._stages for w in stage)

    @staticmethod
    def _exited_cleanly(child: ChildState) -> bool:
        exit = child.last_exit
        if exit is None:
            return False
        if child.spec.kind in BACKGROUND and exit.status == -signal.SIGKILL and exit.reason:
            # The supervisor killed it on purpose. No state is lost: its successor repeats unfinished work.
            return True
        # A child that was never ready has no work to finish.
        was_stopped = exit.status in {-signal.SIGTERM, -signal.SIGINT}
        return exit.is_orderly or (was_stopped and not exit.was_ready)

    def _is_stage_over(self) -> bool:
        return self._stage < 0 or all(child.process is None for child in self._stages[self._stage])

    def _begin(self, stage: int) -> None:
        self._stage = stage
        now_ns = self._clock.monotonic_ns()
        self._deadline_ns = now_ns + self._drain_ns
        self._lowered_deadline_ns = now_ns + min(self._drain_ns, round(BACKGROUND_DRAIN_S * NS_PER_S))
        for child in self._stages[stage]:
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)

    def _kill_lowered(self) -> None:
        """Kill the low-priority children: on a busy host they may never get a CPU to end by themselves."""
        for child in self._stages[self._stage]:
            if child.spec.kind in LOW_PRIORITY:
                self._children.kill(child, "low-priority process did not exit in time")

    def _kill_stage(self) -> None:
        # After SIGKILL the supervisor can only wait for the death.
        self._deadline_ns = None
        for child in self._stages[self._stage]:
            self._children.kill(child, "drain limit reached")
        log_event(log, logging.ERROR, "drain limit reached", limit_s=self._drain_ns / NS_PER_S)
