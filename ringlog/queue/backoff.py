"""How long a job rests that came back, by itself: longer after each delivery. Pure."""

from __future__ import annotations

from typing import NamedTuple

_DOUBLINGS_MAX = 40
"""Beyond it every rest is the longest one: a day's milliseconds double 27 times."""


class Backoff(NamedTuple):
    """After the first delivery `base_ms`, then twice as long each time, `most_ms` at most; 0 = none."""

    base_ms: int = 0
    most_ms: int = 0

    def of(self, deliveries: int) -> int:
        """After so many deliveries."""
        if not self.base_ms:
            return 0
        return min(self.base_ms << min(max(deliveries - 1, 0), _DOUBLINGS_MAX), self.most_ms)


NO_BACKOFF = Backoff()
