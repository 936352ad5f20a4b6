"""Writes over HTTP: replies, what is refused, what is stored, and what faults do to them."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import ringlog
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.http_client import HttpClient

Call = Callable[..., Any]
WRITERS = 8
WRITES = 40


@pytest.fixture
def path(topic: str) -> str:
    return f"/v0/topics/{topic}"


def stored(engine: TestEngine, topic: str) -> list[Any]:
    """Return (data, tag, node, meta) of all records, as the client library reads them."""
    with ringlog.connect(engine.url) as client:
        return [(r.data, r.tag, r.node, r.meta) for r in client.read(topic, limit=1_000).records]


def refused(answer: Any, status: int, code: str) -> dict[str, Any]:
    """Check the error of an answer. Returns its detail."""
    assert (answer.status, answer.body["error"]["code"]) == (status, code), answer
    found: dict[str, Any] = answer.body["error"].get("detail", {})
    return found


# -- replies ----------------------------------------------------------------------------------------------


def test_the_first_write_creates_the_topic(call: Call, topic: str, path: str) -> None:
    made = call("POST", path, {"records": [{"data": {"a": 1}}, {"data": None}]})
    assert made.status == 201
    performance = made.body.pop("performance")
    assert made.body == {
        "topic": topic, "first_seq": 1, "last_seq": 2, "seqs": [1, 2], "head_seq": 2, "epoch": 1, "count": 2,
        "created": True, "deduped": False,
    }  # fmt: skip
    assert performance["server_total_ms"] > 0
    assert performance["wal_append_ms"] > 0
    assert performance["fsync_ms"] == 0
    again = call("POST", path, {"records": [{"data": 3}]})
    assert (again.status, again.body["created"], again.body["seqs"]) == (200, False, [3])


def test_a_synced_write_says_how_long_the_sync_took(call: Call, path: str) -> None:
    body = {"records": [{"data": 1}], "config": {"durability": "fsync"}}
    assert call("POST", path, body).body["performance"]["fsync_ms"] > 0


def test_seqs_are_left_out_on_request(call: Call, path: str) -> None:
    assert "seqs" not in call("POST", f"{path}?return_seqs=false", {"records": [{"data": 1}]}).body
    assert "seqs" not in call("POST", path, {"records": [{"data": 1}], "return_seqs": False}).body
    assert call("POST", f"{path}?return_seqs=maybe", {"records": [{"data": 1}]}).body["seqs"] == [3]


@pytest.mark.parametrize("how", ["body", "header"])
def test_a_repeat_under_a_key_returns_the_first_seqs(call: Call, path: str, how: str) -> None:
    body: dict[str, Any] = {"records": [{"data": 1}, {"data": 2}]}
    headers = {"idempotency-key": "k"} if how == "header" else {}
    if how == "body":
        body["idempotency_key"] = "k"
    first = call("POST", path, body, headers)
    call("POST", path, {"records": [{"data": 3}]})
    repeat = call("POST", path, body, headers)
    assert (first.status, repeat.status) == (201, 200)
    assert (first.body["deduped"], repeat.body["deduped"]) == (False, True)
    assert first.body["seqs"] == repeat.body["seqs"] == [1, 2]
    assert repeat.body["head_seq"] == 2  # The head right after the first write.


def test_a_write_may_refuse_to_create(call: Call, topic: str, path: str) -> None:
    body = {"records": [{"data": 1}]}
    for extra in ({"create": False}, {"config": {"auto_create": False}}):
        assert refused(call("POST", path, body | extra), 404, "topic_not_found") == {"topic": topic}
    assert call("POST", path, body | {"create": True, "config": {"auto_create": False}}).status == 201
    assert call("POST", path, body | {"create": False}).status == 200


def test_an_inline_config_is_of_the_new_topic_only(call: Call, path: str) -> None:
    call("POST", path, {"records": [{"data": 1}], "config": {"cap_records": 5}})
    call("POST", path, {"records": [{"data": 1}], "config": {"cap_records": 9}})
    assert call("GET", path).body["config"]["cap_records"] == 5
    wrong = {"records": [{"data": 1}], "config": {"type": "heap"}}
    refused(call("POST", path, wrong), 400, "invalid_request")


def test_a_topic_that_was_deleted_is_created_again(call: Call, path: str) -> None:
    body = {"records": [{"data": 1}]}
    assert call("POST", path, body).status == 201
    for _ in range(3):
        assert call("DELETE", path).body["deleted"]
        again = call("POST", path, body)
        assert (again.status, again.body["seqs"]) == (201, [1])


def test_writers_at_the_same_time_get_seqs_of_their_own(http_engine: TestEngine, path: str) -> None:
    found: list[list[int]] = []

    def work(writer: int) -> None:
        call = HttpClient(http_engine.http_url)
        for number in range(WRITES):
            body = {"records": [{"data": [writer, number, row]} for row in range(3)]}
            answer = call("POST", path, body)
            assert answer.status in {200, 201}, answer
            found.append(answer.body["seqs"])
        call.close()

    run_threads([threading.Thread(target=work, args=(writer,)) for writer in range(WRITERS)])
    assert len(found) == WRITERS * WRITES
    assert all(seqs == list(range(seqs[0], seqs[0] + 3)) for seqs in found)
    assert sorted(seq for seqs in found for seq in seqs) == list(range(1, WRITERS * WRITES * 3 + 1))


def run_threads(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- what is stored ---------------------------------------------------------------------------------------


def test_values_are_stored_compact_and_unchanged(
    http_engine: TestEngine, call: Call, topic: str, path: str
) -> None:
    text = (
        b'{"records": [ {"data": {"b": 1.50, "a": [18446744073709551615, "x y\\n\\u00e9"]}},'
        b'\n{"data" : "a b"} ]}'
    )
    assert call("POST", path, text, {"content-type": "application/json; charset=utf-8"}).status == 201
    assert [row[0] for row in stored(http_engine, topic)] == [
        b'{"b":1.50,"a":[18446744073709551615,"x y\\n\\u00e9"]}', b'"a b"',
    ]  # fmt: skip


def test_fields_beside_the_data(http_engine: TestEngine, call: Call, topic: str, path: str) -> None:
    records = [
        {"data": 1, "tag": "t:1", "node": "n1", "meta": {"k": "v", "n": 1}},
        {"data": 2, "tag": None, "node": None, "meta": None, "unknown": 5},
        {"data": 3, "tag": "", "node": ""},
    ]
    call("POST", path, {"records": records, "node": "all", "idempotency_key": None, "create": None})
    rows = stored(http_engine, topic)
    assert rows[0][1:] == ("t:1", "n1", {"k": "v", "n": 1})
    assert rows[1][1:] == (None, "all", {})
    assert rows[2][1:3] == ("", "")


def test_bytes_and_text(http_engine: TestEngine, call: Call, topic: str, path: str) -> None:
    records = [
        {"data": {"$base64": "AP8="}}, {"data": {"$text": "no json: é"}}, {"data": {"$base64": "x", "a": 1}},
        {"data": {"$text": 5}}, {"data": {"$other": "x"}},
    ]  # fmt: skip
    assert call("POST", path, {"records": records}).status == 201
    assert [row[0] for row in stored(http_engine, topic)] == [
        b"\x00\xff", "no json: é".encode(), b'{"$base64":"x","a":1}', b'{"$text":5}', b'{"$other":"x"}',
    ]  # fmt: skip
    wrong = {"records": [{"data": 1}, {"data": {"$base64": "AP8"}}]}
    assert refused(call("POST", path, wrong), 400, "invalid_request") == {"index": 1}


def test_a_number_that_python_cannot_represent_is_stored(
    http_engine: TestEngine, call: Call, topic: str, path: str
) -> None:
    """A program of another language may be able to."""
    payloads = [b'{"$x":1e999}', b'{"$text":1e999}']
    records = b",".join(b'{"data":%s}' % each for each in payloads)
    assert call("POST", path, b'{"records":[%s]}' % records).status == 201
    assert [row[0] for row in stored(http_engine, topic)] == payloads
    wrong = b'{"records":[{"data":{"$base64":1e999}}]}'
    assert refused(call("POST", path, wrong), 400, "invalid_request") == {"index": 0}


def test_a_compressed_body_is_accepted_within_the_bound(call: Call, path: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    packed = gzip.compress(b'{"records":[{"data":1}]}')
    assert call("POST", path, packed, headers).status == 201
    refused(call("POST", path, packed[:-9], headers), 400, "invalid_request")
    refused(call("POST", path, packed + b"x", headers), 400, "invalid_request")
    refused(call("POST", path, b"no gzip", headers), 400, "invalid_request")
    bomb = gzip.compress(bytes(200 << 20), 1)
    assert len(bomb) < 2 << 20
    refused(call("POST", path, bomb, headers), 413, "payload_too_large")
    refused(call("POST", path, packed, headers | {"content-encoding": "br"}), 415, "unsupported_media_type")


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'{"records":5}', b'{"records":[]}', b'{"records":[{}]}',
        b'{"records":[{"tag":"x"}]}', b'{"records":[{"data":1,"tag":5}]}',
        b'{"records":[{"data":1,"meta":[]}]}',
        b'{"records":[{"data":1,"meta":"x"}]}', b'{"records":[{"data":NaN}]}', b'{"records":[{"data":1}]} x',
        b'{"records":[{"data":1}],"records":[{"data":2}]}', b'{"records":[{"data":{"a":1,"a":2}}]}',
        b'{"records":[{"data":{"a":1,"\\u0061":2}}]}',
        b'{"records":[{"data":1}],"create":1}', b'{"records":[{"data":1}],"config":[]}', b"\xff",
        b'{"records":[{"data":"\xff"}]}', b'{"records":[{"data":' + b"[" * 200 + b"]" * 200 + b"}]}",
        b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_malformed_bodies_are_refused(call: Call, topic: str, path: str, body: bytes) -> None:
    answer = call("POST", path, body, {"content-type": "application/json"})
    refused(answer, 400, "invalid_request")
    refused(call("GET", path), 404, "topic_not_found")


def test_limits_name_the_record(call: Call, path: str) -> None:
    def write(*records: dict[str, Any], **more: Any) -> Any:
        return call("POST", path, {"records": list(records), **more})

    detail = refused(write({"data": 1}, {"data": "x" * (1 << 20)}), 400, "record_too_large")
    assert (detail["index"], detail["max"]) == (1, 1 << 20)
    detail = refused(call("POST", path, {"records": [{"data": 1}] * 10_001}), 400, "batch_too_large")
    assert (detail["records"], detail["max"]) == (10_001, 10_000)
    refused(write({"data": 1, "tag": "t" * 257}), 400, "invalid_request")
    refused(write({"data": 1, "node": "n" * 129}), 400, "invalid_request")
    refused(write({"data": 1}, node="é" * 65), 400, "invalid_request")
    refused(write({"data": 1}, idempotency_key="k" * 257), 400, "invalid_request")
    refused(write({"data": 1, "meta": {str(n): n for n in range(65)}}), 400, "invalid_request")
    refused(write({"data": 1, "meta": {"k": "x" * 16_384}}), 400, "invalid_request")
    refused(call("GET", path), 404, "topic_not_found")
    assert write({"data": 1, "tag": "t" * 256, "node": "n" * 128}, idempotency_key="k" * 256).status == 201


def test_a_name_that_is_not_allowed_creates_nothing(call: Call) -> None:
    for name in (".hidden", "a%20b", "x" * 300):
        refused(call("POST", f"/v0/topics/{name}", {"records": [{"data": 1}]}), 400, "invalid_request")


def test_a_full_topic_refuses_the_whole_write(call: Call, topic: str, path: str) -> None:
    config = {"cap_records": 3, "discard": "reject"}
    assert call("POST", path, {"records": [{"data": 1}] * 2, "config": config}).status == 201
    detail = refused(call("POST", path, {"records": [{"data": 1}] * 2}), 422, "topic_full")
    assert detail == {
        "topic": topic, "cap_records": 3, "cap_bytes": 0, "head_seq": 2, "earliest_seq": 1,
    }  # fmt: skip
    refused(call("POST", path, {"records": [{"data": 1}] * 4}), 400, "record_too_large")
    assert call("POST", path, {"records": [{"data": 1}]}).body["head_seq"] == 3


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_the_content_type_is_checked_first(call: Call, path: str, kind: str) -> None:
    body = b'{"records":[{"data":1}]}'
    refused(call("POST", path, body, {"content-type": kind}), 415, "unsupported_media_type")
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    assert call.raw(head.encode() + body).startswith(b"HTTP/1.1 415")


def test_a_body_over_the_limit_is_refused_before_it_is_read(http_engine: TestEngine, path: str) -> None:
    call = HttpClient(http_engine.http_url)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    answer = call.raw(f"{head}content-length: 99999999999\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_chunked_body_is_counted_as_it_arrives(http_engine: TestEngine, path: str) -> None:
    connection = http.client.HTTPConnection(http_engine.http_url.removeprefix("http://"), timeout=20)
    headers = {"content-type": "application/json"}
    body = b'{"records":[{"data":1}]}'
    connection.request("POST", path, iter([body[:5], body[5:]]), headers, encode_chunked=True)
    reply = connection.getresponse()
    assert (reply.status, json.loads(reply.read())["count"]) == (201, 1)
    piece = b" " * (1 << 20)
    try:
        connection.request("POST", path, iter([piece] * 80), headers, encode_chunked=True)
    except (BrokenPipeError, ConnectionResetError):
        pass  # The gateway has answered and closed before it got everything.
    else:
        assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_ends_early_writes_nothing(http_engine: TestEngine, call: Call, path: str) -> None:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    with socket.create_connection((call.host, call.port)) as connection:
        connection.sendall(f'{head}content-length: 100\r\n\r\n{{"records":[{{"data":1}}]}}'.encode())
        own = connection.getsockname()
    gateway = psutil.Process(http_engine.pid_of("http_gateway"))
    wait_until(
        lambda: all(each.raddr != own for each in gateway.net_connections("tcp4")), 10.0,
        "the gateway to close the connection",
    )  # fmt: skip
    refused(call("GET", path), 404, "topic_not_found")


def test_a_body_that_ends_early_is_the_fault_of_its_client(call: Call, path: str) -> None:
    """The client may close its half of the connection only, and then reads the answer."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100"
    with socket.create_connection((call.host, call.port), 10) as connection:
        connection.sendall(f'{head}\r\n\r\n{{"records":[{{"data":1}}]}}'.encode())
        connection.shutdown(socket.SHUT_WR)
        found = connection.recv(65_536)
    assert found.startswith(b"HTTP/1.1 400"), found
    assert b"the body ended early" in found
    refused(call("GET", path), 404, "topic_not_found")


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["http_gateway", "wal_shard"])
def test_a_killed_process_neither_loses_nor_doubles_writes(
    http_engine: TestEngine, topic: str, path: str, kind: str
) -> None:
    """Each writer repeats a write whose answer was lost under the same key."""
    acked: list[tuple[int, list[int]]] = []

    def work(writer: int) -> None:
        call = HttpClient(http_engine.http_url)
        for number in range(WRITES):
            body = {"records": [{"data": writer * WRITES + number}], "idempotency_key": f"{writer}/{number}"}
            while True:
                try:
                    answer = call("POST", path, body)
                except (OSError, http.client.HTTPException):
                    call.close()
                    continue
                if answer.status in {200, 201}:
                    break
                assert answer.status == 503, answer
            acked.append((writer * WRITES + number, answer.body["seqs"]))
        call.close()

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        http_engine.kill(kind)
        http_engine.wait_ready(kind)
    for thread in threads:
        thread.join()
    rows = [int(row[0]) for row in stored(http_engine, topic)]
    assert sorted(rows) == list(range(WRITERS * WRITES))
    assert all(rows[seqs[0] - 1] == value for value, seqs in acked)
