"""Payload codecs: from what a program has to bytes and back, with the mark that tells readers which."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ringlog.errors import UsageError
from ringlog.names import utf8
from ringlog.types import PayloadKind

T = TypeVar("T")
_PATH_CHARS_MAX = 128


_encode_json = msgspec.json.Encoder().encode


def json_of(value: Any, name: str) -> bytes:
    """Compact JSON; raises UsageError for what JSON has no word for, and says where NaN or an infinity is."""
    try:
        encoded = _encode_json(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise UsageError(f"{name} cannot be written as JSON", reason=str(e)) from None
    # They are written as null, and would come back as None.
    if b"null" in encoded:
        _require_finite(value, name)
    return encoded


def _is_finite(plain: Any) -> bool:
    """Has it only numbers that are some? False also where that cannot be told as fast."""
    try:
        json.dumps(plain, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _require_finite(value: Any, name: str) -> None:
    plain = msgspec.to_builtins(value, str_keys=True)
    if _is_finite(plain):
        return
    left: list[tuple[str, Any]] = [("", plain)]
    while left:
        path, part = left.pop()
        if isinstance(part, float) and not isfinite(part):
            at = f" at {path[:_PATH_CHARS_MAX]}" if path else ""
            raise UsageError(f"{name} cannot be written as JSON: {part}{at} is no number that JSON has")
        if isinstance(part, dict):
            left += [(f"{path}.{key}" if path else str(key), inner) for key, inner in part.items()]
        elif isinstance(part, list | tuple):
            left += [(f"{path}[{at}]", inner) for at, inner in enumerate(part)]


class PayloadCodec(Protocol[T]):
    """Anything with these three can be a producer's `payload`."""

    @property
    def kind(self) -> PayloadKind:
        """What the bytes mean to a reader."""
        ...

    def encode(self, value: T, /) -> bytes | None:
        """The payload of a value; None for a null."""
        ...

    def decode(self, data: bytes, /) -> T:
        """The value of a payload that is no null; that of a null is None."""
        ...


class _Raw:
    kind = PayloadKind.BYTES

    def encode(self, value: bytes | None) -> bytes | None:
        """Take any buffer of bytes as it is, and None for a null; raises UsageError for anything else, text
        above all."""
        if type(value) is bytes or value is None:
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise UsageError(
            "a payload is bytes; choose payload=TEXT or JSON for others", found=type(value).__name__
        )

    def decode(self, data: bytes) -> bytes:
        """The bytes."""
        return data


class _Text:
    kind = PayloadKind.TEXT

    def encode(self, value: str | None) -> bytes | None:
        """UTF-8, and None for a null; raises UsageError for what is no text."""
        if value is None:
            return None
        if not isinstance(value, str):
            raise UsageError("a TEXT payload is a str", found=type(value).__name__)
        return utf8(value, "data")

    def decode(self, data: bytes) -> str:
        """The text."""
        return data.decode()


class _Json:
    kind = PayloadKind.JSON

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder().decode

    def encode(self, value: Any) -> bytes:
        """Compact JSON, of None `null`, which is no null payload; raises UsageError for what JSON has no word
        for."""
        return json_of(value, "a value")

    def decode(self, data: bytes) -> Any:
        """The value."""
        return self._decode(data)


@dataclass(frozen=True)
class _Typed(Generic[T]):
    """JSON of one msgspec-supported type, validated when it is read."""

    type: type[T]
    kind: PayloadKind = PayloadKind.JSON

    def encode(self, value: T) -> bytes:
        """Compact JSON."""
        return json_of(value, "a value")

    def decode(self, data: bytes) -> T:
        """The value; raises msgspec.ValidationError naming the field."""
        return msgspec.json.decode(data, type=self.type)


RAW: PayloadCodec[bytes | None] = _Raw()
TEXT: PayloadCodec[str | None] = _Text()
JSON: PayloadCodec[Any] = _Json()


def msgspec_codec(type_: type[T]) -> PayloadCodec[T]:
    """JSON of a msgspec Struct, dataclass or any type msgspec knows."""
    return _Typed(type_)
