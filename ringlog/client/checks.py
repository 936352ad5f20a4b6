"""What users give, as the client's inside takes it: whole numbers and names, or a UsageError that says which.

Whoever computes with NumPy has numbers of its types; they are as good as others.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from ringlog.errors import InvalidRequest, UsageError
from ringlog.names import check_topic_name
from ringlog.settings import (
    CALL_SETTINGS,
    GROUP_SETTINGS,
    TOPIC_SETTINGS,
    WHOLE,
    Setting,
    checked,
    require_no_auto_create,
    unknown,
)
from ringlog.types import Durability

WHOLE_MAX = (1 << 63) - 1
_GROUP_LIMITS = {**GROUP_SETTINGS, "min_idle_ms": CALL_SETTINGS["min_idle_ms"]}
_GROUP_OPTIONS = ("create", "dead_letter", "release_on_exit")
_SHOWN_CHARS_MAX = 80


def whole(value: Any, name: str) -> int:
    """A whole number; raises UsageError for everything else, and beyond 63 bits."""
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
            raise UsageError(f"{name} is a whole number", found=_shown(value)) from None
    if not -WHOLE_MAX <= found <= WHOLE_MAX:
        raise UsageError(f"{name} is out of range", found=_shown(found), max=WHOLE_MAX)
    return found


def text(value: Any, name: str) -> str:
    """A string; raises UsageError for everything else."""
    if not isinstance(value, str):
        raise UsageError(f"{name} is a string", found=_shown(value))
    return value


def limits_of_group(limits: Mapping[str, Any]) -> dict[str, Any]:
    """GroupLimits, checked."""
    found: dict[str, Any] = {}
    for name, value in limits.items():
        if name not in _GROUP_LIMITS and name not in _GROUP_OPTIONS:
            raise _usage(unknown(name, [*_GROUP_LIMITS, *_GROUP_OPTIONS], "group"))
        found[name] = _within(_GROUP_LIMITS[name], value) if name in _GROUP_LIMITS else value
    if found.get("dead_letter"):
        try:
            check_topic_name(found["dead_letter"], "dead_letter")
        except InvalidRequest as e:
            raise _usage(e) from None
    return found


def number(value: Any, name: str) -> int:
    """A number of a call, such as `lease_ms`; raises UsageError for what its range does not hold."""
    return _within(CALL_SETTINGS[name], value)


def topic_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a topic as they travel: enumerations by their names, whole numbers as `int`. Raises
    InvalidRequest for an unknown name, with the nearest one, and for a value that is not allowed."""
    named = checked(TOPIC_SETTINGS, {name: _plain(name, value) for name, value in config.items()})
    require_no_auto_create(named)
    return named


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Durability):
        return value.label
    row = TOPIC_SETTINGS.get(name)
    if row is None or row.kind != WHOLE or isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    return operator.index(value)


def _within(row: Setting, value: Any) -> int:
    try:
        return int(row.check(whole(value, row.name)))
    except InvalidRequest as e:
        raise _usage(e) from None


def _usage(error: InvalidRequest) -> UsageError:
    """The same, of an argument."""
    return UsageError(error.message, **error.detail)


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN_CHARS_MAX]
