"""Bodies of messages with one field, or nested field, at an extreme value.

A body is the encoded form, not a message: decoding refuses half of these, and the others reach the actor. All
other fields have plain values, so that the objects in the request exist.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

Path = tuple[int, ...]
_encode = msgspec.msgpack.encode
SURROGATE = msgspec.Raw(b"\xa3\xed\xa0\x80")
"""Text that Python can represent and UTF-8 cannot."""
EXTREMES: Mapping[str, Any] = {
    "-1": -1, "-2**31": -(1 << 31), "-2**63": -(1 << 63), "0": 0, "2**31": 1 << 31, "2**32": 1 << 32,
    "2**53": 1 << 53, "2**63-1": (1 << 63) - 1, "2**63": 1 << 63, "2**64-1": (1 << 64) - 1,
    "2.0**64": 2.0**64, "nan": float("nan"), "true": True, "null": None, "no text": "", "NUL": "t\0x",
    "a path": "../../x", "long text": msgspec.Raw(_encode("x" * 70_000)),
    "surrogate": SURROGATE, "no bytes": b"", "odd bytes": b"\xff" * 9,
    "huge numbers": b"\xff" * 64, "many numbers": bytes(16_000), "no list": [],
    "huge list": msgspec.Raw(_encode([1] * 70_000)), "nested": [[[[]]]], "map": {"a": -1},
    "an operator": ["tag", "Glob", "*"],
}  # fmt: skip
"""2**64 itself is missing: MessagePack cannot encode it."""


def plain_body(kind: type[msgspec.Struct], known: Mapping[str, Any]) -> list[Any]:
    """Return a valid body. `known` has values for fields, by field name."""
    hints = typing.get_type_hints(kind)
    return [_known(field.name, hints[field.name], known) for field in msgspec.structs.fields(kind)]


def _known(name: str, hint: Any, known: Mapping[str, Any]) -> Any:
    """Return the known value of a field by its name, unless its type is compound: then build a plain one."""
    is_compound = len(_field_paths(hint)) > 1
    return _plain(hint, known) if name not in known or is_compound else known[name]


def extreme_bodies(
    kind: type[msgspec.Struct], known: Mapping[str, Any], extremes: Mapping[str, Any] = EXTREMES
) -> Iterator[tuple[str, list[Any]]]:
    """Yield (description, body) for each place with each extreme value; description: `2.0.1=-1`."""
    plain = plain_body(kind, known)
    for field_path in paths_of(kind):
        for name, value in extremes.items():
            yield f"{'.'.join(map(str, field_path))}={name}", _with(plain, field_path, value)


def paths_of(kind: type[msgspec.Struct]) -> list[Path]:
    """Return every place of a body: its fields, and the fields within them."""
    hints = typing.get_type_hints(kind)
    return [
        (n, *path)
        for n, field in enumerate(msgspec.structs.fields(kind))
        for path in _field_paths(hints[field.name])
    ]


def _field_paths(hint: Any) -> list[Path]:
    kind = _bare(hint)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [(), *paths_of(kind)]
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [(), *((0, *path) for path in _field_paths(parts[0]))]
    if origin is tuple:
        return [(), *((n, *path) for n, part in enumerate(parts) for path in _field_paths(part))]
    return [()]


def _bare(hint: Any) -> Any:
    """Return a type without its annotations, and without None."""
    if typing.get_origin(hint) is typing.Annotated:
        return _bare(typing.get_args(hint)[0])
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        return _bare(next(part for part in typing.get_args(hint) if part is not type(None)))
    return hint


def _plain(hint: Any, known: Mapping[str, Any]) -> Any:
    kind = _bare(hint)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return plain_body(kind, known)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [_plain(parts[0], known)]
    if origin is tuple:
        return [_plain(part, known) for part in parts]
    simple = {str: "x", int: 1, bool: False, bytes: b"", float: 0.0, Any: None}
    return simple.get(kind, {})


def _with(body: list[Any], path: Path, value: Any) -> list[Any]:
    """Return a copy of the body with another value at a place."""
    at, *inside = path
    changed = list(body)
    changed[at] = _with(body[at], tuple(inside), value) if inside else value
    return changed
