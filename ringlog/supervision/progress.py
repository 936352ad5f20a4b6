"""Is a child getting on? Progress, not liveness (RD-18). Pure.

A child whose facts on the board stand still is stuck, whether it spins, hangs in a device or was
stopped. Time counts only as far as the supervisor itself was running: after a frozen container or a
suspended host wakes up, nobody is accused of the time nobody had.
"""

from __future__ import annotations

from ringlog.board.layout import ProcessState
from ringlog.limits import HEARTBEAT_INTERVAL_MS
from ringlog.supervision.restart import NS_PER_MS, NS_PER_S

OBSERVE_GAP_NS_MAX = 2 * HEARTBEAT_INTERVAL_MS * NS_PER_MS
"""Two looks further apart than this count as this far apart."""
RECOVERY_FACTOR = 10
"""A recovering child reports in thousandths of its log, so each step may take longer."""
START_STALL_S_MIN = 30.0
"""And never less than this, however impatient the engine is with those who serve: an interpreter that comes
up on a host without a free processor or with a slow disk is not stuck, and a successor would be slower."""
STARTING_STATES = (ProcessState.STARTING, ProcessState.RECOVERING)
"""States in which a child serves nobody yet."""

ProgressFacts = tuple[int, ...]


class ChildProgress:
    """What one incarnation showed so far."""

    def __init__(self, now_ns: int) -> None:
        self._facts: ProgressFacts = ()
        self._looked_ns = now_ns
        self.stalled_ns = 0
        """How long the facts have stood still."""

    def observe(self, facts: ProgressFacts, now_ns: int) -> None:
        """Note the facts of this moment: any numbers that change as long as work is done."""
        if facts != self._facts:
            self._facts, self.stalled_ns = facts, 0
        else:
            self.stalled_ns += min(now_ns - self._looked_ns, OBSERVE_GAP_NS_MAX)
        self._looked_ns = now_ns

    def is_stuck(self, state: ProcessState, stuck_after_s: float) -> bool:
        """True when a child in this state should have moved on by now."""
        limit_s = stuck_after_s
        if state in STARTING_STATES:
            limit_s = max(stuck_after_s * RECOVERY_FACTOR, START_STALL_S_MIN)
        return self.stalled_ns >= limit_s * NS_PER_S
