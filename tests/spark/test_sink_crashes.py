"""Killed drivers of the sink, a few of each kind; `python -m tests.spark.crashes` kills hundreds."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest

import ringlog
import ringlog.testing
from ringlog.errors import ConnectionTrouble
from ringlog.spark.clients import close_clients
from ringlog.spark.commit import WriterKey
from ringlog.spark.options import sink_options
from tests.spark.crashes import MANY, MORE, POINTS, RUNNING, kill_one
from tests.support.sink_world import DEALS, World

pytestmark = pytest.mark.night


@pytest.mark.slow
@pytest.mark.parametrize(("place", "how"), list(zip(POINTS, [*DEALS, *DEALS], strict=True)))
def test_a_killed_driver_loses_and_duplicates_no_row(ringlog_engine, ringlog_topic, tmp_path, place, how):
    """The driver dies by SIGKILL, and the repeated batch has other partitions."""
    topics = (ringlog_topic("a"), ringlog_topic("b"))
    raw = {"path": ringlog_engine.data_dir, "stagingDir": str(tmp_path), "maxFrameRecords": "7"}
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        for topic in topics:
            client.topics.create(topic)
        world = World(client, sink_options(raw), WriterKey(f"query/{tmp_path}"), topics, str(tmp_path))
        hit = kill_one(world, place, how, random.Random(place))
    close_clients()
    assert hit in RUNNING or place == "at random"


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.timeout(180)
def test_a_kill_of_the_engine_during_a_commit_loses_and_duplicates_no_row(tmp_path):
    """First the shard and then the whole engine is killed while frames are in flight."""
    with (
        ringlog.testing.engine(wal={"shards": 1}) as running,
        ringlog.connect(running.url, wait=20) as client,
    ):
        for topic in "ab":
            client.topics.create(topic)
        raw = {"path": running.data_dir, "stagingDir": str(tmp_path), "maxFrameRecords": "1"}
        world = World(client, sink_options(raw), WriterKey("query/1"), ("a", "b"), str(tmp_path))
        shard = threading.Timer(0.05, running.kill, ("wal_shard",))
        shard.start()
        _until_written(world, 0, MANY)
        shard.join()
        files = world.stage(MORE)
        engine = threading.Timer(0.02, running.crash)
        engine.start()
        with contextlib.suppress(ConnectionTrouble):
            world.committer().commit(world.key, 1, files)
        engine.join()
        running.start()
        _until_written(world, 1, MORE)
        assert world.found() == world.expected([*MANY, *MORE])
    close_clients()


def _until_written(world, batch, ids):
    """Repeat a batch, as restarts of Spark do, until its commit succeeds."""
    for how in (*DEALS, *DEALS):
        try:
            world.batch(batch, ids, how)
        except ConnectionTrouble:
            world.abort()
        else:
            return
    pytest.fail("the engine did not come back")
