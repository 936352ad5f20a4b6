"""Kills under routers: schedulers die at all their stop points, shards and whole engines at random times.

At the end, all copies are compared with their sources.
"""

from __future__ import annotations

import time

import ringlog
from chaos.kills import points as stop_plan
from chaos.kills.scene import Scene, Stage
from chaos.rigs.work import KEPT_TOPICS
from ringlog.board.processes import SCHEDULER, WAL_SHARD
from ringlog.client import Client
from ringlog.errors import RinglogError
from ringlog.types import Durability

PER_S = 800.0
DESTS = (("fsync", 0), ("disk", 1), ("memory", 2))
TIMEOUT_MS = 60_000
SETTLE_S = 30.0


def routers(stage: Stage, seconds: float, passes: tuple[int, ...] = stop_plan.PASSES) -> None:
    """Route each source to topics of three durability classes, with kills all the time.

    Every record must be copied exactly once and in order.
    """
    if not seconds:
        return
    account, random = stage.account, stage.order.random("routers")
    scene = stage.cast("routers", plan=stop_plan.plan_of(stop_plan.deaths((SCHEDULER,), passes)))
    scene.last_look = compare
    scene.make_topics()
    with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
        for source in KEPT_TOPICS:
            for durability, number in DESTS:
                dest = f"copy-{source}-{number}"
                client.topics.create(dest, exist_ok=True, durability=Durability.parse(durability))
                client.routers.create(dest, scene.load.topics[source], dest)
    scene.start_load(PER_S)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        scene.load.wait_progress(200)
        act = random.choice([SCHEDULER, SCHEDULER, WAL_SHARD, WAL_SHARD, "all"])
        if act == "all":
            scene.kill_all()
            account.count_work("kills", 1, "RF-4")
        elif scene.kill(act, random.randrange(2)):
            account.count_work("kills", 1, *(["RF-1"] if act == WAL_SHARD else []))
    stage.close(scene)


def compare(scene: Scene) -> list[str]:
    """Compare each router's copies with its source. Returns complaints.

    Both must have the same records in the same order, and the router must count exactly these copies.
    """
    complaints = []
    with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
        for router in list(client.routers.list()):
            try:
                settled = client.routers.settle(router.router, SETTLE_S)
            except RinglogError as e:
                complaints.append(f"router {router.router}: {e}")
                continue
            source, dest = read_all(client, router.source), read_all(client, router.dest)
            if source != dest:
                same = sum(1 for a, b in zip(source, dest, strict=False) if a == b)
                complaints.append(
                    f"router {router.router}: {len(source)} records, {len(dest)} copies, {same} in place;"
                    f" cursor {settled.cursor}, forwarded {settled.forwarded_total}"
                )
            elif settled.forwarded_total != len(dest):
                complaints.append(
                    f"router {router.router}: {len(dest)} copies, it counts {settled.forwarded_total}"
                )
    return complaints


def read_all(client: Client, topic: str) -> list[bytes]:
    """Return every payload of a topic."""
    page = client.read(topic, limit=1_000)
    found = [payload or b"" for payload in page.bytes()]
    while not page.caught_up:
        page = client.read(topic, page.cursor, limit=1_000)
        found += [payload or b"" for payload in page.bytes()]
    return found
