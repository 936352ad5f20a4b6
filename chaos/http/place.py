"""The gateway that hostile clients attack, and raw requests to it."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import psutil

from ringlog.drill.checks import require
from ringlog.errors import RequestTimeout
from ringlog.testing.real_engine import TestEngine, wait_until

ANSWER_S = 5.0
"""Bound of an answer to a normal request, during and after an attack."""
END_S = 5.0
"""Time (s) in which the gateway ends or answers a connection that it refuses."""
GROWTH_BYTES_MAX = 192 << 20
"""Memory that the gateway may have more than before the first row."""
CALM_S = 10.0
FDS_GROWTH_MAX = 16
CANARY = "hostile.canary"
JSON = "content-type: application/json"


class Place:
    """The gateway under attack, and what it was like before."""

    def __init__(self, running: TestEngine) -> None:
        self._engine = running
        host, _, port = running.http_url.removeprefix("http://").rpartition(":")
        self.address = (host, int(port))
        self.pid = running.pid_of("http_gateway")
        self.check_canary()
        self.held_fds = 0
        """Descriptors of connections that the harness holds open."""
        self._process = psutil.Process(self.pid)
        self._rss, self._fds = self._process.memory_info().rss, self._process.num_fds()

    @property
    def grown_mib(self) -> float:
        """Growth of the gateway's memory in MiB."""
        grown: int = self._process.memory_info().rss - self._rss
        return round(grown / (1 << 20), 1)

    def connect(self) -> socket.socket:
        """Open a connection. Its reads have the bound END_S."""
        return socket.create_connection(self.address, END_S)

    def check_canary(self) -> None:
        """Write and read a record. Raises GuaranteeBroken if that takes longer than ANSWER_S."""
        body = json.dumps({"records": [{"data": 1}]}).encode()
        begun = time.monotonic()
        for request in (post(f"/v0/topics/{CANARY}", body), head_of(f"GET /v0/topics/{CANARY} HTTP/1.1")):
            with self.connect() as raw:
                raw.sendall(request)
                status = status_of(until_end(raw, is_first_only=True))
                require(status in {200, 201}, f"a normal request got {status}")
        took = time.monotonic() - begun
        require(took < ANSWER_S, f"a normal request took {took:.1f} s")

    def judge(self) -> None:
        """Check after a row. Raises GuaranteeBroken."""
        self.check_canary()
        found = self._engine.pid_of("http_gateway")
        require(found == self.pid, f"the gateway died: it was {self.pid}, and is {found}")
        more = 0

        def is_calm() -> bool:
            nonlocal more
            more = int(self._process.num_fds() - self._fds - self.held_fds)
            return more <= FDS_GROWTH_MAX

        with contextlib.suppress(RequestTimeout):
            wait_until(is_calm, CALM_S, "the gateway to close connections")
        require(more <= FDS_GROWTH_MAX, f"the gateway holds {more} descriptors more than before")
        limit = GROWTH_BYTES_MAX >> 20
        require(self.grown_mib < limit, f"the gateway grew by {self.grown_mib} MiB, limit {limit}")

    def exchange(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Send bytes on a connection of their own; return what comes until its end or for END_S."""
        with self.connect() as raw:
            with contextlib.suppress(OSError):  # The gateway may have answered and closed before the end.
                raw.sendall(data)
                if half_close:
                    raw.shutdown(socket.SHUT_WR)
            return until_end(raw, is_first_only=not half_close)

    def refuses(self, what: str, data: bytes, *, half_close: bool = False) -> None:
        """Check that bytes get a 4xx or the end of the connection. Raises GuaranteeBroken."""
        status = status_of(self.exchange(data, half_close=half_close))
        require(status == 0 or 400 <= status < 500, f"{what} got {status}")


def head_of(*lines: str) -> bytes:
    """Return the head of a request, with a Host."""
    first, *rest = lines
    return "\r\n".join([first, "host: localhost", *rest, "", ""]).encode("latin-1")


def post(path: str, body: bytes, *more: str) -> bytes:
    """Return a write with these bytes as its body."""
    return head_of(f"POST {path} HTTP/1.1", JSON, f"content-length: {len(body)}", *more) + body


def until_end(raw: socket.socket, *, is_first_only: bool) -> bytes:
    """Return what arrives until the end, the read bound, or the end of the first answer."""
    found = b""
    with contextlib.suppress(OSError):
        while piece := raw.recv(65_536):
            found += piece
            head, end, body = found.partition(b"\r\n\r\n")
            if is_first_only and end and len(body) >= _length(head):
                break
    return found


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def status_of(answer: bytes) -> int:
    """Return the status of an answer; 0 if there is none."""
    first = answer.split(b"\r\n", 1)[0].split()
    return int(first[1]) if len(first) > 1 and first[0].startswith(b"HTTP/1") and first[1].isdigit() else 0
