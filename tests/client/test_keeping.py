"""Automatic lease extension: settled leases cause no request and are forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringlog.client.leases.lease_extender import EXTEND_FRACTION, PRUNE_MIN, Lease, LeaseExtender
from ringlog.envelope import messages as m
from ringlog.link.futures import Pending
from ringlog.link.peer import MS
from ringlog.link.peer_request import PeerReply
from ringlog.link.timers import Timers
from ringlog.testing.clock import ManualClock

LEASE_MS = 30_000


class Line:
    """A fake session whose engine extends every requested lease."""

    def __init__(self) -> None:
        self.clock, self.timers = ManualClock(), Timers()
        self.asked: list[list[int]] = []

    def request_jobs(self, message: m.Extend) -> Pending[PeerReply]:
        self.asked.append(np.frombuffer(message.seqs, "<i8").tolist())
        pending: Pending[PeerReply] = Pending()
        pending.resolve(PeerReply(m.ExtendReply("q", len(self.asked[-1]), b"", 0)))
        return pending

    def after(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.timers.fire(self.clock.monotonic_ns())


@pytest.fixture
def line() -> Line:
    return Line()


def lease(line: Line, seq: int, lease_ms: int = LEASE_MS) -> Lease:
    return Lease(seq, seq, 0, lease_ms, line.clock.monotonic_ns() + lease_ms * MS)


def kept(extender: Any) -> int:
    return len(extender._leases)


def test_settled_leases_cause_no_request_and_are_forgotten(line: Line) -> None:
    """A loop over small jobs has each lease only for a moment. The number of stored leases stays bounded."""
    extender = LeaseExtender(line, "q", "worker")  # type: ignore[arg-type]
    for seq in range(1, 5_000):
        one = lease(line, seq)
        extender.extend_until_settled([one])
        one.is_over = True
        assert kept(extender) <= PRUNE_MIN + 1
    line.after(LEASE_MS / 1_000)
    assert line.asked == []
    assert kept(extender) == 0


def test_a_lease_with_an_earlier_deadline_is_extended_in_time(line: Line) -> None:
    extender = LeaseExtender(line, "q", "worker")  # type: ignore[arg-type]
    extender.extend_until_settled([lease(line, 1)])
    short = lease(line, 2, 1_000)
    extender.extend_until_settled([short])
    line.after(1.2 / EXTEND_FRACTION)
    assert [2] in line.asked
    assert short.until_ns > line.clock.monotonic_ns() + 500 * MS


def test_an_open_lease_among_settled_ones_is_extended_before_it_ends(line: Line) -> None:
    extender = LeaseExtender(line, "q", "worker")  # type: ignore[arg-type]
    held = lease(line, 1)
    extender.extend_until_settled([held])
    for seq in range(2, 4 * PRUNE_MIN):
        one = lease(line, seq)
        extender.extend_until_settled([one])
        one.is_over = True
    for _ in range(9):
        line.after(LEASE_MS / 3_000)
        assert not held.is_lost
    assert line.asked
    assert all(asked == [1] for asked in line.asked)
