"""Crashes of the sink, counted: `python -m tests.spark.crashes [TIMES [PLACE…]]`, by default 30 for each
cell.

A cell combines a place where a driver dies with a distribution of the repeated batch over partitions. After
each crash the batch is staged and committed again, another batch follows, and every (topic, row) is counted.
Each driver is a process that is killed with SIGKILL at a stop point or at a random moment. The engine still
appends the frames that the dead driver pushed into a ring while the next driver starts. Disks fail, or lose
power, at every change.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import ringlog
import ringlog.testing
from ringlog import stop_points
from ringlog.errors import DiskError, InvariantViolation
from ringlog.spark.clients import close_clients
from ringlog.spark.commit import WriterKey
from ringlog.spark.options import sink_options
from ringlog.spark.staging import FRAMES_SUFFIX, PLAN_SUFFIX, Staging, read_plan, writer_file_id
from ringlog.storage.real_disk import RealDisk
from ringlog.testing.faulty_disk import DiskFault, FaultyDisk, Halted
from ringlog.testing.simulated_disk import SimulatedDisk
from tests.support.sink_world import DEALS, WIDE, World, bury

IDS = range(60)
NEXT_IDS = range(60, 90)
CHANGES = 60
"""More than the number of disk changes of a batch with three tasks."""
MANY = range(600)
MORE = range(600, 700)
FRAMES = 88
"""About the number of frames of MANY, with up to 7 records each."""
LIFE_S = 0.15
"""Approximate duration of a driver's batch on an idle machine. `main` measures it; random kills occur within
it."""
EARLY, STAGING, APPENDING, DONE, LIVED = "before it began", "staging", "appending", "done", "lived"
RUNNING = (STAGING, APPENDING, DONE)
"""Phases in which a crash counts: the batch had begun."""
POINTS: dict[str, Callable[[random.Random], str]] = {
    "staging": lambda rng: f"sink_after_stage:{rng.randint(1, 3)}:kill",
    "before the plan": lambda _: "sink_before_plan:1:kill",
    "after the plan": lambda _: "sink_after_plan:1:kill",
    "between frames": lambda rng: f"sink_mid_append:{rng.randint(1, FRAMES - 8)}:kill",
    "after the last": lambda _: "sink_after_append:1:kill",
    "marked done": lambda _: "sink_after_done:1:kill",
    "in abort": lambda rng: f"sink_mid_append:{rng.randint(1, FRAMES - 8)}:raise,sink_in_abort:1:kill",
    "at random": lambda _: "",
}
"""Places where a driver dies, as specs of stop points."""


def crash_at(world: World, disk: FaultyDisk, how: str, *, aborts: bool) -> bool:
    """Run batch 0 on a disk that halts or fails, then again without faults. Return False if no fault
    occurred."""
    world.disk = disk
    try:
        world.batch(0, IDS)
    except Halted:
        bury(disk)
    except (DiskError, InvariantViolation):
        disk.plan.clear()
        if aborts:
            world.abort()
        bury(disk)
    else:
        return False
    world.disk = disk.inner
    again(world, how, IDS, NEXT_IDS)
    return True


def power_cut_at(world: World, nth: int, how: str) -> bool:
    """Lose power at the nth change of the staging disk during batch 0. Return False if there were fewer
    changes."""
    inner = SimulatedDisk(world.directory)
    world.disk = FaultyDisk(inner, DiskFault("any", nth, "halt"))
    try:
        world.batch(0, IDS)
    except Halted:
        inner.power_loss(seed=nth)
    else:
        return False
    world.disk = inner
    again(world, how, IDS, NEXT_IDS)
    return True


def again(world: World, how: str, ids: range, next_ids: range) -> None:
    """Repeat the batch after a crash and run the next one. Assert that no row is lost or duplicated."""
    world.batch(0, ids, how, seed=5)
    world.batch(1, next_ids, how)
    found, expected = world.found(), world.expected([*ids, *next_ids])
    assert found == expected, (
        f"lost {sum((expected - found).values())}, doubled {sum((found - expected).values())}"
    )


def killed_driver(world: World, spec: str, life_s: float | None = None) -> bool:
    """Run batch 0 in a new process until it is killed. Return False if it finished."""
    begun, begins = os.pipe()
    with warnings.catch_warnings():
        # newer Python versions warn about fork in a process with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _be_driver(world, spec, begins)
    os.close(begins)
    os.read(begun, 1)
    os.close(begun)
    if life_s is not None:
        time.sleep(life_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the driver failed: {status}"
    return os.WIFSIGNALED(status)


def _be_driver(world: World, spec: str, begins: int) -> None:
    """Report the start through the pipe, run the batch, and exit the forked process."""
    status = 1
    try:
        stop_points.configure(spec)
        os.write(begins, b"!")
        try:
            world.batch(0, MANY)
        except InvariantViolation:
            world.abort()
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def kill_one(world: World, place: str, how: str, rng: random.Random, life_s: float = LIFE_S) -> str:
    """Crash one cell once. Return the phase of the crash, or "lived" if the driver finished first."""
    until_s = rng.uniform(0, life_s) if place == "at random" else None
    died = killed_driver(world, POINTS[place](rng), until_s)
    hit = phase_of(world) if died else LIVED
    again(world, how, MANY, MORE)
    return hit


def phase_of(world: World) -> str:
    """Return the phase of the batch, from the files on the disk."""
    staging = Staging(world.directory)
    plan = read_plan(
        staging.disk, os.path.join(world.directory, writer_file_id(world.key.text) + PLAN_SUFFIX)
    )
    if plan is not None:
        return DONE if plan.done else APPENDING
    return STAGING if any(name.endswith(FRAMES_SUFFIX) for name in os.listdir(world.directory)) else EARLY


def main(times: int, places: Sequence[str]) -> int:
    """Run every cell of the given places `times` times, and print one line for each cell."""
    os.environ.setdefault("RINGLOG_TIMEOUT_MS", "60000")  # The test does not measure how busy the machine is.
    numbers = itertools.count()
    with (
        ringlog.testing.engine(wal={"shards": 2}) as running,
        ringlog.connect(running.url, wait=10) as client,
    ):

        def new_world(directory: str, frame_records: str) -> World:
            number = next(numbers)
            topics = (f"a{number}", f"b{number}")
            for topic in topics:
                client.topics.create(topic)
            raw = {"path": running.data_dir, "stagingDir": directory, "maxFrameRecords": frame_records}
            key, width = WriterKey(f"query/{number}"), WIDE if number % 2 else 1
            return World(client, sink_options(raw), key, topics, directory, width=width)

        with tempfile.TemporaryDirectory() as directory:
            started = time.monotonic()
            killed_driver(new_world(directory, "7"), "")
            life_s = time.monotonic() - started
        for place, how in itertools.product([each for each in POINTS if each in (places or POINTS)], DEALS):
            tally: Counter[str] = Counter()
            rng = random.Random(f"{place} {how}")
            while sum(tally[each] for each in RUNNING) < times and tally.total() < 5 * times:
                with tempfile.TemporaryDirectory() as directory:
                    hit = kill_one(new_world(directory, "7"), place, how, rng, life_s)
                tally[hit] += 1
                # Other load on the machine changes the duration of a batch.
                life_s *= {LIVED: 0.8, EARLY: 1.1}.get(hit, 1.0)
            hits = sum(tally[each] for each in RUNNING)
            where = ", ".join(f"{name} {count}" for name, count in sorted(tally.items()))
            _say(f"{place:16} {how:8} killed while it ran {hits} ({where}): exact")
        kinds = ("halt", "EIO", "power") if "disk" in (places or ["disk"]) else ()
        for kind, how in itertools.product(kinds, DEALS):
            count = 0
            for nth in range(1, CHANGES):
                with tempfile.TemporaryDirectory() as directory:
                    if kind == "power":
                        happened = power_cut_at(new_world("/staging", "20"), nth, how)
                    else:
                        disk = FaultyDisk(RealDisk(), DiskFault("any", nth, kind))
                        happened = crash_at(new_world(directory, "20"), disk, how, aborts=kind == "EIO")
                count += happened
            _say(f"disk: {kind:10} {how:8} at each of {count} changes: exact")
        close_clients()
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30, sys.argv[2:]))
