"""Detect children that are stuck. The supervisor checks progress, not only liveness. Pure.

A child is stuck if its words on the board do not change, whether it spins, hangs in a device call or was
stopped by a signal. Only time in which the supervisor itself ran is counted. Otherwise the supervisor would
replace every child after a frozen container or a suspended host wakes up.
"""

from __future__ import annotations

from ringlog.board.layout import ProcessState
from ringlog.limits import HEARTBEAT_INTERVAL_MS
from ringlog.supervision.restart import NS_PER_MS, NS_PER_S

OBSERVE_GAP_NS_MAX = 2 * HEARTBEAT_INTERVAL_MS * NS_PER_MS
"""Longest interval (ns) between two polls that is counted as stalled time. A longer one counts as this."""
RECOVERY_FACTOR = 10
"""Factor on the limit during recovery. A shard reports recovery in thousandths of its log, which are slow."""
START_STALL_S_MIN = 30.0
"""Lowest limit (s) before a child is ready, however low `supervisor.stuck_after_s` is. An interpreter that
starts on a busy host or a slow disk is not stuck, and a successor would be slower."""
STARTING_STATES = (ProcessState.STARTING, ProcessState.RECOVERING)
"""States before a child serves clients."""

ProgressFacts = tuple[int, ...]


class ChildProgress:
    """Progress of one incarnation."""

    def __init__(self, now_ns: int) -> None:
        self._facts: ProgressFacts = ()
        self._looked_ns = now_ns
        self.stalled_ns: int = 0
        """Time (ns) for which the facts have not changed."""

    def observe(self, facts: ProgressFacts, now_ns: int) -> None:
        """Record the facts of this moment: any numbers that change while the child makes progress.

        `now_ns` is monotonic.
        """
        if facts != self._facts:
            self._facts, self.stalled_ns = facts, 0
        else:
            self.stalled_ns += min(now_ns - self._looked_ns, OBSERVE_GAP_NS_MAX)
        self._looked_ns = now_ns

    def is_stuck(self, state: ProcessState, stuck_after_s: float) -> bool:
        """Return whether the facts have not changed for longer than a child in this state may take."""
        limit_s = stuck_after_s
        if state in STARTING_STATES:
            limit_s = max(stuck_after_s * RECOVERY_FACTOR, START_STALL_S_MIN)
        return self.stalled_ns >= limit_s * NS_PER_S
