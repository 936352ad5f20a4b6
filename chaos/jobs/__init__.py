"""H5 for queues: workers, shards, gateways and schedulers are killed while jobs are put, claimed and acked.

In the end every job was completed at least once, none is lost, none came back; every job that was handed out
twice is counted under what explains it: a lease that ended, a holder who gave it back, a death.

Settings: `storm_s` (how long a storm lasts; storms fill the time that is left), `empty_s` (how long workers
have to empty the queues after it). A replay runs one case by its name.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import ringlog
from chaos.jobs import journal
from chaos.jobs.clients import LEASE_MS
from chaos.jobs.putting import value_of
from chaos.jobs.verdict import Death, judge
from chaos.kills.load import Stuck, wait_for
from chaos.kills.nursery import Client, Nursery
from chaos.kills.rig import close_down, kill_tree, on_shard
from chaos.kills.scene import SHARDS, Scene, Stage
from chaos.order import Account, Order
from ringlog.board.processes import GATEWAY, SCHEDULER, WAL_SHARD
from ringlog.errors import RinglogError

DEFAULTS: dict[str, Any] = {"storm_s": 10.0, "empty_s": 60.0}
TIMEOUT_MS = 60_000
PUTS_PER_S = 250.0
WORKERS = 3
"""For each queue; one of them through the gateway."""
REJECTS = 1
"""The queue that has dead letters."""
DEAD = "dead-letters"
STEP_S = 0.25
"""Between two deaths at least."""
BAG = [*[WAL_SHARD] * 4, *[GATEWAY, SCHEDULER] * 2, *["worker"] * 4, "all"]


def run(order: Order, account: Account) -> None:
    """Storms until the time is over."""
    settings = order.choose(DEFAULTS)
    end = time.monotonic() + order.seconds
    with Nursery() as nursery:
        stage = Stage(order, account, nursery)
        number = 0
        while number == 0 or (time.monotonic() + settings["storm_s"] < end and not account.findings):
            random = order.random("storm", number)
            stage.run("storm", _case(settings, random))
            number += 1


def replay(order: Order, case: str) -> None:
    """One case by its name: storm."""
    account = Account()
    settings = order.choose(DEFAULTS)
    cases: dict[str, Callable[[Stage], None]] = {"storm": _case(settings, order.random("storm", 0))}
    with Nursery() as nursery:
        Stage(order, account, nursery).run(case, cases[case])
    for finding in account.findings:
        print(finding.what, finding.story, sep="\n")
    print(dict(account.counts), dict(account.faults))
    if account.findings:
        raise AssertionError(account.findings[0].what)


def _case(settings: dict[str, Any], random: Random) -> Callable[[Stage], None]:
    return partial(storm, seconds=settings["storm_s"], empty_s=settings["empty_s"], random=random)


def storm(stage: Stage, *, seconds: float, random: Random, empty_s: float = DEFAULTS["empty_s"]) -> None:
    """Anything killed at any time, workers too (RF-1, 4, 6, 8, 117)."""
    scene = stage.cast("jobs", topics=2 * SHARDS)
    _make_queues(scene)
    putters, workers = _start(scene)
    deaths: list[Death] = []
    deadline = time.monotonic() + seconds
    bag: list[str] = []
    while time.monotonic() < deadline:
        if not bag:
            bag = list(BAG)
            random.shuffle(bag)
        act, from_ns = bag.pop(), time.monotonic_ns()
        if act == "worker":
            victim = random.choice(workers)
            scene.load.kill(victim)
            deaths.append(Death(act, from_ns, time.monotonic_ns(), victim.task.client))
            workers[workers.index(victim)] = _like(scene, victim)
            stage.account.did("client_kills")
        elif act == "all":
            stage.account.did("kills", kill_tree(scene.engine), "RF-4")
            deaths.append(Death(act, from_ns, time.monotonic_ns()))
            scene.engine.start()
        elif scene.kill(act, random.randrange(SHARDS)):
            deaths.append(Death(act, from_ns, time.monotonic_ns()))
            stage.account.did("kills", 1, {WAL_SHARD: "RF-1", GATEWAY: "RF-8"}.get(act, "RF-6"))
        print(f"  {time.monotonic() - deadline + seconds:5.1f} s {act}", flush=True)
        time.sleep(STEP_S * (1 + random.random()))
    _close(stage, scene, putters, deaths, empty_s)


def _make_queues(scene: Scene) -> None:
    """Of both classes on both shards."""
    names = [on_shard(f"queue-{n}", n % SHARDS, SHARDS) for n in range(2 * SHARDS)]
    scene.load.topics[:] = names
    with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
        for number, name in enumerate(names):
            more: dict[str, Any] = {"dead_letter": DEAD} if number % SHARDS == REJECTS else {}
            durability = ("fsync", "disk")[number // SHARDS]
            client.topics.create(name, type="queue", durability=durability, lease_ms=LEASE_MS, **more)


def _start(scene: Scene) -> tuple[list[Client], list[Client]]:
    start = scene.load.start
    putters: list[Client] = []
    workers: list[Client] = []
    for number in range(len(scene.load.topics)):
        transport = "ipc" if number == 0 else "auto"
        putters.append(start("jobs_put", topic=number, per_s=PUTS_PER_S, batch=20, transport=transport))
        hook = "rejects" if number % SHARDS == REJECTS else ""
        workers += [
            start("jobs_work", topic=number, hook=hook, transport="ipc" if n == 0 else "auto")
            for n in range(WORKERS)
        ]
    return putters, workers


def _like(scene: Scene, dead: Client) -> Client:
    """Another worker in place of one that was killed."""
    task = dead.task
    return scene.load.start(task.kind, topic=task.topic, hook=task.hook, transport=task.transport)


# -- the end ----------------------------------------------------------------------------------------------


def _close(stage: Stage, scene: Scene, putters: list[Client], deaths: list[Death], empty_s: float) -> None:
    """Let workers empty the queues, restart once more, judge, stop, verify."""
    load, complaints = scene.load, scene.complaints
    load.is_patient = True  # An outage may be longer than a gateway waits.
    try:
        scene.engine.wait_serving()
        for putter in putters:
            putter.ask_to_end()
        left = _emptied(scene, empty_s)
        load.end()
        from_ns = time.monotonic_ns()
        kill_tree(scene.engine)
        scene.engine.start()
        deaths.append(Death("all", from_ns, time.monotonic_ns()))
        scene.engine.wait_serving()
        with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
            left = left or _jobs_left(scene, client)
            letters = _dead_letters(client)
    except (Stuck, RinglogError) as e:
        complaints.append(f"{type(e).__name__}: {e}")
    else:
        found = judge(journal.load(load.folder), deaths, LEASE_MS, letters, left)
        account = stage.account
        account.did("jobs", found.put)
        account.did("acked", found.done)
        account.did("dead letters", found.dead)
        account.did("doubles", found.doubles, "RF-117")
        for why, times in found.explained.items():
            account.did(f"doubles: {why}", times)
        complaints += [f"{times} x {what}" for what, times in found.wrong.items()] + found.stories
    close_down(scene.engine, complaints)
    stage.judged(scene, complaints + load.complaints)


def _emptied(scene: Scene, seconds: float) -> int:
    """Wait until nothing is ready, leased, resting or being moved; jobs that are left otherwise."""
    with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
        try:
            wait_for(
                lambda: not _jobs_left(scene, client), seconds, "workers to empty the queues", look_s=0.2
            )
        except Stuck:
            return _jobs_left(scene, client)
    return 0


def _jobs_left(scene: Scene, client: ringlog.Client) -> int:
    stats = [client.queue(name).stats() for name in scene.load.topics]
    return sum(each.ready + each.in_flight + each.delayed for each in stats)


def _dead_letters(client: ringlog.Client) -> Counter[int]:
    found: Counter[int] = Counter()
    if any(each.topic == DEAD for each in client.topics.list(DEAD)):
        for page in client.reader(DEAD).pages(1_000):
            found.update(value_of(record.data) for record in page.records)
    return found
