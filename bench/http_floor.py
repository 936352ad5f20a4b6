"""The floor of the HTTP benchmarks: the same server and event loop, and an application that only passes on.

What is posted goes to all streams and all WebSockets at once. Nothing is stored, checked or encoded, so the
difference to it is what the gateway and the engine add. `python -m bench.http_floor PORT` serves until its
standard input ends.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

from bench.http_clients import WAIT_S, LoneClient
from bench.systems.kafka import free_ports

_JSON = [("content-type", "application/json")]
_EVENTS = [("content-type", "text/event-stream")]
_STREAM = b'{"stream_url":"/v0/watch/floor"}'
_CONNECTIONS_MAX = 20_000
_TEXT = 2
"""Kind of a text message of a WebSocket, in granian."""


class Floor:
    """The application, with the routes that the benchmarks use."""

    def __init__(self) -> None:
        self.streams: set[Any] = set()
        self.sockets: set[Any] = set()

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        """Serve one request or one WebSocket."""
        if scope.proto == "ws":
            await self._web_socket(await protocol.accept())
        elif scope.path == "/v0/watch/floor":
            await self._stream(protocol)
        elif scope.path == "/v0/watch":
            protocol.response_bytes(200, _JSON, _STREAM)
        elif scope.method == "POST":
            event = b"event: record\ndata: " + await protocol() + b"\n\n"
            for stream in self.streams:
                stream.send_bytes(event)
            protocol.response_bytes(200, _JSON, b"{}")
        else:
            protocol.response_bytes(200, _JSON, b"{}")

    async def _stream(self, protocol: Any) -> None:
        stream = protocol.response_stream(200, _EVENTS)
        stream.send_bytes(b"event: caught-up\ndata: {}\n\n")
        self.streams.add(stream)
        try:
            await protocol.client_disconnect()
        finally:
            self.streams.discard(stream)

    async def _web_socket(self, socket: Any) -> None:
        while (message := await socket.receive()).kind == _TEXT:
            if '"subscribe"' in message.data[:40]:
                self.sockets.add(socket)
                await socket.send_str('{"op":"subscribed"}')
                continue
            for each in self.sockets:
                asyncio.ensure_future(each.send_str(message.data)).add_done_callback(_ignore)
        self.sockets.discard(socket)


def _ignore(sent: asyncio.Future[None]) -> None:
    """Nothing depends on whether it was sent."""
    sent.cancelled()


async def _serve(port: int) -> None:
    from granian.constants import Interfaces
    from granian.server.embed import Server

    server = Server(
        Floor(), address="127.0.0.1", port=port, interface=Interfaces.RSGI, log_enabled=False,
        backpressure=_CONNECTIONS_MAX,
    )  # fmt: skip
    serving = asyncio.ensure_future(server.serve())
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, daemon=True).start()
    await ended.wait()
    serving.cancel()


class FloorHost:
    """The floor in a process of its own. A context manager."""

    def __init__(self) -> None:
        [port] = free_ports(1)
        self.http_url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.http_floor", str(port)], stdin=subprocess.PIPE
        )
        self.http = self._connected()

    def _connected(self) -> LoneClient:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                return LoneClient(self.http_url)
            except ConnectionRefusedError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.01)

    def create(self, topic: str, **settings: Any) -> None:
        """Nothing: there are no topics."""

    def __enter__(self) -> FloorHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._process.communicate(timeout=WAIT_S)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(int(sys.argv[1])))
