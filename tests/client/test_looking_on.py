"""Spinning for a reply through shared memory, and when a client sleeps instead."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ringlog.client.connection import leadership as leadership_module
from ringlog.client.connection.green_threads import are_green
from ringlog.client.connection.shell import ThreadedShell
from ringlog.link.futures import Pending
from ringlog.spin_wait import SPIN_REPLY_NS

pytestmark = pytest.mark.interpreted


class Links:
    """Fake links of a ring whose reply arrives after a number of spins."""

    def __init__(self, pending: Pending[Any], looks: int, *, is_crowded: bool = False) -> None:
        self.left, self.looked, self.pumped = looks, 0, 0
        self.is_crowded = is_crowded
        self._pending = pending

    def spin_words(self) -> tuple[list[memoryview], list[int]]:
        return ([], []) if self.is_crowded else ([memoryview(bytes(8))], [0])

    def look(self, words: list[memoryview], seen: list[int], ns: int) -> bool:
        assert len(words) == len(seen) == 2, "the ring's, and that of who arrives"
        assert 0 < ns <= SPIN_REPLY_NS
        self.looked += 1
        self.left -= 1
        return True

    def pump(self) -> bool:
        self.pumped += 1
        if self.left <= 0:
            self._pending.resolve("answer")
        return True


class Session:
    def __init__(self, links: Links) -> None:
        self.links = links


class LookingOn:
    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted

    def should_spin(self, now_ns: int) -> bool:
        return self._is_wanted


class Clock:
    """A clock that advances by a fifth of the maximum spin time at each read."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        self.now_ns += SPIN_REPLY_NS // 5
        return self.now_ns


def looked_on(
    monkeypatch: pytest.MonkeyPatch, looks: int, *, is_wanted: bool = True, is_crowded: bool = False
) -> tuple[Pending[Any], Links]:
    pending: Pending[Any] = Pending()
    links = Links(pending, looks, is_crowded=is_crowded)
    make: Any = lambda fds: Session(links)  # noqa: E731
    shell = ThreadedShell(make)
    monkeypatch.setattr(leadership_module, "spin_wait", links.look)
    leadership = shell.leadership
    leadership._clock, leadership._spin_policy = Clock(), LookingOn(is_wanted=is_wanted)
    leadership.leader = threading.current_thread()
    with shell.lock:
        leadership._spin_wait(pending, 0)
    shell.descriptors.close()
    return pending, links


def test_a_reply_that_arrives_soon_is_received_by_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    pending, links = looked_on(monkeypatch, 3)
    assert pending.result() == "answer"
    assert (links.looked, links.pumped) == (3, 3)


def test_a_client_stops_spinning_if_no_reply_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    pending, links = looked_on(monkeypatch, 1_000)
    assert not pending.is_done
    assert links.looked <= 5


@pytest.mark.parametrize(("is_wanted", "is_crowded"), [(False, False), (True, True)])
def test_a_client_does_not_spin_when_spinning_is_too_expensive(
    monkeypatch: pytest.MonkeyPatch, is_wanted: bool, is_crowded: bool
) -> None:
    pending, links = looked_on(monkeypatch, 1, is_wanted=is_wanted, is_crowded=is_crowded)
    assert not pending.is_done
    assert links.looked == 0


def test_a_spinning_thread_notices_a_thread_that_starts_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread may wait for another reply, so it must not wait for the end of the spin."""
    pending: Pending[Any] = Pending()
    links = Links(pending, 2)
    make: Any = lambda fds: Session(links)  # noqa: E731
    shell = ThreadedShell(make)
    other: Pending[Any] = Pending()
    rounds: list[bool] = []

    def look(words: list[memoryview], seen: list[int], ns: int) -> bool:
        if not rounds:
            follower.start()
            while not shell.leadership.followers:
                follower.join(0.001)
        rounds.append(words[-1][0] != seen[-1])
        return links.look(words, seen, ns)

    def follow() -> None:
        with shell.lock:
            shell.leadership._follow(other, None)

    follower = threading.Thread(target=follow)
    monkeypatch.setattr(leadership_module, "spin_wait", look)
    leadership = shell.leadership
    leadership._clock, leadership._spin_policy = Clock(), LookingOn(is_wanted=True)
    leadership.leader = threading.current_thread()
    with shell.lock:
        leadership._spin_wait(pending, 0)
        other.resolve(None)
    follower.join(10)
    shell.descriptors.close()
    assert rounds == [True, False]


def test_green_threads_never_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Green threads share one operating-system thread, which a spin would block."""
    assert not are_green()
    with monkeypatch.context() as patched:
        patched.setattr(threading, "get_ident", lambda: 1)
        assert are_green()
    monkeypatch.setattr(leadership_module, "are_green", lambda: True)
    pending, links = looked_on(monkeypatch, 1)
    assert not pending.is_done
    assert links.looked == 0
