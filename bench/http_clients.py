"""HTTP clients for benchmarks: wrk, h2load, a lone raw socket, receivers of event streams and WebSockets."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from bench.systems.programs import PeerMissing

READ_BYTES = 1 << 18
KEPT_BYTES = 1 << 16
WAIT_S = 30.0
STAMP = re.compile(rb'"at": ?([0-9]+)\}')
"""Time of the writer, in each record."""
_spawn = multiprocessing.get_context("spawn")
_PACKAGES = {"wrk": "wrk", "h2load": "nghttp2-client"}


def tool(name: str) -> str:
    """Return the path of a load generator; raises PeerMissing, which says what to install."""
    found = shutil.which(name)
    if found is None:
        raise PeerMissing(f"{name} is not installed: run `apt-get install {_PACKAGES[name]}`")
    return found


def wrk(url: str, script: str, connections: int, seconds: float) -> dict[str, float]:
    """Run wrk with a Lua script. Returns what its `done` reports: `requests_per_s`, `failed` and more."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script + _DONE)
        file.flush()
        command = [
            tool("wrk"),
            "-t1",
            f"-c{connections}",
            f"-d{max(round(seconds), 1)}s",
            "-s",
            file.name,
            url,
        ]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found: dict[str, float] = json.loads(output.rpartition("RESULT ")[2])
    if found["failed"]:
        raise RuntimeError(f"{found['failed']:.0f} requests to {url} failed")
    return found


_DONE = """
local threads = {}
function setup(thread) table.insert(threads, thread) end
function done(summary, latency, requests)
  local counted = 0
  for _, thread in ipairs(threads) do counted = counted + (thread:get("counted") or 0) end
  local failed = summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout
  local seconds = summary.duration / 1e6
  io.write(string.format('RESULT {"requests_per_s": %f, "failed": %d, "counted_per_s": %f, "p50_us": %f}',
    summary.requests / seconds, failed, counted / seconds, latency:percentile(50)))
end
"""


def lua_post(body: bytes) -> str:
    """Return a script that sends the same JSON body with each request."""
    head = 'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
    return f"{head}wrk.body = [==[{body.decode()}]==]\n"


LUA_JOBS = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
counted = 0
local acks = {}
local number = 0
function request()
  local ack = table.remove(acks)
  if ack then return wrk.format("POST", "/v0/topics/jobs/ack", nil, ack) end
  return wrk.format("POST", "/v0/topics/jobs/claim", nil, '{"node":"bench","max":8,"wait_ms":0}')
end
function response(status, headers, body)
  local seqs = {}
  for seq in body:gmatch('"$seq":(%d+)') do table.insert(seqs, seq) end
  if #seqs > 0 then
    counted = counted + #seqs
    table.insert(acks, '{"node":"bench","seqs":[' .. table.concat(seqs, ",") .. ']}')
  end
end
"""
"""Claims 8 jobs and acks them, on whichever connection is free. Counts claimed jobs."""


def h2load(url: str, body: bytes, connections: int, streams: int, requests: int) -> float:
    """Send POST requests over HTTP/2. Returns requests/s; raises RuntimeError if one fails."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(body)
        file.flush()
        command = [tool("h2load"), f"-n{requests}", f"-c{connections}", f"-m{streams}", "-d", file.name]
        command += ["-H", "content-type: application/json", url]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    rate = re.search(r"finished in [^,]+, ([0-9.]+) req/s", output)
    counts = re.search(r"status codes: ([0-9]+) 2xx", output)
    if rate is None or counts is None or int(counts[1]) != requests:
        raise RuntimeError(f"h2load failed: {output[-2_000:]}")
    return float(rate[1])


class LoneClient:
    """One keep-alive connection on a raw socket, which sends one request at a time."""

    def __init__(self, url: str) -> None:
        self._socket = connect(url)
        self._socket.settimeout(WAIT_S)

    def ask(self, request: bytes) -> bytes:
        """Send a request, return the body of the response; raises RuntimeError for an error."""
        self._socket.sendall(request)
        found = self._socket.recv(READ_BYTES)
        while b"\r\n\r\n" not in found:
            found += self._socket.recv(READ_BYTES)
        head, _, body = found.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *([0-9]+)", head, re.IGNORECASE)
        while length is not None and len(body) < int(length[1]):
            body += self._socket.recv(READ_BYTES)
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"{head[:40]!r} {body[:400]!r}")
        return body

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request with a JSON body, return the decoded body of the response."""
        return json.loads(self.ask(request_of(method, path, body)))

    def is_ready(self) -> bool:
        """Return whether the engine serves requests."""
        try:
            self.ask(request_of("GET", "/v0/ready"))
        except RuntimeError:
            return False
        return True

    def p50_us(self, request: bytes, count: int) -> float:
        """Return the median time of `count` requests, one after the other."""
        times = []
        for _ in range(count):
            begun = time.perf_counter_ns()
            self.ask(request)
            times.append(time.perf_counter_ns() - begun)
        return sorted(times)[len(times) // 2] / 1e3

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def connect(url: str) -> socket.socket:
    """Return a connected socket without Nagle's delay."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    found = socket.create_connection((parts.hostname, parts.port), WAIT_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def request_of(method: str, path: str, body: Any = None) -> bytes:
    """Return the bytes of a request over HTTP/1.1."""
    data = b"" if body is None else json.dumps(body).encode()
    kind = "" if body is None else "content-type: application/json\r\n"
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{kind}content-length: {len(data)}\r\n\r\n".encode()
        + data
    )


# -- receivers, in a process of their own -----------------------------------------------------------------


class Receivers:
    """Streams that a process of their own reads. Each record's stamp says when it was written."""

    def __init__(
        self, url: str, topic: str, count: int, *, is_web_socket: bool = False, expected: int
    ) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(
            target=_receive, args=(theirs, url, topic, count, is_web_socket, expected), daemon=True
        )
        self._process.start()
        self._answer(WAIT_S)

    def end(self, seconds: float = WAIT_S) -> list[int]:
        """Return the nanoseconds of each delivery: all that were expected, or those that came in time."""
        self._pipe.send(seconds)
        found: list[int] = self._answer(seconds + WAIT_S)
        self._process.join(WAIT_S)
        return found

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            self._process.kill()
            raise RuntimeError("the receivers do not answer")
        found = self._pipe.recv()
        if isinstance(found, str):
            raise RuntimeError(f"the receivers failed: {found}")
        return found


def _receive(pipe: Connection, url: str, topic: str, count: int, is_web_socket: bool, expected: int) -> None:
    try:
        sockets = [_subscribe(url, topic) if is_web_socket else _watch(url, topic) for _ in range(count)]
        pipe.send([])
        pipe.send(_read_all(sockets, expected, pipe))
    except (OSError, RuntimeError, AssertionError) as e:
        pipe.send(repr(e))


def _read_all(sockets: Sequence[socket.socket], expected: int, pipe: Connection) -> list[int]:
    """Read all streams until `expected` records have come, or until a deadline that the parent sets."""
    poll = select.epoll()
    for each in sockets:
        poll.register(each.fileno(), select.EPOLLIN)
    poll.register(pipe.fileno(), select.EPOLLIN)
    kept: dict[int, bytes] = {}
    times: list[int] = []
    deadline = float("inf")
    while len(times) < expected and time.monotonic() < deadline:
        for fd, _ in poll.poll(0.1):
            if fd == pipe.fileno():
                deadline = time.monotonic() + float(pipe.recv())
                poll.unregister(fd)
                continue
            data = os.read(fd, READ_BYTES)
            now = time.monotonic_ns()
            if not data:
                poll.unregister(fd)
                continue
            data = kept.pop(fd, b"") + data
            end = 0
            for match in STAMP.finditer(data):
                times.append(now - int(match[1]))
                end = match.end()
            kept[fd] = data[max(end, len(data) - KEPT_BYTES) :]
    if deadline == float("inf"):
        pipe.recv()
    return times


def _watch(url: str, topic: str) -> socket.socket:
    asking = LoneClient(url)
    path = asking.json("POST", "/v0/watch", {"topics": {topic: {"tail": True}}})["stream_url"]
    asking.close()
    found = connect(url)
    found.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n".encode())
    _read_until(found, b"caught-up")
    return found


def _subscribe(url: str, topic: str) -> socket.socket:
    found = web_socket(url)
    found.sendall(text_frame(json.dumps({"op": "subscribe", "topic": topic, "tail": True}).encode()))
    _read_until(found, b'"subscribed"')
    return found


def _read_until(reading: socket.socket, wanted: bytes) -> None:
    found = b""
    while wanted not in found:
        piece = reading.recv(READ_BYTES)
        if not piece:
            raise RuntimeError(f"the stream ended: {found[-400:]!r}")
        found += piece


def web_socket(url: str) -> socket.socket:
    """Return a connected WebSocket."""
    found = connect(url)
    key = base64.b64encode(os.urandom(16)).decode()
    found.sendall(
        f"GET /v0/ws HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n\r\n".encode()
    )
    head = found.recv(READ_BYTES)
    if b" 101 " not in head[:20]:
        raise RuntimeError(f"no WebSocket: {head[:200]!r}")
    return found


def text_frame(text: bytes) -> bytes:
    """Return a masked text frame, with a mask of zeros."""
    size = len(text)
    head = (
        struct.pack("!BB", 0x81, 0x80 | size) if size < 126 else struct.pack("!BBH", 0x81, 0x80 | 126, size)
    )
    return head + b"\0\0\0\0" + text
