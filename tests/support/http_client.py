"""Clients of the HTTP gateway that need only the standard library."""

from __future__ import annotations

import http.client
import json
import select
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 10.0
"""Bound of each read from a socket."""

_READ_BYTES = 65_536


class Answer(NamedTuple):
    """Response of the gateway. `headers` have names in lower case; `body` is decoded where it is JSON."""

    status: int
    headers: dict[str, str]
    body: Any


class HttpClient:
    """One keep-alive connection to a gateway, which is opened again when the server has closed it.

    `tls`: what is trusted, for a URL with https.
    """

    def __init__(
        self, url: str, key: str = "", timeout: float = TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> None:
        self.url, self.key = url, key
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port
        self._connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        )

    def __call__(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request. A body that is not bytes is sent as JSON with its content type."""
        sent = {"authorization": f"Bearer {self.key}"} if self.key else {}
        if body is not None:
            sent["content-type"] = "application/json"
        sent |= {name.lower(): value for name, value in (headers or {}).items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request(method, path, data, sent)
        reply = self._connection.getresponse()
        text = reply.read()
        found = {name.lower(): value for name, value in reply.getheaders()}
        is_json = (
            found.get("content-type", "").startswith("application/json") and "content-encoding" not in found
        )
        return Answer(reply.status, found, json.loads(text) if is_json and text else text)

    def raw(self, data: bytes) -> bytes:
        """Send bytes on a connection of their own; return the first response, or all until the end."""
        with socket.create_connection((self.host, self.port), TIMEOUT_S) as connection:
            connection.sendall(data)
            found = b""
            while piece := connection.recv(_READ_BYTES):
                found += piece
                head, end, rest = found.partition(b"\r\n\r\n")
                length = _content_length(head)
                if end and length is not None and len(rest) >= length:
                    break
            return found

    def stream(
        self, path: str, headers: Mapping[str, str] | None = None, timeout: float = TIMEOUT_S
    ) -> EventStream:
        """Open an event stream. Use it as a context manager, or close it."""
        sent = {"authorization": f"Bearer {self.key}"} if self.key else {}
        connection = socket.create_connection((self.host, self.port), timeout)
        return EventStream(connection, f"{self.host}:{self.port}", path, sent | dict(headers or {}))

    def into_stream(self, path: str, headers: Mapping[str, str] | None = None) -> EventStream:
        """Open an event stream on the connection of the latest request. The client then has none."""
        connection, self._connection.sock = self._connection.sock, None
        assert connection is not None
        sent = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return EventStream(connection, f"{self.host}:{self.port}", path, sent | dict(headers or {}))

    def watch(self, body: Any, headers: Mapping[str, str] | None = None) -> EventStream:
        """Make a watch session and open its stream."""
        answer = self("POST", "/v0/watch", body)
        assert answer.status == 200, answer
        return self.stream(answer.body["stream_url"], headers)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Frame:
    """One block of an event stream."""

    event: str = ""
    id: str = ""
    data: Any = None
    comment: str = ""
    retry: str = ""


class EventStream:
    """Reads an event stream from a raw socket. Each read raises TimeoutError after the socket's timeout."""

    def __init__(self, connection: socket.socket, host: str, path: str, headers: Mapping[str, str]) -> None:
        self._socket = connection
        lines = [f"GET {path} HTTP/1.1", f"host: {host}", "accept: text/event-stream"]
        lines += [f"{name}: {value}" for name, value in headers.items() if name.lower() != "accept"]
        accept = {name.lower(): value for name, value in headers.items()}.get("accept")
        if accept is not None:
            lines[2] = f"accept: {accept}"
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self._raw, self._body, self._has_ended = b"", b"", False
        head = self._read_head()
        first, *rest = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)
        }
        self._is_chunked = self.headers.get("transfer-encoding", "") == "chunked"

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection without a goodbye."""
        self._socket.close()

    def json(self) -> Any:
        """Return the body of a response that is no stream."""
        length = int(self.headers["content-length"])
        while len(self._raw) < length:
            self._receive()
        return json.loads(self._raw[:length])

    def block(self) -> Frame | None:
        """Return the next block, comments included; None when the stream has ended."""
        while b"\n\n" not in self._body:
            if self._has_ended:
                return None
            self._read_chunk()
        text, _, self._body = self._body.partition(b"\n\n")
        return _parse(text.decode())

    def frame(self) -> Frame | None:
        """Return the next block with an event; None when the stream has ended."""
        while (found := self.block()) is not None:
            if found.event:
                return found
        return None

    def frames(self, count: int) -> list[Frame]:
        """Return the next frames. Fewer if the stream ends."""
        found: list[Frame] = []
        while len(found) < count and (one := self.frame()) is not None:
            found.append(one)
        return found

    def until(self, is_wanted: Callable[[Frame], bool]) -> list[Frame]:
        """Return the next frames up to the first one that is wanted."""
        found: list[Frame] = []
        while (one := self.frame()) is not None:
            found.append(one)
            if is_wanted(one):
                return found
        raise AssertionError(f"the stream ended without the frame, after {found}")

    def records(self, count: int) -> list[Any]:
        """Return the records of the next frames, until there are this many."""
        found: list[Any] = []
        while len(found) < count:
            one = self.frame()
            assert one is not None, f"the stream ended after {len(found)} records"
            if one.event == "record":
                found += one.data["records"]
        return found

    def is_silent(self, seconds: float) -> bool:
        """Return whether all was read, and nothing arrives for some seconds."""
        return not self._raw and not self._body and not select.select([self._socket], [], [], seconds)[0]

    def _receive(self) -> None:
        piece = self._socket.recv(_READ_BYTES)
        if not piece:
            self._has_ended = True
            raise EOFError("the connection has ended")
        self._raw += piece

    def _read_head(self) -> bytes:
        while b"\r\n\r\n" not in self._raw:
            self._receive()
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        return head

    def _read_chunk(self) -> None:
        try:
            if not self._is_chunked:
                self._receive()
                self._body, self._raw = self._body + self._raw, b""
                return
            while b"\r\n" not in self._raw:
                self._receive()
            size_text, _, _ = self._raw.partition(b"\r\n")
            begin, size = len(size_text) + 2, int(size_text, 16)
            while len(self._raw) < begin + size + 2:
                self._receive()
        except (EOFError, ConnectionResetError):
            self._has_ended = True
            return
        self._body += self._raw[begin : begin + size]
        self._raw = self._raw[begin + size + 2 :]
        self._has_ended = size == 0


def _parse(text: str) -> Frame:
    found: dict[str, Any] = {}
    for line in text.split("\n"):
        name, _, value = line.partition(":")
        found[name or "comment"] = value.removeprefix(" ")
    if "data" in found:
        found["data"] = json.loads(found["data"])
    return Frame(**found)


def _content_length(head: bytes) -> int | None:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return None
