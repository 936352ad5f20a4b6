"""A thread that waits sleeps, whatever it waits for and whichever process is absent.

Every wait of a client runs at the same time, each in its own thread, over shared memory and over a gateway.
Some began before a process ended or stopped, and some after. For a second, no thread of this program and no
thread of the engine may run most of the time: a loop that looks without sleeping does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

import ringlog
import ringlog.aio
from ringlog.errors import RinglogError, UsageError
from ringlog.testing.real_engine import TestEngine, engine
from tests.support.engines import engine_fixture
from tests.support.http_client import HttpClient
from tests.support.machine import suspended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SETTLE_S, WINDOW_S = 1.0, 1.0
"""Time for connections to end and to be made again, and time for which the threads are observed."""
SHARE_MAX = 0.5
"""Largest share of the time that a thread may run. Retries and heartbeats need less than a tenth."""
LOOKS = 3
"""A thread is busy if it ran too long in each of so many looks."""
RAN_MIN_NS = 20_000_000
"""A thread that ran for less was not measured well enough: others had the processor."""
CALL_MS = 20_000
"""Timeout of the calls: longer than the test looks, so that they wait all the time."""
SHARDS = 2
KINDS = ("wal_shard", "scheduler", "gateway", "http_gateway", "compactor", "reclaimer")

SETTINGS: dict[str, dict[str, object]] = {
    "wal": {"shards": SHARDS},
    "supervisor": {"restart_max": 100},
    "gateway": {"enabled": True},
    "http": {"enabled": True, "port": 0},
    "delivery": {"schedulers": 1},
    "storage": {"enabled": True, "reclaim_interval_s": 0.1},
}
running = engine_fixture("module", **SETTINGS)
Wait = Callable[[ringlog.Client, str], object]
AsyncWait = Callable[[ringlog.aio.Client, str], Awaitable[object]]


def _append(client: ringlog.Client, topic: str) -> object:
    while True:  # Appends are answered while their shard is there.
        client.append(topic, b"x")
        threading.Event().wait(0.1)


def _flush(client: ringlog.Client, topic: str) -> object:
    with client.producer(topic) as producer:
        while True:
            producer.send(b"x")
            producer.flush(CALL_MS / 1_000)
            threading.Event().wait(0.1)


def _keyed(client: ringlog.Client, topic: str) -> object:
    for n in range(1_000):
        client.append_many(topic, [b"x"], idempotency_key=f"{threading.get_ident()}-{n}")
        threading.Event().wait(0.1)
    return None


def _follow(client: ringlog.Client, topic: str) -> object:
    return sum(1 for _ in client.reader(topic, ringlog.LATEST, follow=True))


def _tail(client: ringlog.Client, topic: str) -> object:
    return client.tailer(f"{topic}-quiet", ringlog.LATEST).next(CALL_MS / 1_000)


def _read(client: ringlog.Client, topic: str) -> object:
    return client.read(f"{topic}-quiet", wait_ms=CALL_MS)


def _watch(client: ringlog.Client, topic: str) -> object:
    with client.watch([f"{topic}-quiet"]) as watch:
        return watch.next(CALL_MS / 1_000)


def _claim(client: ringlog.Client, topic: str) -> object:
    return client.queue(f"{topic}-queue").claim(wait_ms=CALL_MS)


def _member(client: ringlog.Client, topic: str) -> object:
    return client.group(f"{topic}-quiet", "g", mode="queue").claim(wait_ms=CALL_MS)


def _create(client: ringlog.Client, topic: str) -> object:
    for n in range(1_000):
        client.topics.create(f"{topic}-{threading.get_ident()}-{n}")
        threading.Event().wait(0.2)
    return None


WAITS: list[Wait] = [_append, _flush, _keyed, _follow, _tail, _read, _watch, _claim, _member, _create]


async def _aio_append(client: ringlog.aio.Client, topic: str) -> object:
    while True:
        await client.append(topic, b"x")
        await asyncio.sleep(0.1)


async def _aio_tail(client: ringlog.aio.Client, topic: str) -> object:
    return await client.tailer(f"{topic}-quiet", ringlog.LATEST).next(CALL_MS / 1_000)


async def _aio_watch(client: ringlog.aio.Client, topic: str) -> object:
    async with client.watch([f"{topic}-quiet"]) as watch:
        return await watch.next(CALL_MS / 1_000)


async def _aio_claim(client: ringlog.aio.Client, topic: str) -> object:
    return await client.queue(f"{topic}-queue").claim(wait_ms=CALL_MS)


ASYNC_WAITS: list[AsyncWait] = [_aio_append, _aio_tail, _aio_watch, _aio_claim]


class Waiters:
    """Calls that wait, each in a thread with a client of its own."""

    def __init__(self, url: str, topics: list[str]) -> None:
        self._url, self._topics = url, topics
        self._clients: list[ringlog.Client] = []
        self._loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def begin(self, prefix: str) -> None:
        """Begin every wait, over every transport and on topics of every shard."""
        before = len(self._threads)
        for at, transport in enumerate(("ring", "ipc")):
            for number, wait in enumerate(WAITS):
                topic = self._topics[(at + number) % len(self._topics)]
                self._start(f"{prefix} {wait.__name__} {transport}", self._call, wait, topic, transport)
            self._start(f"{prefix} asyncio {transport}", self._run_loop, transport)
        assert len(self._threads) > before

    def _start(self, name: str, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name)
        self._threads.append(thread)
        thread.start()

    def _call(self, wait: Wait, topic: str, transport: str) -> None:
        client = ringlog.connect(self._url, transport=transport, timeout_ms=CALL_MS)
        with self._lock:
            self._clients.append(client)
        with suppress(RinglogError):
            wait(client, topic)

    def _run_loop(self, transport: str) -> None:
        async def one(client: ringlog.aio.Client, wait: AsyncWait, topic: str) -> None:
            with suppress(RinglogError):
                await wait(client, topic)

        async def main() -> None:
            client = await ringlog.aio.connect(self._url, transport=transport, timeout_ms=CALL_MS)
            calls = [
                asyncio.create_task(one(client, wait, self._topics[number % len(self._topics)]))
                for number, wait in enumerate(ASYNC_WAITS)
            ]
            try:
                await asyncio.gather(*calls)
            finally:
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                await client.close(0)

        async def registered() -> None:
            task = asyncio.current_task()
            assert task is not None
            with self._lock:
                self._loops.append((asyncio.get_running_loop(), task))
            with suppress(asyncio.CancelledError):
                await main()

        asyncio.run(registered())

    def end(self) -> None:
        """End all waits."""
        with self._lock:
            loops, clients = list(self._loops), list(self._clients)
        for loop, task in loops:
            with suppress(RuntimeError):  # It ended on its own.
                loop.call_soon_threadsafe(task.cancel)
        for client in clients:
            client.close(0)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), thread.name


class Looks(NamedTuple):
    """What a thread did until now, in nanoseconds."""

    ran: int
    queued: int
    """Time for which it could run and had no processor."""


def threads_of(pids: list[int]) -> dict[tuple[int, int], Looks]:
    """Return every thread of these processes by the number of the process and its own."""
    found = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):  # It ended.
                ran, queued, _ = (task / "schedstat").read_text().split()
                found[pid, int(task.name)] = Looks(int(ran), int(queued))
    return found


def busy_threads(pids: list[int]) -> dict[str, float]:
    """Look for a while, and return the threads that hardly slept, with the share of the time that they ran.

    Time for which others had the processor does not count: a loop that never sleeps has a share of 1, also
    on a busy machine.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    before, begun_ns = threads_of(pids), time.monotonic_ns()
    threading.Event().wait(WINDOW_S)
    after, window_ns = threads_of(pids), time.monotonic_ns() - begun_ns
    found = {}
    for (pid, thread), now in after.items():
        if (pid, thread) not in before:
            continue
        ran, queued = (x - y for x, y in zip(now, before[pid, thread], strict=True))
        share = ran / max(window_ns - queued, ran, 1)
        if share > SHARE_MAX and ran > RAN_MIN_NS:
            found[names.get(thread) or f"thread {thread} of {' '.join(psutil.Process(pid).cmdline())}"] = (
                share
            )
    return found


def pids_of(running: TestEngine, *actors: str) -> list[int]:
    """Return the pids of actors, each as its kind and, after a space, its number."""
    return [running.pid_of(kind, int(n or 0)) for kind, _, n in (actor.partition(" ") for actor in actors)]


@contextmanager
def absent(running: TestEngine, *actors: str) -> Iterator[None]:
    """Kill actors, and keep their supervisor from starting them again: it is suspended."""
    pids = pids_of(running, *actors)
    with suspended(running.pid):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        yield


Situation = Callable[[TestEngine], AbstractContextManager[None]]
SITUATIONS: dict[str, Situation] = {
    "nothing happens": lambda _: nullcontext(),
    "a shard is absent": lambda engine: absent(engine, "wal_shard 0"),
    "all shards are absent": lambda engine: absent(engine, *(f"wal_shard {n}" for n in range(SHARDS))),
    "the scheduler is absent": lambda engine: absent(engine, "scheduler"),
    "the gateways are absent": lambda engine: absent(engine, "gateway", "http_gateway"),
    "the others are absent": lambda engine: absent(engine, "compactor", "reclaimer"),
    "a shard is suspended": lambda engine: suspended(*pids_of(engine, "wal_shard 0")),
    "the scheduler is suspended": lambda engine: suspended(*pids_of(engine, "scheduler")),
    "the gateways are suspended": lambda engine: suspended(*pids_of(engine, "gateway", "http_gateway")),
}


def busy_waits(running: TestEngine, name: str, situation: Situation) -> dict[str, float]:
    """Let everyone wait, before and in a situation, and return the threads that hardly slept."""
    for kind in KINDS:
        running.wait_ready(kind)
    topics = [f"{name.replace(' ', '-')}-{n}" for n in range(4)]
    with ringlog.connect(running.url, wait=10) as client:
        for topic in topics:
            client.topics.create(topic)
            client.topics.create(f"{topic}-quiet")
            client.topics.create(f"{topic}-queue", type="queue")
    waiters = Waiters(running.url, topics)
    http = HttpClient(running.http_url)
    try:
        waiters.begin("before")
        stream = http.watch({"topics": {f"{topic}-quiet": {} for topic in topics}})
        with stream, situation(running):
            waiters.begin("after")
            threading.Event().wait(SETTLE_S)
            pids = [os.getpid(), *engine_pids(running)]
            found = busy_threads(pids)
            for _ in range(LOOKS - 1):
                if found:
                    found = {name: share for name, share in busy_threads(pids).items() if name in found}
            return found
    finally:
        http.close()
        waiters.end()


def engine_pids(running: TestEngine) -> list[int]:
    try:
        supervisor = psutil.Process(running.pid)
    except UsageError:
        return []  # No engine runs.
    return [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_whoever_waits_sleeps(running, situation) -> None:
    assert not busy_waits(running, situation, SITUATIONS[situation])


def test_whoever_waits_for_an_engine_sleeps() -> None:
    @contextmanager
    def stopped(running: TestEngine) -> Iterator[None]:
        running.stop()
        yield

    with engine(**SETTINGS) as running:
        assert not busy_waits(running, "stopped", stopped)


def test_a_loop_that_never_sleeps_is_found() -> None:
    end = threading.Event()

    def look_around() -> None:
        while not end.is_set():
            pass

    thread = threading.Thread(target=look_around, name="busy")
    thread.start()
    try:
        assert list(busy_threads([os.getpid()])) == ["busy"]
    finally:
        end.set()
        thread.join()
