"""How long a shard under pressure lets frames collect in the rings before it drains them. Pure.

Each commit batch costs one write and at most one sync, so fewer and larger batches cost less. Waiting helps
only while further producers are expected. The shard therefore drains the rings when one of these conditions
holds:

- As many rings have frames as the previous batch was drained from. Producers that wait for their acks before
  they send again have then all sent.
- The rings contain as many bytes as one ring may contribute to a batch.
- The window has ended. It starts when the previous batch is drained.

A single write therefore never waits (L2). A few writers, or a stream that keeps its ring full, do not wait
either.
"""

from __future__ import annotations

from ringlog.limits import BATCH_WINDOW_RINGS_MIN, DRAIN_BYTES_PER_RING_MAX


class BatchWindow:
    """Decides when to drain the rings. `window_ns` is 0 without pressure; the shell then need not ask."""

    def __init__(self) -> None:
        self.window_ns: int = 0
        self.waited_ns: int = 0
        """Total time in nanoseconds for which frames waited in the rings because of the window."""
        self.last_wait_ns: int = 0
        """Time in nanoseconds for which the frames that were released last had waited."""
        self._taken_ns = 0
        self._rings = 0
        """Number of rings that the previous batch was drained from."""
        self._held_ns: int | None = None

    @property
    def is_holding(self) -> bool:
        """True while frames wait in the rings for the end of the window."""
        return self._held_ns is not None

    def set_window(self, window_ns: int) -> None:
        """Set the length of the window in nanoseconds. 0 switches it off."""
        if not self.window_ns:
            self._rings = 0  # Drains are not recorded while the window is off, so the count is stale.
        if not window_ns:
            self.last_wait_ns = 0
        self.window_ns = window_ns

    def may_drain(self, now_ns: int, rings: int, nbytes: int, is_pressing: bool = False) -> bool:
        """Return True if the shard may drain the rings now.

        `rings` is the number of rings with frames, `nbytes` the total size of the frames. `is_pressing` is
        True if a producer requests that its frames do not wait; the rings are then drained at once.
        """
        is_over = (
            not self.window_ns
            or is_pressing
            or rings >= self._rings
            or self._rings < BATCH_WINDOW_RINGS_MIN
            or nbytes >= DRAIN_BYTES_PER_RING_MAX
            or now_ns - self._taken_ns >= self.window_ns
        )
        if is_over or not rings:
            if rings:
                self.last_wait_ns = 0 if self._held_ns is None else now_ns - self._held_ns
            if self._held_ns is not None:
                self.waited_ns += now_ns - self._held_ns
                self._held_ns = None
            return True
        if self._held_ns is None:
            self._held_ns = now_ns
        return False

    def record_drain(self, now_ns: int, rings: int) -> None:
        """Record that frames were drained from `rings` rings."""
        self._taken_ns, self._rings = now_ns, rings
