"""Options of source and sink: accepted values, refused values and their messages. No JVM, no engine."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.spark import option_values as values
from ringlog.spark.errors import DataLoss, EngineNotRunning, OptionError, SchemaError
from ringlog.spark.options import (
    EARLIEST,
    LATEST,
    TopicOffsets,
    TopicTimes,
    as_text,
    bound_of,
    cursor_of,
    schema_options,
    sink_options,
    source_options,
)
from ringlog.spark.sessions import session
from ringlog.types import Durability

PLACE = {"path": "/data", "subscribe": "t,u"}


def batch(**more):
    return source_options(PLACE | more, streaming=False)


def stream(**more):
    return source_options(PLACE | more, streaming=True)


def refused(call, **more):
    with pytest.raises(OptionError) as caught:
        call(**more)
    return str(caught.value)


# -- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "cursor"), [(1, 0), (2, 1), (18, 17), ((1 << 63) - 1, (1 << 63) - 2)])
def test_offsets_are_one_above_cursors_and_bounds(offset, cursor):
    """An offset is the first seq to read, and a cursor is the last seq read."""
    assert cursor_of(offset) == bound_of(offset) == cursor


@given(st.integers(1, (1 << 63) - 1), st.integers(0, 1000))
def test_a_range_of_offsets_has_as_many_positions_as_its_cursors(start, length):
    """[start, end) in offsets is (cursor, bound] in positions."""
    assert bound_of(start + length) - cursor_of(start) == length


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1767225600000", 1_767_225_600_000_000),
        ("2026-01-01T00:00:00Z", 1_767_225_600_000_000),
        ("2026-01-01T01:00:00.000001+01:00", 1_767_225_600_000_001),
        ("-5", 0),
    ],
)
def test_times_are_epoch_milliseconds_or_iso(text, expected):
    assert values.time_us("startingTimestamp", text) == expected


@pytest.mark.parametrize("text", ["", "soon", "2026-01-01T00:00:00", "1.5", "2026-13-01T00:00:00Z"])
def test_other_times_are_refused(text):
    with pytest.raises(OptionError, match="startingTimestamp"):
        values.time_us("startingTimestamp", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("64m", 64 << 20), ("1G", 1 << 30), ("512 kb".replace(" ", ""), 512 << 10)],
)
def test_byte_counts_have_units(text, expected):
    assert values.byte_count("maxPartitionBytes", text, 1, 1 << 40) == expected


@pytest.mark.parametrize("text", ["", "m", "-1", "1.5m", "1t", "0", "²m"])
def test_other_byte_counts_are_refused(text):
    with pytest.raises(OptionError, match="maxPartitionBytes"):
        values.byte_count("maxPartitionBytes", text, 1, 1 << 40)


@pytest.mark.parametrize("call", [values.boolean, values.comma_list])
def test_empty_values_are_refused(call):
    with pytest.raises(OptionError):
        call("option", "")


# -- source -------------------------------------------------------------------------------------------


def test_options_have_the_documented_defaults():
    """Section 4's table."""
    found = batch()
    assert found.topics == ("t", "u")
    assert (found.starting, found.ending) == (TopicOffsets(EARLIEST), TopicOffsets(LATEST))
    assert (found.max_partition_bytes, found.min_partitions, found.rows_per_batch) == (64 << 20, 1, 8192)
    assert found.fail_on_data_loss
    assert not found.quarantine
    assert (found.view, found.layout, found.tags, found.include_headers) == ("records", "ringlog", (), False)
    assert stream().starting == TopicOffsets(LATEST)


def test_option_names_ignore_case_and_root_is_an_alias_of_path():
    found = source_options(
        {"ROOT": "/data", "SUBSCRIBEPATTERN": "a.*", "MINPARTITIONS": "3"}, streaming=False
    )
    assert (found.path, found.pattern, found.min_partitions) == ("/data", "a.*", 3)
    assert found.matches("abc")
    assert not found.matches("cab")
    assert "are aliases" in refused(batch, root="/other")


def test_every_option_of_a_batch_is_parsed():
    found = batch(
        startingOffsets='{"t": 17, "u": -2}', endingOffsets='{"t": 20, "u": -1}', minPartitions="4",
        maxPartitionBytes="1m", failOnDataLoss="False", includeHeaders="true", tags="a,b*", layout="KAFKA",
        onCorrupt="quarantine", rowsPerBatch="100", startingOffsetsByTimestampStrategy="latest",
    )  # fmt: skip
    assert (found.starting.of("t"), found.starting.of("u")) == (17, EARLIEST)
    assert (found.ending.of("t"), found.ending.of("u")) == (20, LATEST)
    assert (found.min_partitions, found.max_partition_bytes, found.rows_per_batch) == (4, 1 << 20, 100)
    assert (found.fail_on_data_loss, found.quarantine, found.latest_if_too_new) == (False, True, True)
    assert (found.include_headers, found.tags, found.layout) == (True, ("a", "b*"), "kafka")
    assert pickle.loads(pickle.dumps(found)) == found


def test_every_option_of_a_stream_is_parsed():
    found = stream(startingOffsets="earliest", maxOffsetsPerTrigger="10", gapsPath="/gaps")
    assert (found.starting, found.max_offsets, found.gaps_path) == (TopicOffsets(EARLIEST), 10, "/gaps")
    assert stream(maxBytesPerTrigger="8m").max_bytes == 8 << 20
    assert stream(startingOffsets='{"t": -1}').starting.of("t") == LATEST


def test_timestamps_apply_to_all_topics_or_by_topic():
    found = batch(startingTimestamp="1000", endingOffsetsByTimestamp='{"t": "1970-01-01T00:00:02Z"}')
    assert (found.starting_ts.of("t"), found.starting_ts.of("u")) == (1_000_000, 1_000_000)
    assert found.ending_ts == TopicTimes(None, (("t", 2_000_000),))
    assert "at most one of" in refused(batch, startingTimestamp="1", startingOffsetsByTimestamp='{"t": 1}')


@pytest.mark.parametrize(
    ("given_options", "words"),
    [
        ({"strtingOffsets": "x"}, "did you mean startingOffsets"),
        ({"assign": '{"t":[0]}'}, "one partition each"),
        ({"kafka.bootstrap.servers": "h:1"}, "Kafka client"),
        ({"groupIdPrefix": "g"}, "checkpoint"),
        ({"minOffsetsPerTrigger": "1"}, "minimum with a delay"),
        ({"kafkaConsumer.pollTimeoutMs": "1"}, "nothing is polled"),
        ({"fetchOffset.numRetries": "1"}, "nothing is fetched"),
        ({"cold": "/cold", "view": "audit"}, "needs the engine"),
        ({"startingOffsets": "latest"}, "one of earliest"),
        ({"startingOffsets": '{"t": -1}'}, "is not allowed"),
        ({"endingOffsets": "earliest"}, "one of latest"),
        ({"endingOffsets": '{"t": -2}'}, "is not allowed"),
        ({"startingOffsets": '{"t": 0}'}, "must be from 1 to"),
        ({"startingOffsets": '{"t": 1.5}'}, "whole number"),
        ({"startingOffsets": '{"t": true}'}, "whole number"),
        ({"startingOffsets": '{"t": 1, "t": 2}'}, "each topic once"),
        ({"startingOffsets": '{"t"'}, "valid JSON"),
        ({"startingOffsets": "{}"}, "at least one topic"),
        ({"startingOffsets": '{"v": 1}'}, "subscribed topics only"),
        ({"subscribe": "t,,u"}, "empty value"),
        ({"subscribe": "-no"}, "must be a topic name"),
        ({"subscribePattern": ".*"}, "exactly one of"),
        ({"minPartitions": "0"}, "must be from 1 to"),
        ({"minPartitions": "many"}, "whole number"),
        ({"rowsPerBatch": "0"}, "must be from 1 to"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"tags": "a*b"}, "only at the end"),
        ({"view": "tables"}, "one of records"),
        ({"layout": "avro"}, "one of ringlog, kafka"),
        ({"layout": "kafka", "view": "frames"}, "requires view=records"),
        ({"onCorrupt": "ignore"}, "one of fail, quarantine"),
        ({"maxOffsetsPerTrigger": "1"}, "no triggers"),
        ({"gapsPath": "/g"}, "view=gaps"),
        ({"path": "s3://bucket"}, "directory on this host"),
    ],
)  # fmt: skip
def test_invalid_options_of_a_batch_are_refused_with_a_message(given_options, words):
    """Unknown names, Kafka options without a counterpart, and invalid values are refused."""
    assert words.lower() in refused(batch, **given_options).lower()


@pytest.mark.parametrize(
    ("given_options", "words"),
    [
        ({"endingOffsets": "latest"}, "availableNow"),
        ({"endingTimestamp": "1"}, "availableNow"),
        ({"onCorrupt": "quarantine"}, "is for batches only"),
        ({"view": "frames"}, "not supported for a stream"),
        ({"maxOffsetsPerTrigger": "1", "maxBytesPerTrigger": "1"}, "at most one of"),
    ],
)
def test_invalid_options_of_a_stream_are_refused_with_a_message(given_options, words):
    assert words.lower() in refused(stream, **given_options).lower()


def test_path_and_subscription_are_required():
    with pytest.raises(OptionError, match="data directory"):
        source_options({"subscribe": "t"}, streaming=False)
    with pytest.raises(OptionError, match="subscribe"):
        source_options({"path": "/d"}, streaming=False)


def test_an_invalid_pattern_is_refused():
    with pytest.raises(OptionError, match="regular expression"):
        source_options({"path": "/d", "subscribePattern": "("}, streaming=False)


def test_schema_options_ignores_all_other_options():
    shape = schema_options(
        {"path": "/d", "maxoffsetspertrigger": "5", "txnappid": "a", "includeheaders": "true"}
    )
    assert (shape.include_headers, shape.layout) == (True, "ringlog")


def test_keyword_arguments_become_options():
    found = as_text(
        {
            "subscribe": ["t", "u"], "min_partitions": 8, "fail_on_data_loss": False, "tags": None,
            "startingOffsets": {"t": 17}, "starting_timestamp": datetime(2026, 1, 1, tzinfo=UTC),
        }
    )  # fmt: skip
    assert found == {
        "subscribe": '["t", "u"]', "minPartitions": "8", "failOnDataLoss": "false",
        "startingOffsets": '{"t": 17}', "startingTimestamp": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    assert source_options(found | {"path": "/d"}, streaming=False).topics == ("t", "u")
    with pytest.raises(OptionError, match="both spellings"):
        as_text({"minPartitions": 1, "min_partitions": 2})


# -- sink ---------------------------------------------------------------------------------------------


def test_every_option_of_the_sink_is_parsed():
    found = sink_options(
        {
            "path": "/data", "topic": "t", "createTopics": "true", "txnAppId": "job", "txnVersion": "7",
            "durability": "fsync", "maxFrameRecords": "100", "maxFrameBytes": "64k", "stagingDir": "/stage",
        }
    )  # fmt: skip
    assert (found.path, found.topic, found.create_topics) == ("/data", "t", True)
    assert (found.txn_app_id, found.txn_version, found.durability) == ("job", 7, Durability.FSYNC)
    assert (found.max_frame_records, found.max_frame_bytes, found.staging_dir) == (100, 64 << 10, "/stage")
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("given_options", "words"),
    [
        ({}, "path"),
        ({"path": "/d", "connect": "ringlog:///d/run"}, "exactly one of path"),
        ({"connect": "ringlog:///d/run"}, "stagingDir"),
        ({"connect": "http://h", "stagingDir": "/s"}, "engine address"),
        ({"path": "/d", "txnAppId": "a"}, "set both txnAppId and txnVersion"),
        ({"path": "/d", "topic": "-"}, "must be a topic name"),
        ({"path": "/d", "durability": "hope"}, "durability"),
        ({"path": "/d", "maxFrameRecords": "10001"}, "must be from 1 to"),
        ({"path": "/d", "topc": "t"}, "did you mean topic"),
        ({"path": "/d", "txnAppId": " ", "txnVersion": "1"}, "empty"),
    ],
)
def test_invalid_options_of_the_sink_are_refused(given_options, words):
    with pytest.raises(OptionError) as caught:
        sink_options(given_options)
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", [OptionError, SchemaError, EngineNotRunning, DataLoss])
def test_errors_survive_pickling(kind):
    """Type, text and detail stay the same."""
    error = kind("said", topic="t", gap_from=3)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.detail) == (kind, str(error), {"topic": "t", "gap_from": 3})


def test_a_session_has_either_a_master_or_a_remote():
    with pytest.raises(OptionError, match="only one of master and remote"):
        session(master="local[2]", remote="sc://localhost")
