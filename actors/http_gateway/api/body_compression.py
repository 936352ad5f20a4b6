"""Compression of bodies: gzip, in both directions."""

from __future__ import annotations

import asyncio
import zlib

from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.errors import InvalidRequest
from ringlog.limits import HTTP_GZIP_BYTES_MIN, HTTP_GZIP_INLINE_BYTES_MAX

GZIP = "gzip"
HEADERS = (("content-encoding", GZIP), ("vary", "accept-encoding"))
"""Headers of a compressed reply."""
_GZIP_WBITS = 31
_LEVEL = 1


class TooLong(Exception):
    """The plain body is longer than its bound."""


def decompressed(body: bytes, coding: str, bytes_max: int) -> bytes:
    """Return the plain body of a request.

    Raises:
        TooLong: it has more than `bytes_max` bytes.
        InvalidRequest: the body is not gzip, or not complete.
        HttpError: 415, the coding is not known.
    """
    coding = coding.strip().lower()
    if coding in {"identity", ""}:
        return body
    if coding != GZIP:
        raise HttpError(415, "unsupported_media_type", f"content-encoding must be gzip, got {coding[:40]!r}")
    reader = zlib.decompressobj(wbits=_GZIP_WBITS)
    try:
        plain = reader.decompress(body, bytes_max + 1)
    except zlib.error as e:
        raise InvalidRequest(f"the body is not gzip: {e}") from None
    if len(plain) > bytes_max:
        raise TooLong
    if not reader.eof or reader.unused_data:
        raise InvalidRequest("the gzip body ends early, or has bytes after its end")
    return plain


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether an Accept-Encoding header allows gzip: it is named, or `*` is, and not with weight 0."""
    weights = {}
    for part in accept_encoding.lower().split(","):
        coding, _, weight = part.replace(" ", "").partition(";q=")
        weights[coding] = weight
    weight = weights.get(GZIP, weights.get("*", "0"))
    return bool(weight.strip("0.")) if weight else True


async def compressed(body: bytes) -> bytes:
    """Return the gzip form of a reply. A large one is made in a thread, so that other requests go on."""
    if len(body) > HTTP_GZIP_INLINE_BYTES_MAX:
        return await asyncio.to_thread(_compress, body)
    return _compress(body)


def is_worthwhile(body: bytes) -> bool:
    """Return whether a body is long enough to be compressed."""
    return len(body) >= HTTP_GZIP_BYTES_MIN


def _compress(body: bytes) -> bytes:
    return zlib.compress(body, _LEVEL, _GZIP_WBITS)
