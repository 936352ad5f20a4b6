"""CloudEvents: written in structured, batch and binary mode, and read back as a batch."""

from __future__ import annotations

import json
from typing import Any

import pytest

import ringlog
from ringlog.limits import DEDUP_ID_BYTES_MAX, DEDUP_IDS_PER_WRITE_MAX
from ringlog.testing.real_engine import TestEngine

EVENT = {"content-type": "application/cloudevents+json; charset=utf-8"}
BATCH = {"content-type": "application/cloudevents-batch+json"}
READ = {"accept": "application/cloudevents-batch+json"}


def event(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"specversion": "1.0", "id": str(number), "source": "/shop", "type": "order.created", **more}


def events(call, topic: str) -> list[dict[str, Any]]:
    answer = call("POST", f"/v0/topics/{topic}/diff", {}, READ)
    assert (answer.status, answer.headers["content-type"]) == (200, BATCH["content-type"])
    assert answer.headers["ringlog-next-from-seq"] == answer.headers["ringlog-head-seq"]
    return list(json.loads(answer.body))


def test_an_event_comes_back_as_it_was_written(call, topic: str) -> None:
    written = event(
        subject="o-1", time="2026-11-29T12:00:00.123456Z", dataschema="https://schemas.example/order",
        datacontenttype="application/json", traceparent="00-ab-cd-01", retries=3, final=True,
        data={"total": 12.5, "lines": [1, 2]},
    )  # fmt: skip
    answer = call("POST", f"/v0/topics/{topic}", written, EVENT)
    assert (answer.status, answer.body["seqs"], answer.body["created"]) == (201, [1], True)
    assert events(call, topic) == [{**written, "retries": "3", "final": "true"}]


def test_other_programs_see_an_event_as_a_record(http_engine: TestEngine, call, topic: str) -> None:
    call("POST", f"/v0/topics/{topic}", event(time="2026-11-29T12:00:00Z", data={"a": 1}), EVENT)
    with ringlog.connect(http_engine.url) as client:
        [record] = client.read(topic).records
    assert (record.tag, record.json(), record.event_ts) == ("order.created", {"a": 1}, 1_795_953_600_000_000)
    assert record.headers == {"ce-id": b"1", "ce-source": b"/shop"}
    [shown] = call("POST", f"/v0/topics/{topic}/diff", {"include_tags": True}).body["records"]
    assert (shown["$tag"], shown["data"]) == ("order.created", {"a": 1})


def test_an_event_is_stored_once(call, topic: str) -> None:
    """Source and id identify it together."""
    first = call("POST", f"/v0/topics/{topic}", [event(1), event(2), event(1)], BATCH).body
    assert (first["seqs"], first["count"], first["deduped"], first["head_seq"]) == ([1, 2, 1], 3, False, 2)
    again = call("POST", f"/v0/topics/{topic}", [event(2), event(1, source="/other")], BATCH).body
    assert (again["seqs"], again["deduped"]) == ([2, 3], False)
    assert call("POST", f"/v0/topics/{topic}", event(2), EVENT).body["deduped"] is True
    assert [each["source"] for each in events(call, topic)] == ["/shop", "/shop", "/other"]


def test_binary_mode_has_the_attributes_in_headers(call, topic: str) -> None:
    headers = {
        "ce-specversion": "1.0", "ce-id": "b-1", "ce-source": "/cam", "ce-type": "image",
        "ce-subject": "Euro%20%E2%82%AC", "content-type": "image/png",
    }  # fmt: skip
    assert call("POST", f"/v0/topics/{topic}", b"\x89PNG\xff", headers).status == 201
    assert call("POST", f"/v0/topics/{topic}", b"", {**headers, "ce-id": "b-2"}).status == 200
    text = {**headers, "ce-id": "b-3", "content-type": "text/plain"}
    assert call("POST", f"/v0/topics/{topic}", "grün".encode(), text).status == 200
    found = events(call, topic)
    assert [each["subject"] for each in found] == ["Euro €"] * 3
    assert [(each.get("data"), each.get("data_base64")) for each in found] == [
        (None, "iVBOR/8="), (None, None), ("grün", None),
    ]  # fmt: skip
    assert [each["datacontenttype"] for each in found] == ["image/png", "image/png", "text/plain"]


@pytest.mark.parametrize(
    ("data", "content_type"),
    [(None, ""), ({"a": None}, ""), ("text", "text/plain"), ("text", "application/json"), ([1], "a/b+json"),
     (0, "application/json"), ({"$text": "x"}, "application/json")],
)  # fmt: skip
def test_data_of_every_kind_comes_back(call, topic: str, data: Any, content_type: str) -> None:
    more = {"datacontenttype": content_type} if content_type else {}
    if data is not None:
        more["data"] = data
    call("POST", f"/v0/topics/{topic}", event(**more), EVENT)
    [found] = events(call, topic)
    assert {name: found[name] for name in more} == more
    assert ("data" in found) == (data is not None)


def test_other_records_are_events_too(call, topic: str) -> None:
    call("POST", f"/v0/topics/{topic}", {"records": [{"data": {"a": 1}, "tag": "t"}, {"data": None}]})
    found, epoch = events(call, topic), call("GET", f"/v0/topics/{topic}").body["epoch"]
    assert [(each["id"], each["type"], each["source"]) for each in found] == [
        (f"{epoch}-1", "t", f"/v0/topics/{topic}"), (f"{epoch}-2", "record", f"/v0/topics/{topic}"),
    ]  # fmt: skip
    assert found[0]["data"] == {"a": 1}
    assert found[0]["time"].endswith("Z")


def test_headers_and_times_of_other_programs_make_no_wrong_event(
    http_engine: TestEngine, call, topic: str
) -> None:
    """Its time may be outside of what a date can say, and its headers may have names of members."""
    headers = {"ce-data": b"x", "ce-type": b"x", "ce-Bad name": b"x", "ce-ok": b"\xff"}
    with ringlog.connect(http_engine.url) as client:
        client.append(topic, b"1", headers=headers, event_ts=(1 << 63) - 1, tag="t")
    [found] = events(call, topic)
    assert (found["type"], found["data"], found["ok"]) == ("t", 1, "\ufffd")
    assert set(found) == {"specversion", "id", "source", "type", "time", "ok", "data"}


def test_text_that_is_no_unicode_is_refused(call, topic: str) -> None:
    body = json.dumps(event()).replace("/shop", "\\ud800").encode()
    assert call("POST", f"/v0/topics/{topic}", body, EVENT).status == 400


@pytest.mark.parametrize(
    ("wrong", "attribute"),
    [
        ({"specversion": "0.3"}, "specversion"), ({"id": ""}, "id"), ({"source": None}, "source"),
        ({"type": 4}, "type"), ({"time": "yesterday"}, "time"), ({"time": "2026-11-29T12:00:00"}, "time"),
        ({"Big": "x"}, "Big"), ({"x": {"a": 1}}, "x"), ({"x": 1.5}, "x"),
        ({"data_base64": "%"}, "data_base64"),
        ({"data_base64": "AA==", "data": 1}, "data_base64"), ({"datacontenttype": 1}, "datacontenttype"),
    ],
)  # fmt: skip
def test_a_wrong_event_is_refused_with_its_attribute(call, topic: str, wrong: Any, attribute: str) -> None:
    answer = call("POST", f"/v0/topics/{topic}", [event(), event(2, **wrong)], BATCH)
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_request")
    assert answer.body["error"]["detail"] == {"index": 1, "attribute": attribute}
    assert call("GET", f"/v0/topics/{topic}").status == 404, "nothing was written"


@pytest.mark.parametrize("body", ["[]", "{", "[1]", "3", '{"specversion":"1.0","specversion":"1.0"}'])
def test_a_body_that_holds_no_events_is_refused(call, topic: str, body: str) -> None:
    assert call("POST", f"/v0/topics/{topic}", body.encode(), BATCH).status == 400


def test_too_many_events_are_refused(call, topic: str) -> None:
    batch = [event(number) for number in range(DEDUP_IDS_PER_WRITE_MAX + 1)]
    answer = call("POST", f"/v0/topics/{topic}", batch, BATCH)
    assert (answer.status, answer.body["error"]["code"]) == (400, "batch_too_large")
    assert call("POST", f"/v0/topics/{topic}", batch[:-1], BATCH).body["count"] == DEDUP_IDS_PER_WRITE_MAX


def test_a_long_id_is_taken(call, topic: str) -> None:
    long = event(id="x" * DEDUP_ID_BYTES_MAX)
    assert call("POST", f"/v0/topics/{topic}", long, EVENT).body["deduped"] is False
    assert call("POST", f"/v0/topics/{topic}", json.loads(json.dumps(long)), EVENT).body["deduped"] is True
