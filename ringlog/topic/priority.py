"""What a topic is worth to who waits for it: `P = base + auto + age` (P-1), in whole numbers.

`base` is the manual priority. Without one, `auto` says how lately somebody consumed: 500, halved every
30 s (P-2). `age` lets everything rise that waits, a point for 10 ms and 1000 at most (P-5). Priority decides
who is told first; it changes nothing else (SCH-8).
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
"""Turns of a round, by band (SCH-2)."""
FLOORS = (0, 250, 500, 750)
"""Least priority of bands 1 to 4; below the first one lies band 0."""
TOP_BAND = BANDS - 1

_SCALE = 128
_STEP = 0xFFFE7C5E54A6BFE7778325738AA97665
"""2**(-1/30000) in units of 2**-128."""


def _powers() -> tuple[int, ...]:
    """2**(-(2**k)/30000) for every k that a number below 30,000 has a bit for."""
    found = [_STEP]
    while 1 << len(found) < AUTO_HALF_MS:
        found.append(found[-1] * found[-1] >> _SCALE)
    return tuple(found)


_POWERS = _powers()


def auto_of(idle_ms: int) -> int:
    """P-2, rounded half away from zero (P-3); `idle_ms` since the last consumption."""
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
    # Exactly one half is left over at 90 s, where nothing was multiplied; nowhere else is it near.
    return ((value >> halvings) + (1 << _SCALE - 1)) >> _SCALE


def age_of(waited_ms: int) -> int:
    """P-5."""
    return min(max(waited_ms, 0), AGE_MS_MAX) // AGE_MS_PER_POINT


def band_of(priority: int) -> int:
    """Number of the band, 0 to TOP (SCH-2)."""
    if priority < FLOORS[1]:
        return int(priority >= FLOORS[0])
    return 2 + (priority >= FLOORS[2]) + (priority >= FLOORS[3])


class TopicPriority:
    """What one topic's priority follows from, apart from how long it waits."""

    __slots__ = ("base", "consumed_ms", "is_auto")

    def __init__(self, base: int = 0, *, is_auto: bool = True) -> None:
        self.base = base
        self.is_auto = is_auto
        self.consumed_ms: int | None = None
        """When somebody last consumed (P-4), on any clock that does not go back."""

    def priority(self, now_ms: int) -> int:
        """Without age: what is shown to people (P-6)."""
        if not self.is_auto or self.consumed_ms is None:
            return self.base
        return self.base + auto_of(now_ms - self.consumed_ms)

    def effective(self, now_ms: int, dirty_ms: int) -> int:
        """Of somebody who has waited since `dirty_ms`."""
        return self.priority(now_ms) + age_of(now_ms - dirty_ms)

    def next_rise_ms(self, now_ms: int, dirty_ms: int) -> int | None:
        """Who has waited since `dirty_ms` is in a higher band at this instant at the earliest; None = never.

        Age is all that makes a waiting topic rise by itself. What `auto` loses meanwhile is less than that,
        so that who is not there yet has come most of the way.
        """
        age = age_of(now_ms - dirty_ms)
        priority = self.priority(now_ms) + age
        band = band_of(priority)
        if band == TOP_BAND:
            return None
        reached = age + FLOORS[band] - priority
        return dirty_ms + reached * AGE_MS_PER_POINT if reached <= AGE_MAX else None
