"""The body of an HTTP request: read within bounds, or discarded so that the connection serves the next one.

Many clients send head and body in two packets. A request that is refused by its head is answered before its
body has come. Were the body left unread, the server would close the connection, and the client would see the
end of it in its next request, or instead of the answer.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Any

from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.errors import InvalidRequest, PayloadTooLarge
from ringlog.limits import HTTP_BODY_S_MAX, HTTP_DISCARD_BYTES_MAX, HTTP_DISCARD_S_MAX

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.api.request import HttpProtocol, Scope
    from ringlog.actors.http_gateway.gateway import Gateway

_BODY_NS_MAX = round(HTTP_BODY_S_MAX * 1e9)
_DISCARD_NS_MAX = round(HTTP_DISCARD_S_MAX * 1e9)


class _Progress(Enum):
    """How far a body has been read."""

    UNREAD = "unread"
    IN_CHUNKS = "in chunks"
    """The server gives its chunks one by one. They have not all been taken."""
    FAILED = "failed"
    """It ended early, or came too slowly. Nothing more can be read."""
    READ = "read"


class RequestBody:
    """The body of one request. A body without a length is counted as it arrives."""

    __slots__ = ("_gateway", "_length", "_progress", "_protocol", "_scope")

    def __init__(self, gateway: Gateway, scope: Scope, protocol: HttpProtocol) -> None:
        self._gateway = gateway
        self._scope = scope
        self._protocol = protocol
        self._length: str = scope.headers.get("content-length") or ""
        self._progress = _Progress.UNREAD

    async def read(self, bytes_max: int) -> bytes:
        """Return the whole body. Call it once.

        Raises PayloadTooLarge above `bytes_max`, HttpError (408) for a body that does not arrive within
        HTTP_BODY_S_MAX, and InvalidRequest for one that ends early.
        """
        if not self._has_any():
            return b""
        length = self._length
        if length and (not length.isdigit() or int(length) > bytes_max):
            raise body_too_large(bytes_max)
        reading = self._gateway.reading
        task = self._begin(reading, _BODY_NS_MAX)
        try:
            body = await self._protocol() if length else await self._chunks(bytes_max)
        except asyncio.CancelledError:
            self._progress = _Progress.FAILED
            if task in reading:
                raise
            task.uncancel()
            raise HttpError(
                408, "request_timeout", f"the body did not arrive within {HTTP_BODY_S_MAX:g} s"
            ) from None
        except RuntimeError:  # The connection has ended: the server says it this way.
            self._progress = _Progress.FAILED
            raise InvalidRequest("the body ended early") from None
        finally:
            reading.pop(task, None)
        if length and len(body) != int(length):
            self._progress = _Progress.FAILED
            raise InvalidRequest("the body ended early", bytes=len(body), content_length=int(length))
        self._progress = _Progress.READ
        return body

    @property
    def is_left(self) -> bool:
        """Whether a part of the body has not been read. Streams of HTTP/2 end without harm to others."""
        return (
            self._progress is not _Progress.READ
            and self._scope.http_version.startswith("1")
            and self._has_any()
        )

    @property
    def ends_connection(self) -> bool:
        """Whether the connection of a body that is left takes no further request after the answer."""
        return (
            self._progress is not _Progress.UNREAD
            or self._gateway.is_draining
            or bool(self._scope.headers.get("expect"))  # The client may leave the body out now.
            or (self._length.isdigit() and int(self._length) > HTTP_DISCARD_BYTES_MAX)
        )

    async def discard(self) -> None:
        """Take what is left of the body off the connection, after the answer.

        At most HTTP_DISCARD_BYTES_MAX and for HTTP_DISCARD_S_MAX. Then, or at a stop, the connection ends.
        """
        if (
            self._progress is _Progress.FAILED
            or self._scope.headers.get("expect")
            or self._gateway.is_draining
        ):
            return
        discarding = self._gateway.discarding
        task = self._begin(discarding, _DISCARD_NS_MAX)
        size = 0
        try:
            if self._progress is _Progress.UNREAD:
                aiter(self._protocol)
            while size <= HTTP_DISCARD_BYTES_MAX:
                size += len(await anext(self._protocol))
        except StopAsyncIteration:
            self._progress = _Progress.READ
        except RuntimeError:  # The connection has ended.
            self._progress = _Progress.FAILED
        except asyncio.CancelledError:
            if task in discarding:
                raise
            task.uncancel()
        finally:
            discarding.pop(task, None)

    def _begin(self, table: dict[asyncio.Task[Any], int], ns_max: int) -> asyncio.Task[Any]:
        """Give the current task a deadline in a table of the gateway, which cancels it then."""
        task = asyncio.current_task()
        assert task is not None
        table[task] = self._gateway.clock.monotonic_ns() + ns_max
        return task

    def _has_any(self) -> bool:
        if self._length:
            return self._length != "0"
        return self._scope.http_version != "1.1" or bool(self._scope.headers.get("transfer-encoding"))

    async def _chunks(self, bytes_max: int) -> bytes:
        self._progress = _Progress.IN_CHUNKS
        found, size = [], 0
        async for chunk in self._protocol:
            size += len(chunk)
            if size > bytes_max:
                raise body_too_large(bytes_max)
            found.append(bytes(chunk))
        return b"".join(found)


def body_too_large(bytes_max: int) -> PayloadTooLarge:
    """Return the error of a body that is larger than `limits.max_body_bytes`."""
    return PayloadTooLarge(f"the body must have at most {bytes_max} bytes", max=bytes_max)
