"""Threads with clients of their own that work while a test kills processes of their engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ringlog
from ringlog.client import Client
from ringlog.testing.real_engine import TestEngine, wait_until

TIMEOUT_MS = 60_000
JOBS = 600
KILLS = 4
BETWEEN = 60
"""Minimum number of jobs that workers ack between two kills."""
DONE_S = 40.0
WAYS = (("ring", 1), ("ipc", 3), ("ipc", 1))
"""Transport of each worker, and how many jobs it claims at a time."""


def shard_of(client: Client, topic: str) -> int:
    """Return the shard that has the topic."""

    def steps() -> Any:
        info = yield client.connection.resolve(topic)
        return info.shard

    return client.run(steps())


class ClientThread(threading.Thread):
    """A thread that calls `work` with a client of its own. It ends by itself, or when it is stopped."""

    def __init__(self, url: str, transport: Any = "auto") -> None:
        super().__init__(daemon=True)
        self._url, self._transport = url, transport
        self.error: BaseException | None = None
        self.is_stopped = threading.Event()

    def run(self) -> None:
        try:
            with ringlog.connect(
                self._url, wait=20, timeout_ms=TIMEOUT_MS, transport=self._transport
            ) as client:
                self.work(client)
        except BaseException as e:  # noqa: BLE001  judged by the test
            self.error = e

    def work(self, client: Client) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.is_stopped.set()
        self.join(60)
        assert not self.is_alive()
        assert self.error is None, self.error


class JobThread(ClientThread):
    """A thread that claims and acks the jobs of a queue or group, and notes in `acked` what it completed."""

    def __init__(self, url: str, transport: str, most: int) -> None:
        super().__init__(url, transport)
        self.most = most
        self.acked: list[Any] = []

    def work(self, client: Client) -> None:
        source = self.source(client)
        while not self.is_stopped.is_set():
            self.turn(source)

    def source(self, client: Client) -> Any:
        """Return the queue or group."""
        raise NotImplementedError

    def turn(self, source: Any) -> None:
        """Claim once and ack."""
        raise NotImplementedError


def work_under_kills(running: TestEngine, victim: str, shard: int, threads: Sequence[JobThread]) -> None:
    """Let the threads work until all jobs are acked. Meanwhile kill the `wal_shard` or the `gateway`."""

    def acked() -> int:
        failed = [each.error for each in threads if each.error is not None]
        assert not failed, failed
        return sum(len(each.acked) for each in threads)

    for each in threads:
        each.start()
    for _ in range(KILLS):
        enough = min(acked() + BETWEEN, JOBS)
        wait_until(lambda least=enough: acked() >= least, DONE_S, "jobs to be done")  # type: ignore[misc]
        running.kill(victim, shard=shard if victim == "wal_shard" else 0)
    wait_until(lambda: acked() >= JOBS, DONE_S, "all jobs to be done")
    for each in threads:
        each.stop()
