"""This engine, as its users start it and through its public client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import ringlog
from bench.host import Host
from bench.load import topics_for
from bench.systems.base import BATCHES_JOBS, CONNECT_S, LEASE_MS, LOOP_JOBS, Batch, Blocking, Way
from ringlog.client import LATEST, Page
from ringlog.types import Durability

ALONE = "storage.enabled=false"
SHARDS = 2
END = b"no more jobs"
"""A job at which a loop of ours ends; those of the others end when there is none."""
FILL_PART = 100_000
"""Jobs of one call that fills a queue."""
_GROUP = "workers"
_CLASSES = {"page": "disk"}
"""Durability classes that have another name here."""


def require() -> None:
    """It is always there."""


class Client(Blocking):
    """A client over rings."""

    def __init__(self, address: str, topic: str, way: Way) -> None:
        self._client = ringlog.connect(address, wait=CONNECT_S, timeout_ms=60_000)
        self._topic, self._way = topic, way
        self._leases: Any = None
        if way is Way.QUEUE:
            self._leases = self._client.queue(topic)
        elif way is Way.GROUP:
            self._leases = self._client.group(topic, _GROUP, mode="queue")
        self._watch: Any = None
        self._producer: Any = None

    async def put(self, payload: bytes) -> None:
        if self._way is Way.QUEUE:
            self._leases.put(payload)
        else:
            self._client.append(self._topic, payload)

    async def put_many(self, payloads: Sequence[bytes]) -> None:
        if self._way is Way.QUEUE:
            self._leases.put_many(payloads)
        else:
            self._client.append_many(self._topic, payloads)

    async def send(self, payloads: Sequence[bytes]) -> None:
        if self._producer is None:
            self._producer = self._client.producer(self._topic)
        self._producer.send_each(payloads).result(60)

    async def claim(self, most: int, wait_s: float) -> Batch:
        if self._way is Way.WATCH:
            return self._watched(wait_s)
        jobs = self._leases.claim(most, wait_ms=int(wait_s * 1_000))
        return Batch(jobs.payloads(), jobs)

    def _watched(self, wait_s: float) -> Batch:
        if self._watch is None:
            self._watch = self._client.watch(self._topic, start=LATEST).open()
        event = self._watch.next(wait_s)
        return Batch(event.bytes() if isinstance(event, Page) else (), None)

    async def ack(self, jobs: Batch) -> None:
        if self._way is not Way.WATCH:
            settled = self._leases.ack(jobs.names)
            assert settled.is_complete, "no lease ends in a round"

    async def next(self, jobs: Batch, most: int) -> Batch:
        found = self._leases.claim(most, done=jobs.names)
        return Batch(found.payloads(), found)

    async def loop(self, batch: int) -> AsyncIterator[int]:
        if batch == 1:
            for job in self._leases.jobs(max_in_flight=LOOP_JOBS, pipelined_acks=True):
                with job:
                    if job.data == END:
                        return
                yield 1
        for jobs in self._leases.batches(batch, max_in_flight=BATCHES_JOBS):
            payloads = jobs.payloads()
            if END in payloads:
                # Those behind it are other workers' ends, and are given back.
                self._leases.ack(jobs[: payloads.index(END) + 1])
                return
            yield len(payloads)

    def close(self) -> None:
        for each in (self._producer, self._watch, self._client):
            if each is not None:
                each.close()


class Server:
    """An engine of two shards; `sets` are settings. Without compaction, where they do not say otherwise."""

    name = "ringlog"
    warm_s = 0.5

    def __init__(self, durability: str, *sets: str) -> None:
        self._durability = Durability.parse(_CLASSES.get(durability, durability))
        self.host = Host(SHARDS, ALONE, *sets)
        self.address = self.host.url
        self.started_s = self.host.started_s

    def create(self, topic: str, way: Way, consumers: int = 1) -> None:
        topics = self.host.client.topics
        if way is Way.QUEUE:
            topics.create(topic, type="queue", durability=self._durability, lease_ms=LEASE_MS)
        else:
            topics.create(topic, durability=self._durability)

    def spread(self, count: int) -> list[str]:
        """As many of each shard."""
        return topics_for(SHARDS, count, "load")

    def fill(self, topic: str, payload: bytes, count: int, frame: int) -> None:
        fill(self.host, topic, payload, count, frame)

    def end(self, topic: str, loops: int) -> None:
        fill(self.host, topic, END, loops, 1)

    def cpu_s(self) -> float:
        """Of the shards."""
        return self.host.shard_cpu_s()

    def memory_bytes(self) -> float:
        return float(sum(process.memory_full_info().pss for process in self.host.processes()))

    def close(self) -> None:
        self.host.close()


def fill(host: Host, topic: str, payload: bytes, count: int, frame: int) -> None:
    """Put so many jobs, all alike."""
    records = [payload] * min(count, FILL_PART)
    with host.client.producer(topic, max_buffer_bytes=256 << 20) as out:
        for at in range(0, count, len(records)):
            out.send_each(records[: count - at], records_per_frame=frame).result(60)
