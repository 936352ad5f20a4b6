"""A client of HTTP/2 that decides itself how much of each response it takes."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable

_DATA, _HEADERS, _RESET, _SETTINGS, _WINDOW_UPDATE = 0, 1, 3, 4, 8
_CANCEL = 8
_ACK, _END_HEADERS, _END_STREAM = 1, 4, 1
_WINDOW_MAX = (1 << 31) - 1
FIRST_WINDOW = 65_535
"""Bytes of one response that a client takes without `take`."""


class Http2Client:
    """One connection. It takes any number of bytes in all, and FIRST_WINDOW of each response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.received: Counter[int] = Counter()
        """Bytes of the body of each response, by its number."""
        self.ended: set[int] = set()
        """Responses that are complete."""
        self._changed = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def connect(cls, host: str, port: int) -> Http2Client:
        """Open a connection."""
        client = cls(*await asyncio.open_connection(host, port))
        client._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0))
        client._writer.write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack("!I", _WINDOW_MAX - FIRST_WINDOW)))
        return client

    def get(self, path: str, number: int) -> None:
        """Send a GET. `number` is odd, and higher than those before."""
        name = path.encode()
        fields = b"\x82\x86\x04" + bytes([len(name)]) + name + b"\x01\x09localhost"
        self._writer.write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, number, fields))

    def take(self, number: int) -> None:
        """Take the whole of a response from now on."""
        self._writer.write(_frame(_WINDOW_UPDATE, 0, number, struct.pack("!I", _WINDOW_MAX - FIRST_WINDOW)))

    def reset(self, number: int) -> None:
        """End a response before it is complete."""
        self._writer.write(_frame(_RESET, 0, number, struct.pack("!I", _CANCEL)))

    async def until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for a state that holds at latest after a frame from the server."""
        while not is_reached():
            assert not self._reading.done(), "the connection has ended"
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Close the connection without a goodbye."""
        self._reading.cancel()
        self._writer.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                size, number = int.from_bytes(head[:3], "big"), int.from_bytes(head[5:], "big")
                await self._reader.readexactly(size)
                kind, flags = head[3], head[4]
                if kind == _DATA:
                    self.received[number] += size
                elif kind == _SETTINGS and not flags & _ACK:
                    self._writer.write(_frame(_SETTINGS, _ACK, 0))
                if kind in {_DATA, _HEADERS} and flags & _END_STREAM:
                    self.ended.add(number)
                self._changed.set()
        finally:
            self._changed.set()


def _frame(kind: int, flags: int, number: int, body: bytes = b"") -> bytes:
    return struct.pack("!I", len(body))[1:] + bytes([kind, flags]) + struct.pack("!I", number) + body
