"""Throttling of a compaction pass while shards commit small batches.

A pass pauses next to a trickle of appends. It does not pause without load, under heavy load, or with a
backlog.
"""

from __future__ import annotations

import pytest

from ringlog.actors.compactor.throttle import (
    PAUSE_S,
    SAMPLE_INTERVAL_NS,
    TRICKLE_BYTES_PER_S,
    CompactionThrottle,
)
from ringlog.testing.clock import ManualClock


class Shards:
    """Simulated commit counters of the shards, and the number of heartbeats of the pass."""

    def __init__(self) -> None:
        self.groups = self.bytes = self.beats = 0
        self.clock = ManualClock()
        self.pace = CompactionThrottle(self.clock, lambda: (self.groups, self.bytes), self._beat)

    def _beat(self) -> None:
        self.beats += 1

    def take(self, groups: int, bytes_per_s: float) -> None:
        """Advance the clock by one sample interval, in which the shards commit this much."""
        self.clock.advance(SAMPLE_INTERVAL_NS / 1e9)
        self.groups += groups
        self.bytes += int(bytes_per_s * SAMPLE_INTERVAL_NS / 1e9)

    def rested_s(self) -> float:
        """Return how long the pass pauses after its next piece, in seconds."""
        before = self.clock.monotonic_ns()
        self.pace.pause_if_contended()
        return (self.clock.monotonic_ns() - before) / 1e9


@pytest.mark.parametrize(
    ("groups", "bytes_per_s", "rests"),
    [(0, 0, False), (1, 200, True), (150, 600_000, True), (150, TRICKLE_BYTES_PER_S * 1.1, False),
     (2, 100_000_000, False)],
    ids=["nobody", "one append", "a client that waits for each", "many of them", "large groups"],
)  # fmt: skip
def test_a_pass_pauses_while_clients_wait_for_small_commit_batches(
    groups: int, bytes_per_s: float, rests: bool
) -> None:
    shards = Shards()
    shards.take(groups, bytes_per_s)
    assert shards.rested_s() == pytest.approx(PAUSE_S if rests else 0)
    assert shards.beats == rests, "a pause must send a heartbeat"


def test_a_backlog_is_absorbed_at_full_speed() -> None:
    """Otherwise the log could grow until the disk is full, only because a client waits."""
    shards = Shards()
    shards.take(10, 1_000)
    shards.pace.is_urgent = True
    assert shards.rested_s() == 0
    shards.pace.is_urgent = False
    assert shards.rested_s() == pytest.approx(PAUSE_S)


def test_a_sample_is_valid_for_one_interval() -> None:
    shards = Shards()
    shards.take(10, 1_000)
    assert shards.rested_s() > 0
    assert shards.rested_s() > 0, "the previous sample must still be valid"
    for _ in range(2):
        shards.take(0, 0)
        found = shards.rested_s()
    assert found == 0, "no client waits any more"


def test_a_pausing_pass_absorbs_more_than_a_trickle_adds() -> None:
    """The log that waits for compaction shrinks under any trickle of writes."""
    piece = 64 << 10
    assert piece / (PAUSE_S + 0.002) > 1.5 * TRICKLE_BYTES_PER_S
