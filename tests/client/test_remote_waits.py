"""Reads that wait at the gateway, and the ends of gateways while they wait."""

from __future__ import annotations

import pytest

from ringlog.client.connection.session import Session
from ringlog.client.read.pages import Cursor
from ringlog.client.read.remote_source import RemoteSource
from ringlog.envelope import messages as m
from ringlog.errors import RequestTimeout
from ringlog.limits import READ_SLICE_MS_MAX, WAIT_MS_MAX
from ringlog.link.address import Address
from ringlog.link.futures import Pending, resolved, run_steps
from ringlog.link.peer_request import PeerReply
from ringlog.testing.clock import ManualClock

pytestmark = pytest.mark.interpreted


class NoDescriptors:
    def watch(self, fd):
        raise AssertionError("no connection is made")

    unwatch = watch


class FakeGateway:
    """The links to a gateway that answers each Read when its wait is over.

    `ends_after_s`: the gateway ends this long after a Read came. Its successor answers after `restart_s`, and
    waits from the start.
    """

    def __init__(self, clock, *, records_at_s=None, ends_after_s=None, restart_s=0.0):
        self.clock, self.records_at_s = clock, records_at_s
        self.ends_after_s, self.restart_s = ends_after_s, restart_s
        self.waits: list[int] = []
        self.began_s = clock.monotonic_ns() / 1e9

    @property
    def passed_s(self):
        return self.clock.monotonic_ns() / 1e9 - self.began_s

    def connect(self):
        return resolved(None)

    def request(self, shard, request, deadline_ns, attachment=None):
        self.waits.append(request.wait_ms)
        if self.ends_after_s is not None:
            self.clock.advance(min(self.ends_after_s, request.wait_ms / 1e3) + self.restart_s)
        wait_s = request.wait_ms / 1e3
        is_news = self.records_at_s is not None and self.records_at_s <= self.passed_s + wait_s
        self.clock.advance(self.records_at_s - self.passed_s if is_news else wait_s)
        pending: Pending[PeerReply] = Pending()
        if self.clock.monotonic_ns() >= deadline_ns:
            pending.fail(RequestTimeout("the gateway did not answer", outcome="unknown"))
        else:
            seq = request.after + is_news
            pending.resolve(PeerReply(m.ReadReply(request.topic, 7, 3, request.after, seq, seq, 1, True, 0)))
        return pending


def wait(clock, gateway, wait_s, *, timeout_ms=10_000):
    """Wait for records after record 5."""
    session = Session(
        Address("/nowhere"), client_id="c", timeout_ms=timeout_ms, fds=NoDescriptors(), transport="ipc",
        clock=clock,
    )  # fmt: skip
    session.links.close(None)
    session.links = gateway
    source = RemoteSource(session, "t", clock=clock)
    return run_steps(source.fetch(Cursor(3, 5), limit=10, bytes_max=1_000, wait_s=wait_s)).result()


def test_a_long_wait_is_a_series_of_short_reads(clock: ManualClock):
    gateway = FakeGateway(clock)
    result = wait(clock, gateway, 12.0004)
    assert (result.head_seq, result.examined) == (5, 5)
    assert gateway.waits == [READ_SLICE_MS_MAX, READ_SLICE_MS_MAX, 2_001]
    gateway = FakeGateway(clock)
    wait(clock, gateway, 1e9)
    assert sum(gateway.waits) == WAIT_MS_MAX
    gateway = FakeGateway(clock)
    wait(clock, gateway, 0)
    assert gateway.waits == [0]


def test_a_wait_ends_with_the_first_record(clock: ManualClock):
    gateway = FakeGateway(clock, records_at_s=7.5)
    assert wait(clock, gateway, 30).examined == 6
    assert gateway.passed_s == pytest.approx(7.5)


@pytest.mark.parametrize("timeout_ms", [2_000, 10_000])
@pytest.mark.parametrize("ends_after_s", [0, 2, READ_SLICE_MS_MAX / 1e3])
def test_a_wait_survives_the_end_of_its_gateway(clock: ManualClock, timeout_ms, ends_after_s):
    """A quiet topic is no timeout, whenever the gateway ends, if its successor starts within the timeout."""
    gateway = FakeGateway(clock, ends_after_s=ends_after_s, restart_s=timeout_ms / 1e3 - 0.5)
    assert wait(clock, gateway, 30, timeout_ms=timeout_ms).examined == 5
