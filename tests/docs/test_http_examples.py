"""The examples over HTTP: each runs against a real engine, where its tool is installed."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import engine_fixture
from tests.support.machine import is_listening

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "http"
WAIT_S = 20.0

running = engine_fixture(
    "module", ready="http_gateway", http={"enabled": True, "port": 0}, delivery={"schedulers": 1}
)


def run(running: TestEngine, cwd: Path, *command: str) -> str:
    """Run a program of the example; return its output."""
    tool = shutil.which(command[0])
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    environ = os.environ | {"HTTP": running.http_url}
    done = subprocess.run(
        [tool, *command[1:]], env=environ, cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_tour_with_curl(running: TestEngine, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    output = run(running, tmp_path, "bash", str(EXAMPLE / "tour.sh"))
    assert "event: record" in output
    assert "event: caught-up" in output
    assert '"acked":1' in output


def test_the_tour_with_node(running: TestEngine, tmp_path: Path) -> None:
    output = run(running, tmp_path, "node", str(EXAMPLE / "tour.mjs"))
    assert output.split("\n")[1:] == ["read 1", "read 2", "acked 1", ""]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tour_with_go(running: TestEngine, tmp_path: Path) -> None:
    # The first time, Go compiles its standard library: minutes on a small machine.
    output = run(running, tmp_path, "go", "run", str(EXAMPLE / "tour.go"))
    assert output == "wrote [1 2]\nread 1\nread 2\nacked 1\n"


def test_the_proxy_serves_the_page_and_its_requests(running: TestEngine) -> None:
    """What the page sends: a write, a watch, and its stream through the proxy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    proxy = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "proxy.py"), running.http_url, str(port)], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: is_listening(port), WAIT_S, "the proxy")
        status, page = _ask(port, "GET", "/")
        assert status == 200
        assert b"EventSource" in page
        status, _ = _ask(port, "POST", "/v0/topics/page", {"records": [{"data": {"text": "hello"}}]})
        assert status == 201
        _, body = _ask(port, "POST", "/v0/watch", {"topics": {"page": {"from_seq": 0}}, "lenient": True})
        stream = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        stream.request("GET", json.loads(body)["stream_url"], headers={"accept": "text/event-stream"})
        reply = stream.getresponse()
        found = b""
        while b"caught-up" not in found:
            piece = reply.read1(65_536)
            assert piece, found
            found += piece
        assert b'"hello"' in found
        stream.close()
    finally:
        proxy.kill()
        proxy.wait()


def _ask(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"content-type": "application/json"} if data else {})
    reply = connection.getresponse()
    found = reply.status, reply.read()
    connection.close()
    return found
