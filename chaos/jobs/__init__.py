"""H5 for queues: workers, shards, gateways and schedulers are killed while jobs are put, claimed and acked.

In the end every job was completed at least once, none is lost, none came back; every job that was handed out
twice is counted under what explains it: a lease that ended, a holder who gave it back, a death.

Settings: `storm_s` (how long a storm lasts; storms fill the time that is left), `empty_s` (how long workers
have to empty the queues after it). A replay runs one case by its name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ringlog
from chaos.kills.scene import SHARDS, Scene
from chaos.leases import storm as storms
from chaos.leases.clients import DEAD, LEASE_MS, REJECTS
from chaos.leases.putting import MARKS
from chaos.leases.verdict import Death, Place, Rules
from chaos.order import Account, Order
from chaos.rigs.nursery import Client

PUTS_PER_S = 250.0
WORKERS = 3
"""For each queue; one of them through the gateway."""
WITH_LETTERS = 1
"""The queue of each class that has dead letters."""
WITH_MARKS = 3
"""The queue whose jobs say when, and how urgently, they want to be handed out."""


class Jobs:
    """Queues, whose leases are memory of their shards."""

    name, prefix = "jobs", "queue"
    counted = {"records": "jobs", "done": "acked"}  # noqa: RUF012  nobody changes it

    def make(self, client: ringlog.Client, topics: list[str]) -> None:
        """See Cast."""
        for number, name in enumerate(topics):
            more: dict[str, Any] = {"dead_letter": DEAD} if number % SHARDS == WITH_LETTERS else {}
            more |= {"record_priority": True} if number == WITH_MARKS else {}
            durability = ("fsync", "disk")[number // SHARDS]
            client.topics.create(name, type="queue", durability=durability, lease_ms=LEASE_MS, **more)

    def start(self, scene: Scene) -> tuple[list[Client], list[Client]]:
        """See Cast."""
        start = scene.load.start
        putters: list[Client] = []
        workers: list[Client] = []
        for number in range(len(scene.load.topics)):
            transport = "ipc" if number == 0 else "auto"
            marks = MARKS if number == WITH_MARKS else ""
            putters.append(
                start("jobs_put", topic=number, per_s=PUTS_PER_S, batch=20, hook=marks, transport=transport)
            )
            hook = REJECTS if number % SHARDS == WITH_LETTERS else ""
            workers += [
                start("jobs_work", topic=number, hook=hook, transport="ipc" if n == 0 else "auto")
                for n in range(WORKERS)
            ]
        return putters, workers

    def left(self, client: ringlog.Client, topics: list[str]) -> int:
        """See Cast: what is ready, leased, delayed or being moved."""
        return sum(map(partial(self._left, client), topics))

    @staticmethod
    def _left(client: ringlog.Client, topic: str) -> int:
        stats = client.queue(topic).stats()
        return stats.ready + stats.in_flight + stats.delayed

    def places(self, client: ringlog.Client, scene: Scene) -> list[Place]:
        """See Cast."""
        return [Place(n, left=self._left(client, name)) for n, name in enumerate(scene.load.topics)]

    def rules(self, deaths: list[Death]) -> Rules:
        """See Cast."""
        return Rules(LEASE_MS, is_logged=False, deaths=deaths, what="job", who="worker")


storm = partial(storms.storm, Jobs())


def run(order: Order, account: Account) -> None:
    """Storms until the time is over."""
    storms.run(order, account, Jobs())


def replay(order: Order, case: str) -> None:
    """One case by its name: storm."""
    storms.replay(order, case, Jobs())
