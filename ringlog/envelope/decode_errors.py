"""Errors of decoding: bytes that are no envelope, and the exact fault of a message with an invalid field."""

from __future__ import annotations

import contextlib
import re
import typing
from functools import lru_cache
from typing import Any

import msgspec

from ringlog.errors import InvalidRequest

_FOUND_CHARS_MAX = 64
_FAULT = re.compile(r"Expected (?P<wanted>.*?)(?: - at (?P<key>`key` in )?`(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]")
_NOTHING = object()
_parts = msgspec.msgpack.Decoder(list[msgspec.Raw])


class EnvelopeInvalid(InvalidRequest):
    """The bytes are not an envelope of this protocol."""

    corr: int = 0
    """Correlation id under which the sender waits for a reply; 0 = it could not be read."""
    version: int = 0
    """Protocol version of the sender if it differs from ours, else 0. The error reply must use this
    version."""


class MessageInvalid(EnvelopeInvalid):
    """The body of an envelope is no message: a field is missing, has the wrong type, or is out of range."""


def message_invalid(
    name: str, kind: type[msgspec.Struct], corr: int, body: bytes | memoryview | msgspec.Raw, error: Exception
) -> MessageInvalid:
    """Return the error for a body that does not decode. It names field, value and limit where they are
    known."""
    found = _FAULT.fullmatch(str(error)) if isinstance(error, msgspec.ValidationError) else None
    steps = _STEP.findall(found["path"] or "") if found is not None else []
    if isinstance(error, UnicodeDecodeError) and (field := _text_field(kind, body)):
        invalid = MessageInvalid(f"{field} must be UTF-8 text", kind=name, field=field, limit="UTF-8")
        invalid.corr = corr
        return invalid
    if found is None or not steps:
        invalid = MessageInvalid("malformed message", kind=name, reason=str(error))
        invalid.corr = corr
        return invalid
    field, wanted = _field(kind, steps), found["wanted"].replace("`", "").replace("int >", ">")
    wanted = wanted.replace("int <", "<")
    detail: dict[str, Any] = {"kind": name, "field": field, "limit": wanted.partition(", got ")[0]}
    value = _NOTHING if found["key"] else _value(body, steps)
    if ", got " in wanted or value is _NOTHING:
        text = f"{field} must be {wanted}"
    else:
        detail["found"] = value if isinstance(value, int | float) else str(value)[:_FOUND_CHARS_MAX]
        text = f"{field} must be {wanted}, got {str(value)[:_FOUND_CHARS_MAX]}"
    invalid = MessageInvalid(text, **detail)
    invalid.corr = corr
    return invalid


@lru_cache(maxsize=512)
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct type that `hint` is or contains (as an element type); None if there is none."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next((found for part in typing.get_args(hint) if (found := _struct_in(part)) is not None), None)


def _field(kind: type[msgspec.Struct], steps: list[str]) -> str:
    """Return the field at a path of indexes, in the form that a program uses: `feeds[3].topic`."""
    path, inside, current = "", kind, True
    for step in steps:
        names = inside.__struct_fields__
        if current and step.isdigit() and int(step) < len(names):
            name = names[int(step)]
            path += f".{name}" if path else name
            found, current = _struct_in(_hints(inside)[name]), _is_struct(_hints(inside)[name])
            inside = found or inside
        else:
            path += f"[{step}]"
            current = inside is not kind
    return path


def _is_struct(hint: Any) -> bool:
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    return (isinstance(hint, type) and issubclass(hint, msgspec.Struct)) or (
        len(parts) == 1 and typing.get_origin(hint) is not list and _is_struct(parts[0])
    )


def _text_field(kind: type[msgspec.Struct], body: bytes | memoryview | msgspec.Raw) -> str:
    """Return the name of the first field whose text is not UTF-8; "" = unknown."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        for name, value in zip(kind.__struct_fields__, _parts.decode(body), strict=False):
            try:
                msgspec.msgpack.decode(value)
            except UnicodeDecodeError:
                return name
    return ""


def _value(body: bytes | memoryview | msgspec.Raw, steps: list[str]) -> Any:
    """Return the value at a path of indexes; `_NOTHING` if the body cannot be decoded that far."""
    try:
        value: Any = msgspec.msgpack.decode(bytes(body))
        for step in steps:
            value = value[int(step)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, LookupError, TypeError):
        return _NOTHING
    return value
