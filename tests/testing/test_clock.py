"""The manual clock, and the lazily loaded names of ringlog.testing."""

from __future__ import annotations

import pytest

import ringlog.testing
from ringlog.clock import read_both
from ringlog.errors import UsageError


def test_the_manual_clock_moves_only_by_explicit_calls(clock):
    """`advance` and `sleep` move both clocks; `step` moves only the wall clock."""
    wall, mono = clock.now_us(), clock.monotonic_ns()
    assert (clock.now_us(), clock.monotonic_ns()) == (wall, mono)
    clock.sleep(1.5)
    clock.advance(0.5)
    assert (clock.now_us() - wall, clock.monotonic_ns() - mono) == (2_000_000, 2_000_000_000)
    clock.step(-3600)
    assert (clock.now_us() - wall, clock.monotonic_ns() - mono) == (-3_598_000_000, 2_000_000_000)
    assert clock.sleeps == [1.5]


def test_advance_refuses_negative_steps(clock):
    with pytest.raises(UsageError):
        clock.advance(-1)


def test_names_of_the_package_are_loaded_on_first_access():
    assert ringlog.testing.SimulatedDisk("/data").list_dir("/data") == []
    assert "engine" in dir(ringlog.testing)
    with pytest.raises(AttributeError):
        ringlog.testing.unheard_of  # noqa: B018


def test_both_clocks_are_read_again_after_a_preemption(clock):
    """A reading of the wall clock 20 ms before that of the other looked like a step of the wall clock."""
    read = clock.now_us

    def read_and_lose_the_processor():
        clock.now_us = read
        found = read()
        clock.advance(0.02)
        return found

    clock.now_us = read_and_lose_the_processor
    now_us, now_ns = read_both(clock)
    assert (now_us, now_ns) == (clock.now_us(), clock.monotonic_ns())
