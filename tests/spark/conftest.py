"""One Spark session for the run, and an engine that makes segments, for whoever does not hurt it."""

from __future__ import annotations

import os
import sys
import warnings

import pytest

import ringlog
from ringlog.spark.clients import close_clients
from ringlog.testing.real_engine import engine

SESSION = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    # Python workers stay, so that only the first test pays for them.
    "spark.python.worker.reuse": "true",
}


@pytest.fixture(scope="session")
def spark():
    """The session: two cores, no UI. Tests with it carry the marks `slow` and `xdist_group("spark")`."""
    # Workers of Spark do not inherit what pytest put on the path.
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
    # stop() leaves the JVM to the end of the process; the test run is to leave nothing behind.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)


@pytest.fixture
def clean_settings(spark):
    """Settings that a test changes are what they were afterwards."""
    before = dict(spark.conf.getAll)
    yield spark.conf
    for name, value in dict(spark.conf.getAll).items():
        if before.get(name) != value:
            if name in before:
                spark.conf.set(name, before[name])
            else:
                spark.conf.unset(name)


@pytest.fixture(scope="session")
def sealing_engine():
    """One shard that turns its log into segments when `world.checkpoint` says so."""
    with engine(wal={"shards": 1}, storage={"enabled": True}) as running:
        yield running


@pytest.fixture
def sealing_client(sealing_engine):
    with ringlog.connect(sealing_engine.url, wait=10) as connected:
        yield connected


@pytest.fixture(scope="session", autouse=True)
def no_client_stays():
    """Clients that readers keep for their process are closed when the run is over."""
    yield
    close_clients()
