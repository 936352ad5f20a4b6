"""Watch sessions and their event streams."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import ringlog.testing
from ringlog.testing.real_engine import TestEngine
from tests.support.http_client import EventStream, HttpClient

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "two-processes"])
def http_engine(request: pytest.FixtureRequest) -> Iterator[TestEngine]:
    """Sessions and streams behave the same with several gateway processes."""
    http = {"enabled": True, "port": 0, "processes": request.param}
    with ringlog.testing.engine(http=http, delivery={"schedulers": 1}) as running:
        running.wait_ready("http_gateway")
        yield running


def write(call: HttpClient, topic: str, *data: object) -> None:
    reply = call("POST", f"/v0/topics/{topic}", {"records": [{"data": one} for one in data]})
    assert reply.status in {200, 201}, reply


def cursor(text: str) -> object:
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def test_the_backlog_comes_in_one_frame_and_live_records_follow(call: HttpClient) -> None:
    write(call, "w-basic", 1, 2, 3)
    with call.watch({"topics": {"w-basic": {"from_seq": 1}}}) as stream:
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.headers["cache-control"] == "no-store"
        first = stream.block()
        assert first is not None
        assert first.retry == "2000"
        second = stream.block()
        assert second is not None
        assert second.comment.startswith("hb ")
        record, caught_up = stream.frames(2)
        assert record.event == "record"
        assert [one["data"] for one in record.data["records"]] == [2, 3]
        assert (record.data["from_seq"], record.data["to_seq"], record.data["head_seq"]) == (1, 3, 3)
        assert cursor(record.id) == {"w-basic": 3}
        assert (caught_up.event, caught_up.data) == ("caught-up", {"topic": "w-basic", "head_seq": 3})
        for number in (4, 5):
            write(call, "w-basic", number)
            record, caught_up = stream.frames(2)
            assert [one["$seq"] for one in record.data["records"]] == [number]
            assert record.data["from_seq"] == number - 1
            assert (caught_up.event, caught_up.data["head_seq"]) == ("caught-up", number)


def test_the_reply_of_a_watch(call: HttpClient) -> None:
    write(call, "w-reply", 1, 2)
    reply = call("POST", "/v0/watch", {"topics": {"w-reply": {"tail": True}}})
    assert reply.status == 200
    assert reply.body["stream_url"] == f"/v0/watch/{reply.body['wid']}"
    assert reply.body["session_ttl_ms"] == 300_000
    entry = reply.body["topics"]["w-reply"]
    assert (entry["from_seq"], entry["head_seq"], entry["earliest_seq"]) == (2, 2, 1)
    assert call("POST", "/v0/watch", {"topics": {}}).status == 400
    assert call("POST", "/v0/watch", {"topics": {"w-none": {}}}).status == 404
    lenient = call("POST", "/v0/watch?lenient=true", {"topics": {"w-none": {}}})
    assert (lenient.status, lenient.body["topics"]) == (200, {})
    assert call("GET", "/v0/watch/wid_unknown").status == 404
    found = call("GET", reply.body["stream_url"], headers={"accept": "application/json"})
    assert found.status == 406
    with call.stream(reply.body["stream_url"]) as stream:
        assert stream.status == 200


def test_a_reconnect_resumes_and_never_skips(call: HttpClient) -> None:
    write(call, "w-resume", *range(1, 6))
    wid = call("POST", "/v0/watch", {"topics": {"w-resume": {}}, "limit": 2}).body["wid"]
    with call.stream(f"/v0/watch/{wid}") as stream:
        first = stream.frames(3)
    assert [one["$seq"] for frame in first[:2] for one in frame.data["records"]] == [1, 2, 3, 4]
    with call.stream(f"/v0/watch/{wid}", {"last-event-id": first[0].id}) as stream:
        assert [one["$seq"] for one in stream.records(3)] == [3, 4, 5]
    ahead = base64.urlsafe_b64encode(b'{"w-resume":99}').decode()
    with call.stream(f"/v0/watch/{wid}", {"last-event-id": ahead}) as stream:
        write(call, "w-resume", 6)
        assert [one["$seq"] for one in stream.records(1)] == [6]


def test_a_gap_at_the_connect_and_a_deletion(call: HttpClient) -> None:
    call("PUT", "/v0/topics/w-gap", {"cap_records": 2})
    for number in range(5):
        write(call, "w-gap", number)
    with call.watch({"topics": {"w-gap": {"from_seq": 1}}}) as stream:
        tombstone, record, _ = stream.frames(3)
        assert tombstone.event == "tombstone"
        assert (tombstone.data["reason"], tombstone.data["cause"]) == ("from_seq_too_old", "cap")
        assert (tombstone.data["gap_from"], tombstone.data["gap_to"]) == (2, 3)
        assert cursor(tombstone.id) == {"w-gap": 3}
        assert [one["$seq"] for one in record.data["records"]] == [4, 5]
        call("DELETE", "/v0/topics/w-gap")
        (deleted,) = stream.frames(2)  # The stream ends with its last topic.
        assert (deleted.event, deleted.data["reason"], deleted.data["head_seq"]) == (
            "topic-deleted", "deleted", 5,
        )  # fmt: skip


def test_a_new_stream_takes_over(call: HttpClient) -> None:
    write(call, "w-over", 1)
    wid = call("POST", "/v0/watch", {"topics": {"w-over": {}}}).body["wid"]
    with call.stream(f"/v0/watch/{wid}") as old:
        old.frames(2)
        with call.stream(f"/v0/watch/{wid}") as new:
            assert old.frame() is None
            write(call, "w-over", 2)
            assert [one["$seq"] for one in new.records(1)] == [2]


def test_many_streams_and_projections_of_one_topic(call: HttpClient) -> None:
    call("PUT", "/v0/topics/w-many", {})
    bodies = [
        {"topics": {"w-many": {}}},
        {"topics": {"w-many": {}}, "include_data": False, "include_tags": True},
        {"topics": {"w-many": {}}, "node": "me"},
        {"topics": {"w-many": {}}, "consistency": "strong"},
    ]
    streams = [call.watch(bodies[index % 4]) for index in range(16)]
    try:
        for stream in streams:
            stream.frames(1)
        call("POST", "/v0/topics/w-many", {"records": [
            {"data": 1, "tag": "t", "meta": {"k": 1}}, {"data": 2, "node": "me"},
        ]})  # fmt: skip
        for index, stream in enumerate(streams):
            records = stream.records(1)
            assert len(records) == (1 if index % 4 == 2 else 2)
            assert ("data" in records[0]) == (index % 4 != 1)
            assert records[0]["meta"] == {"k": 1}
            assert records[0].get("$tag") == ("t" if index % 4 == 1 else None)
    finally:
        for stream in streams:
            stream.close()


def test_each_watch_gets_the_records_of_its_own_filter(call: HttpClient) -> None:
    """Clients with other filters come and go between the records."""
    call("PUT", "/v0/topics/w-tags", {})
    tags = ["a", "b", "c", "d"]
    with ExitStack() as opened:
        watch = {
            tag: opened.enter_context(call.watch({"topics": {"w-tags": {}}, "filter": tag}))
            for tag in tags[:2]
        }
        for turn in range(1, 4):
            for tag in tags[2:]:
                with call.watch({"topics": {"w-tags": {"tail": True}}, "filter": tag}) as passing:
                    passing.frames(1)
            records = [{"data": turn, "tag": tag} for tag in tags]
            assert call("POST", "/v0/topics/w-tags", {"records": records}).status == 200
            for tag, stream in watch.items():
                assert [(one["$seq"], one["data"]) for one in stream.records(1)] == [
                    (4 * turn - 3 + tags.index(tag), turn)
                ]


def test_a_slow_client_does_not_delay_others_and_gets_everything(call: HttpClient) -> None:
    call("PUT", "/v0/topics/w-slow", {})
    wid = call("POST", "/v0/watch", {"topics": {"w-slow": {}}}).body["wid"]
    with call.stream(f"/v0/watch/{wid}") as stream, call.watch({"topics": {"w-slow": {}}}) as fast:
        stream.frames(1)
        fast.frames(1)
        for number in range(60):
            write(call, "w-slow", f"{number}" + "x" * 200_000)
            assert len(fast.records(1)) == 1
        found = stream.records(60)
        assert [one["$seq"] for one in found] == list(range(1, 61))


def test_a_full_stream_that_falls_silent_does_not_delay_others(call: HttpClient) -> None:
    """It has no room for its heartbeat, and nothing else to send. Others get theirs."""
    call("PUT", "/v0/topics/w-full", {})
    body = {"topics": {"w-full": {}}, "heartbeat_ms": 1_000}
    path = call("POST", "/v0/watch", body).body["stream_url"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect((call.host, call.port))
        full = EventStream(connection, f"{call.host}:{call.port}", path, {})
        full.frames(1)
        write(call, "w-full", "x" * 700_000)
        with call.watch({"topics": {"w-full": {"tail": True}}, "heartbeat_ms": 1_000}) as other:
            other.frames(1)
            for _ in range(3):
                beat = other.block()
                assert beat is not None
                assert beat.comment.startswith("hb ")
        assert len(full.records(1)) == 1


def test_an_orderly_stop_sends_a_final_frame() -> None:
    with ringlog.testing.engine(http={"enabled": True, "port": 0}) as running:
        running.wait_ready("http_gateway")
        client = HttpClient(running.http_url)
        write(client, "w-stop", 1)
        with client.watch({"topics": {"w-stop": {}}}) as stream:
            stream.frames(2)
            running.stop()
            last = stream.frame()
            assert last is not None
            assert (last.event, last.data["code"], last.data["error"]) == ("error", 503, "shutting_down")
            assert stream.frame() is None
        client.close()


@pytest.mark.timeout(120)
def test_a_stream_goes_on_after_its_shard_was_killed(http_engine: TestEngine, call: HttpClient) -> None:
    write(call, "w-shard", 1)
    with call.watch({"topics": {"w-shard": {}}}) as stream:
        assert [one["$seq"] for one in stream.records(1)] == [1]
        http_engine.kill("wal_shard")
        http_engine.wait_ready("wal_shard", timeout=60)
        write(call, "w-shard", 2)
        (record,) = stream.records(1)
        assert record["data"] == 2
        assert record["$seq"] > 1


@pytest.mark.timeout(120)
def test_a_killed_gateway_loses_nothing(http_engine: TestEngine, call: HttpClient) -> None:
    write(call, "w-kill", 1, 2)
    with call.watch({"topics": {"w-kill": {}}}) as stream:
        last = stream.frames(1)[0]
        http_engine.kill("http_gateway")
    # Another process serves at once, but for a moment the kernel still gives connections to the killed one.
    http_engine.wait_ready("http_gateway", timeout=60)
    again = HttpClient(http_engine.http_url)
    write(again, "w-kill", 3)
    position = cursor(last.id)
    assert position == {"w-kill": 2}
    with again.watch({"topics": {"w-kill": {"from_seq": 2}}}) as stream:
        assert [one["$seq"] for one in stream.records(1)] == [3]
    again.close()
