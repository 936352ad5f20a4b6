"""Worker processes that empty a queue, and one that waits for jobs: what they did, and when."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty
from typing import Any

import numpy as np

from bench.queue_peers import WORKERS, Server, Worker
from bench.watchers import STAMP_BYTES, stamp

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["bench.queue_load", "ringlog.client", "redis"])
"""Processes are forked from one that has imported what they need: a hundred start in seconds."""
END_S = 300.0
"""Longest that a round may take."""


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


class How(StrEnum):
    """How a worker works."""

    APART = "a claim and an ack after the other, each waited for"
    NEXT = "an ack and the next claim in one call, which is waited for"
    LOOP = "as a program's loop does it"


def _calls(worker: Worker, batch: int) -> Iterator[int]:
    while payloads := (jobs := worker.claim(batch, 0)).payloads:
        worker.ack(jobs)
        yield len(payloads)


def _nexts(worker: Worker, batch: int) -> Iterator[int]:
    jobs = worker.claim(batch, 0)
    while payloads := jobs.payloads:
        jobs = worker.next(jobs, batch)
        yield len(payloads)
    # Whoever stops has one more, which nobody counts.


def _work(
    name: str, address: str, batch: int, how: How, seconds: float, ready: Any, go: Any, results: Any
) -> None:
    worker = WORKERS[name](address)
    worker.ack(worker.claim(1, 0))  # Connects and opens what there is to open.
    ready.release()
    go.wait()
    begun = time.monotonic()
    done = 0
    ways: dict[How, Callable[[], Iterator[int]]] = {
        How.APART: lambda: _calls(worker, batch),
        How.NEXT: lambda: _nexts(worker, batch),
        How.LOOP: lambda: worker.loop(batch),
    }
    with closing(ways[how]()) as working:  # type: ignore[type-var]
        for count in working:
            done += count
            if time.monotonic() - begun > seconds:
                break
    results.put((done, begun, time.monotonic()))
    worker.close()


def empty(
    server: Server, workers: int, batch: int, seconds: float = END_S, *, how: How = How.APART
) -> Emptied:
    """So many processes claim and ack `batch` jobs at a time, until none is left or `seconds` are over."""
    ready, go, results = _forks.Semaphore(0), _forks.Event(), _forks.Queue()
    processes = [
        _forks.Process(
            target=_work,
            args=(server.name, server.address, batch, how, seconds, ready, go, results),
        )
        for _ in range(workers)
    ]
    for process in processes:
        process.start()
    _collect(processes, ready.acquire)
    go.set()
    found = _collect(processes, results.get)
    for process in processes:
        process.join()
    took = max(end for _, _, end in found) - min(begun for _, begun, _ in found)
    served = np.array([done for done, _, _ in found], dtype=np.int64)
    return Emptied(float(served.sum() / took), served)


def _collect(processes: Sequence[Any], take: Any) -> list[Any]:
    """One answer of each; raises when a process failed, instead of waiting for it for ever."""
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
            for process in processes:
                process.kill()
            raise RuntimeError("a worker failed")
    return found


def _wait(name: str, address: str, count: int, ready: Any, results: Any) -> None:
    worker = WORKERS[name](address)
    ready.release()
    times: list[int] = []
    while len(times) < count:
        jobs = worker.claim(1, 5.0)
        now = time.monotonic_ns()
        times += [now - int.from_bytes(payload[:STAMP_BYTES], "little") for payload in jobs.payloads]
        if jobs.payloads:
            worker.ack(jobs)
    results.put(np.array(times, dtype=np.int64))
    worker.close()


def wake_ups(server: Server, count: int, pause_s: float = 0.003) -> tuple[Any, Any]:
    """A worker waits in a claim, and a job is put every few ms. Nanoseconds of each, (count,): from before
    the put until the worker has the job, and of the put alone."""
    ready, results = _forks.Semaphore(0), _forks.Queue()
    process = _forks.Process(target=_wait, args=(server.name, server.address, count, ready, results))
    process.start()
    _collect([process], ready.acquire)
    putter = WORKERS[server.name](server.address)
    puts = []
    for _ in range(count):
        begun = time.monotonic_ns()
        putter.put(stamp() + bytes(92))
        puts.append(time.monotonic_ns() - begun)
        time.sleep(pause_s)
    times = _collect([process], lambda timeout: (results.get(timeout=timeout),))[0][0]
    process.join()
    putter.close()
    return times, np.array(puts, dtype=np.int64)
