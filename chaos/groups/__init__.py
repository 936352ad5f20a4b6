"""H5 for consumer groups: members, shards, gateways and schedulers die while records are shared and followed.

Groups in mode queue are worked on by members that ack, give back, reject, steal and oversleep; streams are
taken over and committed; one group is told to go back from time to time, and the dead letters of another one
are sent back. In the end every record was done at least once by each group or lies among the dead letters
once, none is lost and none came back; every record that was handed out twice is counted under what explains
it, and no death does: leases lie in the log. Floors were looked at all the time.

Settings: `storm_s` (how long a storm lasts; storms fill the time that is left), `empty_s` (how long members
have to do everything after it). A replay runs one case by its name.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import ringlog
from chaos.groups.clients import (
    AGAIN,
    DEAD,
    FOLLOW,
    IDLE_MS,
    LEASE_MS,
    REDRIVEN,
    SHARE,
    group_of,
    kinds_of,
    look_at,
    read_stream,
)
from chaos.groups.verdict import Place, Times, judge
from chaos.jobs import journal
from chaos.jobs.putting import value_of
from chaos.kills.load import Stuck, wait_for
from chaos.kills.nursery import Client, Nursery
from chaos.kills.rig import close_down, kill_tree, on_shard
from chaos.kills.scene import SHARDS, Scene, Stage
from chaos.order import Account, Order
from ringlog.board.processes import GATEWAY, SCHEDULER, WAL_SHARD
from ringlog.errors import RinglogError

DEFAULTS: dict[str, Any] = {"storm_s": 10.0, "empty_s": 60.0}
TIMEOUT_MS = 60_000
PUTS_PER_S = 60.0
MEMBERS = 2
"""Of each group; one of them through the gateway, and that one takes over what others leave lying."""
STEP_S = 0.25
"""Between two deaths at least."""
BAG = [*[WAL_SHARD] * 4, *[GATEWAY] * 2, SCHEDULER, *["member"] * 4, "all"]
LAST = 0
"""Client number of the one that looks when everybody has ended."""


def run(order: Order, account: Account) -> None:
    """Storms until the time is over."""
    settings = order.choose(DEFAULTS)
    end = time.monotonic() + order.seconds
    with Nursery() as nursery:
        stage = Stage(order, account, nursery)
        number = 0
        while number == 0 or (time.monotonic() + settings["storm_s"] < end and not account.findings):
            stage.run("storm", _case(settings, order.random("storm", number)))
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
    """Anything killed at any time, members too (RF-1, 4, 6, 8, 117)."""
    scene = stage.cast("groups", topics=2 * SHARDS)
    _make_topics(scene)
    makers, members = _start(scene)
    deadline = time.monotonic() + seconds
    died: dict[int, int] = {}
    bag: list[str] = []
    while time.monotonic() < deadline:
        if not bag:
            bag = list(BAG)
            random.shuffle(bag)
        act = bag.pop()
        if act == "member":
            victim = random.choice(members)
            died[victim.task.client] = time.monotonic_ns()
            scene.load.kill(victim)
            members[members.index(victim)] = _like(scene, victim)
            stage.account.did("client_kills")
        elif act == "all":
            stage.account.did("kills", kill_tree(scene.engine), "RF-4")
            scene.engine.start()
        elif scene.kill(act, random.randrange(SHARDS)):
            stage.account.did("kills", 1, {WAL_SHARD: "RF-1", GATEWAY: "RF-8"}.get(act, "RF-6"))
        print(f"  {time.monotonic() - deadline + seconds:5.1f} s {act}", flush=True)
        time.sleep(STEP_S * (1 + random.random()))
    _close(stage, scene, makers, died, empty_s)


def _make_topics(scene: Scene) -> None:
    """Of both classes on both shards."""
    names = [on_shard(f"shared-{n}", n % SHARDS, SHARDS) for n in range(2 * SHARDS)]
    scene.load.topics[:] = names
    with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
        for number, name in enumerate(names):
            client.topics.create(name, durability=("fsync", "disk")[number // SHARDS])


def _start(scene: Scene) -> tuple[list[Client], list[Client]]:
    """Returns those who make work, and those who may be killed."""
    start = scene.load.start
    putters: list[Client] = []
    members: list[Client] = []
    kinds = {SHARE: "groups_share", FOLLOW: "groups_follow", AGAIN: "groups_again"}
    for topic in range(len(scene.load.topics)):
        transport = "ipc" if topic == 0 else "auto"
        putters.append(start("groups_put", topic=topic, per_s=PUTS_PER_S, batch=20, transport=transport))
        for kind in kinds_of(topic):
            members += [
                start(kinds[kind], topic=topic, hook="" if n else "takes", transport="auto" if n else "ipc")
                for n in range(1 if kind is AGAIN else MEMBERS)
            ]
    # Who looks also tells groups to go back, and must end before anything can be done with; so must who sends
    # letters back.
    return [*putters, start("groups_look"), start("groups_redrive", topic=REDRIVEN)], members


def _like(scene: Scene, dead: Client) -> Client:
    """Another member in place of one that was killed."""
    task = dead.task
    return scene.load.start(task.kind, topic=task.topic, hook=task.hook, transport=task.transport)


# -- the end ----------------------------------------------------------------------------------------------


def _close(stage: Stage, scene: Scene, makers: list[Client], died: dict[int, int], empty_s: float) -> None:
    """Let members do everything, restart once more, look, judge, stop, verify."""
    load, complaints = scene.load, scene.complaints
    load.is_patient = True  # An outage may be longer than a gateway waits.
    try:
        scene.engine.wait_serving()
        for maker in makers:
            maker.ask_to_end()
        _wait_done(scene, empty_s)
        load.end()
        kill_tree(scene.engine)
        scene.engine.start()
        scene.engine.wait_serving()
        with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
            places = _look_last(scene, client)
            letters = _dead_letters(client)
    except (Stuck, RinglogError) as e:
        complaints.append(f"{type(e).__name__}: {e}")
    else:
        found = judge(journal.load(load.folder), places, Times(LEASE_MS, IDLE_MS, died), letters)
        account = stage.account
        for what in ("records", "done", "read", "commits", "takeovers", "looks", "seeks"):
            account.did(what, getattr(found, what))
        account.did("dead letters", found.dead)
        account.did("letters redriven", found.redriven)
        account.did("doubles", found.doubles, "RF-117")
        for why, times in found.explained.items():
            account.did(f"doubles: {why}", times)
        if found.wrong:
            complaints.append(", ".join(f"{times} x {what}" for what, times in found.wrong.items()))
        complaints += found.stories
    close_down(scene.engine, complaints)
    stage.judged(scene, complaints + load.complaints)


def _wait_done(scene: Scene, seconds: float) -> None:
    """Until nothing is left to the groups in mode queue; what is left then is counted by the last look."""

    def is_done() -> bool:
        return not any(
            group_of(client, scene.load.topics, topic, kind).stats().lag
            for topic in range(len(scene.load.topics))
            for kind in kinds_of(topic)
            if kind is not FOLLOW
        )

    with ringlog.connect(scene.engine.url, timeout_ms=TIMEOUT_MS) as client:
        try:
            wait_for(is_done, seconds, "members to do everything", look_s=0.2)
        except Stuck as e:
            print(e, flush=True)


def _dead_letters(client: ringlog.Client) -> Counter[int]:
    """How often the record of each value lies there."""
    found: Counter[int] = Counter()
    if any(each.topic == DEAD for each in client.topics.list(DEAD)):
        for page in client.reader(DEAD).pages(1_000):
            found.update(value_of(record.data) for record in page.records)
    return found


def _look_last(scene: Scene, client: ringlog.Client) -> list[Place]:
    """Read streams to their ends, look at all floors, and see whether anything is left."""
    places = []
    notes = journal.Journal(Path(scene.load.folder, f"{LAST:05d}.journal"), LAST)
    try:
        for topic in range(len(scene.load.topics)):
            for kind in kinds_of(topic):
                group = group_of(client, scene.load.topics, topic, kind)
                stats = group.stats()
                if kind is FOLLOW and stats.undelivered:
                    last = read_stream(group, topic, notes, stats.undelivered, is_auto=False)
                    notes.note(journal.Did.COMMIT, topic, [0], seqs=[last], group=kind.number)
                    group.commit()
                    stats = group.stats()
                look_at(group, topic, kind, notes)
                places.append(Place(topic, kind.number, kind is not FOLLOW, kind is AGAIN, stats.lag))
    finally:
        notes.close()
    return places
