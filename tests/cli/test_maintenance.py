"""Requests of commands to background processes, which may start, exit and be replaced meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.cli.maintenance import PASS_S, START_S, ask_until_ready
from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.errors import NotReady, RequestTimeout
from ringlog.link.shard_requests import RequesterReply
from ringlog.testing import ManualClock


class Process:
    """Replies to each request after a time: with its result, or with NotReady because it exited."""

    def __init__(self, *script: tuple[float, bool]) -> None:
        self.clock = ManualClock()
        self.script = list(script)
        self.refused_s = 0.0
        """Time in s that a request takes after the script."""

    def ask(self, request: Any, wanted: Any, *, timeout_s: float) -> RequesterReply[Any]:
        took, is_done = self.script.pop(0) if self.script else (self.refused_s, False)
        self.clock.advance(min(took, timeout_s))
        if took > timeout_s:
            raise RequestTimeout("the process did not answer")
        if not is_done:
            raise NotReady("the process does not run or is restarting")
        return RequesterReply(CheckpointMade(["a"]), memoryview(b""))

    def request(self) -> CheckpointMade:
        return ask_until_ready(self.ask, CheckpointNow(), CheckpointMade, timeout_s=PASS_S, clock=self.clock)

    def elapsed(self) -> float:
        return self.clock.monotonic_ns() / 1e9 - 1


def test_a_process_that_exits_late_in_a_request_is_replaced_without_an_error() -> None:
    """The time of the request that it served does not count as a start."""
    process = Process((4 * START_S, False), (0.0, False), (2 * START_S, False), (1.0, False), (3.0, True))
    assert process.request().files == ["a"]


def test_a_process_that_does_not_start_is_reported_after_the_time_of_a_start() -> None:
    process = Process()
    process.refused_s = 1.1  # An attempt to connect to a process that does not run.
    with pytest.raises(NotReady):
        process.request()
    assert START_S - 2 < process.elapsed() <= START_S + 2


def test_a_process_that_exits_in_every_request_is_reported_at_the_timeout() -> None:
    process = Process()
    process.refused_s = START_S
    with pytest.raises((NotReady, RequestTimeout)):
        process.request()
    assert PASS_S - START_S - 1 < process.elapsed() <= PASS_S


def test_a_request_never_takes_longer_than_its_timeout() -> None:
    process = Process((PASS_S - 1, False), (PASS_S, True))
    with pytest.raises(RequestTimeout):
        process.request()
    assert process.elapsed() <= PASS_S
