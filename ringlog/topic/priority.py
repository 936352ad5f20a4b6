"""Priority of a topic for its waiting readers: `base + auto + age`, in integer arithmetic (T8).

`base` is the configured priority. Without one, `auto` depends on the last consumption: 500, halved every 30
s. `age` raises the priority of a waiting reader: 1 point for 10 ms, at most 1,000. Priority decides only the
order of grants.
"""

from __future__ import annotations

from ringlog.limits import BANDS

AUTO_MAX = 500
AUTO_HALF_MS = 30_000
AUTO_END_MS = 300_000
AGE_MS_MAX = 10_000
AGE_MS_PER_POINT = 10
AGE_MAX = AGE_MS_MAX // AGE_MS_PER_POINT

CREDITS = (1, 1, 2, 4, 8)
"""Grants of each band in one round."""
FLOORS = (0, 250, 500, 750)
"""Lowest priorities of bands 1 to 4. Below the first is band 0."""
TOP_BAND = BANDS - 1

_SCALE = 128
_STEP = 0xFFFE7C5E54A6BFE7778325738AA97665
"""2**(-1/30000) in units of 2**-128."""


def _powers() -> tuple[int, ...]:
    """Return 2**(-(2**k)/30000) for every bit k of a number below 30,000."""
    found = [_STEP]
    while 1 << len(found) < AUTO_HALF_MS:
        found.append(found[-1] * found[-1] >> _SCALE)
    return tuple(found)


_POWERS = _powers()


def auto_of(idle_ms: int) -> int:
    """Return the automatic priority for a last consumption `idle_ms` ago, rounded half away from zero."""
    if idle_ms >= AUTO_END_MS:
        return 0
    halvings, rest = divmod(max(idle_ms, 0), AUTO_HALF_MS)
    value = AUTO_MAX << _SCALE
    bit = 0
    while rest:
        if rest & 1:
            value = value * _POWERS[bit] >> _SCALE
        rest >>= 1
        bit += 1
    # The value is exactly one half only at 90 s, where nothing was multiplied. No other value is near one
    # half.
    return ((value >> halvings) + (1 << _SCALE - 1)) >> _SCALE


def age_of(waited_ms: int) -> int:
    """Return the points for this wait: 1 for 10 ms, at most 1,000."""
    return min(max(waited_ms, 0), AGE_MS_MAX) // AGE_MS_PER_POINT


def band_of(priority: int) -> int:
    """Return the band of a priority, 0 to TOP_BAND."""
    if priority < FLOORS[1]:
        return int(priority >= FLOORS[0])
    return 2 + (priority >= FLOORS[2]) + (priority >= FLOORS[3])


class TopicPriority:
    """Priority of one topic, without the wait of its readers."""

    __slots__ = ("base", "consumed_ms", "is_auto")

    def __init__(self, base: int = 0, *, is_auto: bool = True) -> None:
        self.base: int = base
        self.is_auto: bool = is_auto
        self.consumed_ms: int | None = None
        """Time of the last consumption, on any clock that does not go back."""

    def priority(self, now_ms: int) -> int:
        """Return the priority without age, as the CLI and the API show it."""
        if not self.is_auto or self.consumed_ms is None:
            return self.base
        return self.base + auto_of(now_ms - self.consumed_ms)

    def effective(self, now_ms: int, waiting_since_ms: int) -> int:
        """Return the priority for a reader that has waited since `waiting_since_ms`."""
        return self.priority(now_ms) + age_of(now_ms - waiting_since_ms)

    def next_rise_ms(self, now_ms: int, waiting_since_ms: int) -> int | None:
        """Return the earliest time at which a reader that waits since `waiting_since_ms` is in a higher band.

        None = never. Only age raises the priority of a waiting topic. `auto` loses less in the same time, so
        at the returned time the reader is in the higher band or near it.
        """
        age = age_of(now_ms - waiting_since_ms)
        priority = self.priority(now_ms) + age
        band = band_of(priority)
        if band == TOP_BAND:
            return None
        reached = age + FLOORS[band] - priority
        return waiting_since_ms + reached * AGE_MS_PER_POINT if reached <= AGE_MAX else None
