"""Validation of the names of topics and routers, and of text that must be UTF-8. Pure."""

from __future__ import annotations

import re

from ringlog.errors import InvalidRequest, UsageError
from ringlog.limits import ROUTER_NAME_BYTES_MAX, TOPIC_NAME_BYTES_MAX

_TOPIC_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:-]{{0,{TOPIC_NAME_BYTES_MAX - 1}}}")
_ROUTER_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:>-]{{0,{ROUTER_NAME_BYTES_MAX - 1}}}")
_RULE = "1 to 255 of A-Z a-z 0-9 . _ : - and the first a letter or a digit"
_SHOWN_CHARS_MAX = 64


def utf8(text: str, name: str) -> bytes:
    """Return the argument `name` as UTF-8. Raises UsageError for a text with a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise UsageError(
            f"{name} must be text that UTF-8 can hold, got a lone surrogate at character {e.start}",
            found=ascii(text[e.start : e.start + 8]),
        ) from None


def is_topic_name(name: object) -> bool:
    """Return whether `name` is a valid topic name. Reads and deletes treat an invalid name as no topic."""
    return isinstance(name, str) and _TOPIC_NAME.fullmatch(name) is not None


def is_router_name(name: object) -> bool:
    """Return whether `name` is a valid router name."""
    return isinstance(name, str) and _ROUTER_NAME.fullmatch(name) is not None


def check_topic_name(name: object, field: str = "topic") -> None:
    """Raise InvalidRequest, which names `field`, unless `name` is a valid topic name."""
    if not isinstance(name, str):
        raise InvalidRequest("a topic name must be a string", field=field, found=type(name).__name__)
    if _TOPIC_NAME.fullmatch(name) is None:
        raise InvalidRequest(
            "invalid topic name", field=field, rule=_RULE, found=name[:_SHOWN_CHARS_MAX], chars=len(name)
        )
