"""A shard's own governor: measures how the shard gets on, says so on the board, and what follows from it.

Part of the shell: no decision about a frame. Nothing here knows of another shard or of a reader, so neither
makes this one slower (G-10, BP-2). Without pressure a turn pays for one comparison.
"""

from __future__ import annotations

from actors.wal_shard.commit.batch_window import BatchWindow
from actors.wal_shard.io.rings import Rings
from ringlog.board import pressure
from ringlog.board.board import ProcessSlot
from ringlog.board.layout import GovernorField, ProcessField
from ringlog.governor import Governor, PressureSample, PressureStep, batch_window_ns
from ringlog.limits import GOVERNOR_SAMPLE_MS

_SAMPLE_NS = GOVERNOR_SAMPLE_MS * 1_000_000


class ShardLoadMonitor:
    """The governor of one incarnation. `is_reacting` False: it is measured and said, and nothing follows."""

    def __init__(self, page: ProcessSlot, now_ns: int, *, is_reacting: bool = True) -> None:
        self._page = page
        self._is_reacting = is_reacting
        self._governor = Governor()
        self.window = BatchWindow()
        self.due_ns = now_ns + _SAMPLE_NS
        """When the next sample is due."""
        self.rested_ns = 0
        """Time since the last sample in which there was nothing to do, for whoever rests to add to."""
        self.is_refusing = False
        """The top of the ladder: new writes are refused where the intake is full."""
        self._sampled_ns = now_ns
        self._sync_ns = page.get(ProcessField.SYNC_NS)
        self._waited_before_ns, self._refused_before = (
            page.get(GovernorField.WAITED_NS),
            page.get(GovernorField.THROTTLED),
        )
        pressure.begin(page)

    def sample(self, now_ns: int, rings: Rings, refused: int) -> None:
        """Take a sample; to be called when one is due, before frames are taken out of rings.

        `refused`: writes that this incarnation refused for pressure.
        """
        took_ns = max(now_ns - self._sampled_ns, 1)
        page, governor = self._page, self._governor
        sync_ns = page.get(ProcessField.SYNC_NS)
        # Waiting for a device is no work: one client that waits for each of its syncs is no pressure.
        rested_ns = min(self.rested_ns + sync_ns - self._sync_ns, took_ns)
        page.add(ProcessField.BUSY_NS, max(took_ns - self.rested_ns, 0))
        self._sync_ns, self._sampled_ns, self.rested_ns = sync_ns, now_ns, 0
        self.due_ns = now_ns + _SAMPLE_NS
        fill = rings.fill_ratio()
        governor.observe(PressureSample(busy=1.0 - rested_ns / took_ns, fill=fill))
        pressure.publish(page, governor, fill, now_ns)
        page.set(GovernorField.WAITED_NS, self._waited_before_ns + self.window.waited_ns)
        page.set(GovernorField.THROTTLED, self._refused_before + refused)
        if self._is_reacting:
            self.window.set_window(batch_window_ns(governor.pressure, governor.step))
            self.is_refusing = governor.step is PressureStep.REFUSE

    def may_drain(self, now_ns: int, rings: Rings) -> bool:
        """May frames be taken out of the rings? Asked only while there is a window."""
        return self.window.may_drain(now_ns, *rings.pending_totals())

    def wait_ms(self, most: int) -> int:
        """How long to sleep at most: as long as there is pressure, until the next sample."""
        return min(most, GOVERNOR_SAMPLE_MS) if self._governor.pressure else most
