"""The WebSocket data plane."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http_client import HttpClient
from tests.support.web_socket_client import BINARY, WebSocketClient


@pytest.fixture
def ws(call: HttpClient) -> Iterator[WebSocketClient]:
    client = WebSocketClient(call.host, call.port)
    assert client.status == 101
    yield client
    client.close()


def test_subscribe_publish_and_unsubscribe(call: HttpClient, ws: WebSocketClient) -> None:
    call("POST", "/v0/topics/s-basic", {"records": [{"data": 1}]})
    reply = ws.ask({"op": "subscribe", "topic": "s-basic", "request_id": {"a": 1}})
    assert (reply["op"], reply["request_id"]) == ("subscribed", {"a": 1})
    assert reply["topics"]["s-basic"]["head_seq"] == 1
    record, caught_up = ws.json(), ws.json()
    assert (record["op"], record["topic"], record["from_seq"], record["to_seq"]) == (
        "record",
        "s-basic",
        0,
        1,
    )
    assert caught_up == {"op": "caught_up", "topic": "s-basic", "head_seq": 1}
    ws.send({"op": "publish", "topic": "s-basic", "records": [{"data": {"x": [1]}}], "request_id": 7})
    found = {one["op"]: one for one in (ws.json(), ws.json(), ws.json())}
    assert (found["ack"]["first_seq"], found["ack"]["request_id"]) == (2, 7)
    assert [one["data"] for one in found["record"]["records"]] == [{"x": [1]}]
    assert ws.ask({"op": "unsubscribe", "topic": "s-basic"})["op"] == "unsubscribed"
    call("POST", "/v0/topics/s-basic", {"records": [{"data": 3}]})
    assert ws.ask({"op": "ping"}) == {"op": "pong", "request_id": None}


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"{", "invalid_json"),
        (b"\xff\xfe", None),
        (b"[1]", "invalid_request"),
        (b'{"op":"no"}', "invalid_request"),
        (b'{"op":1}', "invalid_request"),
        (b'{"op":"subscribe"}', "invalid_request"),
        (b'{"op":"subscribe","topic":"s-absent"}', "topic_not_found"),
        (b'{"op":"subscribe","topic":"s-absent","from_seq":null}', "invalid_request"),
        (b'{"op":"publish","topic":"s-hostile","records":[]}', "invalid_request"),
        (b'{"op":"publish","records":[{"data":1}]}', "invalid_request"),
        (b"[" * 100_000, "invalid_request"),
        (b'{"op":"ping","op":"ping"}', "invalid_request"),
    ],
)
def test_hostile_messages(ws: WebSocketClient, sent: bytes, code: str | None) -> None:
    if code is None:  # Text that is not UTF-8 is a violation of the protocol: the connection ends.
        ws.send(sent)
        with pytest.raises((EOFError, ConnectionResetError, AssertionError)):
            ws.json()
        return
    ws.send(sent)
    reply = ws.json()
    assert (reply["op"], reply["code"], reply["request_id"]) == ("error", code, None)
    assert ws.ask({"op": "ping", "request_id": "x"}) == {"op": "pong", "request_id": "x"}


def test_a_binary_message_and_a_huge_message(ws: WebSocketClient) -> None:
    ws.send(b"\0\1", BINARY)
    assert ws.json()["code"] == "unsupported_message"
    text = b'{"op":"ping","x":"' + b"x" * 1_000_000 + b'"}'
    ws.send(text)
    assert ws.json()["op"] == "pong"


def test_a_deleted_topic_and_a_gap(call: HttpClient, ws: WebSocketClient) -> None:
    call("PUT", "/v0/topics/s-gap", {"cap_records": 1})
    for number in range(3):
        call("POST", "/v0/topics/s-gap", {"records": [{"data": number}]})
    ws.ask({"op": "subscribe", "topics": ["s-gap"]})
    tombstone, record, caught_up = ws.json(), ws.json(), ws.json()
    assert (tombstone["op"], tombstone["reason"], tombstone["gap_to"]) == ("tombstone", "from_seq_too_old", 2)
    assert record["from_seq"] == 2
    assert caught_up["op"] == "caught_up"
    call("DELETE", "/v0/topics/s-gap")
    deleted = ws.json()
    assert (deleted["op"], deleted["topic"], deleted["reason"]) == ("topic_deleted", "s-gap", "deleted")


def test_a_slow_client_is_not_buffered_and_loses_nothing(call: HttpClient, ws: WebSocketClient) -> None:
    call("PUT", "/v0/topics/s-slow", {})
    ws.ask({"op": "subscribe", "topic": "s-slow"})
    for number in range(60):
        call("POST", "/v0/topics/s-slow", {"records": [{"data": f"{number}" + "x" * 200_000}]})
    found: list[int] = []
    while len(found) < 60:
        message = ws.json()
        if message["op"] == "record":
            found += [record["$seq"] for record in message["records"]]
    assert found == list(range(1, 61))


def test_a_room_of_participants(call: HttpClient) -> None:
    call("PUT", "/v0/topics/s-room", {"durability": "ephemeral"})
    room = [WebSocketClient(call.host, call.port) for _ in range(8)]
    try:
        for one in room:
            assert one.ask({"op": "subscribe", "topic": "s-room", "tail": True})["op"] == "subscribed"
        for turn in range(10):
            for index, one in enumerate(room):
                one.send({"op": "publish", "topic": "s-room", "records": [{"data": [index, turn]}]})
        for one in room:
            seen: list[Any] = []
            while len(seen) < 80:
                message = one.json()
                if message["op"] == "record":
                    seen += [record["$seq"] for record in message["records"]]
            assert seen == list(range(1, 81))
    finally:
        for one in room:
            one.close()
