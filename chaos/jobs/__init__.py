"""Kills under queues: workers, shards, gateways and schedulers die while jobs are put, claimed and acked.

At the end, every job must be completed at least once. No job is lost, and no completed job is delivered
again. Every repeated delivery is counted under its reason: an expired lease, a nack by the holder, a death.

Case `cancels`, without kills: claims and their undo requests arrive in any order and more than once.

Settings: `storm_s`: length of a storm; storms fill the remaining time; `empty_s`: time that workers have to
empty the queues after a storm. A replay runs one case by its name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ringlog
from chaos.jobs.cancels import cancels
from chaos.kills.scene import SHARDS, Scene
from chaos.leases import storm as storms
from chaos.leases.clients import DEAD, LEASE_MS, REJECTS
from chaos.leases.history import Death, Place, Rules
from chaos.leases.putting import MARKS
from chaos.order import Account, Order
from ringlog.drill.nursery import ClientProcess
from ringlog.types import Durability

PUTS_PER_S = 250.0
WORKERS = 3
"""Workers per queue. One of them uses the gateway."""
WITH_LETTERS = 1
"""Index, within its class, of the queue that has a dead-letter topic."""
WITH_CANCELS = (0, 3)
"""Indexes of the queues with a worker that cancels its claims."""
WITH_MARKS = 3
"""Index of the queue whose jobs have priorities and `not_before` times."""


class Jobs:
    """The cast of class `jobs`: queues, whose leases are in the memory of their shards."""

    name, prefix = "jobs", "queue"
    counted = {"records": "jobs", "done": "acked"}  # noqa: RUF012  nobody changes it

    def make(self, client: ringlog.Client, topics: list[str]) -> None:
        """Create the queues. Implements Cast."""
        for number, name in enumerate(topics):
            more: dict[str, Any] = {"dead_letter": DEAD} if number % SHARDS == WITH_LETTERS else {}
            more |= {"record_priority": True} if number == WITH_MARKS else {}
            durability = (Durability.FSYNC, Durability.DISK)[number // SHARDS]
            client.topics.create(name, type="queue", durability=durability, lease_ms=LEASE_MS, **more)

    def start(self, scene: Scene) -> tuple[list[ClientProcess], list[ClientProcess]]:
        """Start producers and workers. Implements Cast."""
        start = scene.load.start
        putters: list[ClientProcess] = []
        workers: list[ClientProcess] = []
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
        workers += [start("jobs_cancel", topic=number) for number in WITH_CANCELS]
        return putters, workers

    def left(self, client: ringlog.Client, topics: list[str]) -> int:
        """Return the number of ready, leased and delayed jobs. Implements Cast."""
        return sum(map(partial(self._left, client), topics))

    @staticmethod
    def _left(client: ringlog.Client, topic: str) -> int:
        stats = client.queue(topic).stats()
        return stats.ready + stats.in_flight + stats.delayed

    def places(self, client: ringlog.Client, scene: Scene) -> list[Place]:
        """Return the queues to judge, with the jobs left in them. Implements Cast."""
        return [Place(n, left=self._left(client, name)) for n, name in enumerate(scene.load.topics)]

    def rules(self, deaths: list[Death]) -> Rules:
        """Return the rules: leases are not logged. Implements Cast."""
        return Rules(LEASE_MS, is_logged=False, deaths=deaths, what="job", who="worker")


storm = partial(storms.storm, Jobs())


def run(order: Order, account: Account) -> None:
    """Run case `cancels`, then storms until the time is over."""
    storms.run(order, account, Jobs(), _first(order))


def replay(order: Order, case: str) -> None:
    """Repeat one case by its name: cancels or storm."""
    storms.replay(order, case, Jobs(), _first(order))


def _first(order: Order) -> dict[str, storms.Case]:
    return {"cancels": partial(cancels, random=order.random("cancels"))}
