"""Stopping in good order: those who accept work first, then those who keep promises (SD-1..SD-4)."""

from __future__ import annotations

import logging
import signal

from ringlog.clock import Clock
from ringlog.limits import BACKGROUND_DRAIN_S
from ringlog.logs import log_event
from ringlog.supervision.children import Children, ChildState
from ringlog.supervision.restart import NS_PER_S
from ringlog.supervision.tree import BACKGROUND, LOW_PRIORITY

log = logging.getLogger("ringlog.supervision")


class EngineDrain:
    """One orderly stop. Call `look` once a turn, after the dead were reaped."""

    def __init__(self, children: Children, *, drain_s: float, clock: Clock) -> None:
        self._children = children
        self._drain_ns = round(drain_s * NS_PER_S)
        self._clock = clock
        # A child that is down or given up now has not ended in good order, unless it was told to stop as
        # well: some service managers signal every process of a service.
        self._is_degraded = any(
            ward.starts and ward.process is None and (ward.give_up_reason or not self._exited_cleanly(ward))
            for ward in children.states
        )
        children.stop_restarting()
        orders = {ward.spec.stop_order for ward in children.states}
        self._stages = [self._of(order) for order in sorted(orders)]
        self._stage = -1
        self._deadline_ns: int | None = None
        self._lowered_deadline_ns: int | None = None

    def _of(self, order: int) -> list[ChildState]:
        return [w for w in self._children.states if w.spec.stop_order == order and w.process is not None]

    def advance(self) -> bool:
        """Take the next step that is due; True when every child is dead."""
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
        """End the waiting: kill everybody (the second signal of SD-1)."""
        for ward in self._children.states:
            self._children.kill(ward, "told to hurry")

    def is_orderly(self) -> bool:
        """True when every child that had been started ended by itself and well. Ask after the drain."""
        return not self._is_degraded and all(self._exited_cleanly(w) for stage in self._stages for w in stage)

    @staticmethod
    def _exited_cleanly(ward: ChildState) -> bool:
        exit = ward.last_exit
        if exit is None:
            return False
        if ward.spec.kind in BACKGROUND and exit.status == -signal.SIGKILL and exit.reason:
            # It keeps no promise, and what it had begun is begun anew: we ended it, not chance.
            return True
        # A child that had not begun to serve has nothing to put in order.
        was_stopped = exit.status in {-signal.SIGTERM, -signal.SIGINT}
        return exit.is_orderly or (was_stopped and not exit.was_ready)

    def _is_stage_over(self) -> bool:
        return self._stage < 0 or all(ward.process is None for ward in self._stages[self._stage])

    def _begin(self, stage: int) -> None:
        self._stage = stage
        now_ns = self._clock.monotonic_ns()
        self._deadline_ns = now_ns + self._drain_ns
        self._lowered_deadline_ns = now_ns + min(self._drain_ns, round(BACKGROUND_DRAIN_S * NS_PER_S))
        for ward in self._stages[stage]:
            if ward.process is not None:
                ward.process.send_signal(signal.SIGTERM)

    def _kill_lowered(self) -> None:
        """They get the processor when nobody else wants it: on a busy host never."""
        for ward in self._stages[self._stage]:
            if ward.spec.kind in LOW_PRIORITY:
                self._children.kill(ward, "no time to end by itself")

    def _kill_stage(self) -> None:
        # After SIGKILL there is nothing left to do but to wait for the death itself.
        self._deadline_ns = None
        for ward in self._stages[self._stage]:
            self._children.kill(ward, "drain limit reached")
        log_event(log, logging.ERROR, "drain limit reached", limit_s=self._drain_ns / NS_PER_S)
