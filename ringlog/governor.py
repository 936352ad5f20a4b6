"""The pressure governor, decided: what is measured becomes one number and a step of a ladder (semantics 23).

A governor is fed a sample every GOVERNOR_SAMPLE_MS. Each shard has one, which knows of nothing but that shard
(G-10, BP-2); the instance has one, in the first scheduler, which knows how delivery gets on and takes the
shards' pressures over. Pressure is the worst of what is measured, each in [0, 1]:

    busy       share of the time in which the process worked, averaged; waiting for a device is no work
    fill       of the fullest intake ring
    ready      topics that could be told of and were not, against what is due to the schedulers
    latency    from news to turn, averaged, against GOVERNOR_LATENCY_MS
    beneath    for the instance: the pressure of the shard that has most of it

What waits for somebody who is slow is in none of them: a slow consumer degrades itself alone.

    step        from        left below    what it does; each includes those before it
    COALESCE    0.2         0.15          a topic's wake-ups are gathered
    WIDEN       0.4         0.35          a shard's groups are gathered
    SHED        0.8, three  0.6           routers run a band lower, the lowest band gets no credit
                samples
    REFUSE      0.99        0.94          new writes are refused where the intake is full

What is shed is latency, then new work; never what was taken in, and no delivery is skipped (G-5). Pure.
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
"""How much of an average is new with each sample (G-2)."""
SHED_SAMPLES = 3
IDLE_THRESHOLD = 0.01
"""An average below counts as none, so that a governor without work, but for its own, comes to rest."""
_LATENCY_NS = GOVERNOR_LATENCY_MS * 1_000_000


class PressureStep(IntEnum):
    """How far a governor went."""

    FREE = 0
    COALESCE = 1
    WIDEN = 2
    SHED = 3
    REFUSE = 4


ENTER = (0.0, 0.2, 0.4, 0.8, 0.99)
"""A step is taken above this."""
LEAVE = (0.0, 0.15, 0.35, 0.6, 0.94)
"""And left below this (G-4)."""


class PressureSample(NamedTuple):
    """What was measured since the sample before."""

    busy: float = 0.0
    fill: float = 0.0
    ready: int = 0
    workers: int = 1
    latency_ns: float = 0.0
    """Mean; 0 when nothing was told of."""
    shards_pressure: float = 0.0


class Governor:
    """One pressure and its step. `busy` and `latency_ns` are the averages it goes by."""

    def __init__(self) -> None:
        self.pressure = 0.0
        self.own = 0.0
        """Pressure without what lies beneath."""
        self.step = PressureStep.FREE
        self.busy = 0.0
        self.latency_ns = 0.0
        self._high_samples = 0

    def observe(self, sample: PressureSample) -> None:
        """Take one sample; pressure and step are those of now."""
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
    """The pressure that a process's averaged share of work and averaged latency are."""
    return max(clamp_unit(latency_ns / _LATENCY_NS), clamp_unit(busy))


def clamp_unit(value: float) -> float:
    """Clamped to [0, 1]; what is no number counts as nothing."""
    return 0.0 if isnan(value) else min(max(value, 0.0), 1.0)


def _average(before: float, value: float, nothing: float) -> float:
    after = before + SMOOTHING * (value - before)
    return after if after >= nothing else 0.0


def coalesce_ns(pressure: float) -> int:
    """Least time between two wake-ups of one topic: linear from 0 at 0.2 to COALESCE_MS_MAX (G-3)."""
    return round(_share(pressure, PressureStep.COALESCE) * COALESCE_MS_MAX * 1_000_000)


def batch_window_ns(pressure: float, step: PressureStep) -> int:
    """For how long a shard gathers a group: 0 below WIDEN, then linear between the two bounds (G-3, WC-4)."""
    if step < PressureStep.WIDEN:
        return 0
    widened = _share(pressure, PressureStep.WIDEN) * (BATCH_WINDOW_US_MAX - BATCH_WINDOW_US_MIN)
    return round((BATCH_WINDOW_US_MIN + widened) * 1_000)


def shed_bands(*, is_router: bool) -> int:
    """Bands, from the lowest, that get no credit while the instance sheds: routers run one lower (G-3)."""
    return 2 if is_router else 1


def _share(pressure: float, step: PressureStep) -> float:
    return clamp_unit((pressure - ENTER[step]) / (1.0 - ENTER[step]))
