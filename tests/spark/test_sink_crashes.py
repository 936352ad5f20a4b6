"""Drivers of the sink that are killed, a few of each kind; `python -m tests.spark.crashes` kills hundreds."""

from __future__ import annotations

import random

import pytest

import ringlog
from ringlog.spark.clients import close_clients
from ringlog.spark.commit import WriterKey
from ringlog.spark.options import sink_options
from tests.spark.crashes import POINTS, kill_one
from tests.spark.sink_world import DEALS, World


@pytest.mark.slow
@pytest.mark.parametrize(("place", "how"), list(zip(POINTS, [*DEALS, *DEALS], strict=True)))
def test_a_killed_driver_loses_and_doubles_nothing(ringlog_engine, ringlog_topic, tmp_path, place, how):
    """SP-9, section 8, layer 3: killed with SIGKILL, repeated with other partitions."""
    topics = (ringlog_topic("a"), ringlog_topic("b"))
    raw = {"path": ringlog_engine.data_dir, "stagingDir": str(tmp_path), "maxFrameRecords": "7"}
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        for topic in topics:
            client.topics.create(topic)
        world = World(client, sink_options(raw), WriterKey(f"query/{tmp_path}"), topics, str(tmp_path))
        died = kill_one(world, place, how, random.Random(place))
    close_clients()
    assert died or place == "at random"
