"""Checks of arguments. Every public call passes its arguments through here before any other work.

A check returns the value in the form that the client uses, or raises a UsageError with the parameter, the
expectation and the value. Numbers of NumPy types are accepted as numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Any

import numpy as np

from ringlog.client.read.pages import Cursor, Position, Start, TagFilter
from ringlog.errors import InvalidRequest, UsageError
from ringlog.limits import CLAIM_JOBS_MAX, DURATION_MS_MAX, SEQ_MAX
from ringlog.names import check_topic_name, utf8
from ringlog.payload import PayloadCodec
from ringlog.settings import (
    CALL_SETTINGS,
    GROUP_SETTINGS,
    TOPIC_SETTINGS,
    WHOLE,
    Setting,
    check_settings,
    require_no_auto_create,
    unknown_setting_error,
)
from ringlog.tags import parse_match
from ringlog.types import Durability, PayloadKind

WHOLE_MAX = (1 << 63) - 1
_GROUP_LIMITS = {**GROUP_SETTINGS, "min_idle_ms": CALL_SETTINGS["min_idle_ms"]}
_GROUP_OPTIONS = ("create", "dead_letter", "release_on_exit")
_SHOWN_CHARS_MAX = 80
_EPOCH_MAX = _DELIVERIES_MAX = (1 << 32) - 1
_PRODUCER_ID_MAX = (1 << 64) - 1
SECONDS_MAX = 1e9
"""Longest finite timeout in seconds, about thirty years."""


def check_int(value: Any, name: str) -> int:
    """Check a whole number of at most 63 bits. Raises UsageError for any other value."""
    if type(value) is int:
        found = value
    elif isinstance(value, float) and value.is_integer():
        found = int(value)
    else:
        try:
            if isinstance(value, bool):
                raise TypeError
            found = operator.index(value)
        except TypeError:
            raise UsageError(
                f"{name} must be a whole number, got {_short_repr(value)}", found=_short_repr(value)
            ) from None
    if not -WHOLE_MAX <= found <= WHOLE_MAX:
        raise UsageError(
            f"{name} must be from {-WHOLE_MAX} to {WHOLE_MAX}, got {_short_repr(found)}",
            found=_short_repr(found), max=WHOLE_MAX,
        )  # fmt: skip
    return found


def check_int_range(value: Any, name: str, low: int = 0, high: int = WHOLE_MAX) -> int:
    """Check a whole number from `low` to `high`."""
    found = check_int(value, name)
    if found < low:
        raise UsageError(f"{name} must be >= {low}, got {found}")
    if found > high:
        raise UsageError(f"{name} must be <= {high}, got {found}")
    return found


def check_str(value: Any, name: str) -> str:
    """Check a str that can be encoded as UTF-8. Raises UsageError for any other value."""
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a str, got {_short_repr(value)}", found=_short_repr(value))
    if not value.isascii():
        utf8(value, name)
    return value


def check_bool(value: Any, name: str) -> bool:
    """Check a bool. Raises UsageError for any other value, such as "no"."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise UsageError(f"{name} must be True or False, got {_short_repr(value)}")


def check_timeout(value: Any, name: str) -> float | None:
    """Check a timeout in seconds. None and infinity mean no limit, and return None. Raises UsageError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise UsageError(f"{name} must be a number of seconds, got {_short_repr(value)}")
    found = float(value) if -WHOLE_MAX < value < WHOLE_MAX else float(f"{value}")
    if found == inf:
        return None
    if not 0 <= found <= SECONDS_MAX:
        raise UsageError(f"{name} must be from 0 to {SECONDS_MAX:.0f} seconds, got {_short_repr(value)}")
    return found


def check_close_timeout(value: Any, name: str = "timeout") -> float:
    """Check the timeout of a close in seconds. None and infinity become SECONDS_MAX."""
    found = check_timeout(value, name)
    return SECONDS_MAX if found is None else found


def node_name(value: Any, otherwise: str) -> str:
    """Check the name of a worker; None or "" becomes `otherwise`."""
    return otherwise if value is None or value == "" else check_str(value, "node")


def check_sequence(value: Any, name: str) -> Sequence[Any]:
    """Check an iterable and return a sequence. Raises UsageError for text, bytes, mappings and single
    values."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be an iterable such as a list, got {type(value).__name__}")
    return value if isinstance(value, Sequence | np.ndarray) else list(value)  # type: ignore[return-value]


def check_callable(value: Any, name: str) -> None:
    """Raise UsageError if the value is not callable."""
    if not callable(value):
        raise UsageError(f"{name} must be a function, got {_short_repr(value)}")


def check_payload_codec(value: Any, name: str = "payload") -> PayloadCodec[Any]:
    """Check a payload codec. Raises UsageError if it has no encode, decode or kind."""
    try:
        is_codec = callable(value.encode) and callable(value.decode) and isinstance(value.kind, PayloadKind)
    except AttributeError:
        is_codec = False
    if not is_codec:
        raise UsageError(
            f"{name} must be RAW, TEXT, JSON or have encode, decode and kind, got {_short_repr(value)}"
        )
    found: PayloadCodec[Any] = value
    return found


def check_seq(value: Any, name: str) -> int:
    """Check a seq after which to continue. Raises UsageError."""
    return check_int_range(value, name, 0, SEQ_MAX)


def check_cursor(value: Any, name: str) -> Cursor:
    """Check a cursor, or a seq, which becomes a cursor of any epoch."""
    if not isinstance(value, Cursor):
        return Cursor(0, check_seq(value, name))
    return Cursor(
        check_int_range(value.epoch, f"{name}.epoch", 0, _EPOCH_MAX), check_seq(value.seq, f"{name}.seq")
    )


def check_start(value: Any, name: str = "start") -> Start:
    """Check a start position. A seq becomes the cursor before it. Raises UsageError."""
    if isinstance(value, Position):
        return value
    if isinstance(value, datetime):
        return check_start_time(value, name)
    if isinstance(value, str | bytes) or not (isinstance(value, Cursor) or hasattr(value, "__index__")):
        raise UsageError(
            f"{name} must be EARLIEST, LATEST, a Cursor, a position or a datetime, got {_short_repr(value)}"
        )
    if isinstance(value, Cursor):
        return check_cursor(value, name)
    return cursor_before(value, name)


def cursor_before(seq: Any, name: str) -> Cursor:
    """Return the cursor after which the record `seq` is the first."""
    return Cursor(0, max(check_seq(seq, name) - 1, 0))


def check_start_time(value: Any, name: str) -> datetime:
    """Check a datetime with a time zone."""
    if not isinstance(value, datetime):
        raise UsageError(f"{name} must be a datetime with a time zone, got {_short_repr(value)}")
    if value.tzinfo is None:
        raise UsageError(f"{name} must be a datetime with a time zone, got {value}", found=str(value))
    return value


def check_seqs(value: Any, name: str = "seqs") -> list[int]:
    """Check seqs. Returns them ascending and without duplicates."""
    return sorted({check_seq(seq, name) for seq in check_sequence(value, name)})


def pending_options(
    node: Any, idle_ms: Any, min_deliveries: Any, after: Any, limit: Any
) -> tuple[str, int, int, int, int]:
    """Check the arguments of a query of a group's pending list."""
    return (
        check_str(node, "node"), check_int_range(idle_ms, "idle_ms", 0, DURATION_MS_MAX),
        check_int_range(min_deliveries, "min_deliveries", 0, _DELIVERIES_MAX), check_seq(after, "after"),
        check_int_range(limit, "limit", 1),
    )  # fmt: skip


def check_auto_commit_ms(auto_commit_ms: Any) -> int | None:
    """Check the commit interval in milliseconds; None = no automatic commits."""
    return (
        None
        if auto_commit_ms is None
        else check_int_range(auto_commit_ms, "auto_commit_ms", 0, DURATION_MS_MAX)
    )


def producer_id(value: Any) -> int:
    """Check a producer id that the program chose."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _PRODUCER_ID_MAX:
        raise UsageError(f"producer_id must be a whole number from 1 to 2**64 - 1, got {_short_repr(value)}")
    return value


def check_nodes(value: Any, name: str = "node") -> list[str]:
    """Check the nodes to omit: one, several, or None."""
    if value is None:
        return []
    return [
        check_str(one, name) for one in ([value] if isinstance(value, str) else check_sequence(value, name))
    ]


def check_tag_filter(value: Any, name: str = "tags") -> TagFilter | None:
    """Check a tag filter. Raises InvalidRequest."""
    if value is not None:
        parse_match(value, name)
    found: TagFilter | None = value
    return found


def check_group_limits(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Check GroupLimits. Raises UsageError."""
    found: dict[str, Any] = {}
    for name, value in limits.items():
        if name not in _GROUP_LIMITS and name not in _GROUP_OPTIONS:
            raise _usage(unknown_setting_error(name, [*_GROUP_LIMITS, *_GROUP_OPTIONS], "group"))
        if name in _GROUP_LIMITS:
            found[name] = _within(_GROUP_LIMITS[name], value)
        elif name == "dead_letter":
            found[name] = None if value is None else check_str(value, name)
        else:
            found[name] = check_bool(value, name)
    if found.get("dead_letter"):
        try:
            check_topic_name(found["dead_letter"], "dead_letter")
        except InvalidRequest as e:
            raise _usage(e) from None
    return found


def check_call_setting(value: Any, name: str) -> int:
    """Check a numeric setting of a call, such as `lease_ms`. Raises UsageError outside its range."""
    return _within(CALL_SETTINGS[name], value)


def check_topic_settings(config: Mapping[str, object]) -> dict[str, Any]:
    """Check settings of a topic and return them as in messages: enumerations by name, whole numbers as `int`.

    Raises InvalidRequest for an unknown name, with the nearest one, and for an invalid value.
    """
    named = check_settings(TOPIC_SETTINGS, {name: _plain(name, value) for name, value in config.items()})
    require_no_auto_create(named)
    return named


def check_claim_size(most: int) -> None:
    """Check the number of jobs of a claim. Raises UsageError."""
    if not 1 <= most <= CLAIM_JOBS_MAX:
        raise UsageError(
            f"max must be from 1 to {CLAIM_JOBS_MAX}, got {most}", found=most, max=CLAIM_JOBS_MAX
        )


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Durability):
        return value.label
    row = TOPIC_SETTINGS.get(name)
    if row is None or row.kind != WHOLE or isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    return operator.index(value)


def _within(row: Setting, value: Any) -> int:
    try:
        return int(row.check(check_int(value, row.name)))
    except InvalidRequest as e:
        raise _usage(e) from None


def _usage(error: InvalidRequest) -> UsageError:
    """Convert an InvalidRequest to a UsageError of an argument."""
    return UsageError(error.message, **error.detail)


def _short_repr(value: Any) -> str:
    return repr(value)[:_SHOWN_CHARS_MAX]
