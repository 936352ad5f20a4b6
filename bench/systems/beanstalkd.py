"""beanstalkd: put, reserve, delete. It has no calls for several jobs, so its commands are pipelined."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

from bench.systems.base import CONNECT_S, LEASE_MS, Batch, Blocking, SocketServer, Way, loop_by_hand
from bench.systems.programs import program

_FILL_PART = 1_000
"""Jobs in flight while a queue is filled: their replies fit the socket's buffers."""


def require() -> None:
    """Raise PeerMissing when its server is not installed. Its protocol needs no client."""
    program("beanstalkd")


class Client(Blocking):
    """A connection of its own small protocol, over a Unix socket."""

    def __init__(self, address: str, topic: str, way: Way = Way.QUEUE) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(CONNECT_S)
        self._socket.connect(address)
        self._replies = self._socket.makefile("rb")
        tube = topic.encode()
        self._socket.sendall(b"use %s\r\nwatch %s\r\nignore default\r\n" % (tube, tube))
        for word in (b"USING", b"WATCHING", b"WATCHING"):
            self._expect(word)

    @staticmethod
    def _put(payload: bytes) -> bytes:
        return b"put 0 0 %d %d\r\n%s\r\n" % (LEASE_MS // 1_000, len(payload), payload)

    def _expect(self, word: bytes) -> list[bytes]:
        words = self._replies.readline().split()
        if not words or words[0] != word:
            raise RuntimeError(f"beanstalkd replied {words}, expected {word!r}")
        return words

    async def put(self, payload: bytes) -> None:
        self._socket.sendall(self._put(payload))
        self._expect(b"INSERTED")

    async def put_many(self, payloads: Sequence[bytes]) -> None:
        self._socket.sendall(b"".join(map(self._put, payloads)))
        for _ in payloads:
            self._expect(b"INSERTED")

    async def send(self, payloads: Sequence[bytes]) -> None:
        await self.put_many(payloads)

    async def claim(self, most: int, wait_s: float) -> Batch:
        # Only the first is waited for.
        rest = b"reserve-with-timeout 0\r\n" * (most - 1)
        self._socket.sendall(b"reserve-with-timeout %d\r\n" % int(wait_s) + rest)
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

    async def ack(self, jobs: Batch) -> None:
        self._socket.sendall(b"".join(b"delete %s\r\n" % number for number in jobs.names))
        for _ in jobs.names:
            self._expect(b"DELETED")

    async def next(self, jobs: Batch, most: int) -> Batch:
        deletes = b"".join(b"delete %s\r\n" % number for number in jobs.names)
        self._socket.sendall(deletes + b"reserve-with-timeout 0\r\n" * most)
        for _ in jobs.names:
            self._expect(b"DELETED")
        return self._reserved(most)

    def loop(self, batch: int) -> AsyncIterator[int]:
        return loop_by_hand(self, batch)

    def close(self) -> None:
        self._replies.close()
        self._socket.close()


class Server(SocketServer):
    """Without a log; with one that is never synced, each 50 ms, or with each write."""

    name = "beanstalkd"
    _SYNCS: ClassVar = {"memory": (), "page": ("-F",), "disk": ("-f", "50"), "fsync": ("-f", "0")}

    def __init__(self, durability: str) -> None:
        def command(directory: Path) -> list[str]:
            log = [] if durability == "memory" else ["-b", str(directory)]
            return [program("beanstalkd"), "-l", f"unix:{self.address}", *log, *self._SYNCS[durability]]

        super().__init__(command)

    def create(self, topic: str, way: Way, consumers: int = 1) -> None:
        """A tube is there when it is used."""

    def fill(self, topic: str, payload: bytes, count: int, frame: int) -> None:
        client = Client(self.address, topic)
        for at in range(0, count, _FILL_PART):
            client.run(client.put_many([payload] * min(_FILL_PART, count - at)))
        client.close()
