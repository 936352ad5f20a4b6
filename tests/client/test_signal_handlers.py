"""A signal handler can use the client that the main thread waits with, or its call fails at once."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ringlog
from ringlog.errors import CalledInside, RinglogError
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from ringlog.testing.real_engine import wait_until

__all__ = ["ringlog_engine", "ringlog_topic"]
Use = Callable[[ringlog.Client, str], Any]

WAITS: dict[str, Use] = {
    "claim": lambda client, topic: client.queue(f"{topic}-q").claim(wait_ms=60_000),
    "jobs": lambda client, topic: next(client.queue(f"{topic}-q").jobs()),
    "read": lambda client, topic: client.read(topic, after=1, wait_ms=30_000),
    "tailer": lambda client, topic: client.tailer(topic, start=2).next(60),
    "reader": lambda client, topic: next(iter(client.reader(topic, start=2, follow=True))),
}
USES: dict[str, Use] = {
    "append": lambda client, topic: client.append(f"{topic}-other", b"x"),
    "claim": lambda client, topic: client.queue(f"{topic}-q").claim(),
    "read": lambda client, topic: client.read(topic),
    "stats": lambda client, topic: client.queue(f"{topic}-q").stats(),
    "close": lambda client, topic: client.close(2),
}


def sleeps(client: ringlog.Client) -> bool:
    """Return True while the main thread sleeps on the client's descriptors."""
    leadership = client._shell.leadership
    return leadership.leader is threading.main_thread() and leadership.wakes_ns > 0


@pytest.fixture
def handled() -> Iterator[list[Callable[[], None]]]:
    """A list whose first function runs on SIGUSR2."""
    calls: list[Callable[[], None]] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: calls[0]())
    yield calls
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", ["ring", "ipc"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("wait", WAITS)
def test_a_signal_handler_can_use_the_client_its_thread_waits_with(
    ringlog_engine, ringlog_topic, handled, wait, use, transport
):
    if wait == "tailer" and transport == "ipc":
        pytest.skip("files are read on the engine's host only")
    topic, outcomes = ringlog_topic(), queue.Queue[str]()
    with ringlog.connect(ringlog_engine.url, wait=10) as steady:
        steady.append(topic, b"first")
        steady.topics.create(f"{topic}-q", type="queue")
        client = ringlog.connect(ringlog_engine.url, wait=10, transport=transport)
        main = threading.get_ident()

        def handle() -> None:
            outcome = "done"
            try:
                USES[use](client, topic)
            except CalledInside:
                outcome = "awake"  # The client had just woken up. The test sends the signal again.
            finally:
                outcomes.put(outcome)

        def interrupt() -> None:
            outcome = "awake"
            while outcome == "awake":
                wait_until(lambda: sleeps(client), 20, "the main thread to sleep")
                signal.pthread_kill(main, signal.SIGUSR2)
                outcome = outcomes.get(timeout=20)
            steady.append(topic, b"second")
            steady.queue(f"{topic}-q").put(b"job")

        handled.append(handle)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            assert WAITS[wait](client, topic) or use == "close"
        except (RinglogError, StopIteration):
            assert use == "close"
        thread.join(20)
        assert not thread.is_alive()
        if use != "close":
            assert client.append(f"{topic}-after", b"x").count == 1
        client.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("use", USES)
def test_a_handler_that_interrupts_the_clients_work_fails_at_once(client, topic, use):
    """The interrupted work is incomplete. Without the error both calls could wait for each other."""
    client.topics.create(f"{topic}-q", type="queue")
    client.append(topic, b"first")
    producer = client.producer(topic)
    with client._shell.checked_lock, client._shell.guarded_session:
        with pytest.raises(CalledInside):
            USES[use](client, topic)
        with pytest.raises(CalledInside):
            producer.send(b"x")
    assert client.append(f"{topic}-after", b"x").count == 1


@pytest.mark.timeout(60)
def test_a_handler_that_uses_the_interrupted_reader_fails(ringlog_engine, ringlog_topic, handled):
    """A reader has one user at a time. Without the error the handler would wait for itself."""
    topic, told, done = ringlog_topic(), [], threading.Event()
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        client.append(topic, b"first")
        reader, main = client.reader(topic, start=2, follow=True), threading.get_ident()

        def handle() -> None:
            try:
                next(iter(reader))
            except CalledInside as e:
                told.append(e)
            finally:
                done.set()

        def interrupt() -> None:
            wait_until(lambda: sleeps(client), 20, "the main thread to sleep")
            signal.pthread_kill(main, signal.SIGUSR2)
            assert done.wait(20)
            client.append(topic, b"second")

        handled.append(handle)
        thread = threading.Thread(target=interrupt)
        thread.start()
        assert next(iter(reader)).data == b"second"
        thread.join(20)
        assert len(told) == 1
