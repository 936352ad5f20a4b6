"""Hostile HTTP: what no client should send. After each row the gateway must be the same process, serve a
normal request within a bound, and have kept within a bound of memory. A row returns its number of cases.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import resource
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from chaos.http.place import CANARY, END_S, JSON, Place, head_of, post, status_of, until_end
from chaos.http.upgrades import http2, upgrades, web_socket_frames
from ringlog.drill.checks import require
from ringlog.limits import HTTP_BODY_S_MAX, HTTP_HEADER_MS_MAX

IDLE_CONNECTIONS = 2_000
SLOW = 16
SLOW_SENDERS = "slow"
DRIP_S = 0.2
PIPELINED = 200
LATE_BODIES = 40
LATE_BODY_S = 0.02
"""Longest wait in s between a head and its body, if no answer comes first."""
SMUGGLED = "hostile.smuggled"
CHUNKS_COUNT = {"a length and chunks", "chunks and a length", "a length of 0 and chunks"}
CUT = "a chunk without its end"
"""Its body is complete JSON, which the HTTP server hands over before it sees that the framing is broken."""


Row = Callable[[Place, random.Random], int]


def rows_of(names: list[str], *, idle: int) -> dict[str, Row]:
    """Return the selected rows by name; all for an empty list. The row SLOW_SENDERS is apart."""
    every: dict[str, Row] = {
        "framing": framing,
        "heads": heads,
        "text": text,
        "half-closed": half_closed,
        "late-bodies": late_bodies,
        "pipelined": pipelined,
        "json": json_bodies,
        "gzip": gzip_bodies,
        "idle": partial(idle_connections, most=idle),
        "http2": http2,
        "upgrades": upgrades,
        "frames": web_socket_frames,
        "noise": noise,
    }
    return {name: row for name, row in every.items() if not names or name in names}


def framing(place: Place, dice: random.Random) -> int:
    """Smuggle a write in the body of a request whose length can be read in two ways."""
    body = b'{"records":[{"data":1}]}'
    name = f"{SMUGGLED}-{dice.getrandbits(32):x}"
    hidden = post(f"/v0/topics/{name}", body)
    start, chunked = (f"POST /v0/topics/{CANARY} HTTP/1.1", JSON), "transfer-encoding: chunked"
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    inside, length = chunk + b"0\r\n\r\n", f"content-length: {len(body)}"
    cases: list[tuple[str, bytes]] = [
        ("two lengths", head_of(*start, length, "content-length: 0") + body),
        ("two lengths, the short one first", head_of(*start, "content-length: 0", length) + body),
        ("a list of lengths", head_of(*start, f"content-length: {len(body)}, 0") + body),
        ("a length and chunks", head_of(*start, length, chunked) + inside),
        ("chunks and a length", head_of(*start, chunked, length) + inside),
        ("a length of 0 and chunks", head_of(*start, "content-length: 0", chunked) + inside),
        ("chunks that are named twice", head_of(*start, chunked, "transfer-encoding: identity") + inside),
        ("an unknown coding", head_of(*start, "transfer-encoding: xchunked") + inside),
        ("chunked that is not last", head_of(*start, "transfer-encoding: chunked, gzip") + inside),
        ("a tab before chunked", head_of(*start, "transfer-encoding:\tchunked\x0b") + inside),
        ("a space before the colon", head_of(*start, "content-length : 5") + body),
        ("a folded length", head_of(*start, "content-length:\r\n 24") + body),
    ]
    cases += [(f"the length {text!r}", head_of(*start, f"content-length: {text}") + body)
              for text in ("-1", "+24", "0x18", "2 4", "24.0", "9" * 30, "")]  # fmt: skip
    for size in (b"-1", b"0x18", b"+18", b"1 8", b"", b"g", b"f" * 17, b"\xff", b"18;" + b"x" * 20_000):
        bad = size + b"\r\n" + body + b"\r\n0\r\n\r\n"
        cases.append((f"the chunk size {size[:20]!r}", head_of(*start, chunked) + bad))
    cases.append((CUT, head_of(*start, chunked) + b"18\r\n" + body + b"xx0\r\n\r\n"))
    for what, data in cases:
        answer = place.exchange(data + hidden, half_close=True)
        served = answer.count(b"HTTP/1.1 2")
        # With a length and chunks, the chunks count and the connection ends behind them (RFC 9112, 6.1).
        is_closed = what in CHUNKS_COUNT and answer.count(b"connection: close") == 1
        require(
            served <= (is_closed or what == CUT), f"{what}: {served} requests were served: {answer[:200]!r}"
        )
    answer = place.exchange(head_of(f"GET /v0/topics/{name} HTTP/1.1"))
    require(status_of(answer) == 404, f"a smuggled write was done: {answer[:200]!r}")
    return len(cases)


def heads(place: Place, dice: random.Random) -> int:
    """Send huge and malformed heads."""
    start = "GET /v0/health HTTP/1.1"
    cases = {
        "a header of 1 MiB": head_of(start, "x: " + "a" * (1 << 20)),
        "20,000 headers": head_of(start, *[f"x{n}: 1" for n in range(20_000)]),
        "a path of 1 MiB": head_of(f"GET /{'a' * (1 << 20)} HTTP/1.1"),
        "a query of 1 MiB": head_of(f"GET /v0/topics?prefix={'a' * (1 << 20)} HTTP/1.1"),
        "an endless first line": b"GET /" + b"a" * (1 << 20),
        "no version": b"GET /v0/topics\r\n\r\n",
        "version 9": head_of("GET /v0/health HTTP/9.9"),
        "a zero in a header": head_of(start, "x: a\0b"),
        "a header without a colon": head_of(start, "nothing"),
        "a name with a space": head_of(start, "a b: 1"),
        "no host": b"GET /v0/topics HTTP/1.1\r\n\r\n",
        "the host of another": b"GET /v0/topics HTTP/1.1\r\nhost: example.com\r\n\r\n",
        "CONNECT": head_of("CONNECT example.com:443 HTTP/1.1"),
        "an absolute address": head_of("GET http://example.com/v0/nowhere HTTP/1.1"),
        "an unknown method": head_of(f"{'X' * dice.randint(1, 4_000)} /v0/topics HTTP/1.1"),
    }
    for what, data in cases.items():
        place.refuses(what, data)
    return len(cases)


def text(place: Place, dice: random.Random) -> int:
    """Send bytes that are not UTF-8 and names that are not allowed, in paths, queries and bodies."""
    body = b'{"records":[{"data":1}]}'
    names = [
        b"%ff",
        b"%c0%ae",
        b"%ed%a0%80",
        b"%00",
        b"a%0ab",
        b"%",
        b"%f",
        b"%zz",
        b"..",
        b"a%2fb%",
        b"\xff\xfe",
    ]
    for name in names:
        data = b"POST /v0/topics/" + name + b" HTTP/1.1\r\nhost: localhost\r\n" + JSON.encode()
        place.refuses(f"the name {name!r}", data + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    bodies = [
        b"\xff",
        b'"\xc0\xae"',
        b'"\xed\xa0\x80"',
        b'"\\ud800"x',
        b'"\0"',
        b"\xef\xbb\xbf1",
        b'"' + dice.randbytes(64),
    ]
    for data in bodies:
        place.refuses(
            f"the data {data!r}", post(f"/v0/topics/{CANARY}", b'{"records":[{"data":' + data + b"}]}")
        )
        place.refuses(f"the body {data!r}", post(f"/v0/topics/{CANARY}/diff", data))
    return len(names) + 2 * len(bodies)


def half_closed(place: Place, dice: random.Random) -> int:
    """Send parts of a request and close the writing half, or the whole connection."""
    whole = post(f"/v0/topics/{CANARY}", b'{"records":[{"data":1}]}')
    cuts = [0, 1, len(whole) - 1, *(dice.randrange(1, len(whole)) for _ in range(20))]
    for cut in cuts:
        place.refuses(f"{cut} bytes of a request", whole[:cut], half_close=True)
        with place.connect() as raw:
            raw.sendall(whole[:cut])
    watch = post("/v0/watch", json.dumps({"topics": {CANARY: {}}}).encode())
    for _ in range(10):
        path = json.loads(place.exchange(watch).partition(b"\r\n\r\n")[2])["stream_url"]
        with place.connect() as raw:
            raw.sendall(head_of(f"GET {path} HTTP/1.1", "accept: text/event-stream"))
            raw.shutdown(socket.SHUT_WR)
            raw.recv(1)
    return 2 * len(cuts) + 10


def late_bodies(place: Place, dice: random.Random) -> int:
    """Send the body of a request that is answered by its head, at a random moment around the answer.

    The connection must serve the next request."""
    data = b"x" * dice.randint(1, 100_000)
    cases = (
        f"POST /v0/topics/{CANARY}/nowhere",
        "POST /v0/health",
        "PUT /v0/topics/..",
        "DELETE /v0/topics/..",
    )
    for start in cases:
        for _ in range(LATE_BODIES):
            with place.connect() as raw:
                raw.sendall(head_of(f"{start} HTTP/1.1", JSON, f"content-length: {len(data)}"))
                select.select([raw], [], [], dice.uniform(0, LATE_BODY_S))
                raw.sendall(data)
                first = status_of(until_end(raw, is_first_only=True))
                require(200 <= first < 500, f"{start} with a late body got {first}")
                with contextlib.suppress(OSError):  # What is judged is the answer.
                    raw.sendall(head_of("GET /v0/health HTTP/1.1"))
                status = status_of(until_end(raw, is_first_only=True))
                require(status == 200, f"the request behind the late body of {start} got {status}")
    return len(cases) * LATE_BODIES


def pipelined(place: Place, _: random.Random) -> int:
    """Send many requests at once; each is answered, in order."""
    data = b"".join(head_of(f"GET /v0/topics/hostile.none-{n} HTTP/1.1") for n in range(PIPELINED))
    with place.connect() as raw:
        raw.sendall(data)
        found = b""
        with contextlib.suppress(OSError):
            while found.count(b"HTTP/1.1 404") < PIPELINED and (piece := raw.recv(65_536)):
                found += piece
    at = [found.find(b'"hostile.none-%d"' % n) for n in range(PIPELINED)]
    require(
        -1 not in at and at == sorted(at), f"{found.count(b'HTTP/1.1 404')} of {PIPELINED} answers in order"
    )
    with place.connect() as raw:  # And who does not read them gets a bounded number of answers.
        raw.settimeout(1.0)
        with contextlib.suppress(OSError):
            for _round in range(200):
                raw.sendall(data)
        place.check_canary()
    return 2


def json_bodies(place: Place, dice: random.Random) -> int:
    """Send deep, repeated, huge and wrong JSON to every route with a body."""
    deep = dice.randint(200, 100_000)
    bodies = {
        "deep lists": b"[" * deep + b"]" * deep,
        "deep lists without an end": b"[" * deep,
        "deep objects": b'{"a":' * deep + b"1" + b"}" * deep,
        "deep data": b'{"records":[{"data":' + b"[" * 129 + b"]" * 129 + b"}]}",
        "repeated keys": b'{"records":[{"data":1}],"records":[{"data":2}]}',
        "repeated keys inside": b'{"records":[{"data":{"a":1,"a":2}}]}',
        "a huge number": b'{"records":[{"data":1}],"node":' + b"9" * 10_000 + b"}",
        "a list": b"[]",
        "a text": b'"records"',
        "nothing": b"",
        "white space": b" " * 100_000,
        "two values": b"{}{}",
        "NaN": b'{"records":NaN}',
        "a comma at the end": b'{"records":[{"data":1},]}',
    }
    paths = [f"/v0/topics/{CANARY}", "/v0/watch", *(f"/v0/topics/{CANARY}/{what}" for what in
             ("delete", "claim", "ack", "nack", "extend"))]  # fmt: skip
    for path in paths:
        for what, body in bodies.items():
            place.refuses(f"{what} to {path}", post(path, body))
    return len(paths) * len(bodies)


def gzip_bodies(place: Place, dice: random.Random) -> int:
    """Send compressed bodies that grow a thousandfold, end early, or are not gzip."""
    bomb = gzip.compress(b'{"records":[{"data":"' + b"a" * (96 << 20) + b'"}]}', 1)
    small = gzip.compress(b'{"records":[{"data":1}]}')
    cases = {
        "a bomb": bomb, "an early end": small[:-4], "no gzip": b"{}",
        "bytes after the end": small + b"x", "two members": small + small, "nothing": b"",
        "noise": small[:10] + dice.randbytes(1_000),
    }  # fmt: skip
    for what, body in cases.items():
        place.refuses(what, post(f"/v0/topics/{CANARY}", body, "content-encoding: gzip"))
    for coding in ("br", "gzip, gzip", "\xff", "x" * 1_000):
        place.refuses(
            f"the coding {coding[:9]!r}", post(f"/v0/topics/{CANARY}", small, f"content-encoding: {coding}")
        )
    return len(cases) + 4


def idle_connections(place: Place, dice: random.Random, *, most: int = IDLE_CONNECTIONS) -> int:
    """Open connections that say nothing, or one request each; others must be served meanwhile."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(most, max(hard - 512, 64))
    with contextlib.ExitStack() as held:
        for number in range(most):
            raw = held.enter_context(place.connect())
            if number % 2:
                raw.sendall(head_of("GET /v0/health HTTP/1.1")[: dice.choice((5, 30, 1_000))])
        for _ in range(5):
            place.check_canary()
    return most


def noise(place: Place, dice: random.Random) -> int:
    """Send random bytes, the start of TLS, and broken copies of a request."""
    whole = bytearray(post(f"/v0/topics/{CANARY}", b'{"records":[{"data":1}]}'))
    cases: list[bytes] = [dice.randbytes(dice.randint(1, 2_000)) for _ in range(20)]
    cases += [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(500),
        b"\r\n" * 50_000,
        bytes(100_000),
    ]
    for _ in range(60):
        broken = whole.copy()
        for _each in range(dice.randint(1, 4)):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        cases.append(bytes(broken))
    for data in cases:
        answer: Any = place.exchange(data, half_close=True)
        require(b"HTTP/1.1 5" not in answer[:12], f"{data[:200]!r} got {answer[:300]!r}")
    return len(cases)


class SlowSenders:
    """Connections whose heads and bodies come a byte at a time, while the other rows run.

    The gateway must end them at its deadlines. Those with bodies are judged only `with_bodies`.
    """

    def __init__(self, place: Place, *, with_bodies: bool = False) -> None:
        head = b"GET /v0/health HTTP/1.1\r\nx: "
        body = head_of(f"POST /v0/topics/{CANARY} HTTP/1.1", JSON, "content-length: 1000") + b'{"rec'
        self._place, self._is_over = place, threading.Event()
        self._begun = time.monotonic()
        self._heads = [self._open(head) for _ in range(SLOW)]
        self._bodies = [self._open(body) for _ in range(SLOW)]
        self._judged = [("head", self._heads, HTTP_HEADER_MS_MAX / 1_000)]
        if with_bodies:
            self._judged.append(("body", self._bodies, HTTP_BODY_S_MAX))
        place.held_fds += 2 * SLOW
        self._thread = threading.Thread(target=self._drip, daemon=True)
        self._thread.start()

    def _open(self, begin: bytes) -> socket.socket:
        raw = self._place.connect()
        raw.sendall(begin)
        return raw

    def _drip(self) -> None:
        while not self._is_over.wait(DRIP_S):
            for raw in (*self._heads, *self._bodies):
                with contextlib.suppress(OSError):
                    raw.send(b"a", socket.MSG_DONTWAIT)

    def judge(self, _place: Place, _dice: random.Random) -> int:
        """Wait for the deadlines; a row. Raises GuaranteeBroken."""
        for what, connections, limit_s in self._judged:
            while not all(map(_has_end, connections)):
                took = time.monotonic() - self._begun
                require(took < limit_s + END_S, f"a slow {what} is still open after {took:.0f} s")
                self._place.check_canary()
                time.sleep(DRIP_S)
        return 2 * SLOW

    def close(self) -> None:
        """Close what is open."""
        self._is_over.set()
        self._thread.join(END_S)
        for raw in (*self._heads, *self._bodies):
            raw.close()
        self._place.held_fds -= 2 * SLOW


def _has_end(raw: socket.socket) -> bool:
    """Whether an answer or the end of the connection has come."""
    try:
        raw.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
