"""Requests about queues that several tests send."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from typing import Any

from ringlog.testing.real_engine import TestEngine

FIELDS = {"$seq", "lease_id", "deadline", "$ts", "deliveries", "data"}
WAIT_S = 15.0


def make_queue(call, request) -> str:
    """Create a queue with the name of the test."""
    name = "q-" + re.sub(r"[^a-z0-9_]+", "-", request.node.name)
    answer = call("PUT", f"/v0/topics/{name}", {"type": "queue"})
    assert answer.status == 201, answer
    return name


def put(call, queue: str, *data: Any, **fields: Any) -> None:
    answer = call("POST", f"/v0/topics/{queue}", {"records": [{"data": each, **fields} for each in data]})
    assert answer.status == 200, answer


def claim(call, queue: str, **body: Any) -> list[dict[str, Any]]:
    answer = call("POST", f"/v0/topics/{queue}/claim", {"node": "w", "max": 10, **body})
    assert answer.status == 200, answer
    assert answer.body["count"] == len(answer.body["claimed"])
    return answer.body["claimed"]


def stats(call, queue: str) -> dict[str, Any]:
    answer = call("GET", f"/v0/topics/{queue}/stats")
    assert answer.status == 200, answer
    return answer.body


def wait_until(is_done, what: str) -> None:
    """Poll until `is_done()`. Each poll is a request, which takes time itself."""
    end = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < end, what


def kill_gateway(engine: TestEngine, call) -> None:
    """Kill the HTTP gateway, and wait until its successor serves requests."""
    engine.kill("http_gateway")
    wait_gateway(call)


def wait_gateway(call) -> None:
    """Wait until a gateway serves requests."""

    def is_serving() -> bool:
        try:
            return bool(call("GET", "/v0/topics").status == 200)
        except (ConnectionError, http.client.HTTPException):
            call.close()
            return False

    wait_until(is_serving, "the next gateway serves requests")


def open_request(call, method: str, path: str, body: Any) -> socket.socket:
    """Send a request on a connection of its own, and do not read its answer."""
    data = json.dumps(body).encode()
    connection = socket.create_connection((call.host, call.port), 10)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n"
    head += "content-type: application/json"
    if call.key:
        head += f"\r\nauthorization: Bearer {call.key}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection
