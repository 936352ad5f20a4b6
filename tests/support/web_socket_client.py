"""A WebSocket client that needs only the standard library."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
from typing import Any

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class WebSocketClient:
    """A WebSocket of the standard library's sockets."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), 15)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET /v0/ws HTTP/1.1\r\nhost: {host}\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n\r\n".encode()
        )
        self._raw = b""
        while b"\r\n\r\n" not in self._raw:
            self._receive()
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        self.status = int(head.split()[1])

    def send(self, data: Any, kind: int = TEXT) -> None:
        """Send a message. Anything but bytes is encoded as JSON."""
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        mask = os.urandom(4)
        size = len(body)
        if size < 126:
            head = struct.pack("!BB", 0x80 | kind, 0x80 | size)
        elif size < 65_536:
            head = struct.pack("!BBH", 0x80 | kind, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", 0x80 | kind, 0x80 | 127, size)
        whole = (mask * (size // 4 + 1))[:size]
        masked = int.from_bytes(body, "little") ^ int.from_bytes(whole, "little")
        self._socket.sendall(head + mask + masked.to_bytes(size, "little"))

    def message(self) -> tuple[int, bytes]:
        """Return kind and body of the next message."""
        first, second = self._take(2)
        size = second & 127
        if size == 126:
            (size,) = struct.unpack("!H", self._take(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self._take(8))
        return first & 15, self._take(size)

    def json(self) -> Any:
        """Return the next text message."""
        while True:
            kind, body = self.message()
            if kind == TEXT:
                return json.loads(body)
            assert kind in {PING, PONG}, (kind, body)

    def ask(self, command: Any) -> Any:
        """Send a command and return the next message."""
        self.send(command)
        return self.json()

    def close(self) -> None:
        """Close without a goodbye."""
        self._socket.close()

    def _take(self, count: int) -> bytes:
        while len(self._raw) < count:
            self._receive()
        found, self._raw = self._raw[:count], self._raw[count:]
        return found

    def _receive(self) -> None:
        piece = self._socket.recv(1 << 20)
        if not piece:
            raise EOFError("the connection has ended")
        self._raw += piece
