"""What streams send, and the WebSocket takes, is what the AsyncAPI document says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

import ringlog.testing
from ringlog.actors.http_gateway.api.channel_messages import CHANNELS, Channel
from ringlog.actors.http_gateway.api.documents import asyncapi, documented
from ringlog.actors.http_gateway.streams.subscriptions import error_json
from ringlog.actors.http_gateway.streams.web_socket import Subscribe, Unsubscribe, WebSocket
from ringlog.errors import CorruptData
from tests.support.http_client import EventStream, HttpClient
from tests.support.http_queues import put
from tests.support.web_socket_client import WebSocketClient

OF: dict[str, Channel] = {channel.name: channel for channel in CHANNELS}


def check(kind: Any, found: dict[str, Any], *, has_more: bool = False) -> None:
    """Fail unless a message has the fields of its type. `has_more`: it may have others."""
    decoded = msgspec.to_builtins(msgspec.convert(found, documented(kind)))
    assert {**found, **decoded} == found
    assert has_more or decoded == found


def check_frames(channel: str, stream: EventStream, *names: str) -> None:
    """Read frames of these names, and check each."""
    for name in names:
        frame = stream.frame()
        assert frame is not None
        assert frame.event == name, frame
        check(OF[channel].sent[name], frame.data, has_more=(channel, name) == ("work", "error"))


def check_messages(ws: WebSocketClient, *names: str) -> list[Any]:
    """Read messages with these values of `op` in any order, and check each."""
    found = [ws.json() for _ in names]
    assert sorted(one["op"] for one in found) == sorted(names)
    for one in found:
        check(OF["webSocket"].sent[one["op"]], one)
    return found


def write_all(call: HttpClient, topic: str) -> None:
    """Write a record with every field, and one with none."""
    records = [{"data": {"x": 1}, "tag": "t", "node": "n", "meta": {"k": 1}}, {"data": None}]
    assert call("POST", f"/v0/topics/{topic}", {"records": records}).status in {200, 201}


def test_the_gateway_serves_this_document(call: HttpClient) -> None:
    assert call("GET", "/v0/asyncapi.json").body == json.loads(msgspec.json.encode(asyncapi(CHANNELS)))


@pytest.mark.parametrize(
    "shown", [{}, {"include_tags": True}, {"include_data": False, "include_meta": False}]
)
def test_frames_of_a_watch(call: HttpClient, topic: str, shown: dict[str, bool]) -> None:
    call("PUT", f"/v0/topics/{topic}", {"cap_records": 2})
    write_all(call, topic)
    write_all(call, topic)
    with call.watch({"topics": {topic: {"from_seq": 1}}, **shown}) as stream:
        check_frames("watch", stream, "tombstone", "record", "caught-up")
        call("DELETE", f"/v0/topics/{topic}")
        check_frames("watch", stream, "topic-deleted")


@pytest.mark.slow
def test_the_last_frames_of_an_engine_that_stops(topic: str) -> None:
    with ringlog.testing.engine(http={"enabled": True, "port": 0}) as running:
        running.wait_ready("http_gateway")
        client = HttpClient(running.http_url)
        write_all(client, topic)
        client("PUT", "/v0/topics/q-stop", {"type": "queue"})
        ws = WebSocketClient(client.host, client.port)
        with (
            client.watch({"topics": {topic: {}}}) as watch,
            client.stream("/v0/topics/q-stop/work?node=w") as work,
        ):
            check_frames("watch", watch, "record", "caught-up")
            work.block()
            ws.send({"op": "ping"})
            check_messages(ws, "pong")
            running.stop()
            check_frames("watch", watch, "error")
            check_frames("work", work, "error")
            check_messages(ws, "error")
        ws.close()
        client.close()


def test_frames_of_a_work_stream(call: HttpClient, queue: str) -> None:
    put(call, queue, 1)
    put(call, queue, 2, tag="t", node="n", meta={"k": 1})
    with call.stream(f"/v0/topics/{queue}/work?node=w&max=5") as stream:
        check_frames("work", stream, "job", "job")
        call("DELETE", f"/v0/topics/{queue}")
        check_frames("work", stream, "error")


@pytest.fixture
def ws(call: HttpClient) -> Iterator[WebSocketClient]:
    client = WebSocketClient(call.host, call.port)
    yield client
    client.close()


def test_messages_of_a_web_socket(call: HttpClient, ws: WebSocketClient, topic: str) -> None:
    call("PUT", f"/v0/topics/{topic}", {"cap_records": 2})
    write_all(call, topic)
    write_all(call, topic)
    ws.send({"op": "subscribe", "topic": topic, "from_seq": 1, "include_tags": True, "request_id": 1})
    check_messages(ws, "subscribed", "tombstone", "record", "caught_up")
    ws.send({"op": "publish", "topic": topic, "records": [{"data": 1}], "request_id": [2]})
    check_messages(ws, "ack", "record", "caught_up")
    ws.send({"op": "publish", "topic": topic, "records": [{"data": 1}], "return_seqs": False})
    check_messages(ws, "ack", "record", "caught_up")
    ws.send({"op": "subscribe", "topics": [topic], "tail": True})
    check_messages(ws, "subscribed", "caught_up")
    ws.send({"op": "unsubscribe", "topics": [topic]})
    check_messages(ws, "unsubscribed")
    ws.send({"op": "unsubscribe", "topic": topic})
    check_messages(ws, "unsubscribed")
    ws.send({"op": "subscribe", "topics": {topic: {"tail": True}, "absent": None}, "lenient": True})
    check_messages(ws, "subscribed", "caught_up")
    ws.send({"op": "subscribe", "topic": "absent"})
    (refused,) = check_messages(ws, "error")
    assert refused["detail"]
    ws.send(b"{")
    check_messages(ws, "error")
    call("DELETE", f"/v0/topics/{topic}")
    check_messages(ws, "topic_deleted")


def test_commands_have_the_fields_that_are_decoded() -> None:
    received = OF["webSocket"].received
    for name, kind in (("subscribe", Subscribe), ("unsubscribe", Unsubscribe)):
        hints = get_type_hints(received[name], include_extras=True)
        assert get_args(hints.pop("op")) == (name,)
        del hints["request_id"]
        assert hints == get_type_hints(kind, include_extras=True)


def test_an_error_of_one_topic() -> None:
    body = error_json(CorruptData("stored frames are damaged"), "t")
    check(OF["watch"].sent["error"], json.loads(body))
    check(OF["webSocket"].sent["error"], json.loads(WebSocket._text("error", body)))
