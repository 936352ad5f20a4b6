"""What users give, as the client's inside takes it: whole numbers and names, or a UsageError that says which.

Whoever computes with NumPy has numbers of its types; they are as good as others.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from ringlog.errors import UsageError

WHOLE_MAX = (1 << 63) - 1
_WHOLE_LIMITS = ("max_in_flight", "member_max_in_flight", "min_idle_ms", "max_deliveries")
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
    found = {name: whole(value, name) if name in _WHOLE_LIMITS else value for name, value in limits.items()}
    if "dead_letter" in found:
        found["dead_letter"] = text(found["dead_letter"], "dead_letter")
    return found


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN_CHARS_MAX]
