"""One Spark session for the whole run, and an engine with segments for tests that do not damage it."""

from __future__ import annotations

import os
import sys
import warnings

import pytest

import ringlog
from ringlog.spark.clients import close_clients
from tests.support.engines import engine_fixture

SESSION = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    # Python workers are reused, so that only the first test waits for their start.
    "spark.python.worker.reuse": "true",
}


@pytest.fixture(scope="session")
def spark():
    """The session: two cores, no UI. Tests that use it have the marks `slow` and `xdist_group("spark")`."""
    # Spark workers do not inherit the paths that pytest added.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ringlog.spark import session

        started = session("tests", master="local[2]", config=SESSION)
    started.sparkContext.setLogLevel("ERROR")
    yield started
    gateway = started.sparkContext._gateway
    started.stop()
    # stop() keeps the JVM until the process exits, but the test run must leave no process behind.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)


@pytest.fixture
def clean_settings(spark):
    """Restore the settings that a test changes."""
    before = dict(spark.conf.getAll)
    yield spark.conf
    for name, value in dict(spark.conf.getAll).items():
        if before.get(name) != value:
            if name in before:
                spark.conf.set(name, before[name])
            else:
                spark.conf.unset(name)


sealing_engine = engine_fixture("session", wal={"shards": 1}, storage={"enabled": True})
"""An engine with one shard that turns its log into segments when `checkpoint` requests it."""


@pytest.fixture
def sealing_client(sealing_engine):
    with ringlog.connect(sealing_engine.url, wait=10) as connected:
        yield connected


@pytest.fixture(scope="session", autouse=True)
def no_client_stays():
    """Close the clients that readers keep for their process at the end of the run."""
    yield
    close_clients()
