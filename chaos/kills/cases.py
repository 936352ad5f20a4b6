"""The cases of class `kills`: each starts one or more engines and injects one family of faults."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from random import Random

import ringlog
from chaos.check.keys import tried_twice
from chaos.kills import points as stop_plan
from chaos.kills.scene import KEYED_SHARD, SHARDS, Scene, Stage
from chaos.processes import raise_priority
from ringlog.board.processes import GATEWAY, SCHEDULER, WAL_SHARD
from ringlog.drill import targets
from ringlog.drill.engine import SETTLE_S, kill_tree
from ringlog.drill.load import Stuck, wait_for
from ringlog.envelope.messages import ProcessStatus
from ringlog.errors import RinglogError
from ringlog.supervision.tree import BACKGROUND

PER_S = 3_000.0
KEYS = 4
"""Index of the topic of keyed writers."""
IN_COMMIT = (
    "log_after_write",
    "log_after_sync",
    "log_after_publish",
    "log_before_settle",
    "settle_before_tail",
)
"""Stop points between the write of a commit batch and the store that frees its ring space (RF-36)."""
PLACES = ("before", "inside", "filled", "ring_after_publish")
PAUSES_S = (0.1, 0.3, 1.0)


# -- stop points ------------------------------------------------------------------------------------------


def points(stage: Stage, seconds: float, passes: tuple[int, ...] = stop_plan.PASSES) -> None:
    """Kill shards and gateway at all their stop points, one per start, under load (RF-2, RF-36)."""
    _pass_points(stage, "points", stop_plan.deaths((WAL_SHARD, GATEWAY), passes), seconds, PER_S)


def tidy(stage: Stage, seconds: float, passes: tuple[int, ...] = stop_plan.PASSES) -> None:
    """Kill compactor, reclaimer and relocator at all their stop points (RF-6), while they have much work."""
    _pass_points(stage, "tidy", stop_plan.deaths(BACKGROUND, passes), seconds, PER_S / 4)


def _pass_points(
    stage: Stage, name: str, deaths: dict[str, list[stop_plan.Death]], seconds: float, per_s: float
) -> None:
    scene = stage.cast(name, plan=stop_plan.plan_of(deaths))
    # A process may die before it settled anything, so an outage can be longer than the gateway's timeout.
    scene.load.tolerates_errors = True
    scene.make_topics()
    scene.start_load(per_s)
    deadline, told = time.monotonic() + seconds, set[tuple[str, int]]()
    lives: dict[str, int] = {}
    while time.monotonic() < deadline:
        found = scene.engine.look()
        doomed = [each for each in found.processes if each.kind in deaths] if found else []
        for each in doomed:
            lives[each.name] = max(lives.get(each.name, 0), each.restarts)
            raise_priority([each]) if each.kind in BACKGROUND else _drain_when_due(scene, each, deaths, told)
        if doomed and all(each.restarts >= len(deaths[each.kind]) for each in doomed):
            break
        time.sleep(0.05)
    _count_points(stage, deaths, lives)
    scene.engine.arm("")
    stage.account.count_work("kills", kill_and_start(scene), "RF-4")
    scene.load.wait_progress(1_000)
    stage.close(scene)


def _drain_when_due(
    scene: Scene, each: ProcessStatus, deaths: dict[str, list[stop_plan.Death]], told: set[tuple[str, int]]
) -> None:
    """Send SIGTERM to a shard whose next stop point is in a drain. A shard drains only on request."""
    plan = deaths[each.kind]
    is_due = each.restarts < len(plan) and plan[each.restarts][0] == stop_plan.DRAIN_POINT
    if is_due and each.state == "ready" and (each.name, each.restarts) not in told:
        told.add((each.name, each.restarts))
        target = targets.hold_child(each.pid, scene.engine.pid)
        if target is not None:
            with target:
                target.send(signal.SIGTERM)


def _count_points(stage: Stage, deaths: dict[str, list[stop_plan.Death]], lives: dict[str, int]) -> None:
    """Count the deaths at stop points. Nothing else kills in this case, so each restart is one such death."""
    account, reached = stage.account, set()
    for name, restarts in lives.items():
        kind = name.partition("-")[0]
        died = deaths[kind][:restarts]
        print(
            f"  {name}: {len(died)} of {len(deaths[kind])} deaths; next {deaths[kind][restarts:][:1]}",
            flush=True,
        )
        for point, _ in died:
            row = "RF-2" if kind == WAL_SHARD else "RF-8" if kind == GATEWAY else "RF-6"
            account.count_work("kills", 1, row)
            if point in IN_COMMIT:
                account.faults["RF-36"] += 1
        account.count_work("point_passes", len(died))
        reached |= {point for point, _ in died}
    account.counts["points"] += len(reached)


# -- random kills -----------------------------------------------------------------------------------------


def storm(stage: Stage, seconds: float) -> None:
    """Kill or pause any process at any time, or several at once, and clients too.

    Covers RF-1, RF-4, RF-5, RF-6, RF-8, RF-9, RF-11, RF-24 and RF-97.
    """
    account, random = stage.account, stage.order.random("storm")
    scene = stage.cast("storm")
    scene.make_topics()
    keyed = scene.start_load(PER_S)
    _producers_die(stage, scene)
    deadline, turn = time.monotonic() + seconds, 0
    bag: list[str] = []
    while time.monotonic() < deadline:
        if not bag:
            bag = (
                [WAL_SHARD] * 6
                + [GATEWAY, SCHEDULER] * 2
                + [*BACKGROUND, "keyed", "keyed", "pause", "supervisor", "all", "forks", *["several"] * 4]
            )
            random.shuffle(bag)
        act, turn = bag.pop(), turn + 1
        scene.load.wait_progress(300)
        print(f"  {time.monotonic() - deadline + seconds:5.1f} s {act}", flush=True)
        if act == "keyed":
            # Kill the writer's shard first, so that the writer has a pending request when it is killed
            # itself.
            account.count_work("kills", int(scene.kill(WAL_SHARD, shard=KEYED_SHARD)), "RF-1")
            scene.wait_asked(keyed[turn % 2])
            keyed[turn % 2] = scene.replace_keyed(keyed[turn % 2])
            account.count_work("client_kills")
        elif act == "pause":
            if scene.pause(random.choice([WAL_SHARD, GATEWAY]), random.choice(PAUSES_S)):
                account.count_work("pauses", 1, "RF-11")
        elif act == "supervisor":
            scene.kill_supervisor()
            account.count_work("kills", 1, "RF-5")
        elif act == "all":
            account.count_work("kills", kill_and_start(scene), "RF-4")
        elif act == "forks":
            if scene.kill_forkserver():
                account.count_work("kills", 1, "RF-6")
        elif act == "several":
            _kill_several(stage, scene, random)
        elif scene.kill(act, shard=random.randrange(2)):
            account.count_work("kills", 1, {WAL_SHARD: "RF-1", GATEWAY: "RF-8"}.get(act, "RF-6"))
    stage.close(scene)
    if scene.rows is not None:
        account.faults["RF-97"] += tried_twice(scene.rows, KEYS)


def _kill_several(stage: Stage, scene: Scene, random: Random) -> None:
    """Kill two to five actors in direct succession. In one of four cases the forkserver is killed first."""
    if random.random() < 0.25:
        scene.kill_forkserver()
    everybody = [(WAL_SHARD, 0), (WAL_SHARD, 1), (GATEWAY, 0), *((kind, 0) for kind in BACKGROUND)]
    killed = sum(scene.kill(*each) for each in random.sample(everybody, random.randint(2, 5)))
    stage.account.count_work("kills", killed, *(["RF-24"] if killed > 1 else []))


def _producers_die(stage: Stage, scene: Scene) -> None:
    """Kill producers during a push, at each of its stages. The other clients must not be affected (RF-9)."""
    doomed = [
        scene.load.start("produce", topic=topic, per_s=2_000, hook=f"{place}:{n}")
        for place in PLACES
        for topic, n in ((0, 1), (1, 2), (0, 7))
    ]
    for client in doomed:
        if not scene.load.died(client, SETTLE_S):
            raise Stuck(f"a producer did not die at {client.task.hook}")
        stage.account.count_work("client_kills", 1, "RF-9")
    scene.load.wait_progress(300)


# -- ends -------------------------------------------------------------------------------------------------


def ends(stage: Stage, passes: tuple[int, ...] = stop_plan.PASSES, rounds: int = 1) -> None:
    """Send SIGTERM in every phase, twice, and followed by SIGKILL (RF-23).

    Also kill the supervisor at its stop point (RF-5).
    """
    account, random = stage.account, stage.order.random("ends")
    scene = stage.cast("ends")
    engine = scene.engine
    scene.make_topics()
    scene.start_load(PER_S / 3)
    for n in passes:
        _supervisor_dies_respawning(stage, scene, n)
    for _ in range(rounds):
        # Under load the stop must be orderly, although clients continue.
        scene.load.wait_progress(300)
        engine.signal(signal.SIGTERM)
        status = engine.wait_status(SETTLE_S)
        if status != 0:
            scene.complaints.append(f"SIGTERM under load ended with {status}")
        _start_again(scene)
        account.count_work("terms", 1, "RF-23")
        for second in (signal.SIGTERM, signal.SIGKILL):
            scene.load.wait_progress(300)
            engine.signal(signal.SIGTERM)
            wait_for(lambda: _is_draining(scene), SETTLE_S, "the drain to begin", look_s=0.001)
            engine.signal(second)
            if engine.wait_status(SETTLE_S) is None:
                raise Stuck(f"the engine did not exit after SIGTERM and {second.name}")
            engine.wait_alone()
            _start_again(scene)
            account.count_work("terms", 1, "RF-23")
        for _ in range(2):
            # During a start: at a random time between its first step and readiness.
            scene.load.wait_progress(300)
            engine.signal(signal.SIGTERM)
            engine.wait_status(SETTLE_S)
            before = engine.begin_start()
            time.sleep(random.uniform(0.0, 0.8))
            engine.signal(signal.SIGTERM)
            if engine.wait_status(SETTLE_S) is None:
                raise Stuck("the engine did not exit after SIGTERM during its start")
            del before
            engine.wait_alone()
            _start_again(scene)
            account.count_work("terms", 1, "RF-23")
    if "drain timed out" in engine.log_path.read_text():
        scene.complaints.append("an orderly stop, with living shards, dropped requests of the gateway")
    stage.close(scene)


SHARD_COUNTS = (1, 2, 3, 4)


def reshards(stage: Stage, rounds: int) -> None:
    """Stop or kill the engine and start it with another number of shards, under load (RF-124).

    Topics move between shards, and clients see only a pause. Batches in which only some records have a dedup
    id continue too.
    """
    random = stage.order.random("reshards")
    scene = stage.cast("reshards")
    engine, shards = scene.engine, SHARDS
    scene.make_topics()
    scene.start_load(PER_S / 3)
    for topic, transport in ((0, "auto"), (3, "ipc")):
        scene.load.start("produce_mixed", topic=topic, per_s=200, batch=10, transport=transport)
    for left in reversed(range(rounds)):
        scene.load.wait_progress(300, SETTLE_S)
        shards = random.choice([n for n in SHARD_COUNTS if n != shards]) if left else SHARDS
        engine.change("wal.shards", shards)
        if random.random() < 0.5:
            kill_tree(engine)
        else:
            engine.signal(signal.SIGTERM)
            status = engine.wait_status(SETTLE_S)
            if status != 0:
                scene.complaints.append(f"SIGTERM before another number of shards ended with {status}")
            engine.wait_alone()
        engine.start()
        engine.wait_serving()
        stage.account.count_work("reshards", 1, "RF-124")
    scene.load.wait_progress(1_000, SETTLE_S)
    stage.close(scene)


def _is_draining(scene: Scene) -> bool:
    """Whether the supervisor drains or has exited."""
    found = scene.engine.look()
    return found is None or found.state == "draining"


def _start_again(scene: Scene) -> None:
    scene.engine.start()


def _supervisor_dies_respawning(stage: Stage, scene: Scene, n: int) -> None:
    engine = scene.engine
    engine.signal(signal.SIGTERM)
    engine.wait_status(SETTLE_S)
    engine.arm(f"{stop_plan.SUPERVISOR_POINT}:{n}:kill")
    engine.start()
    with targets.Target(engine.pid) as supervisor:
        for death in range(n):
            wait_for(lambda: bool(engine.pids(WAL_SHARD)), SETTLE_S, "a shard to kill")
            scene.load.wait_progress(100)
            role, shard = (
                (WAL_SHARD, death % 2) if n < 7 else ((WAL_SHARD, GATEWAY)[death % 2], death % 4 // 2)
            )
            wait_for(lambda role=role, shard=shard: scene.kill(role, shard), SETTLE_S, "a kill")  # type: ignore[misc]
            stage.account.count_work("kills", 1, "RF-1")
        if not supervisor.wait_dead():
            raise Stuck(f"the supervisor did not die at pass {n} of its stop point")
    engine.end_process()
    engine.wait_alone()
    stage.account.count_work("kills", 1, "RF-5")
    stage.account.count_work("point_passes", 1)
    if n == 1:
        stage.account.counts["points"] += 1
    engine.arm("")
    engine.start()


# -- a shard that stands still, and one that cannot live ----------------------------------------------------


def frozen(stage: Stage) -> None:
    """Stop a shard with SIGSTOP until it is replaced. It must be dead before its successor starts (RF-10).

    At the same time a shard of another engine dies at every start and is given up; its other shard continues
    (RF-16).
    """
    scene = stage.cast("frozen", settings={"supervisor.stuck_after_s": 3.0})
    scene.make_topics()
    scene.start_load(PER_S / 6)
    scene.load.wait_progress(300)
    (old,) = [p for p in targets.living(scene.engine.look(), WAL_SHARD) if p.name.endswith("-00")]
    target = targets.hold_child(old.pid, scene.engine.pid)
    if target is None:
        raise Stuck("the shard to pause died by itself")
    with target:
        target.send(signal.SIGSTOP)
        doomed(stage)
        wait_for(lambda: _successor(scene, old.pid) != 0, SETTLE_S, "the stopped shard to be replaced")
        if not target.wait_dead(0):
            scene.complaints.append("a successor was started while the stopped shard was not dead")
        files = _files_of(scene, old.incarnation)
        was_alive = target.send(signal.SIGCONT)
    if was_alive:
        scene.complaints.append("the stopped shard could be continued after it was replaced")
    scene.load.wait_progress(500)
    after = _files_of(scene, old.incarnation)
    # The successor may truncate the unused end of a file.
    changed = [name for name, data in after.items() if not files.get(name, b"").startswith(data)]
    if changed:
        scene.complaints.append(f"files of the replaced shard changed: {changed}")
    stage.account.count_work("kills", 1, "RF-10")
    stage.close(scene)


def _successor(scene: Scene, old: int) -> int:
    found = targets.living(scene.engine.look(), WAL_SHARD)
    return next((p.pid for p in found if p.name.endswith("-00") and p.pid != old), 0)


def _files_of(scene: Scene, incarnation: int) -> dict[str, bytes]:
    folder = Path(scene.engine.data_dir, "wal", "shard-00")
    found = {}
    for path in folder.glob(f"wal-{incarnation}-*.log"):
        try:
            found[path.name] = path.read_bytes()
        except FileNotFoundError:  # Absorbed by a snapshot and deleted in the meantime.
            continue
    return found


RESTARTS_MAX = 3


def doomed(stage: Stage) -> None:
    """Kill a shard at every start.

    After `restart_max` restarts it is given up, and the others continue (RF-16).
    """
    scene = stage.cast("doomed", topics=2, settings={"supervisor.restart_max": RESTARTS_MAX})
    scene.load.tolerates_errors = True
    scene.make_topics()
    for topic in (0, 1):
        scene.load.start("produce", topic=topic, per_s=500, timeout_s=5.0)
    scene.load.start("read", topic=1)
    scene.load.wait_progress(300)
    pids: set[int] = set()

    def is_given_up() -> bool:
        found = scene.engine.look()
        first = next((p for p in found.processes if p.name == "wal_shard-00"), None) if found else None
        if first is None:
            return False
        if first.pid and targets.kill_child(first.pid, scene.engine.pid):
            pids.add(first.pid)
        return first.state == "given_up"

    wait_for(is_given_up, SETTLE_S, "the shard to be given up")
    if len(pids) != RESTARTS_MAX + 1:
        scene.complaints.append(f"it was started {len(pids)} times, {RESTARTS_MAX + 1} are allowed")
    stage.account.count_work("kills", len(pids), "RF-16")
    found = scene.engine.look()
    if found is None or found.state != "degraded":
        scene.complaints.append(f"with a shard given up the engine calls itself {found and found.state}")
    with ringlog.connect(scene.engine.url, timeout_ms=5_000) as client:
        _expect_refusal(client, scene)
        before = client.topics.state(scene.load.topics[1]).head_seq
        wait_for(
            lambda: client.topics.state(scene.load.topics[1]).head_seq > before + 200, SETTLE_S,
            "the other shard to append",
        )  # fmt: skip
    if scene.engine.restarts(WAL_SHARD)[0] != RESTARTS_MAX:
        scene.complaints.append("a shard that was given up was started again")
    stage.account.count_work("kills", kill_and_start(scene), "RF-4")
    stage.close(scene)


def kill_and_start(scene: Scene) -> int:
    """Kill the whole tree and start it again. Returns the number of killed processes."""
    before = len(scene.kills)
    scene.kill_all()
    return len(scene.kills) - before


def _expect_refusal(client: ringlog.Client, scene: Scene) -> None:
    try:
        client.append(scene.load.topics[0], b"x")
    except RinglogError as e:
        if "shard_failed" not in f"{e} {e.detail}":
            scene.complaints.append(f"a topic of a shard that was given up says {e!r} {e.detail}")
    else:
        scene.complaints.append("a topic of a shard that was given up took a record")


# -- outage -----------------------------------------------------------------------------------------------

OUTAGE_LOG_BYTES = 64 << 20


def outage(stage: Stage, kills: int) -> None:
    """Measure how long writers wait for a shard that has 64 MiB of log to replay."""
    scene = stage.cast(
        "outage", topics=3,
        settings={"storage.enabled": False, "wal.file_bytes": "64MiB", "gateway.enabled": False},
    )  # fmt: skip
    scene.make_topics()
    filler = scene.load.start("produce", topic=2, per_s=100_000, batch=200, record_bytes=6_000)
    folder = Path(scene.engine.data_dir, "wal", "shard-00")

    def has_enough() -> bool:
        with ringlog.connect(scene.engine.url) as client:
            return client.topics.state(scene.load.topics[2]).bytes >= OUTAGE_LOG_BYTES

    wait_for(has_enough, 60.0, f"64 MiB of log in {folder.name}", look_s=0.1)
    filler.ask_to_end()
    filler.wait(SETTLE_S)
    scene.load.start("produce_one", topic=0, per_s=500)
    scene.load.start("produce", topic=1, per_s=100)
    for _ in range(kills):
        scene.load.wait_progress(200)
        if scene.kill(WAL_SHARD, 0):
            stage.account.count_work("kills", 1, "RF-1")
        scene.load.wait_progress(200)
        scene.engine.wait_serving()
    kept = list(stage.pauses_ms)
    stage.close(scene)
    stage.outages_ms += scene.pauses_ms()
    stage.pauses_ms = kept
