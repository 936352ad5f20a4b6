"""What all systems have in common: a server with topics, and a Python client with a few calls.

Calls are coroutines, because one client (NATS) is for asyncio alone: loops over calls are written once. The
coroutines of a client that blocks never suspend, so that waiting costs it nothing more.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import psutil

from bench.host import BUILD, ran_s

T = TypeVar("T")

TOPIC = "jobs"
CONNECT_S = 60.0
LEASE_MS = 120_000
"""Longer than any round: what is measured is work, not leases that end."""
_READY_LOOK_S = 0.001


class Way(StrEnum):
    """How messages of a topic are consumed. The peers have one way; ours are three."""

    QUEUE = "queue"
    GROUP = "group"
    WATCH = "watch"
    """Not consumed by claims: a log, which may be watched."""


class Batch(NamedTuple):
    """Messages of one claim."""

    payloads: Sequence[bytes | None]
    names: Any
    """What the system needs to ack them."""


class Client(Protocol):
    """A connection that is used for one topic."""

    number: int
    """Of this client among those that work on the topic; for a system that shares a topic out by hand."""

    async def put(self, payload: bytes) -> None:
        """Add a message; returns when it is as durable as the server was told to make it."""

    async def put_many(self, payloads: Sequence[bytes]) -> None:
        """Add messages in one call, in the quickest way there is."""

    async def send(self, payloads: Sequence[bytes]) -> None:
        """Add messages, each for itself and all in flight together; returns when all are acked."""

    async def claim(self, most: int, wait_s: float) -> Batch:
        """Take up to `most`, waiting up to `wait_s` for the first."""

    async def ack(self, jobs: Batch) -> None:
        """They are done."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run calls to their end."""

    def close(self) -> None:
        """Close the connection."""


class LoopClient(Client, Protocol):
    """A client that can also be used as a program's loop over jobs does."""

    async def next(self, jobs: Batch, most: int) -> Batch:
        """Ack these and claim up to `most` others in one round trip, without waiting for some."""

    def loop(self, batch: int) -> AsyncIterator[int]:
        """Work on one job after the other, or on batches, in the quickest way; yields how many were done."""


class Blocking:
    """A client whose calls block."""

    number = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """See Client.run: the coroutine is at its end when it returns the first time."""
        try:
            work.send(None)
        except StopIteration as e:
            result: T = e.value
            return result
        raise RuntimeError("a client that blocks has waited for an event loop")


class Server(Protocol):
    """A system that runs; empty when it was started."""

    name: str
    address: str
    started_s: float
    """Seconds from the command until it was ready."""
    warm_s: float
    """How long it is used before it is measured."""

    def create(self, topic: str, way: Way, consumers: int = 1) -> None:
        """Make a topic for so many consumers."""

    def spread(self, count: int) -> list[str]:
        """Return names of so many topics which together use all that the system has."""

    def cpu_s(self) -> float:
        """Seconds of processor time that its data path has used."""

    def memory_bytes(self) -> float:
        """Memory of all its processes, pages that several share counted once (PSS)."""

    def close(self) -> None:
        """Stop it and remove what it left."""


class QueueServer(Server, Protocol):
    """One whose queue can be filled beforehand."""

    def fill(self, topic: str, payload: bytes, count: int, frame: int) -> None:
        """Put so many jobs, all alike; `frame` records at a time where the system has such a thing."""

    def end(self, topic: str, loops: int) -> None:
        """Have so many loops end when all jobs are done."""


class PeerServer:
    """A peer's server, in a directory of its own."""

    name: ClassVar[str]
    address: str
    warm_s = 0.5

    def __init__(
        self, command: Callable[[Path], Sequence[str]], environ: dict[str, str] | None = None
    ) -> None:
        """`command` gets the data directory. A subclass sets `address` before, or in `is_ready`."""
        BUILD.mkdir(exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="bench-peer-", dir=BUILD))
        arguments = command(self.directory)
        begun = time.perf_counter()
        self._process = subprocess.Popen(
            arguments,
            cwd=self.directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        self.started_s = time.perf_counter() - begun

    def _wait_ready(self) -> None:
        ends = time.monotonic() + CONNECT_S
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"{self.name} did not start (exit {self._process.poll()})")
            time.sleep(_READY_LOOK_S)

    def is_ready(self) -> bool:
        """Does it answer?"""
        raise NotImplementedError

    def spread(self, count: int) -> list[str]:
        """See Server.spread."""
        return [f"load{n}" for n in range(count)]

    def end(self, topic: str, loops: int) -> None:
        """Their loops end when there is no job."""

    def cpu_s(self) -> float:
        """See Server.cpu_s: all of it."""
        return sum(ran_s(process.pid) for process in self._processes())

    def memory_bytes(self) -> float:
        """See Server.memory_bytes."""
        return float(sum(process.memory_full_info().pss for process in self._processes()))

    def _processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def close(self) -> None:
        """See Server.close."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(CONNECT_S)
        shutil.rmtree(self.directory, ignore_errors=True)


class SocketServer(PeerServer):
    """One that listens on a Unix socket."""

    def __init__(self, command: Callable[[Path], Sequence[str]]) -> None:
        # Not below the checkout: the path of a Unix socket has 107 bytes at most.
        self._sockets = Path(tempfile.mkdtemp(prefix="bench-"))
        self.address = str(self._sockets / "s")
        super().__init__(command)

    def is_ready(self) -> bool:
        """See PeerServer.is_ready."""
        return answers(self.address)

    def close(self) -> None:
        """See Server.close."""
        super().close()
        shutil.rmtree(self._sockets, ignore_errors=True)


def answers(path: str) -> bool:
    """Does anything listen on this Unix socket?"""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


LOOP_JOBS = 64
"""Jobs that a loop over single jobs has in flight."""
BATCHES_JOBS = 1_000
"""Jobs that a loop over batches has in flight."""


async def loop_by_hand(client: Client, batch: int) -> AsyncIterator[int]:
    """Claim many and ack all of them at once, also where they are worked on one by one: which spares the
    peers what ours does for each job."""
    while payloads := (jobs := await client.claim(LOOP_JOBS if batch == 1 else BATCHES_JOBS, 0)).payloads:
        await client.ack(jobs)
        yield len(payloads)
