"""A storm: kills of any process at any time, including clients with leases, and the final judgement."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, Protocol

import ringlog
from chaos.kills.rig import on_shard
from chaos.kills.scene import SHARDS, Scene, Stage
from chaos.leases import journal
from chaos.leases.clients import DEAD
from chaos.leases.history import Death, LeaseVerdict, Place, Rules
from chaos.leases.putting import value_of
from chaos.leases.verdict import judge
from chaos.order import Account, Order
from ringlog.board.processes import GATEWAY, SCHEDULER, WAL_SHARD
from ringlog.drill.engine import close_down, kill_tree
from ringlog.drill.load import Stuck, wait_for
from ringlog.drill.nursery import ClientProcess, Nursery
from ringlog.errors import RinglogError

DEFAULTS: dict[str, Any] = {"storm_s": 10.0, "empty_s": 60.0}
"""`storm_s`: length of a storm (s). `empty_s`: time (s) that clients have to finish all work after it."""
TIMEOUT_MS = 60_000
STEP_S = 0.25
"""Minimum time (s) between two kills."""
LEASER = "leaser"
BAG = [*[WAL_SHARD] * 4, *[GATEWAY, SCHEDULER] * 2, *[LEASER] * 4, "all"]


class Cast(Protocol):
    """What a class adds to the storm: topics, clients and rules."""

    name: str
    prefix: str
    """Prefix of topic names."""
    counted: dict[str, str]
    """Counts of a LeaseVerdict to report, and their names in the account."""

    def make(self, client: ringlog.Client, topics: list[str]) -> None:
        """Create the topics, of both durability classes on both shards."""

    def start(self, scene: Scene) -> tuple[list[ClientProcess], list[ClientProcess]]:
        """Start clients. Returns the producers, and the clients with leases, which may be killed."""

    def left(self, client: ringlog.Client, topics: list[str]) -> int:
        """Return the amount of work that is not done."""

    def places(self, client: ringlog.Client, scene: Scene) -> list[Place]:
        """Take a last look after all clients exited. Returns the queues and groups to judge."""

    def rules(self, deaths: list[Death]) -> Rules:
        """Return the rules that explain repeated deliveries."""


Case = Callable[[Stage], None]


def run(order: Order, account: Account, cast: Cast, first: Mapping[str, Case] | None = None) -> None:
    """Run the cases in `first`, then storms until the time is over."""
    settings = order.choose(DEFAULTS)
    end = time.monotonic() + order.seconds
    with Nursery("chaos.rigs.work") as nursery:
        stage = Stage(order, account, nursery)
        for name, case in (first or {}).items():
            stage.run(name, case)
        number = 0
        while not account.findings and (number == 0 or time.monotonic() + settings["storm_s"] < end):
            stage.run("storm", _case(cast, settings, order.random("storm", number)))
            number += 1


def replay(order: Order, case: str, cast: Cast, first: Mapping[str, Case] | None = None) -> None:
    """Repeat one case by its name: storm, or one in `first`."""
    settings = order.choose(DEFAULTS)
    cases = {**(first or {}), "storm": _case(cast, settings, order.random("storm", 0))}
    Stage.replay(order, case, cases[case])


def _case(cast: Cast, settings: dict[str, Any], random: Random) -> Case:
    return partial(storm, cast, seconds=settings["storm_s"], empty_s=settings["empty_s"], random=random)


def storm(
    cast: Cast, stage: Stage, *, seconds: float, random: Random, empty_s: float = DEFAULTS["empty_s"]
) -> None:
    """Kill anything at any time, including clients with leases (RF-1, RF-4, RF-6, RF-8, RF-117)."""
    scene = stage.cast(cast.name, topics=2 * SHARDS)
    scene.load.topics[:] = [on_shard(f"{cast.prefix}-{n}", n % SHARDS, SHARDS) for n in range(2 * SHARDS)]
    with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
        cast.make(client, scene.load.topics)
    makers, leasers = cast.start(scene)
    deaths: list[Death] = []
    deadline = time.monotonic() + seconds
    bag: list[str] = []
    while time.monotonic() < deadline:
        if not bag:
            bag = list(BAG)
            random.shuffle(bag)
        act, from_ns = bag.pop(), time.monotonic_ns()
        if act == LEASER:
            victim = random.choice(leasers)
            scene.load.kill(victim)
            deaths.append(Death(act, from_ns, time.monotonic_ns(), victim.task.client))
            leasers[leasers.index(victim)] = _like(scene, victim)
            stage.account.count_work("client_kills")
        elif act == "all":
            stage.account.count_work("kills", kill_tree(scene.engine), "RF-4")
            deaths.append(Death(act, from_ns, time.monotonic_ns()))
            scene.engine.start()
        elif scene.kill(act, random.randrange(SHARDS)):
            deaths.append(Death(act, from_ns, time.monotonic_ns()))
            stage.account.count_work("kills", 1, {WAL_SHARD: "RF-1", GATEWAY: "RF-8"}.get(act, "RF-6"))
        print(f"  {time.monotonic() - deadline + seconds:5.1f} s {act}", flush=True)
        time.sleep(STEP_S * (1 + random.random()))
    _close(cast, stage, scene, makers, deaths, empty_s)


def _like(scene: Scene, dead: ClientProcess) -> ClientProcess:
    """Start a client with the task of a killed one."""
    task = dead.task
    return scene.load.start(task.kind, topic=task.topic, hook=task.hook, transport=task.transport)


def _close(
    cast: Cast, stage: Stage, scene: Scene, makers: list[ClientProcess], deaths: list[Death], empty_s: float
) -> None:
    """Wait until all work is done, restart once more, look, judge, stop and verify."""
    load, complaints = scene.load, scene.complaints
    load.tolerates_errors = True  # An outage may be longer than the gateway's timeout.
    try:
        scene.engine.wait_serving()
        for maker in makers:
            maker.ask_to_end()
        _wait_done(cast, scene, empty_s)
        load.end()
        from_ns = time.monotonic_ns()
        kill_tree(scene.engine)
        scene.engine.start()
        deaths.append(Death("all", from_ns, time.monotonic_ns()))
        scene.engine.wait_serving()
        with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
            places = cast.places(client, scene)
            letters = _dead_letters(client)
    except (Stuck, RinglogError) as e:
        complaints.append(f"{type(e).__name__}: {e}")
    else:
        found = judge(journal.load(load.folder), places, cast.rules(deaths), letters)
        _count(cast, stage.account, found)
        if found.wrong:
            complaints.append(", ".join(f"{times} x {what}" for what, times in found.wrong.items()))
        complaints += found.stories
    close_down(scene.engine, complaints)
    stage.judged(scene, complaints + load.complaints)


def _count(cast: Cast, account: Account, found: LeaseVerdict) -> None:
    for what, name in cast.counted.items():
        account.count_work(name, getattr(found, what))
    account.count_work("dead letters", found.dead)
    account.count_work("doubles", found.doubles, "RF-117")
    for why, times in found.explained.items():
        account.count_work(f"doubles: {why}", times)


def _wait_done(cast: Cast, scene: Scene, seconds: float) -> None:
    """Wait until all work is done. Work that is left after `seconds` is counted by the last look."""
    with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
        try:
            wait_for(
                lambda: not cast.left(client, scene.load.topics), seconds, "everything to be done", look_s=0.2
            )
        except Stuck as e:
            print(e, flush=True)


def _dead_letters(client: ringlog.Client) -> Counter[int]:
    """Return how often each value is in the dead-letter topic."""
    found: Counter[int] = Counter()
    if any(each.topic == DEAD for each in client.topics.list(DEAD)):
        for page in client.reader(DEAD).pages(1_000):
            found.update(value_of(record.data) for record in page.records)
    return found
