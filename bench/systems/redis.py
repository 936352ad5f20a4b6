"""Redis Streams with a consumer group: XADD, XREADGROUP BLOCK, XACK.

It is spared the deletion of what is acked, which the others do: the entries stay in its stream.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from bench.systems.base import CONNECT_S, Batch, Blocking, SocketServer, Way, loop_by_hand
from bench.systems.programs import module, program

_GROUP = "workers"
_FILL_PART = 100_000


def require() -> None:
    """Raise PeerMissing when its server or its client is not installed."""
    program("redis-server")
    module("redis")


class Client(Blocking):
    """A consumer of the group, over a Unix socket."""

    def __init__(self, address: str, topic: str, way: Way = Way.QUEUE) -> None:
        import redis

        self.redis = redis.Redis(unix_socket_path=address, socket_timeout=CONNECT_S)
        self._topic = topic
        self._name = f"{id(self)}-{time.monotonic_ns()}"

    async def put(self, payload: bytes) -> None:
        self.redis.xadd(self._topic, {"d": payload})

    async def put_many(self, payloads: Sequence[bytes]) -> None:
        pipe = self.redis.pipeline(transaction=False)
        for payload in payloads:
            pipe.xadd(self._topic, {"d": payload})
        pipe.execute()

    async def send(self, payloads: Sequence[bytes]) -> None:
        await self.put_many(payloads)

    async def claim(self, most: int, wait_s: float) -> Batch:
        block = int(wait_s * 1_000) or None
        found = self.redis.xreadgroup(_GROUP, self._name, {self._topic: ">"}, count=most, block=block)
        return self._batch(found)

    @staticmethod
    def _batch(found: Any) -> Batch:
        if not found:
            return Batch((), ())
        entries = next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
        return Batch([fields[b"d"] for _, fields in entries], [number for number, _ in entries])

    async def ack(self, jobs: Batch) -> None:
        if not jobs.names:
            return
        acked = self.redis.xack(self._topic, _GROUP, *jobs.names)
        assert acked == len(jobs.names), "every job is acked once"

    async def next(self, jobs: Batch, most: int) -> Batch:
        pipe = self.redis.pipeline(transaction=False)
        pipe.xack(self._topic, _GROUP, *jobs.names)
        pipe.xreadgroup(_GROUP, self._name, {self._topic: ">"}, count=most)
        acked, found = pipe.execute()
        assert acked == len(jobs.names), "every job is acked once"
        return self._batch(found)

    def loop(self, batch: int) -> AsyncIterator[int]:
        return loop_by_hand(self, batch)

    def close(self) -> None:
        self.redis.close()


class Server(SocketServer):
    """Append-only file as durable as asked: none, or synced by the system, each second, or each time."""

    name = "redis"
    _SYNCS: ClassVar = {"memory": "no", "page": "no", "disk": "everysec", "fsync": "always"}

    def __init__(self, durability: str) -> None:
        file = "no" if durability == "memory" else "yes"
        super().__init__(
            lambda directory: [
                program("redis-server"), "--port", "0", "--unixsocket", self.address, "--save", "",
                "--appendonly", file, "--appendfsync", self._SYNCS[durability], "--dir", str(directory),
            ]
        )  # fmt: skip

    def create(self, topic: str, way: Way, consumers: int = 1) -> None:
        client = Client(self.address, topic)
        client.redis.xgroup_create(topic, _GROUP, id="0", mkstream=True)
        client.close()

    def fill(self, topic: str, payload: bytes, count: int, frame: int) -> None:
        """All in the server, in as few calls as it takes."""
        script = "for i=1,ARGV[1] do redis.call('XADD', KEYS[1], '*', 'd', ARGV[2]) end"
        client = Client(self.address, topic)
        for at in range(0, count, _FILL_PART):
            client.redis.eval(script, 1, topic, min(_FILL_PART, count - at), payload)
        client.close()
