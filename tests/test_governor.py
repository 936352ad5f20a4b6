"""The steps of the governor under synthetic pressure: thresholds, hysteresis, and the effect of each step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.governor import (
    ENTER,
    LEAVE,
    SHED_SAMPLES,
    Governor,
    PressureSample,
    PressureStep,
    batch_window_ns,
    coalesce_ns,
    shed_bands,
)
from ringlog.limits import (
    BATCH_WINDOW_US_MAX,
    BATCH_WINDOW_US_MIN,
    COALESCE_MS_MAX,
    GOVERNOR_LATENCY_MS,
    GOVERNOR_READY_PER_SCHEDULER,
)

MS = 1_000_000
SHARE = st.floats(0, 1)
ANY = st.floats(allow_nan=True, allow_infinity=True)
TO_REST = 60
"""Number of samples after which every average is 0."""


def at(pressure: float, samples: int = 1, governor: Governor | None = None) -> Governor:
    """Return a governor after `samples` samples of this pressure, by the only input that is not averaged."""
    governor = governor or Governor()
    for _ in range(samples):
        governor.observe(PressureSample(fill=pressure))
    return governor


@pytest.mark.parametrize(
    ("pressure", "step"),
    [(0.0, PressureStep.FREE), (0.2, PressureStep.FREE), (0.21, PressureStep.COALESCE), (0.4,
    PressureStep.COALESCE), (0.41, PressureStep.WIDEN),
     (0.8, PressureStep.WIDEN), (0.81, PressureStep.SHED), (0.99, PressureStep.SHED), (1.0,
     PressureStep.REFUSE)],
)  # fmt: skip
def test_a_step_starts_above_its_threshold(pressure: float, step: PressureStep) -> None:
    """A step starts above its threshold, not at it (L1)."""
    assert at(pressure, SHED_SAMPLES).step is step


def test_shedding_begins_with_the_third_sample_in_a_row() -> None:
    """Lower samples in between restart the count."""
    governor = at(0.9, SHED_SAMPLES - 1)
    assert governor.step is PressureStep.WIDEN
    at(0.7, governor=governor)
    at(0.9, SHED_SAMPLES - 1, governor)
    assert governor.step is PressureStep.WIDEN
    assert at(0.9, governor=governor).step is PressureStep.SHED


def test_full_pressure_refuses_at_once() -> None:
    """One sample of pressure 1.0 is enough."""
    assert at(1.0).step is PressureStep.REFUSE


@pytest.mark.parametrize(
    "step", [PressureStep.COALESCE, PressureStep.WIDEN, PressureStep.SHED, PressureStep.REFUSE]
)
def test_a_step_ends_only_below_its_lower_threshold(step: PressureStep) -> None:
    """A step ends below another threshold than the one where it starts (L1)."""
    governor = at(1.0, SHED_SAMPLES)
    assert at(LEAVE[step], 50, governor).step >= step
    assert at(LEAVE[step] - 0.001, governor=governor).step < step


def test_the_lower_thresholds_have_the_documented_distance() -> None:
    """The distance is 0.05, except for SHED, which ends below 0.6."""
    for step in (PressureStep.COALESCE, PressureStep.WIDEN, PressureStep.REFUSE):
        assert math.isclose(ENTER[step] - LEAVE[step], 0.05, abs_tol=1e-9)
    assert LEAVE[PressureStep.SHED] == 0.6


@given(st.floats(0.03, 0.97), st.lists(st.floats(-0.024, 0.024), min_size=1, max_size=200))
def test_noise_below_the_hysteresis_does_not_change_the_step_back_and_forth(
    middle: float, noise: list[float]
) -> None:
    """Under small noise the steps change in one direction only."""
    governor = at(middle, SHED_SAMPLES)
    steps = [governor.step, *(at(middle + each, governor=governor).step for each in noise)]
    assert steps == sorted(steps) or steps == sorted(steps, reverse=True)


@given(st.lists(SHARE, max_size=100), st.lists(SHARE, max_size=100))
def test_more_pressure_never_means_a_lower_step(lower: list[float], gains: list[float]) -> None:
    """Of two histories, the one with more pressure at all times never has the lower step."""
    one, other = Governor(), Governor()
    for pressure, gain in zip(lower, gains, strict=False):
        at(pressure, governor=one)
        at(min(pressure + gain, 1.0), governor=other)
        assert other.step >= one.step
        assert other.pressure >= one.pressure


@given(st.lists(st.tuples(ANY, ANY, st.integers(), st.integers(), ANY, ANY), min_size=1, max_size=30))
def test_pressure_is_in_range_for_any_samples(samples: list[tuple[float, ...]]) -> None:
    """Pressure is limited to [0, 1] (L1)."""
    governor = Governor()
    for busy, fill, ready, workers, latency, beneath in samples:
        governor.observe(PressureSample(busy, fill, int(ready), int(workers), latency, beneath))
        assert 0.0 <= governor.own <= governor.pressure <= 1.0
        assert 0.0 <= governor.busy <= 1.0
        assert governor.latency_ns >= 0.0


@given(st.lists(st.tuples(SHARE, SHARE, st.integers(0, 1_000), st.floats(0, 1e12)), max_size=50))
def test_pressure_returns_to_zero_without_work(samples: list[tuple[float, float, int, float]]) -> None:
    governor = Governor()
    for busy, fill, ready, latency in samples:
        governor.observe(PressureSample(busy, fill, ready, 1, latency))
    for _ in range(TO_REST + 100):
        governor.observe(PressureSample())
    assert (governor.pressure, governor.own, governor.step) == (0.0, 0.0, PressureStep.FREE)
    assert (governor.busy, governor.latency_ns) == (0.0, 0.0)


def test_each_input_is_relative_to_its_own_capacity() -> None:
    """Pressure is the greatest of the inputs."""
    full = GOVERNOR_READY_PER_SCHEDULER
    for sample, pressure in (
        (PressureSample(fill=0.3), 0.3),
        (PressureSample(shards_pressure=0.3), 0.3),
        (PressureSample(ready=full // 2), 0.5),
        (PressureSample(ready=full // 2, workers=2), 0.25),
        (PressureSample(busy=1.0), 0.2),
        (PressureSample(latency_ns=GOVERNOR_LATENCY_MS * MS), 0.2),
    ):
        governor = Governor()
        governor.observe(sample)
        assert math.isclose(governor.pressure, pressure)


def test_averages_approach_a_constant_input() -> None:
    """Each sample contributes one fifth."""
    governor = Governor()
    for n in range(1, 30):
        governor.observe(PressureSample(latency_ns=GOVERNOR_LATENCY_MS * MS))
        assert math.isclose(governor.pressure, 1 - 0.8**n)


def test_the_pressure_of_shards_does_not_count_as_own_pressure() -> None:
    """Total pressure is the greater of both."""
    governor = Governor()
    governor.observe(PressureSample(fill=0.3, shards_pressure=0.9))
    assert (governor.own, governor.pressure) == (0.3, 0.9)


@given(SHARE)
def test_coalesce_ns_grows_linearly_with_the_pressure(pressure: float) -> None:
    """It starts at pressure 0.2 and reaches COALESCE_MS_MAX at 1.0 (L3)."""
    expected = max(pressure - 0.2, 0) / 0.8 * COALESCE_MS_MAX * MS
    assert abs(coalesce_ns(pressure) - expected) <= 1
    assert coalesce_ns(0.2) == 0
    assert coalesce_ns(1.0) == COALESCE_MS_MAX * MS


@given(SHARE)
def test_batch_window_ns_stays_between_its_bounds(pressure: float) -> None:
    """It is 0 below the step WIDEN (L2)."""
    assert (
        batch_window_ns(pressure, PressureStep.FREE) == batch_window_ns(pressure, PressureStep.COALESCE) == 0
    )
    found = batch_window_ns(pressure, PressureStep.WIDEN)
    assert BATCH_WINDOW_US_MIN * 1_000 <= found <= BATCH_WINDOW_US_MAX * 1_000
    assert batch_window_ns(0.35, PressureStep.WIDEN) == BATCH_WINDOW_US_MIN * 1_000
    assert batch_window_ns(1.0, PressureStep.REFUSE) == BATCH_WINDOW_US_MAX * 1_000
    assert batch_window_ns(0.7, PressureStep.WIDEN) == (BATCH_WINDOW_US_MIN + BATCH_WINDOW_US_MAX) * 500


def test_shedding_affects_one_more_band_for_routers() -> None:
    """The lowest band is shed, and for routers also the band above it."""
    assert (shed_bands(is_router=False), shed_bands(is_router=True)) == (1, 2)
