"""Claims and their undo requests arrive over several connections, in any order and more than once.

No process dies, so every job must be free as soon as all requests are answered, and no delivery may count.
A shard is suspended in some rounds, so that it finds all requests of the round at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import ringlog
import ringlog.aio
from chaos.kills.scene import SHARDS, Scene, Stage
from ringlog.aio.client import Client
from ringlog.board.processes import WAL_SHARD
from ringlog.drill import targets
from ringlog.drill.engine import close_down
from ringlog.envelope import messages as m

CONFIGS: tuple[dict[str, Any], ...] = (
    {"type": "queue"},
    {"type": "queue", "leases_durable": True},
    {"type": "queue", "record_priority": True},
    {},
)
"""Settings of the topics. The last one has a consumer group."""
GROUP = "g"
ROUNDS = 400
RECORDS = 20
TIMEOUT_MS = 60_000
LEASE_MS = 600_000
REQUESTS_MAX = 5
NEW_CONNECTION_SHARE, SUSPENDED_SHARE = 0.2, 0.3
TRANSPORTS = ("ring", "ring", "ipc")


def cancels(stage: Stage, *, random: Random) -> None:
    """Send claims and undo requests in any order, and look for leases that remain."""
    scene = stage.cast("cancels", topics=len(CONFIGS))
    topics = scene.load.topics
    with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
        for topic, config in zip(topics, CONFIGS, strict=True):
            client.topics.create(topic, **config)
            client.append_many(topic, [b"%d" % n for n in range(RECORDS)])
            if _group_of(topic):
                client.group(topic, GROUP, mode="queue").seek(ringlog.EARLIEST)
    complaints = asyncio.run(_cancels(scene, random))
    stage.account.count_work("cancelled claims", ROUNDS)
    close_down(scene.engine, complaints)
    stage.judged(scene, complaints)


async def _cancels(scene: Scene, random: Random) -> list[str]:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(scene, each)) for each in TRANSPORTS]
        sources = [_source(clients[0], topic) for topic in scene.load.topics]
        for _ in range(ROUNDS):
            place = random.randrange(len(sources))
            order = await _round(scene, clients, place, random)
            stats = await sources[place].stats()
            if held := stats.in_flight if hasattr(stats, "in_flight") else stats.leased:
                return [f"a cancelled claim holds {held} jobs of topic {place} after {order}"]
        complaints = []
        for place, source in enumerate(sources):
            deliveries = {job.deliveries for job in await source.claim(RECORDS)}
            if deliveries != {1}:
                complaints.append(f"jobs of topic {place} have {deliveries} deliveries, all were cancelled")
        return complaints


def _client(scene: Scene, transport: Any) -> Client:
    return ringlog.aio.connect(scene.engine.url, transport=transport, timeout_ms=TIMEOUT_MS, wait=20)


def _source(client: Client, topic: str) -> Any:
    return client.group(topic, GROUP, mode="queue") if _group_of(topic) else client.queue(topic)


def _group_of(topic: str) -> str:
    return GROUP if topic.startswith(f"topic-{len(CONFIGS) - 1}-") else ""


async def _round(scene: Scene, clients: Sequence[Client], place: int, random: Random) -> list[str]:
    """Send a claim and its undo, each at least once. Returns their order, with the transports."""
    topic, call, node = scene.load.topics[place], random.getrandbits(63) | 1, "w"
    group = _group_of(topic)
    claim = m.Claim(topic, node, random.randint(1, 4), LEASE_MS, 0, call, group=group)
    undo = m.Nack(topic, node, b"", call=call, undo=True, group=group)
    requests: list[Any] = [claim, undo, *random.choices((claim, undo), k=random.randint(0, REQUESTS_MAX - 2))]
    random.shuffle(requests)
    async with contextlib.AsyncExitStack() as stack:
        chosen = [random.choice(clients) for _ in requests]
        if random.random() < NEW_CONNECTION_SHARE:
            new = await stack.enter_async_context(_client(scene, "ring"))
            chosen = [new if random.random() < 0.5 else each for each in chosen]
        is_suspended = random.random() < SUSPENDED_SHARE
        with _suspended(scene, place % SHARDS) if is_suspended else contextlib.nullcontext():
            asked = [
                asyncio.ensure_future(client.run(_ask(client, request)))
                for client, request in zip(chosen, requests, strict=True)
            ]
            for _ in range(random.randint(0, 3)):
                await asyncio.sleep(0)
        await asyncio.gather(*asked)
    return [
        f"{type(request).__name__} by {client.transport}"
        for client, request in zip(chosen, requests, strict=True)
    ]


def _ask(client: Client, request: Any) -> Any:
    yield client.connection.request_jobs(request)


@contextlib.contextmanager
def _suspended(scene: Scene, shard: int) -> Iterator[None]:
    """Stop this shard with SIGSTOP within the block."""
    living = targets.living(scene.engine.look(), WAL_SHARD)
    (pid,) = [each.pid for each in living if each.name.endswith(f"-{shard:02d}")]
    target = targets.hold_child(pid, scene.engine.pid)
    assert target is not None, "nothing kills the shard"
    with target:
        target.send(signal.SIGSTOP)
        try:
            yield
        finally:
            target.send(signal.SIGCONT)
