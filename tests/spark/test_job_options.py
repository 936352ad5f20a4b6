"""A named job continues only with the options that it was started with.

The jobs have no rows to write, so they need no session.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ringlog
from ringlog.spark.clients import close_clients
from ringlog.spark.errors import OptionError
from ringlog.spark.jobs import backfill, replay


@pytest.fixture(scope="module")
def client(ringlog_engine):
    with ringlog.connect(ringlog_engine.url, wait=10) as connected:
        yield connected
    close_clients()


def state_of(data_dir: str, job: str, name: str) -> Path:
    return Path(data_dir, "spark-jobs", f"{job}-{name}.json")


@pytest.fixture
def copy(client, ringlog_engine, topic):
    """Return a function that runs a replay of an empty topic under one name."""
    client.topics.create(topic)

    def run(**options):
        given = {"topics": topic, "to": "copy", "name": topic.rsplit(".", 1)[0], **options}
        return replay.run(None, ringlog_engine.data_dir, **given)

    return run


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topics", ["other"]), ("pattern", "t.*"), ("startingOffsets", 5), ("endingOffsets", 5),
        ("startingTimestamp", "2020-01-01T00:00:00Z"), ("endingTimestamp", "2090-01-01T00:00:00Z"),
        ("startingOffsetsByTimestamp", 0), ("endingOffsetsByTimestamp", 4_000_000_000_000),
        ("startingOffsetsByTimestampStrategy", "latest"), ("tags", ["a"]), ("keep_times", False),
        ("sink", {"topic": "elsewhere"}), ("to", "elsewhere"),
    ],
)  # fmt: skip
def test_a_replay_with_another_option_is_refused(copy, topic, name, value):
    copy()
    if name == "pattern":
        changed = {"topics": None, "pattern": value}
    elif isinstance(value, int) and not isinstance(value, bool):
        changed = {name: {topic: value}}
    else:
        changed = {name: value}
    with pytest.raises(OptionError, match="other options"):
        copy(**changed)
    assert copy().steps == 0


def test_a_replay_continues_with_the_same_options_in_another_spelling(copy, topic):
    """The rate, and options that do not select records, may differ."""
    copy(topics=[topic], tags=["a", "b*"], startingOffsets="earliest")
    copy(
        tags="b*,a", starting_offsets={topic: -2}, rate=5.0, failOnDataLoss=False, sink={"durability": "disk"}
    )


def test_a_replay_of_an_earlier_version_keeps_the_options_of_its_next_run(copy, topic, ringlog_engine):
    """That version did not store them."""
    name = copy(tags=["a"]).name
    path = state_of(ringlog_engine.data_dir, "replay", name)
    old = json.loads(path.read_text())
    del old["options"]
    path.write_text(json.dumps(old))
    copy(tags=["b"])
    with pytest.raises(OptionError, match="other options"):
        copy(tags=["a"])


@pytest.fixture
def fill(client, ringlog_engine, topic, tmp_path):
    """Return a function that runs a backfill of no rows under one name."""
    pq.write_table(pa.table({"payload": pa.array([], pa.binary())}), tmp_path / "rows.parquet")

    def run(**options):
        given = {"topic": "filled", "name": topic.rsplit(".", 1)[0], **options}
        return backfill.run(None, ringlog_engine.data_dir, str(tmp_path / "rows.parquet"), **given)

    return run


@pytest.mark.parametrize(
    "changed",
    [{"topic": "other"}, {"topic": None}, {"columns": {"payload": "key"}}, {"sink": {"topic": "elsewhere"}}],
)
def test_a_backfill_with_another_option_is_refused(fill, changed):
    fill()
    with pytest.raises(OptionError, match="other options"):
        fill(**changed)
    assert fill(rate=5.0, sink={"durability": "disk"}).steps == 0


def test_a_backfill_of_an_earlier_version_keeps_the_options_of_its_next_run(fill, ringlog_engine):
    """That version did not store them."""
    path = state_of(ringlog_engine.data_dir, "backfill", fill().name)
    old = json.loads(path.read_text())
    del old["options"]
    path.write_text(json.dumps(old))
    fill(topic="other")
    with pytest.raises(OptionError, match="other options"):
        fill()
