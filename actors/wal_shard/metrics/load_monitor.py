"""Load monitor of a shard: measures the load, publishes the pressure on the board, and sets the batch window.

Part of the shell; it decides nothing about frames. It measures only this shard, so readers and other shards
do not affect its pressure (L4). Without pressure, a pass of the loop costs one comparison.
"""

from __future__ import annotations

from ringlog.actors.wal_shard.commit.batch_window import BatchWindow
from ringlog.actors.wal_shard.io.rings import Rings
from ringlog.board import pressure
from ringlog.board.board import ProcessSlot
from ringlog.board.layout import GovernorField, ProcessField
from ringlog.governor import Governor, PressureSample, PressureStep, batch_window_ns
from ringlog.limits import GOVERNOR_SAMPLE_MS

_SAMPLE_NS = GOVERNOR_SAMPLE_MS * 1_000_000


class ShardLoadMonitor:
    """Load monitor of one incarnation. With `is_reacting` False it only measures and publishes."""

    def __init__(self, page: ProcessSlot, now_ns: int, *, is_reacting: bool = True) -> None:
        self._page = page
        self._is_reacting = is_reacting
        self._governor = Governor()
        self.window: BatchWindow = BatchWindow()
        self.due_ns: int = now_ns + _SAMPLE_NS
        """Monotonic time of the next sample."""
        self.idle_ns: int = 0
        """Idle time in nanoseconds since the last sample. The shell adds to it when it sleeps or spins."""
        self.is_refusing: bool = False
        """True at the highest step of the governor: new writes are refused if the intake is full."""
        self._sampled_ns = now_ns
        self._sync_ns = page.get(ProcessField.SYNC_NS)
        self._waited_before_ns, self._refused_before = (
            page.get(GovernorField.WAITED_NS),
            page.get(GovernorField.THROTTLED),
        )
        pressure.reset_gauges(page)

    def sample(self, now_ns: int, rings: Rings, refused: int) -> None:
        """Take a sample. Call it when `due_ns` is reached, before the rings are drained.

        `refused` is the number of writes that this incarnation refused because of pressure.
        """
        took_ns = max(now_ns - self._sampled_ns, 1)
        page, governor = self._page, self._governor
        sync_ns = page.get(ProcessField.SYNC_NS)
        # Time in syncs counts as idle: a single client that waits for each of its syncs causes no pressure.
        idle_ns = min(self.idle_ns + sync_ns - self._sync_ns, took_ns)
        page.add(ProcessField.BUSY_NS, max(took_ns - self.idle_ns, 0))
        self._sync_ns, self._sampled_ns, self.idle_ns = sync_ns, now_ns, 0
        self.due_ns = now_ns + _SAMPLE_NS
        fill = rings.fill_ratio()
        governor.observe(PressureSample(busy=1.0 - idle_ns / took_ns, fill=fill))
        pressure.publish(page, governor, fill, now_ns)
        page.set(GovernorField.WAITED_NS, self._waited_before_ns + self.window.waited_ns)
        page.set(GovernorField.THROTTLED, self._refused_before + refused)
        if self._is_reacting:
            self.window.set_window(batch_window_ns(governor.pressure, governor.step))
            page.set(ProcessField.LAST_WAIT_NS, self.window.last_wait_ns)
            self.is_refusing = governor.step is PressureStep.REFUSE

    def may_drain(self, now_ns: int, rings: Rings) -> bool:
        """Return True if the rings may be drained. Call it only while there is a window."""
        may_drain = self.window.may_drain(now_ns, *rings.pending_totals())
        self._page.set(ProcessField.LAST_WAIT_NS, self.window.last_wait_ns)
        return may_drain

    def wait_ms(self, most: int) -> int:
        """Return the maximum sleep in milliseconds: `most`, or one sample interval under pressure."""
        return min(most, GOVERNOR_SAMPLE_MS) if self._governor.pressure else most
