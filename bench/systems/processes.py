"""Client processes that work on a topic at the same time: what they did, and when.

Each work is a function of a Start and its arguments. It opens its client, warms up, waits with all others for
the start, works, and returns what it measured.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty
from typing import Any, NamedTuple

import numpy as np

from bench.systems import registry
from bench.systems.base import TOPIC, Batch, Client, LoopClient, Server, Way
from bench.watchers import STAMP_BYTES, stamp

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["bench.systems.processes", "ringlog.client", "redis", "nats", "confluent_kafka", "bench.systems.ringlog"]
)
"""Processes are forked from one that has imported what they need: a hundred start in seconds."""
END_S = 300.0
"""Longest that a round may take."""
WAIT_S = 1.0
"""How long a claim waits; what it waits for is there or on its way."""
PAYLOAD = bytes(100)
WARM_CYCLES = 10


# -- processes --------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What one process does: `function(start, *arguments)`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    topic: str = TOPIC
    way: Way = Way.QUEUE


@dataclass(frozen=True)
class Start:
    """What a work begins with."""

    name: str
    address: str
    topic: str
    way: Way
    number: int
    ready: Any
    go: Any

    def connect(self) -> Any:
        """A new client of the server. Any: a Client, or a LoopClient in the works that need one."""
        client = registry.connect(self.name, self.address, self.topic, self.way)
        client.number = self.number
        return client

    def wait(self) -> None:
        """Report to be ready, and wait until all are."""
        self.ready.release()
        self.go.wait()


def _main(start: Start, work: Work, results: Any) -> None:
    results.put((start.number, work.function(start, *work.arguments)))


class Ran(NamedTuple):
    """What the works returned, in order, and seconds of processor time of the server from their start on."""

    results: list[Any]
    server_cpu_s: float


def run(server: Server, works: Sequence[Work]) -> Ran:
    """Run each work in a process of its own; raises RuntimeError when one fails."""
    ready, go, results = _forks.Semaphore(0), _forks.Event(), _forks.Queue()
    processes = [
        _forks.Process(
            target=_main,
            args=(
                Start(server.name, server.address, work.topic, work.way, n, ready, go),
                work,
                results,
            ),
        )
        for n, work in enumerate(works)
    ]
    try:
        for process in processes:
            process.start()
        _collect(processes, ready.acquire)
        before = server.cpu_s()
        go.set()
        found = dict(_collect(processes, results.get))
        used = server.cpu_s() - before
        for process in processes:
            process.join()
    except BaseException:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        raise
    return Ran([found[n] for n in range(len(works))], used)


def _collect(processes: Sequence[Any], take: Any) -> list[Any]:
    """One answer of each; raises when a process failed, instead of waiting for it forever."""
    found: list[Any] = []
    ends = time.monotonic() + END_S
    while len(found) < len(processes):
        try:
            answer = take(timeout=1.0)
        except Empty:
            answer = None
        if answer:
            found.append(answer)
        elif any(process.exitcode for process in processes) or time.monotonic() > ends:
            raise RuntimeError("a client process failed")
    return found


class Span(NamedTuple):
    """What one process did between two moments of the clock that all share."""

    done: int
    begun: float
    ended: float
    cpu_s: float = 0.0


def rate(spans: Sequence[Span]) -> float:
    """Done in a second by all together."""
    took = max(span.ended for span in spans) - min(span.begun for span in spans)
    return sum(span.done for span in spans) / took


# -- emptying a queue -------------------------------------------------------------------------------------


class How(StrEnum):
    """How a worker works."""

    APART = "a claim and an ack after the other, each waited for"
    NEXT = "an ack and the next claim in one call, which is waited for"
    LOOP = "as a program's loop does it"


async def _calls(client: Client, batch: int) -> AsyncIterator[int]:
    while payloads := (jobs := await client.claim(batch, 0)).payloads:
        await client.ack(jobs)
        yield len(payloads)


async def _nexts(client: LoopClient, batch: int) -> AsyncIterator[int]:
    jobs = await client.claim(batch, 0)
    while payloads := jobs.payloads:
        jobs = await client.next(jobs, batch)
        yield len(payloads)
    # A worker that stops has one more, which is not counted.


def _empty(start: Start, batch: int, how: How, seconds: float) -> Span:
    client: LoopClient = start.connect()

    async def work() -> Span:
        await client.ack(await client.claim(1, 0))  # Connects and opens what there is to open.
        start.wait()
        begun, done = time.monotonic(), 0
        ways: dict[How, Callable[[], AsyncIterator[int]]] = {
            How.APART: lambda: _calls(client, batch),
            How.NEXT: lambda: _nexts(client, batch),
            How.LOOP: lambda: client.loop(batch),
        }
        async with aclosing(ways[how]()) as working:  # type: ignore[type-var]
            async for count in working:
                done += count
                if time.monotonic() - begun > seconds:
                    break
        return Span(done, begun, time.monotonic())

    try:
        return client.run(work())
    finally:
        client.close()


@dataclass(frozen=True)
class Emptied:
    """One round: jobs a second over all workers, and how many each had."""

    jobs_per_s: float
    served: np.ndarray[Any, Any]
    """(workers,) jobs."""

    @property
    def variation(self) -> float:
        """Coefficient of variation of the jobs served."""
        return float(self.served.std() / self.served.mean())


def empty(
    server: Server, workers: int, batch: int, seconds: float = END_S, *, how: How = How.APART
) -> Emptied:
    """So many processes claim and ack `batch` jobs at a time, until none is left or `seconds` are over."""
    spans = run(server, [Work(_empty, (batch, how, seconds))] * workers).results
    return Emptied(rate(spans), np.array([span.done for span in spans], dtype=np.int64))


# -- cycles -----------------------------------------------------------------------------------------------


class Cycled(NamedTuple):
    """Cycles (put, claim, ack) of one job each: a second, and microseconds of processor time for each."""

    per_s: float
    client_us: float
    server_us: float


def _cycle(start: Start, batch: int, seconds: float) -> Span:
    client: Client = start.connect()
    payloads = [PAYLOAD] * batch

    async def once() -> int:
        if batch == 1:
            await client.put(PAYLOAD)
        else:
            await client.put_many(payloads)
        jobs: Batch = await client.claim(batch, WAIT_S)
        await client.ack(jobs)
        return len(jobs.payloads)

    async def work() -> Span:
        await client.ack(await client.claim(1, 0))  # Connects and opens what there is to open.
        for _ in range(WARM_CYCLES):
            await once()
        start.wait()
        begun, cpu, done = time.monotonic(), time.process_time(), 0
        while time.monotonic() - begun < seconds:
            done += await once()
        return Span(done, begun, time.monotonic(), time.process_time() - cpu)

    try:
        return client.run(work())
    finally:
        client.close()


def cycles(server: Server, topic: str, workers: int, batch: int, seconds: float) -> Cycled:
    """So many processes put, claim and ack `batch` jobs a call on one queue, each call waited for."""
    spans, used = run(server, [Work(_cycle, (batch, seconds), topic)] * workers)
    done = max(sum(span.done for span in spans), 1)
    return Cycled(rate(spans), sum(span.cpu_s for span in spans) / done * 1e6, used / done * 1e6)


# -- single messages --------------------------------------------------------------------------------------


def _deliveries(start: Start, count: int) -> np.ndarray[Any, Any]:
    client: Client = start.connect()

    async def work() -> list[int]:
        await client.ack(await client.claim(1, 0))  # Connects and opens what there is to open.
        start.wait()
        times: list[int] = []
        ends = time.monotonic() + END_S
        while len(times) < count and time.monotonic() < ends:
            jobs = await client.claim(1, WAIT_S)
            now = time.monotonic_ns()
            times += [
                now - int.from_bytes((payload or b"")[:STAMP_BYTES], "little") for payload in jobs.payloads
            ]
            if jobs.payloads:
                await client.ack(jobs)
        return times

    try:
        return np.array(client.run(work()), dtype=np.int64)
    finally:
        client.close()


def _paced_puts(start: Start, count: int, pause_s: float) -> np.ndarray[Any, Any]:
    client: Client = start.connect()

    async def work() -> list[int]:
        start.wait()
        times = []
        for _ in range(count):
            # NATS's client needs its loop meanwhile; the others have none.
            await _pause(start, pause_s)
            begun = time.monotonic_ns()
            await client.put(stamp() + PAYLOAD[STAMP_BYTES:])
            times.append(time.monotonic_ns() - begun)
        return times

    try:
        return np.array(client.run(work()), dtype=np.int64)
    finally:
        client.close()


async def _pause(start: Start, pause_s: float) -> None:
    if start.name == "nats":
        await asyncio.sleep(pause_s)
    else:
        time.sleep(pause_s)


def deliveries(
    server: Server, topic: str, way: Way, count: int, pause_s: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A consumer waits, and a message is put every `pause_s`. Nanoseconds of each, (count,): from before the
    put until the consumer has it, and of the put alone."""
    works = [Work(_deliveries, (count,), topic, way), Work(_paced_puts, (count, pause_s), topic, way)]
    times, puts = run(server, works).results
    return times, puts


def _appends(start: Start, count: int, warm: int) -> np.ndarray[Any, Any]:
    client: Client = start.connect()

    async def work() -> list[int]:
        for _ in range(warm):
            await client.put(PAYLOAD)
        start.wait()
        times = []
        for _ in range(count):
            begun = time.monotonic_ns()
            await client.put(PAYLOAD)
            times.append(time.monotonic_ns() - begun)
        return times

    try:
        return np.array(client.run(work()), dtype=np.int64)
    finally:
        client.close()


def appends(server: Server, topic: str, count: int, warm: int = 20) -> np.ndarray[Any, Any]:
    """One message after the other from one process, each waited for: nanoseconds of each, (count,)."""
    found: np.ndarray[Any, Any] = run(server, [Work(_appends, (count, warm), topic, Way.WATCH)]).results[0]
    return found


def _windows(start: Start, in_flight: int, seconds: float) -> Span:
    client: Client = start.connect()
    payloads = [PAYLOAD] * in_flight

    async def work() -> Span:
        await client.send(payloads)
        start.wait()
        begun, done = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            await client.send(payloads)
            done += in_flight
        return Span(done, begun, time.monotonic())

    try:
        return client.run(work())
    finally:
        client.close()


def windows(server: Server, topics: Sequence[str], in_flight: int, seconds: float) -> float:
    """A producer a topic, each with so many messages in flight: messages a second over all."""
    works = [Work(_windows, (in_flight, seconds), topic, Way.WATCH) for topic in topics]
    return rate(run(server, works).results)


# -- a client's first call --------------------------------------------------------------------------------


def _modules(start: Start) -> list[str]:
    """Modules that a process has imported once a client was used."""
    start.wait()
    client: Client = start.connect()
    client.run(client.put(PAYLOAD))
    client.close()
    return [name for name in sys.modules if not name.startswith("__")]


def _first_ack(start: Start, modules: Sequence[str]) -> float:
    for name in modules:
        with suppress(ImportError):  # Made by another module, not found by its name.
            importlib.import_module(name)
    start.wait()
    begun = time.perf_counter()
    client: Client = start.connect()
    client.run(client.put(PAYLOAD))
    took = time.perf_counter() - begun
    client.close()
    return took


def first_acks(server: Server, topic: str, count: int) -> list[float]:
    """Seconds from making a client object to its first ack, each in a process that has only imported."""
    modules = run(server, [Work(_modules, (), topic, Way.WATCH)]).results[0]
    work = Work(_first_ack, (modules,), topic, Way.WATCH)
    return [run(server, [work]).results[0] for _ in range(count)]
