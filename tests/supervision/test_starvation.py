"""A child that gets no CPU time is not stuck (RF-21)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ringlog.supervision.restart import NS_PER_S
from ringlog.supervision.starvation import SHARE_MIN, CpuSample, CpuStarvation, sample_cpu
from ringlog.testing.real_engine import wait_until

SPINS = "print('up', flush=True)\nwhile True: pass"
SLEEPS = "print('up', flush=True)\nimport sys; sys.stdin.read()"


@contextmanager
def child(code: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_a_child_that_does_not_want_cpu_is_not_starved() -> None:
    """It sleeps, waits for a device, was stopped, or has exited."""
    assert not CpuStarvation().is_starved(CpuSample(wants_cpu=False, used_ns=5), 0)
    assert not CpuStarvation().is_starved(None, 0)


def test_a_child_that_wants_cpu_is_starved_until_a_window_shows_its_share() -> None:
    hunger = CpuStarvation()
    assert hunger.is_starved(CpuSample(wants_cpu=True, used_ns=0), 0)
    assert hunger.is_starved(CpuSample(wants_cpu=True, used_ns=NS_PER_S // 2), NS_PER_S // 2), (
        "too early to say"
    )
    assert not hunger.is_starved(CpuSample(wants_cpu=True, used_ns=NS_PER_S), NS_PER_S), "it spins"


@pytest.mark.parametrize(("share", "is_starved"), [(SHARE_MIN - 0.01, True), (SHARE_MIN, False)])
def test_the_share_of_cpu_decides_in_each_window(share: float, is_starved: bool) -> None:
    hunger = CpuStarvation()
    for n in range(5):
        found = hunger.is_starved(CpuSample(wants_cpu=True, used_ns=int(n * share * NS_PER_S)), n * NS_PER_S)
        assert found == (is_starved or n == 0)
        if not found:
            return


def test_reset_starts_a_new_window() -> None:
    hunger = CpuStarvation()
    hunger.is_starved(CpuSample(wants_cpu=True, used_ns=0), 0)
    assert hunger.has_waited_for_cpu
    hunger.reset()
    assert not hunger.has_waited_for_cpu
    assert hunger.is_starved(CpuSample(wants_cpu=True, used_ns=90 * NS_PER_S), 100 * NS_PER_S), "of before"


@pytest.mark.slow
def test_sample_cpu_distinguishes_spinning_and_sleeping_processes() -> None:
    with child(SPINS) as spinning, child(SLEEPS) as sleeping:
        first = sample_cpu(spinning)
        assert first is not None
        assert first.wants_cpu

        def has_used_more() -> bool:
            now = sample_cpu(spinning)
            assert now is not None
            return now.wants_cpu and now.used_ns > first.used_ns

        wait_until(has_used_more, 20, "processor time")
        found = sample_cpu(sleeping)
        assert found is not None
        wait_until(lambda: sample_cpu(sleeping) == found._replace(wants_cpu=False), 20, "sleep")
    assert sample_cpu(spinning) is None
