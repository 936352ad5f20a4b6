"""Payload codecs: from what a program has to bytes and back, with the mark that tells readers which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ringlog.errors import UsageError
from ringlog.types import PayloadKind

T = TypeVar("T")


class PayloadCodec(Protocol[T]):
    """Anything with these three can be a producer's `payload`."""

    @property
    def kind(self) -> PayloadKind:
        """What the bytes mean to a reader."""
        ...

    def encode(self, value: T, /) -> bytes:
        """The payload of a value."""
        ...

    def decode(self, data: bytes, /) -> T:
        """The value of a payload."""
        ...


class _Raw:
    kind = PayloadKind.BYTES

    def encode(self, value: bytes) -> bytes:
        """Take any buffer of bytes as it is; raises UsageError for anything else, text above all."""
        if type(value) is bytes:
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

    def encode(self, value: str) -> bytes:
        """UTF-8; raises UsageError for what is no text."""
        if not isinstance(value, str):
            raise UsageError("a TEXT payload is a str", found=type(value).__name__)
        try:
            return value.encode()
        except UnicodeEncodeError as e:
            raise UsageError("text cannot be written as UTF-8", reason=str(e)) from None

    def decode(self, data: bytes) -> str:
        """The text."""
        return data.decode()


class _Json:
    kind = PayloadKind.JSON

    def __init__(self) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder().decode

    def encode(self, value: Any) -> bytes:
        """Compact JSON; raises UsageError for what JSON has no word for."""
        try:
            return self._encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            raise UsageError("a value cannot be written as JSON", reason=str(e)) from None

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
        return JSON.encode(value)

    def decode(self, data: bytes) -> T:
        """The value; raises msgspec.ValidationError naming the field."""
        return msgspec.json.decode(data, type=self.type)


RAW: PayloadCodec[bytes] = _Raw()
TEXT: PayloadCodec[str] = _Text()
JSON: PayloadCodec[Any] = _Json()


def msgspec_codec(type_: type[T]) -> PayloadCodec[T]:
    """JSON of a msgspec Struct, dataclass or any type msgspec knows."""
    return _Typed(type_)
