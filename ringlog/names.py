"""What topics and routers may be called, and which text can travel at all. Pure."""

from __future__ import annotations

import re

from ringlog.errors import InvalidRequest, UsageError
from ringlog.limits import ROUTER_NAME_BYTES_MAX, TOPIC_NAME_BYTES_MAX

_TOPIC_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:-]{{0,{TOPIC_NAME_BYTES_MAX - 1}}}")
_ROUTER_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:>-]{{0,{ROUTER_NAME_BYTES_MAX - 1}}}")
_RULE = "1 to 255 of A-Z a-z 0-9 . _ : - and the first a letter or a digit"
_SHOWN_CHARS_MAX = 64


def utf8(text: str, name: str) -> bytes:
    """The argument `name` as it travels; raises UsageError for text that UTF-8 cannot hold."""
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise UsageError(
            f"{name} must be text that UTF-8 can hold, got a lone surrogate at character {e.start}",
            found=ascii(text[e.start : e.start + 8]),
        ) from None


def is_topic_name(name: object) -> bool:
    """Say whether `name` is a legal topic name; reads and deletes treat others as absent topics."""
    return isinstance(name, str) and _TOPIC_NAME.fullmatch(name) is not None


def is_router_name(name: object) -> bool:
    """Say whether `name` is a legal name of a router (N-2)."""
    return isinstance(name, str) and _ROUTER_NAME.fullmatch(name) is not None


def check_topic_name(name: object, field: str = "topic") -> None:
    """Raise InvalidRequest, naming `field`, unless `name` is a legal topic name."""
    if not isinstance(name, str):
        raise InvalidRequest("a topic name must be a string", field=field, found=type(name).__name__)
    if _TOPIC_NAME.fullmatch(name) is None:
        raise InvalidRequest(
            "not a legal topic name", field=field, rule=_RULE, found=name[:_SHOWN_CHARS_MAX], chars=len(name)
        )
