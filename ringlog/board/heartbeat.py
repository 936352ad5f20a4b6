"""Heartbeat: a process publishes that it makes progress."""

from __future__ import annotations

from ringlog.board.board import ProcessSlot
from ringlog.board.layout import ProcessField


class Heartbeat:
    """Counts the passes of one incarnation's duty cycle and publishes them on the process page."""

    def __init__(self, slot: ProcessSlot) -> None:
        self._slot = slot
        self.passes: int = 0
        """Number of passes."""

    def beat(self, now_ns: int) -> None:
        """Record that a pass, or a step of a long pass, ended at `now_ns` (monotonic)."""
        self.passes += 1
        slot = self._slot
        slot.set(ProcessField.TURNS, self.passes)
        slot.set(ProcessField.HEARTBEAT_NS, now_ns)
