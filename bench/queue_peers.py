"""Queues to measure side by side: ringlog's, Redis Streams with a consumer group, and beanstalkd.

Each is put behind the same few calls: fill, put one, claim some, ack some. All are used from Python, each
in the way that is quickest for what is asked: several jobs are claimed and acked in one round trip everywhere
(beanstalkd has no call for that, so its commands are pipelined). Redis is spared the deletion of what
is acked, which the others do: XACK alone, the entries stay in its stream.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import ringlog
from bench.host import BUILD, Host

TOPIC = "jobs"
CONNECT_S = 60.0
FILL_PART = 100_000
"""Jobs of one call that fills a queue."""
ALONE = "storage.enabled=false"
LOOP_JOBS = 64
"""Jobs that a loop over single jobs has in flight."""
BATCHES_JOBS = 1_000
"""Jobs that a loop over batches has in flight."""
END = b"no more jobs"
"""A job at which a loop of ours ends; those of the others end when there is none."""
LEASE_MS = 120_000
"""Longer than any round: what is measured is work, not leases that end."""


class Batch(NamedTuple):
    """Jobs of one claim."""

    payloads: Sequence[bytes]
    names: Any
    """What the system wants to hear when they are done."""


class Worker(Protocol):
    """One worker's connection."""

    def put(self, payload: bytes) -> None:
        """Add a job; returns when it is as durable as the server was told to make it."""

    def claim(self, most: int, wait_s: float) -> Batch:
        """Take up to `most`, waiting up to `wait_s` for the first."""

    def ack(self, jobs: Batch) -> None:
        """They are done."""

    def next(self, jobs: Batch, most: int) -> Batch:
        """They are done, and up to `most` others are taken, without waiting for some: in one round trip."""

    def loop(self, batch: int) -> Iterator[int]:
        """Work as a program's loop does, in the quickest way there is: on one job after the other, or on
        batches; how many were done, as it goes."""

    def close(self) -> None:
        """Leave."""


def loop_by_hand(worker: Worker, batch: int) -> Iterator[int]:
    """Claim many and ack all of them at once, also where they are worked on one by one: which spares the
    peers what ours does for each job."""
    while payloads := (jobs := worker.claim(LOOP_JOBS if batch == 1 else BATCHES_JOBS, 0)).payloads:
        worker.ack(jobs)
        yield len(payloads)


class RinglogWorker:
    """A client of ours, over rings."""

    def __init__(self, url: str) -> None:
        self._client = ringlog.connect(url, wait=CONNECT_S, timeout_ms=60_000)
        self._queue = self._client.queue(TOPIC)

    def put(self, payload: bytes) -> None:
        self._queue.put(payload)

    def claim(self, most: int, wait_s: float) -> Batch:
        jobs = self._queue.claim(most, wait_ms=int(wait_s * 1_000))
        return Batch(jobs.payloads(), jobs)

    def ack(self, jobs: Batch) -> None:
        settled = self._queue.ack(jobs.names)
        assert settled.is_complete, "no lease ends in a round"

    def next(self, jobs: Batch, most: int) -> Batch:
        found = self._queue.claim(most, done=jobs.names)
        return Batch(found.payloads(), found)

    def loop(self, batch: int) -> Iterator[int]:
        if batch == 1:
            for job in self._queue.jobs(max_in_flight=LOOP_JOBS, ack_behind=True):
                with job:
                    if job.data == END:
                        return
                yield 1
        for jobs in self._queue.batches(batch, max_in_flight=BATCHES_JOBS):
            payloads = jobs.payloads()
            if END in payloads:
                # Those behind it are other workers' ends, and are given back.
                self._queue.ack(jobs[: payloads.index(END) + 1])
                return
            yield len(payloads)

    def close(self) -> None:
        self._client.close()


class RedisWorker:
    """A consumer of one group."""

    _GROUP = "workers"

    def __init__(self, path: str) -> None:
        import redis

        self._redis = redis.Redis(unix_socket_path=path, socket_timeout=CONNECT_S)
        self._name = f"{id(self)}-{time.monotonic_ns()}"

    def start(self) -> None:
        """Make the stream and its group."""
        self._redis.xgroup_create(TOPIC, self._GROUP, id="0", mkstream=True)

    def fill(self, payload: bytes, count: int) -> None:
        """All in the server, in as few calls as it takes."""
        script = "for i=1,ARGV[1] do redis.call('XADD', KEYS[1], '*', 'd', ARGV[2]) end"
        for at in range(0, count, FILL_PART):
            self._redis.eval(script, 1, TOPIC, min(FILL_PART, count - at), payload)

    def put(self, payload: bytes) -> None:
        self._redis.xadd(TOPIC, {"d": payload})

    def claim(self, most: int, wait_s: float) -> Batch:
        block = int(wait_s * 1_000) or None
        return self._batch(
            self._redis.xreadgroup(self._GROUP, self._name, {TOPIC: ">"}, count=most, block=block)
        )

    @staticmethod
    def _batch(found: Any) -> Batch:
        if not found:
            return Batch((), ())
        entries = next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
        return Batch([fields[b"d"] for _, fields in entries], [number for number, _ in entries])

    def ack(self, jobs: Batch) -> None:
        acked = self._redis.xack(TOPIC, self._GROUP, *jobs.names)
        assert acked == len(jobs.names), "every job is acked once"

    def next(self, jobs: Batch, most: int) -> Batch:
        pipe = self._redis.pipeline(transaction=False)
        pipe.xack(TOPIC, self._GROUP, *jobs.names)
        pipe.xreadgroup(self._GROUP, self._name, {TOPIC: ">"}, count=most)
        acked, found = pipe.execute()
        assert acked == len(jobs.names), "every job is acked once"
        return self._batch(found)

    def loop(self, batch: int) -> Iterator[int]:
        return loop_by_hand(self, batch)

    def close(self) -> None:
        self._redis.close()


class BeanstalkWorker:
    """A connection of its own small protocol."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(CONNECT_S)
        self._socket.connect(path)
        self._replies = self._socket.makefile("rb")

    def fill(self, payload: bytes, count: int) -> None:
        """Pipelined, in parts whose replies fit the socket's buffers."""
        part = 1_000
        command = self._put(payload)
        for at in range(0, count, part):
            wanted = min(part, count - at)
            self._socket.sendall(command * wanted)
            for _ in range(wanted):
                self._expect(b"INSERTED")

    @staticmethod
    def _put(payload: bytes) -> bytes:
        return b"put 0 0 %d %d\r\n%s\r\n" % (LEASE_MS // 1_000, len(payload), payload)

    def _expect(self, word: bytes) -> list[bytes]:
        words = self._replies.readline().split()
        if not words or words[0] != word:
            raise RuntimeError(f"beanstalkd said {words} in place of {word!r}")
        return words

    def put(self, payload: bytes) -> None:
        self._socket.sendall(self._put(payload))
        self._expect(b"INSERTED")

    def claim(self, most: int, wait_s: float) -> Batch:
        self._socket.sendall(b"reserve-with-timeout %d\r\n" % int(wait_s) * most)
        return self._reserved(most)

    def _reserved(self, most: int) -> Batch:
        payloads, names = [], []
        for _ in range(most):
            words = self._replies.readline().split()
            if words[0] == b"TIMED_OUT":
                continue
            _, number, size = words
            names.append(number)
            payloads.append(self._replies.read(int(size) + 2)[:-2])
        return Batch(payloads, names)

    def ack(self, jobs: Batch) -> None:
        self._socket.sendall(b"".join(b"delete %s\r\n" % number for number in jobs.names))
        for _ in jobs.names:
            self._expect(b"DELETED")

    def next(self, jobs: Batch, most: int) -> Batch:
        deletes = b"".join(b"delete %s\r\n" % number for number in jobs.names)
        self._socket.sendall(deletes + b"reserve-with-timeout 0\r\n" * most)
        for _ in jobs.names:
            self._expect(b"DELETED")
        return self._reserved(most)

    def loop(self, batch: int) -> Iterator[int]:
        return loop_by_hand(self, batch)

    def close(self) -> None:
        self._replies.close()
        self._socket.close()


WORKERS: dict[str, Callable[[str], Worker]] = {
    "ringlog": RinglogWorker,
    "redis": RedisWorker,
    "beanstalkd": BeanstalkWorker,
}


class Server(Protocol):
    """A system that runs, with one empty queue."""

    name: str
    address: str

    def fill(self, payload: bytes, count: int, frame: int) -> None:
        """Put so many jobs, all alike; `frame` records at a time where the system has such a thing."""

    def end(self, loops: int) -> None:
        """Have so many loops end when all jobs are done."""

    def close(self) -> None:
        """Stop it and remove what it left."""


class RinglogServer:
    """An engine of two shards, without compaction."""

    name = "ringlog"

    def __init__(self, durability: str, *sets: str) -> None:
        self.host = Host(2, ALONE, *sets)
        self.address = self.host.url
        self.host.client.topics.create(TOPIC, type="queue", durability=durability, lease_ms=LEASE_MS)

    def fill(self, payload: bytes, count: int, frame: int) -> None:
        fill(self.host, TOPIC, payload, count, frame)

    def end(self, loops: int) -> None:
        fill(self.host, TOPIC, END, loops, 1)

    def close(self) -> None:
        self.host.close()


def fill(host: Host, topic: str, payload: bytes, count: int, frame: int) -> None:
    """Put so many jobs, all alike."""
    records = [payload] * min(count, FILL_PART)
    with host.client.producer(topic, max_buffer_bytes=256 << 20) as out:
        for at in range(0, count, len(records)):
            out.send_each(records[: count - at], records_per_frame=frame).result(60)


class _PeerServer:
    """A server of somebody else's, in a directory of its own, over a Unix socket."""

    name = ""

    def __init__(self, command: Callable[[Path], list[str]]) -> None:
        BUILD.mkdir(exist_ok=True)
        # Not below the checkout: a Unix socket's path has 107 bytes at most.
        self._sockets = Path(tempfile.mkdtemp(prefix="bench-"))
        self._directory = Path(tempfile.mkdtemp(prefix="bench-peer-", dir=BUILD))
        self.address = str(self._sockets / "s")
        self._process = subprocess.Popen(
            command(self._directory),
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ends = time.monotonic() + CONNECT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > ends:
                self.close()
                raise RuntimeError(f"{self.name} did not start (exit {self._process.poll()})")
            time.sleep(0.01)

    def end(self, loops: int) -> None:
        """They see it."""

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.address) == 0

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(30)
        shutil.rmtree(self._directory)
        shutil.rmtree(self._sockets)


class RedisServer(_PeerServer):
    """Append-only file as durable as the class asks: none, synced each second, or before each answer."""

    name = "redis"
    _SYNCS: ClassVar = {"memory": "no", "disk": "everysec", "fsync": "always"}

    def __init__(self, durability: str) -> None:
        file = "no" if durability == "memory" else "yes"
        super().__init__(
            lambda directory: [
                "redis-server", "--port", "0", "--unixsocket", str(self._sockets / "s"), "--save", "",
                "--appendonly", file, "--appendfsync", self._SYNCS[durability], "--dir", str(directory),
            ]
        )  # fmt: skip
        RedisWorker(self.address).start()

    def fill(self, payload: bytes, count: int, frame: int) -> None:
        worker = RedisWorker(self.address)
        worker.fill(payload, count)
        worker.close()


class BeanstalkServer(_PeerServer):
    """Without a log, with one synced every 50 ms, or with each write."""

    name = "beanstalkd"
    _SYNCS: ClassVar = {"disk": "50", "fsync": "0"}

    def __init__(self, durability: str) -> None:
        def command(directory: Path) -> list[str]:
            log = ["-b", str(directory), "-f", self._SYNCS[durability]] if durability != "memory" else []
            return ["beanstalkd", "-l", f"unix:{self._sockets / 's'}", *log]

        super().__init__(command)

    def fill(self, payload: bytes, count: int, frame: int) -> None:
        worker = BeanstalkWorker(self.address)
        worker.fill(payload, count)
        worker.close()


def missing() -> dict[str, str]:
    """Peers that cannot be measured here, and why."""
    found = {}
    for name, program, package in (("redis", "redis-server", "redis"), ("beanstalkd", "beanstalkd", "")):
        if shutil.which(program) is None:
            found[name] = f"no program {program} (Debian: apt-get install {program})"
        elif package:
            try:
                __import__(package)
            except ImportError:
                found[name] = f"no module {package} (pip install 'ringlog[bench]')"
    return found


SERVERS: dict[str, Callable[[str], Server]] = {
    "ringlog": RinglogServer,
    "redis": RedisServer,
    "beanstalkd": BeanstalkServer,
}
