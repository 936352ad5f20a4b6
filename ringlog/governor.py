"""The pressure governor: combines measurements into one number and a step of degradation. Pure.

A governor receives a sample every GOVERNOR_SAMPLE_MS. Each shard has one, which measures only that shard. The
first scheduler has one for the whole engine, which measures delivery and includes the shards' pressures.
Pressure is the maximum of these measurements, each in [0, 1]:

    busy              share of the time in which the process worked, averaged; waits for a device do not count
    fill              fill level of the fullest intake ring
    ready             topics that wait for a grant, relative to GOVERNOR_READY_PER_SCHEDULER per scheduler
    latency           time from news to grant, averaged, relative to GOVERNOR_LATENCY_MS
    shards_pressure   for the engine: the pressure of the shard that has most of it

Data that waits for a slow consumer counts in none of them: a slow consumer degrades only itself.

    step        enter above  leave below  effect; each step includes the effects of those before it
    COALESCE    0.2          0.15         the wake-ups of a topic are coalesced
    WIDEN       0.4          0.35         a shard collects larger commit batches
    SHED        0.8 in three 0.6          routers run one band lower, and the lowest band gets no credit
                samples
    REFUSE      0.99         0.94         new writes are refused if the intake is full

First latency grows, then new work is refused. Accepted work is never dropped, and no delivery is skipped.
"""

from __future__ import annotations

from enum import IntEnum
from math import isnan
from typing import NamedTuple

from ringlog.limits import (
    BATCH_WINDOW_US_MAX,
    BATCH_WINDOW_US_MIN,
    COALESCE_MS_MAX,
    GOVERNOR_LATENCY_MS,
    GOVERNOR_READY_PER_SCHEDULER,
)

SMOOTHING = 0.2
"""Weight of a new sample in the exponential moving averages."""
SHED_SAMPLES = 3
IDLE_THRESHOLD = 0.01
"""An average below this counts as 0. Otherwise the governor's own work would keep an idle process busy."""
_LATENCY_NS = GOVERNOR_LATENCY_MS * 1_000_000


class PressureStep(IntEnum):
    """Degradation step of a governor."""

    FREE = 0
    COALESCE = 1
    WIDEN = 2
    SHED = 3
    REFUSE = 4


ENTER = (0.0, 0.2, 0.4, 0.8, 0.99)
"""Per step: it is entered above this pressure."""
LEAVE = (0.0, 0.15, 0.35, 0.6, 0.94)
"""Per step: it is left below this pressure. The gap prevents oscillation."""


class PressureSample(NamedTuple):
    """Measurements since the previous sample."""

    busy: float = 0.0
    fill: float = 0.0
    ready: int = 0
    workers: int = 1
    latency_ns: float = 0.0
    """Mean time from news to grant; 0 if there were no grants."""
    shards_pressure: float = 0.0


class Governor:
    """Pressure and step of one process or engine. `busy` and `latency_ns` are its moving averages."""

    def __init__(self) -> None:
        self.pressure: float = 0.0
        self.own: float = 0.0
        """Pressure without the shards' pressures."""
        self.step: PressureStep = PressureStep.FREE
        self.busy: float = 0.0
        self.latency_ns: float = 0.0
        self._high_samples = 0

    def observe(self, sample: PressureSample) -> None:
        """Add one sample and update pressure and step."""
        self.busy = _average(self.busy, clamp_unit(sample.busy), IDLE_THRESHOLD)
        self.latency_ns = _average(self.latency_ns, max(sample.latency_ns, 0.0), IDLE_THRESHOLD * _LATENCY_NS)
        ready = sample.ready / (GOVERNOR_READY_PER_SCHEDULER * max(sample.workers, 1))
        averages = pressure_of_averages(self.busy, self.latency_ns)
        self.own = max(clamp_unit(ready), averages, clamp_unit(sample.fill))
        self.pressure = max(self.own, clamp_unit(sample.shards_pressure))
        self.step = self._next_step()

    def _next_step(self) -> PressureStep:
        pressure, step = self.pressure, int(self.step)
        self._high_samples = self._high_samples + 1 if pressure > ENTER[PressureStep.SHED] else 0
        while step and pressure < LEAVE[step]:
            step -= 1
        for higher in range(step + 1, len(ENTER)):
            is_held = higher != PressureStep.SHED or self._high_samples >= SHED_SAMPLES
            if pressure > ENTER[higher] and is_held:
                step = higher
        return PressureStep(step)


def pressure_of_averages(busy: float, latency_ns: float) -> float:
    """Return the pressure that results from averaged busy share and averaged latency."""
    return max(clamp_unit(latency_ns / _LATENCY_NS), clamp_unit(busy))


def clamp_unit(value: float) -> float:
    """Return the value clamped to [0, 1]; NaN counts as 0."""
    return 0.0 if isnan(value) else min(max(value, 0.0), 1.0)


def _average(before: float, value: float, nothing: float) -> float:
    after = before + SMOOTHING * (value - before)
    return after if after >= nothing else 0.0


def coalesce_ns(pressure: float) -> int:
    """Return the least time (ns) between two wake-ups of a topic: 0 at 0.2, linear up to COALESCE_MS_MAX."""
    return round(_share(pressure, PressureStep.COALESCE) * COALESCE_MS_MAX * 1_000_000)


def batch_window_ns(pressure: float, step: PressureStep) -> int:
    """Return the time (ns) for which a shard collects a commit batch.

    It is 0 below WIDEN, and then linear from BATCH_WINDOW_US_MIN to BATCH_WINDOW_US_MAX.
    """
    if step < PressureStep.WIDEN:
        return 0
    widened = _share(pressure, PressureStep.WIDEN) * (BATCH_WINDOW_US_MAX - BATCH_WINDOW_US_MIN)
    return round((BATCH_WINDOW_US_MIN + widened) * 1_000)


def shed_bands(*, is_router: bool) -> int:
    """Return the number of lowest bands that get no credit in step SHED: 2 for routers, 1 for watches."""
    return 2 if is_router else 1


def _share(pressure: float, step: PressureStep) -> float:
    return clamp_unit((pressure - ENTER[step]) / (1.0 - ENTER[step]))
