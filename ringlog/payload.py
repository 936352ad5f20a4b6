"""Payload codecs: convert a program's values to bytes and back, and mark the kind of payload for readers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from ringlog.errors import UsageError
from ringlog.names import utf8
from ringlog.types import PayloadKind

if TYPE_CHECKING:
    import typing_extensions

    V = typing_extensions.TypeVar("V", default=bytes | None)
else:
    V = TypeVar("V")  # Type of decoded payloads: bytes without a codec.
T = TypeVar("T")
_PATH_CHARS_MAX = 128


_encode_json = msgspec.json.Encoder().encode


def json_of(value: Any, name: str) -> bytes:
    """Return compact JSON.

    Raises UsageError for a value that JSON cannot represent. For NaN and infinities it names the path.
    """
    try:
        encoded = _encode_json(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise UsageError(f"{name} cannot be written as JSON", reason=str(e)) from None
    # msgspec writes NaN and infinities as null, and they would be read as None.
    if b"null" in encoded:
        _require_finite(value, name)
    return encoded


def _is_finite(plain: Any) -> bool:
    """Return whether all floats are finite. False also for values that are nested too deeply to check."""
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
            raise UsageError(f"{name} cannot be written as JSON: {part}{at} is not a JSON number")
        if isinstance(part, dict):
            left += [(f"{path}.{key}" if path else str(key), inner) for key, inner in part.items()]
        elif isinstance(part, list | tuple):
            left += [(f"{path}[{at}]", inner) for at, inner in enumerate(part)]


class PayloadCodec(Protocol[T]):
    """Interface of payload codecs. Any object with these three attributes can be a producer's `payload`."""

    @property
    def kind(self) -> PayloadKind:
        """Kind of the payload bytes, which frames carry for readers."""
        ...

    def encode(self, value: T, /) -> bytes | None:
        """Return the payload of a value; None for a null payload."""
        ...

    def decode(self, data: bytes, /) -> T:
        """Return the value of a payload. Not called for a null payload, whose value is None."""
        ...


class _Raw:
    kind = PayloadKind.BYTES

    def encode(self, value: bytes | None) -> bytes | None:
        """Return any bytes-like object as bytes, and None for a null. Raises UsageError for other types."""
        if type(value) is bytes or value is None:
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise UsageError(
            "a payload must be bytes; use payload=TEXT or payload=JSON for other types",
            found=type(value).__name__,
        )

    def decode(self, data: bytes) -> bytes:
        """Return the bytes unchanged."""
        return data


class _Text:
    kind = PayloadKind.TEXT

    def encode(self, value: str | None) -> bytes | None:
        """Return UTF-8, and None for a null. Raises UsageError for other types than str."""
        if value is None:
            return None
        if not isinstance(value, str):
            raise UsageError("a TEXT payload is a str", found=type(value).__name__)
        return utf8(value, "data")

    def decode(self, data: bytes) -> str:
        """Return the text."""
        return data.decode()


class _Json:
    kind = PayloadKind.JSON

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder().decode

    def __reduce__(self) -> str:
        return "JSON"

    def encode(self, value: Any) -> bytes:
        """Return compact JSON. None becomes `null`, which is not a null payload.

        Raises UsageError for a value that JSON cannot represent.
        """
        return json_of(value, "a value")

    def decode(self, data: bytes) -> Any:
        """Return the decoded value."""
        return self._decode(data)


@dataclass(frozen=True)
class _Typed(Generic[T]):
    """JSON of one type that msgspec supports. The payload is validated when it is decoded."""

    type: type[T]
    kind: PayloadKind = PayloadKind.JSON

    def encode(self, value: T) -> bytes:
        """Return compact JSON; raises UsageError."""
        return json_of(value, "a value")

    def decode(self, data: bytes) -> T:
        """Return the value. Raises msgspec.ValidationError, which names the field."""
        return msgspec.json.decode(data, type=self.type)


RAW: PayloadCodec[bytes | None] = _Raw()
TEXT: PayloadCodec[str | None] = _Text()
JSON: PayloadCodec[Any] = _Json()


def msgspec_codec(type_: type[T]) -> PayloadCodec[T]:
    """Return a JSON codec for a msgspec Struct, a dataclass, or any other type that msgspec supports.

    Args:
        type_: Type of the payloads.

    Returns:
        A codec for `payload=`.

    Example:
        class Order(msgspec.Struct):
            id: int

        producer = client.producer("orders", payload=ringlog.msgspec_codec(Order))
    """
    return _Typed(type_)
