"""`mirror` into Kafka and Delta, in nightly runs: a real broker with one node, and tables of Delta Lake.

Connectors are made for one Spark version and appear months later. Spark 4.3 has none so far, so the drivers
here run 4.2.1, the lowest version that ringlog supports. `make spark-night` installs it next to the
environment's version. The newest Iceberg is for 4.1 and loads in neither version. Maven resolves the broker,
the connectors and their dependencies. The test is skipped with the reason if Maven or its repository is not
available, or if a connector was not published. Any other Maven error is a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringlog
from ringlog.testing.real_engine import engine, wait_until
from tests.support.checkpoints import checkpoint
from tests.support.machine import is_listening
from tests.support.spark_records import write

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.timeout(1_800)]
ROOT = Path(__file__).parent.parent.parent
RESOLVE_S = 900
DRIVER_S = 900
READY_S = 120
N = 2_000
BROKER = "org.apache.kafka:kafka_2.13:3.9.1"
OLDER = ROOT / ".venv" / "spark-4.2"
"""Only pyspark 4.2.1, placed before the environment's version on the path; created by `make spark-night`."""
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
# A newer version of the token provider is not available everywhere. The parts in use did not change.
TOKENS = "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0"
DELTA = "io.delta:delta-spark_4.2_2.13:4.4.0"
OF_SPARK = (
    "RoaringBitmap", "aircompressor", "commons-logging", "hadoop-client", "jackson", "log4j", "parquet",
    "scala-library", "shims", "slf4j", "snappy", "zstd-jni",
)  # fmt: skip
"""Prefixes of jars that Spark already has. A second copy with another version would take precedence."""
POM = """<project><modelVersion>4.0.0</modelVersion><groupId>x</groupId><artifactId>x</artifactId>
<version>1</version><dependencies>{0}</dependencies></project>"""
WANTED = """<dependency><groupId>{0}</groupId><artifactId>{1}</artifactId><version>{2}</version>
<exclusions>{3}</exclusions></dependency>"""
LEFT_OUT = "<exclusion><groupId>{0}</groupId><artifactId>{1}</artifactId></exclusion>"


NOT_THERE = ("Could not find artifact", "was not found in")
NO_WAY = ("Could not transfer artifact", "Unknown host", "in offline mode", "No plugin found")


def pom_of(coordinates: tuple[str, ...]) -> str:
    """Return a project that needs these artifacts. Dependencies of the first one that are listed separately
    are excluded."""
    first, *others = [each.split(":") for each in coordinates]
    without = "".join(LEFT_OUT.format(*each) for each in others)
    wanted = [WANTED.format(*first, without), *(WANTED.format(*each, "") for each in others)]
    return POM.format("".join(wanted))


def why_not(coordinates: tuple[str, ...], said: str) -> str:
    """Return the reason to skip, from Maven's output. Fail the test if there is no such reason."""
    line = next((line for line in said.splitlines() if "[ERROR]" in line), said)
    about = f"{' and '.join(coordinates)}: {line}"
    if any(words in said for words in NO_WAY):
        return f"no way to Maven's repository for {about}"
    assert any(words in said for words in NOT_THERE), said
    return f"not published: {about}"


def jars_of(directory: Path, *coordinates: str) -> list[str]:
    """Return the paths of artifacts and all their dependencies. Skip the test if they are not available."""
    if shutil.which("mvn") is None:
        pytest.skip("Maven is not installed")
    directory.mkdir(parents=True)
    (directory / "pom.xml").write_text(pom_of(coordinates))
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime",
               f"-DoutputDirectory={directory}/jars"]  # fmt: skip
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=RESOLVE_S, check=False
    )
    if done.returncode:
        pytest.skip(why_not(coordinates, done.stdout + done.stderr))
    return sorted(str(path) for path in (directory / "jars").glob("*.jar"))


@pytest.fixture(scope="module")
def running() -> Iterator:
    with (
        engine(wal={"shards": 1}, storage={"enabled": True}) as found,
        ringlog.connect(found.url, wait=10) as client,
    ):
        write(client, "mirrored", 1, N)
        checkpoint(found)
        write(client, "mirrored", N + 1, N + 50, frame=7)
        yield found


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[str]:
    """The address of a Kafka broker that is its own controller (KRaft)."""
    root = tmp_path_factory.mktemp("kafka")
    jars = os.pathsep.join(jars_of(root / "broker", BROKER))
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, controller = one.getsockname()[1], two.getsockname()[1]
    properties = root / "server.properties"
    properties.write_text(
        f"process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:{controller}\n"
        f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}\ncontroller.listener.names=CONTROLLER\n"
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n"
        f"log.dirs={root}/logs\noffsets.topic.replication.factor=1\nauto.create.topics.enable=true\n"
        "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
    )
    java = ["java", "-Xmx512m", "-cp", jars]
    storage = [
        *java,
        "kafka.tools.StorageTool",
        "format",
        "-t",
        "AAAAAAAAAAAAAAAAAAAAAQ",
        "-c",
        str(properties),
    ]
    subprocess.run(storage, check=True, timeout=READY_S, capture_output=True)
    with (root / "broker.log").open("wb") as log:
        process = subprocess.Popen([*java, "kafka.Kafka", str(properties)], stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or is_listening(port), READY_S, "the broker")
        assert process.poll() is None, (root / "broker.log").read_text()[-2_000:]
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(READY_S)


DRIVER = """
import json, sys
given = json.loads(sys.argv[1])
import ringlog.spark
from ringlog.spark.jobs import mirror
config = {"spark.ui.enabled": False, "spark.jars": ",".join(given["jars"]), **given["config"]}
spark = ringlog.spark.session("mirror", master="local[2]", config=config)
reports = []
for _ in range(2):
    done = mirror.run(spark, given["path"], "mirrored", checkpoint=given["checkpoint"], **given["mirror"])
    reports.append(done.rows)
reader = spark.read.format(given["mirror"]["format"]).options(**given["read"])
frame = reader.load(given["mirror"].get("target"))
column = "value" if given["mirror"]["format"] == "kafka" else "payload"
values = [bytes(row[0]).decode() for row in frame.select(column).collect()]
print("RESULT " + json.dumps([reports, values]))
spark.stop()
"""


def mirrored(running, tmp_path, jars, mirror, *, config=None, read=None):
    """Return (rows of each of two runs, payloads that arrived) from a separate driver."""
    given = {
        "path": running.data_dir, "checkpoint": str(tmp_path / "checkpoint"), "jars": jars, "mirror": mirror,
        "config": config or {}, "read": read or {},
    }  # fmt: skip
    if not OLDER.exists():
        pytest.skip(f"the Spark that has connectors is not in {OLDER.relative_to(ROOT)}: make spark-night")
    path = os.pathsep.join([str(OLDER), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable}
    environ.pop("SPARK_HOME", None)
    given["jars"] = [jar for jar in jars if not Path(jar).name.startswith(OF_SPARK)]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(given)], capture_output=True, text=True, env=environ,
        timeout=DRIVER_S, check=False,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert told, done.stderr[-4_000:]
    return json.loads(told[-1].removeprefix("RESULT "))


def test_mirror_into_a_kafka_broker(running, broker, tmp_path):
    """The first run copies every record once, and the second one copies none."""
    jars = jars_of(tmp_path / "connector", CONNECTOR, TOKENS)
    server = {"kafka.bootstrap.servers": broker}
    reports, values = mirrored(
        running, tmp_path, jars, {"format": "kafka", "options": server, "topic_prefix": "m."},
        read={**server, "subscribe": "m.mirrored"},
    )  # fmt: skip
    assert reports == [N + 50, 0]
    assert sorted(map(int, values)) == list(range(1, N + 51))


def test_mirror_into_a_delta_table(running, tmp_path):
    """The first run copies every record once, and the second one copies none."""
    jars = jars_of(tmp_path / "delta", DELTA)
    config = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
    reports, values = mirrored(
        running, tmp_path, jars, {"format": "delta", "target": str(tmp_path / "table")}, config=config
    )
    assert reports == [N + 50, 0]
    assert sorted(map(int, values)) == list(range(1, N + 51))
