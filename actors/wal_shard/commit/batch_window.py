"""For how long a shard under pressure lets frames gather in the rings before it takes them. Pure.

A group that waits is larger, and each costs one write and at most one sync. But waiting gains something only
while somebody is still to come: so a group is taken as soon as as many rings have frames as the group before
came out of, for those who wait for their acks before they send on are all back then; or as soon as a ring's
share is there; or when the window, counted from when the group before was taken, is over. A lone write
therefore never waits (G-7), nor do a few writers, nor does a stream that keeps its ring full.
"""

from __future__ import annotations

from ringlog.limits import BATCH_WINDOW_RINGS_MIN, DRAIN_BYTES_PER_RING_MAX


class BatchWindow:
    """`window_ns` 0 = no pressure: then nothing here needs to be asked."""

    def __init__(self) -> None:
        self.window_ns = 0
        self.waited_ns = 0
        """Time for which frames were held in the rings, in all."""
        self._taken_ns = 0
        self._rings = 0
        """Rings that the group before came out of."""
        self._held_ns: int | None = None

    @property
    def is_holding(self) -> bool:
        """Frames are there and not to be taken yet."""
        return self._held_ns is not None

    def set_window(self, window_ns: int) -> None:
        """The window is this long from now on."""
        if not self.window_ns:
            self._rings = 0  # What was before nobody has looked at.
        self.window_ns = window_ns

    def may_drain(self, now_ns: int, rings: int, nbytes: int, is_pressing: bool = False) -> bool:
        """May frames be taken out of the rings, of which `rings` have some, `nbytes` in all? At once when one
        of them asks for that (G-12)."""
        is_over = (
            not self.window_ns
            or is_pressing
            or rings >= self._rings
            or self._rings < BATCH_WINDOW_RINGS_MIN
            or nbytes >= DRAIN_BYTES_PER_RING_MAX
            or now_ns - self._taken_ns >= self.window_ns
        )
        if is_over or not rings:
            if self._held_ns is not None:
                self.waited_ns += now_ns - self._held_ns
                self._held_ns = None
            return True
        if self._held_ns is None:
            self._held_ns = now_ns
        return False

    def record_drain(self, now_ns: int, rings: int) -> None:
        """Frames were taken out of so many rings."""
        self._taken_ns, self._rings = now_ns, rings
