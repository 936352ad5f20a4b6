"""Bodies of requests that are answered by their heads: the connection serves the next request, or says that
it ends."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ringlog.limits import HTTP_DISCARD_BYTES_MAX
from ringlog.testing.real_engine import TestEngine
from tests.support.engines import engine_fixture

KEY = "mine-" + "b" * 40
BODY_BYTES_MAX = 4_096
JSON = "content-type: application/json"
CHUNKED = "transfer-encoding: chunked"
ROUNDS = 10
REFUSED = [
    (401, "POST /v0/topics/mine.a", "authorization: Bearer unknown"),
    (403, "PUT /v0/topics/hidden.1", JSON), (403, "DELETE /v0/topics/hidden.1", JSON),
    (404, "POST /v0/nowhere", JSON), (405, "POST /v0/health", JSON),
    (415, "POST /v0/topics/mine.a", "content-type: text/plain"),
]  # fmt: skip

running = engine_fixture(
    "module",
    ready="http_gateway",
    http={"enabled": True, "port": 0},
    limits={"max_body_bytes": BODY_BYTES_MAX},
    environ={"RINGLOG_API_KEYS": f"{KEY}::mine."},
)


@pytest.fixture
def raw(running: TestEngine) -> Iterator[socket.socket]:
    host, _, port = running.http_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        yield connection


class Answer(NamedTuple):
    status: int
    ends_connection: bool


def send_head(raw: socket.socket, request: str, *headers: str) -> None:
    lines = [f"{request} HTTP/1.1", "host: localhost", *headers]
    if not any(each.startswith("authorization") for each in headers):
        lines.append(f"authorization: Bearer {KEY}")
    raw.sendall("\r\n".join([*lines, "", ""]).encode())


def receive(raw: socket.socket) -> Answer:
    with http.client.HTTPResponse(raw) as response:
        response.begin()
        response.read()
        return Answer(response.status, response.getheader("connection") == "close")


def require_usable(raw: socket.socket) -> None:
    send_head(raw, "GET /v0/health")
    assert receive(raw) == (200, False)


@pytest.mark.parametrize(("status", "request_line", "header"), REFUSED)
@pytest.mark.parametrize("framing", ["content-length: 2", CHUNKED])
def test_a_body_that_comes_after_the_answer_does_not_end_the_connection(
    raw: socket.socket, status: int, request_line: str, header: str, framing: str
) -> None:
    for _ in range(ROUNDS):
        send_head(raw, request_line, header, framing)
        assert receive(raw) == (status, False)
        raw.sendall(b"2\r\n{}\r\n0\r\n\r\n" if framing == CHUNKED else b"{}")
        require_usable(raw)


@pytest.mark.parametrize("size", [BODY_BYTES_MAX + 1, 8 << 20])
def test_a_client_that_sends_a_body_above_the_limit_reads_why_it_is_refused(
    raw: socket.socket, size: int
) -> None:
    for _ in range(2):
        send_head(raw, "POST /v0/topics/mine.a", JSON, f"content-length: {size}")
        raw.sendall(bytes(size))
        assert receive(raw) == (413, False)
        require_usable(raw)


def test_a_chunked_body_above_the_limit_ends_the_connection_after_the_answer(raw: socket.socket) -> None:
    send_head(raw, "POST /v0/topics/mine.a", JSON, CHUNKED)
    for _ in range(100):
        raw.sendall(b"1000\r\n" + bytes(4_096) + b"\r\n")
    raw.sendall(b"0\r\n\r\n")
    assert receive(raw) == (413, True)
    assert raw.recv(1) == b""


def test_a_client_that_asks_before_it_sends_a_body_is_not_told_to_go_on(raw: socket.socket) -> None:
    send_head(raw, "PUT /v0/topics/hidden.1", JSON, "content-length: 2", "expect: 100-continue")
    assert receive(raw) == (403, True)
    assert raw.recv(1) == b""


def test_a_body_that_is_too_large_to_discard_ends_the_connection(raw: socket.socket) -> None:
    length = f"content-length: {HTTP_DISCARD_BYTES_MAX + 1}"
    send_head(raw, "POST /v0/topics/mine.a", JSON, length)
    assert receive(raw) == (413, True)
    raw.shutdown(socket.SHUT_WR)
    assert raw.recv(1) == b""
