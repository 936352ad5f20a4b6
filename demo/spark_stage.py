"""The Spark stage: tables, files and a live aggregate from the flights in the log.

One driver answers a query from the log, archives the log to Parquet, and answers the query from the archive.
Both answers must equal those of pandas on the source data. Then flights are written once more at a constant
rate while a streaming query counts them. The query and its JVM are killed during this and restarted; the
final counts must be right.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

import ringlog
from demo import answers, spark_batch, spark_feed, spark_live
from demo.answers import Delays
from demo.engine import Engine
from demo.progress import Progress
from demo.source import Source
from ringlog.cli.maintenance import COMPACTOR, request_actor
from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.spark.errors import JavaMissing

TOPIC = "live.flights"
LIVE_FLIGHTS = 80_000
KILL_AFTER = 0.25
"""Fraction of the live flights that the first driver has counted when it is killed."""
DRIVER_S = 600.0
"""Generous, so that the load of the machine does not decide the result."""
CHECKPOINT_S = 60.0
LOOK_S = 0.02
LOG_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class SparkStage:
    """Result of the stage. `wrong_*`: number of rows of an answer that differ from pandas."""

    session_s: float
    log_s: float
    archive_s: float
    parquet_s: float
    archived: int
    rows: int
    wrong_log: int
    wrong_parquet: int
    live_flights: int
    counted_at_kill: int
    restart_s: float
    """Seconds from the kill until the successor counted more flights than its predecessor."""
    live_batches: int
    wrong_live: int
    picture: str

    @property
    def is_good(self) -> bool:
        """Whether all three answers equal those of pandas, and the query was killed before its end."""
        is_killed = 0 < self.counted_at_kill < self.live_flights
        is_right = not (self.wrong_log or self.wrong_parquet or self.wrong_live)
        return is_right and is_killed and self.rows > 0

    def facts(self) -> dict[str, Any]:
        """Return the entries for demo.json."""
        return {"spark": asdict(self)}


def missing_requirement() -> str:
    """Return what this stage needs but is missing; an empty string if it can run."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: pip install 'ringlog[spark]'"
    from ringlog.spark.jre import provide_java

    try:
        provide_java(dict(os.environ))
    except JavaMissing as e:
        return e.message
    return ""


def run(
    directory: Path, engine: Engine, events: Source, limit: int | None, picture: Path, progress: Progress
) -> SparkStage:
    """Run the stage on a running engine with all events. All started processes have exited at the end."""
    progress.say("Spark: pandas computes what must come out")
    wanted = answers.delays(limit)
    # With a checkpoint, drivers read segments as well as the log.
    request_actor(engine.shm_dir, COMPACTOR, CheckpointNow(), CheckpointMade, timeout_s=CHECKPOINT_S)
    progress.say("Spark: delays by carrier and hour out of the log, archive to Parquet, the same out of it")
    batch = _batch(directory, engine, events)
    found = _delays_of(batch["log"])
    answers.draw(found, picture)
    live_count = min(LIVE_FLIGHTS, len(events))
    counted, restart_s, state = _live(directory, engine, live_count, progress)
    live = {carrier: tuple(counts) for carrier, counts in state["carriers"].items()}
    return SparkStage(
        **{name: batch[name] for name in ("session_s", "log_s", "archive_s", "parquet_s", "archived")},
        rows=len(found),
        wrong_log=answers.wrong(found, wanted),
        wrong_parquet=answers.wrong(_delays_of(batch["parquet"]), wanted),
        live_flights=live_count,
        counted_at_kill=counted,
        restart_s=round(restart_s, 3),
        live_batches=state["batch"] + 1,
        wrong_live=answers.wrong(live, answers.by_carrier(answers.delays(live_count))),
        picture=str(picture),
    )


def _delays_of(rows: list[list[Any]]) -> Delays:
    return {
        (carrier, hour): (flights, departed, minutes) for carrier, hour, flights, departed, minutes in rows
    }


def _batch(directory: Path, engine: Engine, events: Source) -> dict[str, Any]:
    driver = Driver(directory, "demo.spark_batch", directory, engine.data_dir, ",".join(events.topics))
    try:
        driver.wait()
    finally:
        driver.kill()
    found: dict[str, Any] = json.loads((directory / spark_batch.RESULT).read_text())
    return found


def _live(
    directory: Path, engine: Engine, count: int, progress: Progress
) -> tuple[int, float, dict[str, Any]]:
    """Return (flights counted at the kill, seconds until the successor counted more, last state)."""
    state = directory / spark_live.STATE
    arguments = (directory, engine.data_dir, TOPIC, count)
    with ringlog.connect(engine.url, wait=20.0) as client:
        client.topics.create(TOPIC, durability="fsync")
    progress.say(f"Spark: a streaming query follows {count:,} flights while they are written")
    driver = Driver(directory, "demo.spark_live", *arguments)
    feed: Driver | None = None
    try:
        driver.wait_for((directory / spark_live.READY).exists, "the streaming query")
        feed = Driver(directory, "demo.spark_feed", directory, engine.url, TOPIC, count)
        driver.wait_for(lambda: spark_live.counted(state) >= count * KILL_AFTER, "a quarter of the flights")
        killed = time.monotonic()
        driver.kill()
        counted = spark_live.counted(state)
        (directory / spark_feed.GO_ON).touch()
        progress.say(f"SIGKILL to the query and its JVM after {counted:,} flights; restarting it")
        driver = Driver(directory, "demo.spark_live", *arguments)
        driver.wait_for(lambda: spark_live.counted(state) > counted, "the successor to go on")
        restart_s = time.monotonic() - killed
        driver.wait()
        feed.wait()
    finally:
        driver.kill()
        if feed is not None:
            feed.kill()
    return counted, restart_s, spark_live.known(state)


class Driver:
    """A child process with all its descendants: for Spark, the JVM and its Python workers."""

    def __init__(self, directory: Path, module: str, *arguments: object) -> None:
        self._module = module
        self._log = directory / f"{module}.log"
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._log.open("ab") as log:
            # The session id identifies all descendants; the Python workers have their own process groups.
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environ,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the process exits; raise SystemExit with the end of its log if it failed."""
        try:
            status = self._process.wait(DRIVER_S)
        except subprocess.TimeoutExpired:
            raise self._failure(f"did not end within {DRIVER_S:.0f} s") from None
        if status:
            raise self._failure(f"ended with {status}")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds; raise SystemExit after a timeout or if the process ends before."""
        deadline = time.monotonic() + DRIVER_S
        while not condition():
            status = self._process.poll()
            if time.monotonic() > deadline or status or (status == 0 and not condition()):
                raise self._failure(f"waited in vain for {what}")
            time.sleep(LOOK_S)

    def kill(self) -> None:
        """Kill the process and all its descendants with SIGKILL; wait until they have exited."""
        members = [
            process for process in psutil.process_iter() if _session_of(process.pid) == self._process.pid
        ]
        for process in members:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        psutil.wait_procs(members, timeout=DRIVER_S)

    def _failure(self, what: str) -> SystemExit:
        return SystemExit(f"{self._module} {what}; the end of its log:\n{self._log.read_text()[-LOG_CHARS:]}")


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1
