"""Looking on for the answer of a shard, and when a client sleeps for it instead."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ringlog.client.shell import CROWDED_WAITS, Shell
from ringlog.link.pending import Pending
from ringlog.testing.clock import ManualClock


class Calls:
    """A ring whose answer is there after so many looks."""

    def __init__(self, pending: Pending[Any], looks: int) -> None:
        self.left, self.looked, self._pending = looks, 0, pending

    def look(self, times: int) -> bool:
        self.looked += 1
        self.left -= 1
        return self.left <= 0

    def pump(self) -> bool:
        self._pending.resolve("answer")
        return True


class Links:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def can_look_on(self) -> bool:
        return True

    def lone_calls(self) -> Calls:
        return self.calls


class Session:
    def __init__(self, calls: Calls) -> None:
        self.links = Links(calls)


def looked_on(looks: int, *, crowded: int = 0) -> tuple[Shell, Pending[Any], Calls]:
    pending: Pending[Any] = Pending()
    calls = Calls(pending, looks)
    make: Any = lambda fds: Session(calls)  # noqa: E731
    shell = Shell(make)
    shell._crowded = crowded
    shell._clock = ManualClock()  # On a loaded machine the usual wait may be over before the first look.
    shell._leader = threading.current_thread()
    with shell.lock:
        shell._look_on(pending, shell._clock.monotonic_ns())
    shell.descriptors.close()
    return shell, pending, calls


@pytest.mark.interpreted
def test_an_answer_that_comes_soon_is_taken_awake() -> None:
    _, pending, calls = looked_on(3)
    assert pending.take() == "answer"
    assert calls.looked == 3


@pytest.mark.interpreted
def test_where_somebody_computes_the_answer_is_slept_for_at_once() -> None:
    shell, pending, calls = looked_on(1, crowded=CROWDED_WAITS)
    assert not pending.is_done
    assert calls.looked == 0
    assert shell._crowded == CROWDED_WAITS - 1
