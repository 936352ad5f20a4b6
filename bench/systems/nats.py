"""NATS JetStream: streams in files, a durable pull consumer, explicit acks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from bench.systems.base import CONNECT_S, LEASE_MS, Batch, PeerServer, Way
from bench.systems.programs import module, program

T = TypeVar("T")
_DURABLE = "workers"
_SHORTEST_S = 0.05
"""A fetch needs a timeout."""


def require() -> None:
    """Raise PeerMissing when its server or its client is not installed."""
    program("nats-server")
    module("nats")


class Client:
    """A connection over TCP, with an event loop of its own."""

    number = 0

    def __init__(self, address: str, topic: str, way: Way = Way.QUEUE) -> None:
        import nats

        self._loop = asyncio.new_event_loop()
        self._topic = topic
        self.connection = self._loop.run_until_complete(nats.connect(address, connect_timeout=int(CONNECT_S)))
        self.stream = self.connection.jetstream(timeout=CONNECT_S)
        self._pull: Any = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def put(self, payload: bytes) -> None:
        await self.stream.publish(self._topic, payload)

    async def put_many(self, payloads: Sequence[bytes]) -> None:
        acks = [await self.stream.publish_async(self._topic, payload) for payload in payloads]
        await asyncio.gather(*acks)

    async def send(self, payloads: Sequence[bytes]) -> None:
        await self.put_many(payloads)

    async def claim(self, most: int, wait_s: float) -> Batch:
        if self._pull is None:
            self._pull = await self.stream.pull_subscribe_bind(durable=_DURABLE, stream=self._topic)
        try:
            found = await self._pull.fetch(most, timeout=max(wait_s, _SHORTEST_S))
        except TimeoutError:
            return Batch((), ())
        return Batch([message.data for message in found], found)

    async def ack(self, jobs: Batch) -> None:
        """Not waited for: its users do not either."""
        for message in jobs.names:
            await message.ack()

    def close(self) -> None:
        self._loop.run_until_complete(self.connection.close())
        self._loop.close()


class Server(PeerServer):
    """Synced every two minutes, as it comes, or with each write."""

    name = "nats"
    _SYNCS: ClassVar = {"page": "", "fsync": "sync_interval: always"}

    def __init__(self, durability: str) -> None:
        def command(directory: Path) -> list[str]:
            file = directory / "nats.conf"
            file.write_text(
                f'listen: "127.0.0.1:-1"\nports_file_dir: "{directory}"\n'
                f'jetstream {{ store_dir: "{directory}"\n{self._SYNCS[durability]} }}\n'
            )
            return [program("nats-server"), "-c", str(file)]

        self.address = ""
        super().__init__(command)

    def is_ready(self) -> bool:
        """See PeerServer.is_ready: it writes its port when it listens."""
        for file in self.directory.glob("*.ports"):
            if text := file.read_text():
                self.address = json.loads(text)["nats"][0]
        return bool(self.address)

    def create(self, topic: str, way: Way, consumers: int = 1) -> None:
        client = Client(self.address, topic)
        client.run(self._create(client, topic, way))
        client.close()

    @staticmethod
    async def _create(client: Client, topic: str, way: Way) -> None:
        from nats.js import api

        is_queue = way is Way.QUEUE
        retention = api.RetentionPolicy.WORK_QUEUE if is_queue else api.RetentionPolicy.LIMITS
        await client.stream.add_stream(
            api.StreamConfig(name=topic, subjects=[topic], storage=api.StorageType.FILE, retention=retention)
        )
        if is_queue:
            config = api.ConsumerConfig(
                durable_name=_DURABLE,
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=LEASE_MS / 1_000,
                max_ack_pending=100_000,
            )
            await client.stream.add_consumer(topic, config)
