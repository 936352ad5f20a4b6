"""Difference reads over HTTP."""

from __future__ import annotations

import threading

import pytest

from tests.support.http_client import Answer, HttpClient


def written(call: HttpClient, topic: str, *data: object, **fields: object) -> None:
    for one in data:
        reply = call("POST", f"/v0/topics/{topic}", {"records": [{"data": one, **fields}]})
        assert reply.status in {200, 201}, reply


def seqs(reply: Answer) -> list[int]:
    return [record["$seq"] for record in reply.body["records"]]


def test_a_cap_holds_at_once_and_leaves_a_tombstone(call: HttpClient) -> None:
    call("PUT", "/v0/topics/diff-cap", {"cap_records": 3})
    written(call, "diff-cap", *range(6))
    found = call("POST", "/v0/topics/diff-cap/diff", {"from_seq": 0})
    assert found.status == 200
    assert found.body["tombstone"] == {
        "gap_from": 1, "gap_to": 3, "reason": "cap", "missed_estimate": 3, "earliest_seq": 4, "head_seq": 6,
    }  # fmt: skip
    assert seqs(found) == [4, 5, 6]
    assert (found.body["next_from_seq"], found.body["caught_up"], found.body["lag"]) == (6, True, 0)
    assert found.body["performance"]["records_scanned"] == 3


def test_a_cursor_above_the_head_begins_again(call: HttpClient) -> None:
    written(call, "diff-above", 1, 2)
    found = call("POST", "/v0/topics/diff-above/diff", {"from_seq": 9})
    assert found.body["tombstone"]["reason"] == "recreated"
    assert seqs(found) == [1, 2]


def test_fields_and_payloads_of_records(call: HttpClient) -> None:
    written(call, "diff-fields", {"a": [1, "ä"]}, tag="t1", node="n1", meta={"k": 1})
    written(call, "diff-fields", None, {"$base64": "/w=="}, {"$text": "a\nb"})
    found = call("POST", "/v0/topics/diff-fields/diff", {"include_tags": True}).body["records"]
    assert {name: value for name, value in found[0].items() if name != "$ts"} == {
        "$seq": 1, "$node": "n1", "$tag": "t1", "data": {"a": [1, "ä"]}, "meta": {"k": 1},
    }  # fmt: skip
    assert [record["data"] for record in found[1:]] == [None, {"$base64": "/w=="}, {"$text": "a\nb"}]
    assert "$node" not in found[1]
    plain = call("POST", "/v0/topics/diff-fields/diff", {"include_meta": False}).body["records"][0]
    assert "$tag" not in plain
    assert "meta" not in plain


def test_filters_move_the_cursor(call: HttpClient) -> None:
    written(call, "diff-filter", 1, tag="a1", node="me")
    written(call, "diff-filter", 2, tag="b1", node="you")
    written(call, "diff-filter", 3)
    without = call("POST", "/v0/topics/diff-filter/diff", {"node": ["me", "you"]})
    assert (seqs(without), without.body["next_from_seq"]) == ([3], 3)
    tagged = call("POST", "/v0/topics/diff-filter/diff", {"filter": "a*"})
    assert (seqs(tagged), tagged.body["caught_up"]) == ([1], True)
    assert call("POST", "/v0/topics/diff-filter/diff", {"filter": ["tag", "Glob", "a"]}).status == 400


def test_limits_of_a_page(call: HttpClient) -> None:
    call("POST", "/v0/topics/diff-limit", {"records": [{"data": "x" * 100} for _ in range(1_100)]})
    for limit, expected in ((0, 256), (7, 7), (1_000, 1_000), (5_000, 1_000)):
        found = call("POST", "/v0/topics/diff-limit/diff", {"limit": limit})
        assert (len(found.body["records"]), found.body["next_from_seq"]) == (expected, expected)
        assert not found.body["caught_up"]
    assert len(call("POST", "/v0/topics/diff-limit/diff", {"max_batch_bytes": 1}).body["records"]) == 1


@pytest.mark.parametrize("field", ["from_seq", "limit", "wait_ms", "include_tags", "max_batch_bytes"])
def test_null_and_wrong_types_are_refused(call: HttpClient, field: str) -> None:
    written(call, "diff-null", 1)
    for value in (None, -1, "x"):
        reply = call("POST", "/v0/topics/diff-null/diff", {field: value})
        assert (reply.status, reply.body["error"]["code"]) == (400, "invalid_request"), value


def test_an_empty_body_and_an_absent_topic(call: HttpClient) -> None:
    written(call, "diff-empty", 1)
    assert seqs(call("POST", "/v0/topics/diff-empty/diff")) == [1]
    absent = call("POST", "/v0/topics/diff-absent/diff", {})
    assert (absent.status, absent.body["error"]["code"]) == (404, "topic_not_found")


def test_a_wait_ends_with_a_record_and_with_the_deletion(call: HttpClient) -> None:
    call("PUT", "/v0/topics/diff-wait", {})
    found: list[Answer] = []

    def wait(from_seq: int) -> None:
        other = HttpClient(call.url, timeout=30)
        found.append(other("POST", "/v0/topics/diff-wait/diff", {"from_seq": from_seq, "wait_ms": 20_000}))
        other.close()

    thread = threading.Thread(target=wait, args=(0,))
    thread.start()
    written(call, "diff-wait", 1)
    thread.join(25)
    assert seqs(found[0]) == [1]
    thread = threading.Thread(target=wait, args=(1,))
    thread.start()
    call("DELETE", "/v0/topics/diff-wait")
    thread.join(25)
    assert found[1].status == 404


def test_a_reader_of_a_destination_sees_what_the_source_acknowledged(call: HttpClient) -> None:
    for name in ("diff-src", "diff-dst"):
        call("PUT", f"/v0/topics/{name}", {})
    assert call("PUT", "/v0/routers/diff-r", {"source": "diff-src", "dest": "diff-dst"}).status in {200, 201}
    for number in range(1, 6):
        written(call, "diff-src", number)
        found = call("POST", "/v0/topics/diff-dst/diff", {"from_seq": number - 1})
        assert [record["data"] for record in found.body["records"]] == [number]
