"""Main sequence of the demo: write under kills, restart, read, Spark, delete, relocate, judge."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ringlog
from demo import copies, judge, source, spark_stage, stage
from demo.copies import Copies
from demo.engine import Engine
from demo.judge import Counts, Ledger, Verdict
from demo.progress import Progress
from demo.report import Speeds
from demo.spark_stage import SparkStage
from demo.stage import Stage
from demo.words import FIRST_PRODUCER, FIRST_READER, GO, READY_OFFSET, WRITTEN, SharedCounters

CHILD_S = 120.0
LOOK_S = 0.005
PAGE_RECORDS = 10_000
SCHEDULER = "scheduler-00"


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a run."""

    directory: Path
    shards: int
    producers: int
    readers: int
    kills: int
    limit: int | None
    picture: Path | None
    """Path for the picture of the Spark stage; None: skip that stage."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run."""

    verdict: Verdict
    live: Verdict
    stage: Stage
    copies: Copies
    speeds: Speeds
    failures: list[str]
    facts: dict[str, Any]
    spark: SparkStage | None = None

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, doubled, reordered or refused: live, copied, restarted and relocated."""
        is_good = all(part.is_good for part in (self.verdict, self.live, self.copies, self.stage))
        is_good &= self.spark is None or self.spark.is_good
        return is_good and not self.failures and self.live.acked > 0


def run(plan: Plan, progress: Progress) -> Outcome:
    """Run all stages. All child processes have exited when this returns or raises."""
    progress.say("reading the flights")
    events = source.prepare(plan.directory, plan.limit)
    engine = Engine(plan.directory, plan.shards)
    try:
        facts: dict[str, Any] = {"events": len(events), "topics": len(events.topics)}
        facts["start_s"] = round(engine.start(), 3)
        _make_topics(engine.url, events)
        facts["kills"] = _write_under_fire(plan, engine, events, progress)
        facts["restarts"] = engine.restarts()
        progress.say("stopping and starting the engine")
        facts["stop_s"] = round(engine.stop(), 3)
        facts["restart_s"] = round(engine.start(), 3)
        began = time.monotonic()
        ledger = _read_back(plan, engine.url, events, progress)
        facts["read_back_s"] = round(time.monotonic() - began, 3)
        acked = _acked(plan, events)
        progress.say("reading what the routers copied")
        copied = copies.read_and_judge(engine.url, plan.directory, events, acked)
        facts["copies"] = asdict(copied)
        sparked = _spark(plan, engine, events, progress)
        facts |= sparked.facts() if sparked is not None else {}
        staged = stage.run(plan.directory, engine, events, acked, plan.producers, progress)
        facts |= staged.facts()
    finally:
        engine.stop()
    return replace(_outcome(plan, events, ledger, staged, copied, facts), spark=sparked)


def _spark(plan: Plan, engine: Engine, events: source.Source, progress: Progress) -> SparkStage | None:
    """Run the Spark stage, before any delete, so that the log contains every flight."""
    if plan.picture is None:
        return None
    return spark_stage.run(plan.directory, engine, events, plan.limit, plan.picture, progress)


def _make_topics(url: str, events: source.Source) -> None:
    with ringlog.connect(url, wait=20.0) as client:
        for topic in events.topics:
            client.topics.create(topic, durability="fsync")
        copies.make_routers(client, events.topics)


# -- writing, following, killing -------------------------------------------------------------------------


def _write_under_fire(plan: Plan, engine: Engine, events: source.Source, progress: Progress) -> list[str]:
    """Start and release all children, kill processes at even intervals; return the killed names."""
    counters = SharedCounters(plan.directory)
    children: list[subprocess.Popen[bytes]] = []
    try:
        where = (str(plan.directory), engine.url)
        followers = [
            _child("demo.follower", *where, i, plan.readers, plan.producers) for i in range(plan.readers)
        ]
        children += followers
        producers = [_child("demo.producer", *where, i, plan.producers) for i in range(plan.producers)]
        children += producers
        _wait_ready(plan, counters, children)
        counters[GO] = 1
        kills = _conduct(plan, engine, len(events), counters, producers, progress)
        counters[WRITTEN] = 1
        progress.say("readers catch up")
        _wait_all(followers)
        return kills
    finally:
        _end(children)


def _child(module: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", module, *map(str, arguments)], stdin=subprocess.DEVNULL)


def _wait_ready(plan: Plan, counters: SharedCounters, children: Sequence[subprocess.Popen[bytes]]) -> None:
    def ready() -> int:
        return counters.total(FIRST_PRODUCER + READY_OFFSET, plan.producers) + counters.total(
            FIRST_READER + READY_OFFSET, plan.readers
        )

    deadline = time.monotonic() + CHILD_S
    while ready() < plan.producers + plan.readers:
        _require_alive(children)
        if time.monotonic() > deadline:
            raise SystemExit("the producers and readers did not start")
        time.sleep(LOOK_S)


def _conduct(
    plan: Plan, engine: Engine, total: int, counters: SharedCounters,
    producers: Sequence[subprocess.Popen[bytes]], progress: Progress,
) -> list[str]:  # fmt: skip
    """Monitor the acks, and kill a process at each equal fraction of them."""
    kills: list[str] = []
    victims = _victims(plan)
    deadline = time.monotonic() + CHILD_S
    while any(child.poll() is None for child in producers):
        acked = counters.total(FIRST_PRODUCER, plan.producers)
        progress.show(acked, counters.total(FIRST_READER, plan.readers))
        if len(kills) < len(victims) and acked >= total * (len(kills) + 1) / (len(victims) + 1):
            name = victims[len(kills)]
            pid = engine.kill(name)
            kills.append(name)
            progress.say(f"SIGKILL to {name} (pid {pid}) after {acked:,} acks")
        if time.monotonic() > deadline:
            raise SystemExit(f"the producers did not finish; {acked:,} of {total:,} acked")
        time.sleep(LOOK_S)
    _wait_all(producers)
    progress.show(counters.total(FIRST_PRODUCER, plan.producers), counters.total(FIRST_READER, plan.readers))
    return kills


def _victims(plan: Plan) -> list[str]:
    """Return shards in rotation, and in the middle the scheduler, which serves the watchers and routers."""
    shards = [f"wal_shard-{number % plan.shards:02d}" for number in range(plan.kills)]
    middle = plan.kills // 2
    return [*shards[:middle], SCHEDULER, *shards[middle:]] if shards else []


def _require_alive(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() not in {None, 0}:
            raise SystemExit(f"a child process failed: {child.args!r} ended with {child.returncode}")


def _wait_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.wait(CHILD_S)
    _require_alive(children)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()


# -- reading back ---------------------------------------------------------------------------------------


def _read_back(plan: Plan, url: str, events: source.Source, progress: Progress) -> Ledger:
    """Read every topic from its start to its end."""
    progress.say("reading everything back")
    ledger = Ledger(events, plan.producers)
    with ringlog.connect(url, wait=20.0) as client:
        for topic in events.topics:
            for page in client.reader(topic).pages(PAGE_RECORDS):
                if page.tombstone is not None:
                    ledger.announce()
                for piece in page.batches:
                    ledger.take(topic, piece.seq_at(0), piece.payloads())
                progress.show_read_back(ledger.counts.read)
    return ledger


# -- judging --------------------------------------------------------------------------------------------


def _acked(plan: Plan, events: source.Source) -> NDArray[np.uint64]:
    """Return the acknowledged seq of each event, (n,); 0: not acknowledged."""
    acked = np.zeros(len(events), dtype=np.uint64)
    for number in range(plan.producers):
        with np.load(plan.directory / f"producer-{number}.npz") as found:
            acked[found["ids"]] = found["seqs"]
    return acked


def _outcome(
    plan: Plan, events: source.Source, ledger: Ledger, staged: Stage, copied: Copies, facts: dict[str, Any]
) -> Outcome:
    acked = _acked(plan, events)
    latencies, failures, times = [], [], []
    for number in range(plan.producers):
        with np.load(plan.directory / f"producer-{number}.npz") as found:
            latencies.append(found["latencies_ns"])
            failures += found["failures"].tolist()
            times.append(found["times_ns"])
    began, ended, pauses = np.array(times).T
    verdict = judge.judge(acked, ledger.seen, ledger.seqs, ledger.counts)
    seconds = (int(ended.max()) - int(began.min())) / 1e9
    delays_us = np.concatenate([np.load(plan.directory / f"delays-{n}.npy") for n in range(plan.readers)])
    speeds = Speeds.of(verdict.acked, seconds, np.concatenate(latencies), int(pauses.max()), delays_us)
    live = _live_verdict(plan, acked)
    facts |= {"write_s": round(seconds, 3), "live": asdict(live), "failures": failures[:10]}
    return Outcome(verdict, live, staged, copied, speeds, failures, facts)


def _live_verdict(plan: Plan, acked: Any) -> Verdict:
    """Judge what the watchers saw: together they watch every topic once."""
    parts = [judge.load(plan.directory / f"follower-{number}.npz") for number in range(plan.readers)]
    seen = np.stack([part[0] for part in parts]).sum(axis=0, dtype=np.uint32)
    seqs = np.stack([part[1] for part in parts]).sum(axis=0, dtype=np.uint64)
    counts = Counts(*np.sum([list(asdict(part[2]).values()) for part in parts], axis=0).tolist())
    return judge.judge(acked, seen, seqs, counts)
