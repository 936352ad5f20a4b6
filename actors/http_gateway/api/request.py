"""One HTTP request: its path, query, headers and body, and who sent it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from ringlog.access.keys import Principal, authorise
from ringlog.actors.http_gateway.api.body_compression import TooLong, decompressed
from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.actors.http_gateway.api.request_body import RequestBody, body_too_large
from ringlog.envelope.messages import Message
from ringlog.errors import InvalidRequest
from ringlog.limits import HTTP_NESTING_MAX
from ringlog.native_kernel import kernel

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.api.route_table import Route
    from ringlog.actors.http_gateway.gateway import Gateway

T = TypeVar("T")
Whole = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A number in a body."""
JSON = "application/json"
_KEY_SEED = secrets.randbits(64)
_TRUE, _FALSE = {"true", "1"}, {"false", "0"}


class Headers(Protocol):
    """Headers of a request as granian gives them. Names are in lower case."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the first value of a header."""

    def get_all(self, name: str) -> list[str]:
        """Return all values of a header."""

    def items(self) -> list[tuple[str, str]]:
        """Return all headers, with each value of a repeated one."""


def authorization_of(headers: Headers) -> str:
    """Return the Authorization header. "" if there is none, or several: a proxy may have checked any."""
    found = headers.get_all("authorization")
    return found[0] if len(found) == 1 else ""


class Scope(Protocol):
    """What granian (RSGI) tells of a request or of an upgrade to a WebSocket."""

    proto: str
    http_version: str
    """"1" is HTTP/1.0; otherwise "1.1" or "2"."""
    method: str
    path: str
    query_string: str
    client: str
    authority: str | None
    """Host of a request over HTTP/2."""
    headers: Headers


class StreamTransport(Protocol):
    """The body of a response that is sent in pieces."""

    async def send_bytes(self, data: bytes) -> None:
        """Send bytes. Waits while the connection takes none."""


class ServerFuture(Protocol):
    """A future of granian. It has room for one callback, which a second one or the end of a wait replaces.

    So it is no asyncio.Future for the type checker: it is not to be waited for or given away.
    """

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` in the event loop when it is done or cancelled."""

    def cancel(self) -> bool:
        """Cancel it, which frees what the server keeps for it."""


class HttpProtocol(Protocol):
    """The connection of one request (RSGI)."""

    async def __call__(self) -> bytes:
        """Return the whole body."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the body as it arrives. Once, and not after a call."""

    async def __anext__(self) -> bytes:
        """Return the next part of the body, after `__aiter__`."""

    def response_bytes(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        """Send the whole response."""

    def response_stream(self, status: int, headers: list[tuple[str, str]]) -> StreamTransport:
        """Send status and headers."""

    def client_disconnect(self) -> ServerFuture:
        """Return a future that is done when the client has gone. Use `departure`, which releases it."""


@contextmanager
def departure(protocol: HttpProtocol) -> Iterator[asyncio.Future[None]]:
    """Give a future that is done when the client has gone. It is cancelled at the end of the block.

    Any number of callers may wait for it. The future of the server is released with it: otherwise the server
    would keep it and its own task for as long as it runs.
    """
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = protocol.client_disconnect()
    left.add_done_callback(lambda _: None if gone.done() else gone.set_result(None))
    try:
        yield gone
    finally:
        gone.cancel()
        left.cancel()


class Response(NamedTuple):
    """A response with a JSON body. A mapping gets `performance` added; bytes are sent as they are."""

    status: int
    body: dict[str, Any] | bytes
    headers: tuple[tuple[str, str], ...] = ()


class Request:
    """One request that has a route. `params` are the decoded parts of the path, in order."""

    __slots__ = (
        "_body", "_holds_slot", "_query", "gateway", "params", "principal", "protocol", "request_id",
        "route", "scope",
    )  # fmt: skip

    def __init__(
        self, gateway: Gateway, scope: Scope, protocol: HttpProtocol, body: RequestBody, route: Route,
        params: tuple[str, ...], principal: Principal, request_id: str,
    ) -> None:  # fmt: skip
        self.gateway: Gateway = gateway
        self.scope: Scope = scope
        self.protocol: HttpProtocol = protocol
        self.route: Route = route
        self.params: tuple[str, ...] = params
        self.principal: Principal = principal
        self.request_id: str = request_id
        self._body = body
        self._query: dict[str, str] | None = None
        self._holds_slot = True

    @property
    def topic(self) -> str:
        """First parameter of the path: the topic or the router."""
        return self.params[0]

    @property
    def group(self) -> str:
        """Second parameter of the path: the consumer group. "" stands for the queue's own leases."""
        return self.params[1] if len(self.params) > 1 else ""

    def authorise(self, *messages: Message) -> None:
        """Raise Forbidden unless the key may do what each message says. Call it first."""
        if not self.principal.is_unrestricted:
            for message in messages:
                authorise(self.principal, message)

    def release_slot(self) -> None:
        """Give back the in-flight slot: from now on this request is a stream. Idempotent."""
        if self._holds_slot:
            self._holds_slot = False
            self.gateway.release_request(self.principal)

    # -- query and headers ----------------------------------------------------------------------------

    @property
    def query(self) -> dict[str, str]:
        """Query parameters, percent-decoded. Of a repeated one the first counts."""
        if self._query is None:
            text = self.scope.query_string
            self._query = dict(reversed(parse_qsl(text, keep_blank_values=True))) if text else {}
        return self._query

    def query_bool(self, name: str, default: bool) -> bool:
        """Return a flag of the query. Anything but true, 1, false and 0 is the default."""
        value = self.query.get(name, "")
        return value in _TRUE or (default and value not in _FALSE)

    def query_int(self, name: str, default: int) -> int:
        """Return a number of the query. Text that is no number is the default."""
        value = self.query.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else default

    def header(self, name: str) -> str:
        """Return a header by its name in lower case, or ""."""
        return self.scope.headers.get(name) or ""

    # -- body -----------------------------------------------------------------------------------------

    async def json(self, kind: type[T], *, may_be_empty: bool = False) -> T:
        """Read the body and decode it strictly as `kind`. Unknown fields are ignored.

        Raises HttpError (415, 408), PayloadTooLarge, or InvalidRequest, which names the field.
        """
        body = await self.body(may_be_empty=may_be_empty)
        return decode(body or b"{}", kind)

    async def body(self, *, may_be_empty: bool = False) -> bytes:
        """Read the body: JSON, not compressed any more, within the bounds. Raises as `json` does."""
        kind = self.header("content-type")
        is_json = kind == JSON or kind.split(";", 1)[0].strip().lower() == JSON
        if not is_json and not may_be_empty:
            raise _not_json(self.header("content-type"))
        body = await self.raw_body()
        if body and not is_json:
            raise _not_json(self.header("content-type"))
        return body

    async def raw_body(self) -> bytes:
        """Read the body of any type, not compressed any more, within the bounds."""
        bytes_max = self.gateway.settings.limits.max_body_bytes
        body = await self._body.read(bytes_max)
        coding = self.header("content-encoding")
        if not coding:
            return body
        try:
            return decompressed(body, coding, bytes_max)
        except TooLong:
            raise body_too_large(bytes_max) from None


def decode(body: bytes, kind: type[T]) -> T:
    """Decode JSON as `kind`. Raises InvalidRequest for other bytes, repeated keys and deep nesting."""
    check_structure(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"the body is not valid: {e}") from None


class Structure(NamedTuple):
    """What `check_structure` found."""

    is_compact: bool
    """There is no white space between tokens."""
    names: int
    """A bit for each of the names that it was asked for."""


def check_structure(body: bytes, level: int = 0, names: bytes = b"") -> Structure:
    """Raise InvalidRequest if the JSON is not UTF-8, nested too deeply, or an object has a key twice.

    Args:
        body: The JSON text. A parser must still check it.
        level: Level of nesting of the objects in which `names` are looked for; 1 = the outermost object.
        names: Names, each followed by a zero byte. The bit of a name is set if such an object has the key.
    """
    depth, repeated_at, is_compact, found, has_escapes = kernel.json_structure(body, _KEY_SEED, level, names)
    if depth > HTTP_NESTING_MAX:
        raise InvalidRequest(f"the body must be nested at most {HTTP_NESTING_MAX} deep", max=HTTP_NESTING_MAX)
    if repeated_at >= 0:
        raise InvalidRequest("the body has an object with a repeated key", offset=repeated_at)
    if not body.isascii():
        try:
            body.decode()  # The decoder takes parts that it leaves as they are without this check.
        except UnicodeDecodeError as e:
            raise InvalidRequest("the body is not UTF-8", offset=e.start) from None
    if has_escapes:
        _check_escaped_keys(body)
    return Structure(is_compact, found)


def _check_escaped_keys(body: bytes) -> None:
    """Raise InvalidRequest if an object has a key twice, written in different ways with escapes."""
    try:
        json.loads(body, object_pairs_hook=_require_distinct)
    except (ValueError, RecursionError):
        return  # The decoder says what is wrong.


def _require_distinct(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        raise InvalidRequest("the body has an object with a repeated key")


def _not_json(found: str) -> HttpError:
    return HttpError(415, "unsupported_media_type", f"content-type must be {JSON}, got {found[:80]!r}")
