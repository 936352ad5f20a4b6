"""The HTTP gateway as a process: where it listens, and what it answers without a route."""

from __future__ import annotations

from ringlog.testing.real_engine import TestEngine


def test_unknown_routes_have_an_error_body(call) -> None:
    answer = call("GET", "/nope")
    assert answer.status == 404
    assert answer.body["error"]["code"] == "not_found"


def test_the_engine_file_names_the_address(http_engine: TestEngine, call) -> None:
    assert http_engine.http_url == f"http://{call.host}:{call.port}"
    assert http_engine.info.http_url == http_engine.http_url


def test_the_address_outlives_the_process(http_engine: TestEngine, call) -> None:
    """A free port is chosen once for the engine: clients find the successor of the gateway there."""
    http_engine.kill("http_gateway")
    http_engine.wait_ready("http_gateway")
    call.close()
    assert call("GET", "/nope").status == 404
