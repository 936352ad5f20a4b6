"""Other ways to run Spark: clusters on one host, Connect, and the packaged Java (SK-1, SK-3, SK-4).

Each in a driver of its own. They take minutes and the extras spark-connect and spark-jre: `make spark-night`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import ringlog
from ringlog.spark import jre
from ringlog.testing.real_engine import TestEngine, engine, wait_until

ROOT = Path(__file__).parent.parent.parent
RECORDS = 20_000
TAGS = 4
DRIVER_S = 800.0
CLUSTER_S = 90.0
pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def running() -> Iterator[TestEngine]:
    """20,000 records in the topic orders; copies is there, and empty."""
    with engine(wal={"shards": 2}, storage={"enabled": True}) as found:
        with ringlog.connect(found.url) as log:
            log.topics.create("orders", durability="fsync")
            with log.producer("orders") as out:
                for n in range(RECORDS):
                    out.send(b'{"n":%d}' % n, tag=f"t{n % TAGS}")
        yield found


@pytest.fixture
def copies(running: TestEngine) -> Iterator[TestEngine]:
    """The engine with an empty topic `copies`."""
    with ringlog.connect(running.url, wait=30) as log:
        log.topics.create("copies", durability="fsync")
        yield running
        log.topics.delete("copies")


def drive(running: TestEngine, environ: dict[str, str] | None = None, **given: Any) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tests.spark.modes_driver",
        json.dumps({"data_dir": running.data_dir, **given}),
    ]
    child_environ = {**os.environ, "PYTHONPATH": str(ROOT), "RINGLOG_ALLOW_ROOT": "1", **(environ or {})}
    done = subprocess.run(
        command, cwd=ROOT, env=child_environ, capture_output=True, text=True, timeout=DRIVER_S, check=False
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    with ringlog.connect(running.url) as log:
        payloads = sorted(int(record.json()["n"]) for record in log.reader("copies"))
    assert payloads == list(range(1, RECORDS, 2)), "every second record was copied, once"
    assert found["tags"] == {f"t{i}": RECORDS // TAGS for i in range(TAGS)}
    return found


def test_an_embedded_session_reads_and_writes(copies: TestEngine) -> None:
    assert drive(copies, master="local[2]")["partitions"] > 1


def test_a_local_cluster_reads_and_writes_from_executors_of_its_own(copies: TestEngine) -> None:
    assert drive(copies, master="local-cluster[2,1,1024]")["partitions"] > 1


def test_a_query_survives_the_loss_of_an_executor(copies: TestEngine, tmp_path: Path) -> None:
    """A standalone cluster, master and two workers as processes: each record is counted once all the same."""
    with standalone(tmp_path) as master:
        found = drive(copies, master=master, kill_executor=True)
    assert found["killed"] > 0
    assert found["done_at_kill"] < found["tasks"]
    assert (found["n"], found["total"]) == (RECORDS, RECORDS * (RECORDS + 1) // 2)


@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="needs the extra spark-connect")
def test_connect_reads_and_writes(copies: TestEngine) -> None:
    drive(copies, remote="local[2]")


@pytest.mark.skipif(importlib.util.find_spec(jre.PACKAGE) is None, reason="needs the extra spark-jre")
def test_without_a_java_on_the_machine_the_packaged_one_is_used(copies: TestEngine, tmp_path: Path) -> None:
    environ = {"PATH": str(path_without_java(tmp_path)), "JAVA_HOME": ""}
    assert jre.PACKAGE in drive(copies, environ, master="local[2]")["java"]


def path_without_java(directory: Path) -> Path:
    """A directory of links to all programs on PATH but Java's."""
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = directory / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return directory


@contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """A master and two workers with one core each; gives the master's address."""
    import pyspark

    home = Path(pyspark.__file__).parent
    log = directory / "cluster.log"
    environ = {**os.environ, "SPARK_HOME": str(home), "PYTHONPATH": str(ROOT), "RINGLOG_ALLOW_ROOT": "1"}
    environ |= {
        "SPARK_WORKER_DIR": str(directory),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
        with log.open("ab") as file:
            started.append(
                subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
            )

    def workers() -> int:
        return log.read_text().count("Registering worker")

    try:
        start("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        wait_until(
            lambda: "Starting Spark master at" in log.read_text(), CLUSTER_S, "the master", log.read_text
        )
        address = log.read_text().split("Starting Spark master at ")[1].split()[0]
        for _ in range(2):
            start("worker.Worker", "--cores", "1", "--memory", "1g", "--webui-port", "0", address)
        wait_until(lambda: workers() == 2, CLUSTER_S, "two workers", log.read_text)
        yield address
    finally:
        for process in started:
            _kill_session(process)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """The daemon and the executors it started."""
    for member in psutil.process_iter():
        try:
            if os.getsid(member.pid) == process.pid:
                member.kill()
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    process.wait(CLUSTER_S)
