"""From errors to responses: a status, and a body `{"error": {"code", "message", "detail"}}`."""

from __future__ import annotations

from typing import Any

import msgspec

from ringlog.errors import (
    Backpressure,
    ConnectionTrouble,
    CorruptData,
    LeaseLost,
    NotReady,
    Refused,
    RinglogError,
    Throttled,
    UsageError,
)

_PRIVATE = ("file", "path", "part", "holder", "story")
"""Details that name files of the server. Clients get the message only."""
_SERVER_STATUSES = {429, 503}


class HttpError(Refused):
    """A refusal that only HTTP has: an unknown route, a method, a content type."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        headers: tuple[tuple[str, str], ...] = (),
        **detail: Any,
    ) -> None:
        super().__init__(message, **detail)
        self.http_status: int = status
        self.http_code: str = code
        self.headers: tuple[tuple[str, str], ...] = headers


def status_and_code(error: RinglogError) -> tuple[int, str]:
    """Return the HTTP status and the code of an error."""
    if isinstance(error, HttpError):
        return error.http_status, error.http_code
    if isinstance(error, Refused):
        return type(error).http, error.code
    if isinstance(error, UsageError):
        return 400, "invalid_request"
    if isinstance(error, Backpressure):
        return Throttled.http, Throttled.code
    if isinstance(error, ConnectionTrouble):
        return NotReady.http, NotReady.code
    if isinstance(error, LeaseLost):
        return 409, error.code
    return 500, "internal"


def error_body(error: RinglogError) -> dict[str, Any]:
    """Return the body of an error, as a value for JSON."""
    _, code = status_and_code(error)
    inner: dict[str, Any] = {"code": code, "message": error.message}
    detail = {name: value for name, value in error.detail.items() if name not in _PRIVATE}
    if isinstance(error, ConnectionTrouble) or error.outcome == "unknown":
        detail["outcome"] = error.outcome
    if isinstance(error, CorruptData):
        detail["reason"] = "corrupt_segment"
    if detail:
        inner["detail"] = msgspec.to_builtins(detail, enc_hook=str)
    return {"error": inner}


def error_headers(error: RinglogError) -> tuple[tuple[str, str], ...]:
    """Return the headers of an error's response."""
    status, _ = status_and_code(error)
    headers = error.headers if isinstance(error, HttpError) else ()
    if status in _SERVER_STATUSES:
        wait_ms = error.detail.get("retry_after_ms", 1_000)
        seconds = max(1, -(-int(wait_ms) // 1_000)) if isinstance(wait_ms, int | float) else 1
        headers = (*headers, ("retry-after", str(seconds)))
    if status == 401:
        headers = (*headers, ("www-authenticate", "Bearer"))
    return headers
