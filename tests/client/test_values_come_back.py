"""Values are returned as they were written, or refused.

Refused are numbers that JSON lacks, repeated headers, and times in another unit. Records can be pickled and
copied.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import ringlog
from ringlog.client.read.pages import Cursor, Record, Tombstone
from ringlog.client.write.fields import NewRecord
from ringlog.errors import UsageError
from ringlog.payload import JSON, msgspec_codec

NAN, INF = float("nan"), float("inf")


@dataclasses.dataclass
class Reading:
    value: float
    unit: str | None = None


@pytest.mark.parametrize(
    ("value", "at"),
    [
        (NAN, "nan is no"), ([1, None, -INF], r"-inf at \[2\]"), ({"a": [{"b": NAN}]}, r"nan at a\[0\].b"),
        ({"a": None, "b": (1.5, INF)}, r"inf at b\[1\]"), (Reading(NAN), "nan at value"),
    ],
)  # fmt: skip
def test_nan_and_infinity_are_refused_with_their_position(value: Any, at: str) -> None:
    with pytest.raises(UsageError, match=at):
        JSON.encode(value)


@pytest.mark.parametrize("value", [None, [None, 1.5], {"null": "null"}, 5, {"a": {"b": [None]}}])
def test_none_and_the_text_null_can_be_encoded_as_json(value: Any) -> None:
    assert JSON.decode(JSON.encode(value)) == value


def test_a_typed_payload_refuses_infinity() -> None:
    codec = msgspec_codec(Reading)
    assert codec.decode(codec.encode(Reading(1.5))) == Reading(1.5)
    with pytest.raises(UsageError, match="inf at value"):
        codec.encode(Reading(INF))


def test_nan_in_metadata_or_payloads_is_refused(client: ringlog.Client, topic: str) -> None:
    with pytest.raises(UsageError, match=r"meta cannot be written as JSON: nan at a.b"):
        client.append(topic, b"", meta={"a": {"b": NAN}})
    with pytest.raises(UsageError, match=r"meta cannot be written as JSON: inf at a"):
        client.append_many(topic, [NewRecord(data=b"", meta={"a": INF})])
    with client.producer(topic, payload=JSON) as producer, pytest.raises(UsageError, match=r"nan at \[1\]"):
        producer.send([None, NAN])
    client.append(topic, b"", meta={"a": None})
    (record,) = client.read(topic).records
    assert record.meta == {"a": None}


def test_headers_keep_their_order_and_a_repeated_name_is_refused(
    client: ringlog.Client, ringlog_topic: Any
) -> None:
    topic, pairs = ringlog_topic(), [("b", b"1"), ("a", b"2")]
    client.append(topic, b"", headers=dict(pairs))
    client.append(topic, b"", headers=iter(pairs))  # type: ignore[arg-type]
    assert [list(record.headers.items()) for record in client.read(topic).records] == [pairs, pairs]
    with pytest.raises(UsageError, match="headers must have each name once, got 'a' more than once"):
        client.append(topic, b"", headers=[("a", b"1"), ("a", b"2")])  # type: ignore[arg-type]


def test_empty_values_and_null_are_distinct(client: ringlog.Client, topic: str) -> None:
    client.append(topic, b"", key=b"", tag="", node="")
    client.append(topic, None)
    client.append_many(topic, [b"", None, NewRecord(data=None, key=b""), b"x"])
    with client.producer(topic) as producer:
        producer.send(None)
        producer.send(b"", tag="")
        producer.send_each([b"", None])
    records = client.read(topic).records
    assert [record.data for record in records] == [b"", None, b"", None, None, b"x", None, b"", b"", None]
    assert [record.key for record in records] == [b"", None, None, None, b"", *[None] * 5]
    assert [record.tag for record in records] == ["", *[None] * 6, "", None, None]
    assert (records[0].node, records[1].node) == ("", None)
    assert client.read(topic).bytes() == [record.data for record in records]
    assert [each.seq for each in client.read(topic, tags="*").records] == [], (
        "an empty tag is matched by nothing"
    )


def test_the_payload_of_a_job_may_be_null(client: ringlog.Client, topic: str) -> None:
    client.topics.create(topic, type="queue")
    queue = client.queue(topic)
    queue.put(None)
    queue.put_many([b"", None])
    jobs = queue.claim(3)
    assert jobs.payloads() == [None, b"", None]
    assert [job.data for job in jobs] == [job.value for job in jobs] == [None, b"", None]


@pytest.mark.parametrize("field", ["expires_at", "event_ts", "not_before"])
@pytest.mark.parametrize(
    ("unit", "value"),
    [("seconds", 1_764_000_000), ("milliseconds", 1_764_000_000_000), ("nanoseconds", 1_764_000_000 * 10**9)],
)
def test_a_time_in_another_unit_is_refused_with_the_name_of_the_unit(
    client: ringlog.Client, ringlog_topic: Any, field: Any, unit: str, value: int
) -> None:
    with pytest.raises(
        UsageError, match=f"{field} is in microseconds since the epoch; {value} looks like {unit}"
    ):
        client.append(ringlog_topic(), b"", **{field: value})


def test_times_are_returned_in_microseconds(client: ringlog.Client, topic: str) -> None:
    early = datetime(1970, 1, 1, 0, 29, 24, tzinfo=UTC)
    for event_ts in (0, 5, 1_764_000_000_000_000, early):
        client.append(topic, b"", event_ts=event_ts)
    found = [record.event_ts for record in client.read(topic).records]
    assert found == [0, 5, 1_764_000_000_000_000, 1_764_000_000]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_records_tombstones_and_cursors_can_be_pickled_and_copied(
    client: ringlog.Client, topic: str, again: Callable[[Any], Any]
) -> None:
    client.append(topic, b"plain")
    client.append(topic, b"full", key=b"k", tag="t", meta={"a": 1}, headers={"h": b"v"}, priority=3)
    page = client.read(topic)
    for record in page.records:
        other: Record = again(record)
        assert other == record
        assert other.meta == record.meta
    for value in (Tombstone(topic, 1, 2, "ttl", 3, 4), Cursor(1, 2), page.cursor):
        assert again(value) == value
        assert type(again(value)) is type(value)


def test_the_record_of_a_job_can_be_pickled(client: ringlog.Client, topic: str) -> None:
    client.topics.create(topic, type="queue")
    queue = client.queue(topic)
    queue.put(b"job", headers={"h": b"v"})
    with queue.claim()[0] as job:
        assert pickle.loads(pickle.dumps((job.record, job.data))) == (job.record, b"job")
