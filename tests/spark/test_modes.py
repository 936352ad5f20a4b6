"""Other ways to run Spark: clusters on one host, Spark Connect, and the packaged Java.

Each test runs its own driver. The tests take minutes and need the extras spark-connect and spark-jre: `make
spark-night`.
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
    """An engine with 20,000 records in the topic `orders`."""
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


def test_a_local_cluster_reads_and_writes_in_its_executors(copies: TestEngine) -> None:
    assert drive(copies, master="local-cluster[2,1,1024]")["partitions"] > 1


def test_a_query_and_a_write_survive_the_loss_of_an_executor(copies: TestEngine, tmp_path: Path) -> None:
    """On a standalone cluster of one master and two workers, each record still counts once."""
    with standalone(tmp_path) as master:
        found = drive(copies, master=master, scratch=str(tmp_path))
    assert (found["n"], found["total"]) == (RECORDS, RECORDS * (RECORDS + 1) // 2)
    for each in (found["read"], found["written"]):
        assert each["killed"] > 0
        assert each["attempts"] > found["partitions"], "tasks of the executor that died ran again"
    assert found["read"]["killed"] != found["written"]["killed"]


@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="needs the extra spark-connect")
def test_spark_connect_with_its_own_server_reads_and_writes(copies: TestEngine) -> None:
    drive(copies, remote="local[2]")


@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="needs the extra spark-connect")
def test_spark_connect_with_a_running_server_reads_and_writes(copies: TestEngine, tmp_path: Path) -> None:
    with connect_server(tmp_path) as address:
        drive(copies, remote=address)


@pytest.mark.skipif(importlib.util.find_spec(jre.PACKAGE) is None, reason="needs the extra spark-jre")
def test_without_java_on_the_machine_the_packaged_java_is_used(copies: TestEngine, tmp_path: Path) -> None:
    environ = {"PATH": str(path_without_java(tmp_path)), "JAVA_HOME": ""}
    assert jre.PACKAGE in drive(copies, environ, master="local[2]")["java"]


def path_without_java(directory: Path) -> Path:
    """Create a directory of links to all programs on PATH except Java."""
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = directory / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return directory


class Daemons:
    """Spark processes that run until the test ends, with their output."""

    def __init__(self, directory: Path, memory: str) -> None:
        import pyspark

        self.home = Path(pyspark.__file__).parent
        self.log = directory / "daemons.log"
        self.environ = {
            **os.environ,
            "SPARK_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": sys.executable,
            "RINGLOG_ALLOW_ROOT": "1",
            "SPARK_WORKER_DIR": str(directory),
            "SPARK_DAEMON_MEMORY": memory,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, program: str, *arguments: str) -> None:
        command = [str(self.home / "bin" / program), *arguments]
        with self.log.open("ab") as file:
            process = subprocess.Popen(
                command, env=self.environ, stdout=file, stderr=file, start_new_session=True
            )
        self._started.append(process)

    def said(self, words: str, times: int = 1) -> str:
        """Wait until the output contains the words `times` times. Return the text after them on the first
        such line."""

        def is_said() -> bool:
            assert all(process.poll() is None for process in self._started), self.log.read_text()[-8000:]
            return self.log.read_text().count(words) >= times

        wait_until(is_said, CLUSTER_S, words, self.log.read_text)
        return self.log.read_text().split(words)[1].splitlines()[0].strip()

    def __enter__(self) -> Daemons:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            _kill_session(process)


@contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """Run a master and two workers with one core each. Yield the master's address."""
    with Daemons(directory, "256m") as daemons:
        kind = "org.apache.spark.deploy."
        daemons.start(
            "spark-class", f"{kind}master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"
        )
        address = daemons.said("Starting Spark master at ")
        for _ in range(2):
            daemons.start(
                "spark-class",
                f"{kind}worker.Worker",
                "--cores",
                "1",
                "--memory",
                "1g",
                "--webui-port",
                "0",
                address,
            )
        daemons.said("Registering worker", 2)
        yield address


@contextmanager
def connect_server(directory: Path) -> Iterator[str]:
    """Run a Spark Connect server on a free port. Yield its address."""
    with Daemons(directory, "1g") as daemons:
        daemons.start(
            "spark-submit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
            "--master", "local[2]", "--conf", "spark.ui.enabled=false",
            "--conf", "spark.connect.grpc.binding.port=0",
        )  # fmt: skip
        yield f"sc://127.0.0.1:{daemons.said('Spark Connect server started at: ').rsplit(':', 1)[1]}"


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the daemon and the executors that it started."""
    for member in psutil.process_iter():
        try:
            if os.getsid(member.pid) == process.pid:
                member.kill()
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    process.wait(CLUSTER_S)
