"""Bodies of control frames: exactly one MessagePack value of plain types, validated before it is decoded.

Decoders differ in what they accept: extension types, duplicate keys, keys that are not text, deep nesting.
The format therefore limits a body to these types, and this module enforces it: integers, floats, booleans,
nil, UTF-8 text, byte strings, arrays, and maps with distinct text keys.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ringlog.errors import FrameInvalid
from ringlog.limits import ENVELOPE_BYTES_MAX

CONTROL_DEPTH_MAX = 16
"""Maximum nesting of arrays and maps. The engine's own frames need four levels."""
CONTROL_BYTES_MAX = ENVELOPE_BYTES_MAX
"""A control frame's contents arrived in an envelope, so a control frame is never larger than one."""

_SCALAR_BYTES = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | dict(
    zip(range(0xCC, 0xD4), (1, 2, 4, 8, 1, 2, 4, 8), strict=True)
)
_BIN = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_STR = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY = {0xDC: 2, 0xDD: 4}
_MAP = {0xDE: 2, 0xDF: 4}


def check_control(body: bytes) -> None:
    """Raise FrameInvalid (with an offset in the body) unless `body` is one value as described above."""
    if len(body) > CONTROL_BYTES_MAX:
        raise FrameInvalid("control body too large", bytes=len(body), max=CONTROL_BYTES_MAX)
    if _past_value(body, 0, 0) != len(body):
        raise FrameInvalid("unexpected bytes after the control body")


def decode_control(body: bytes) -> Any:
    """Decode a body that passed check_control."""
    return msgspec.msgpack.decode(body)


def _past_value(body: bytes, at: int, depth: int) -> int:
    """Return the offset after the value at `at`. Recurses at most CONTROL_DEPTH_MAX levels."""
    if at >= len(body):
        raise FrameInvalid("control body is truncated", offset=at)
    first = body[at]
    if first < 0x80 or first >= 0xE0:
        return at + 1
    if first < 0x90:
        return _past_map(body, at + 1, first & 0x0F, depth)
    if first < 0xA0:
        return _past_array(body, at + 1, first & 0x0F, depth)
    if first < 0xC0:
        return _past_text(body, at + 1, first & 0x1F)
    if first in _SCALAR_BYTES:
        return _past_bytes(body, at + 1, _SCALAR_BYTES[first])
    for widths, past in ((_BIN, _past_bytes), (_STR, _past_text)):
        if first in widths:
            return past(body, *_length(body, at + 1, widths[first]))
    for widths, past_all in ((_ARRAY, _past_array), (_MAP, _past_map)):
        if first in widths:
            return past_all(body, *_length(body, at + 1, widths[first]), depth)
    raise FrameInvalid("control body contains a type that is not allowed", offset=at)


def _length(body: bytes, at: int, width: int) -> tuple[int, int]:
    stop = _past_bytes(body, at, width)
    return stop, int.from_bytes(body[at:stop], "big")


def _past_bytes(body: bytes, at: int, length: int) -> int:
    if length > len(body) - at:
        raise FrameInvalid("control body is truncated", offset=at)
    return at + length


def _past_text(body: bytes, at: int, length: int) -> int:
    stop = _past_bytes(body, at, length)
    try:
        body[at:stop].decode()
    except UnicodeDecodeError:
        raise FrameInvalid("control body contains text that is not UTF-8", offset=at) from None
    return stop


def _past_array(body: bytes, at: int, length: int, depth: int) -> int:
    _check_depth(at, depth)
    for _ in range(length):
        at = _past_value(body, at, depth + 1)
    return at


def _past_map(body: bytes, at: int, length: int, depth: int) -> int:
    _check_depth(at, depth)
    keys: set[bytes] = set()
    for _ in range(length):
        if not _is_text_at(body, at):
            raise FrameInvalid("control body contains a key that is not text", offset=at)
        stop = _past_value(body, at, depth + 1)
        # The same key may have a length field of another width, so only the text is compared.
        keys.add(body[at + 1 + _STR.get(body[at], 0) : stop])
        at = _past_value(body, stop, depth + 1)
    if len(keys) != length:
        raise FrameInvalid("control body contains a duplicate key", offset=at)
    return at


def _is_text_at(body: bytes, at: int) -> bool:
    return at < len(body) and (0xA0 <= body[at] < 0xC0 or body[at] in _STR)


def _check_depth(at: int, depth: int) -> None:
    if depth >= CONTROL_DEPTH_MAX:
        raise FrameInvalid("control body is nested too deeply", offset=at, max=CONTROL_DEPTH_MAX)
