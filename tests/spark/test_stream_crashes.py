"""Queries that are killed and started again: the sink has every (topic, epoch, seq) exactly once.

Each run of a query is its own process group, killed with SIGKILL at a chosen step or at a random moment. The
next run has other partitions, another shuffle and another limit. Records are written in between and move from
the log into segments. A nightly run has 36 kills, and the daily tests have one.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import ringlog
from ringlog.testing.real_engine import engine
from tests.spark.stream_driver import STEPS
from tests.support.checkpoints import checkpoint
from tests.support.spark_records import write

pytestmark = pytest.mark.night

TOPICS = ("a", "b")
PARTITIONS = itertools.cycle(["1", "5", "2", "16"])
SHUFFLES = itertools.cycle([None, 3, 2])
LIMITS = itertools.cycle(["900", "350", "2000"])
RUN_S = 300
OVERLOADED = "Python worker failed to connect back"
"""Spark's error if a Python process takes ten seconds to start. The limit cannot be configured."""
TRIES_MAX = 4
RANDOM_S = 6.0
"""Longest life of a randomly killed query in seconds, from the start of the query, not of the session."""


class Runs:
    """A query's directories and its runs so far."""

    def __init__(self, running, directory: Path) -> None:
        self.running = running
        self.directory = directory
        self.out, self.checkpoint = directory / "out", directory / "checkpoint"
        self.written = dict.fromkeys(TOPICS, 0)
        self.kills = Counter()
        self.started = 0

    def write(self, count: int) -> None:
        with ringlog.connect(self.running.url, wait=10) as client:
            for topic in TOPICS:
                first = self.written[topic] + 1
                write(client, topic, first, first + count - 1, frame=100)
                self.written[topic] += count

    def run(self, *, die: str | None = None, after: int = 0, kill_after_s: float | None = None) -> int:
        """Run the query with its own settings. Return its exit status, negative if it was killed.

        A run that Spark itself ended on a busy machine counts as one more crash and is repeated.
        """
        for _ in range(TRIES_MAX):
            status, said = self._run(die, after, kill_after_s)
            if status == 0:
                return 0
            if status == -signal.SIGKILL:
                self.kills[die or "random"] += 1
                return status
            assert OVERLOADED in said, said[-4_000:]
            self.kills["by Spark"] += 1
        pytest.fail(f"Spark gave up {TRIES_MAX} times: the machine is too busy for it")

    def _run(self, die: str | None, after: int, kill_after_s: float | None) -> tuple[int, str]:
        """Return (status, output)."""
        self.started += 1
        scratch = self.directory / f"scratch{self.started}"
        scratch.mkdir()
        given = {
            "options": {
                "path": self.running.data_dir, "subscribe": ",".join(TOPICS), "startingOffsets": "earliest",
                "minPartitions": next(PARTITIONS), "maxOffsetsPerTrigger": next(LIMITS),
            },
            "out": str(self.out), "checkpoint": str(self.checkpoint), "scratch": str(scratch),
            "shuffle": next(SHUFFLES), "die": die, "after": after,
        }  # fmt: skip
        log = scratch.with_suffix(".log")
        with log.open("wb") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.stream_driver", json.dumps(given)],
                stdout=subprocess.PIPE, stderr=errors, text=True, env=_environ(),
            )  # fmt: skip
        try:
            if kill_after_s is not None:
                while child.stdout.readline().strip() not in {"started", ""}:
                    pass
                time.sleep(kill_after_s)
                os.killpg(child.pid, signal.SIGKILL)
            told, _ = child.communicate(timeout=RUN_S)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        assert child.returncode or "done" in told
        return child.returncode, log.read_text()

    def batches(self) -> int:
        """Return the number of micro-batches in the offset log."""
        offsets = self.checkpoint / "offsets"
        return sum(name.isdigit() for name in os.listdir(offsets)) if offsets.exists() else 0

    def rows(self) -> Counter:
        """Return the counts of (topic, epoch, seq) in the files that the sink's own log lists."""
        found = Counter()
        for path in self._files():
            table = pq.ParquetFile(path).read()
            found.update(zip(*(table[name].to_pylist() for name in ("topic", "epoch", "seq")), strict=True))
        return found

    def check(self) -> None:
        """Check that no record is lost, duplicated or invented."""
        found = self.rows()
        doubled = [row for row, count in found.items() if count > 1]
        by_topic = {topic: sorted(seq for name, _, seq in found if name == topic) for topic in TOPICS}
        lost = {t: set(range(1, self.written[t] + 1)).difference(seqs) for t, seqs in by_topic.items()}
        assert not doubled, f"{len(doubled)} doubled, such as {doubled[:3]}"
        assert not any(lost.values()), {topic: len(each) for topic, each in lost.items()}
        assert len(found) == sum(self.written.values())
        assert len({(topic, epoch) for topic, epoch, _ in found}) == len(TOPICS)

    def _files(self) -> set[str]:
        log = self.out / "_spark_metadata"
        found = set()
        for file in log.iterdir():
            if file.name.removesuffix(".compact").isdigit():
                entries = [json.loads(line) for line in file.read_text().splitlines()[1:]]
                found |= {each["path"].removeprefix("file://") for each in entries}
        return found


def _environ() -> dict[str, str]:
    root = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def runs(tmp_path):
    with engine(wal={"shards": 2}, storage={"enabled": True}) as running:
        yield Runs(running, tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(700)
def test_a_query_killed_while_it_reads_continues_exactly(runs):
    """One kill occurs in the middle of a task. The next run has other partitions and a shuffle."""
    runs.write(2_000)
    checkpoint(runs.running)
    runs.write(1_000)
    assert runs.run(die="tasks", after=1) != 0
    before = runs.batches()
    assert before >= 2, "it died with a batch planned"
    assert runs.run() == 0
    assert runs.batches() > before
    runs.check()


@pytest.mark.night
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_every_step_and_at_random_lose_and_duplicate_no_record(runs, seed):
    """Each seed has 12 kills: each step twice, early and late, and four random moments."""
    random_ = random.Random(seed)
    plan = [(step, None) for step in STEPS for _ in range(2)] + [(None, RANDOM_S)] * 4
    random_.shuffle(plan)
    runs.write(1_500)
    for step, seconds in plan:
        runs.write(random_.choice([400, 900]))
        if random_.random() < 0.4:
            checkpoint(runs.running)
        # A step counts from the existing batches; within a task it counts from those of this run.
        ahead = random_.randrange(2)
        after = ahead if step == "tasks" else runs.batches() + ahead
        if step is None:
            runs.run(kill_after_s=random_.uniform(0, seconds))
        else:
            runs.run(die=step, after=after)
    runs.write(100)
    assert runs.run() == 0
    runs.check()
    sys.stdout.write(f"seed {seed}: kills {dict(runs.kills)}, {runs.batches()} batches\n")
    assert sum(runs.kills.values()) - runs.kills["by Spark"] >= 10
