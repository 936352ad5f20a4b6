"""Hostile HTTP/2, upgrades and WebSocket frames. See hostile.py for what a row is."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable

from chaos.http.place import Place, head_of, status_of, until_end
from ringlog.drill.checks import require

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
UPGRADE = (
    "GET /v0/ws HTTP/1.1", "host: localhost", "upgrade: websocket", "connection: upgrade",
    "sec-websocket-version: 13", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
)  # fmt: skip


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def http2(place: Place, dice: random.Random) -> int:
    """Send the preface of HTTP/2 and then what does not belong there."""
    settings = _frame(4, 0, 0)
    # GET / of localhost, from the static table of HPACK.
    block = b"\x82\x86\x84\x41\x09localhost"
    odd = range(1, 4_001, 2)
    cases = [
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", PREFACE[:10], PREFACE + dice.randbytes(500),
        PREFACE + _frame(4, 0, 0, b"abc"), PREFACE + settings + _frame(0, 0, 0, b"data"),
        PREFACE + settings + _frame(1, 4, 2, block),
        PREFACE + settings + _frame(1, 4, 1, dice.randbytes(40)),
        PREFACE + settings + _frame(9, 4, 1, block),
        PREFACE + settings + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
        PREFACE + settings + _frame(1, 0, 1, block) + _frame(9, 0, 1, b"\x00" * 1_000) * 500,
        PREFACE + settings * 20_000,
        PREFACE + settings + _frame(6, 0, 0, bytes(8)) * 20_000,
        PREFACE + settings + b"".join(_frame(1, 5, n, block) + _frame(3, 0, n, bytes(4)) for n in odd),
        PREFACE + settings + _frame(8, 0, 0, b"\x7f\xff\xff\xff") * 3,
    ]  # fmt: skip
    for data in cases:
        with place.connect() as raw:
            raw.settimeout(0.5)
            with contextlib.suppress(OSError):
                raw.sendall(data)
            until_end(raw, is_first_only=False)
        place.check_canary()
    return len(cases)


def upgrades(place: Place, _: random.Random) -> int:
    """Ask for upgrades that do not exist, and for WebSockets in wrong ways."""
    cases = [
        head_of(f"GET {path} HTTP/1.1", f"upgrade: {what}", "connection: upgrade", *more)
        for path in ("/v0/ws", "/v0/topics/hostile.none")
        for what, more in (
            ("h2c", ("http2-settings: AAMAAABkAAQAAP__",)), ("chat", ()), ("websocket", ()), ("", ()),
            ("websocket", ("sec-websocket-version: 12", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==")),
            ("TLS/1.0, websocket", ()),
        )
    ]  # fmt: skip
    cases.append("\r\n".join([*UPGRADE, "origin: https://example.com", "", ""]).encode())
    for data in cases:
        place.refuses(f"an upgrade {data[:200]!r}", data)
    return len(cases)


def _masked(kind: int, payload: bytes, *, final: bool = True, reserved: int = 0) -> bytes:
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes([final << 7 | reserved << 4 | kind]) + length + bytes(4) + payload


def web_socket_frames(place: Place, dice: random.Random) -> int:
    """Send invalid frames and messages to a WebSocket."""
    deep = b"[" * 30_000
    cases: Iterable[bytes] = (
        dice.randbytes(300), _masked(3, b"x"), _masked(11, b"x"), _masked(1, b"{}", reserved=4),
        b"\x81\x02{}", b"\x81\xff" + b"\x7f" + b"\xff" * 7 + bytes(4), b"\x81\xff" + b"\xff" * 12,
        _masked(9, b"x", final=False), _masked(9, b"x" * 126), _masked(0, b"x"), _masked(1, b"\xff\xfe"),
        _masked(1, b"{", final=False) + _masked(1, b"}"), _masked(8, b"x"), _masked(8, b"\x00\x00"),
        _masked(1, deep), _masked(1, b"{}"), _masked(1, b"[]"), _masked(1, b"1"), _masked(2, b"{}"),
        _masked(1, b'{"op":"nothing"}'), _masked(1, b'{"op":"ping","op":"ping"}'), _masked(1, b'{"op":1}'),
        _masked(1, b'{"op":"subscribe","topics":{"x":[]}}'), _masked(1, b'{"op":"publish"}') * 200,
        _masked(9, b"") * 5_000, _masked(1, b"a", final=False) + _masked(0, b"a", final=False) * 5_000,
    )  # fmt: skip
    tried = 0
    for data in cases:
        with place.connect() as raw:
            raw.sendall("\r\n".join([*UPGRADE, "", ""]).encode())
            require(status_of(until_end(raw, is_first_only=True)) == 101, "no WebSocket was opened")
            raw.settimeout(0.2)
            with contextlib.suppress(OSError):
                raw.sendall(data)
            until_end(raw, is_first_only=False)
        tried += 1
    return tried
