"""Values as a person writes them: sizes with units, durations with units, words for true and false."""

from __future__ import annotations

import re

_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ]*)\s*$")
_DIGITS_MAX = 64
_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def parse_size(text: str) -> int:
    """Return the bytes of `64MiB`, `1GB` or a plain number. Raises ValueError for other texts."""
    match = _QUANTITY.match(text)
    if not match or match[2] not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size such as 67108864, 64MiB or 1GB")
    if len(match[1]) > _DIGITS_MAX:
        raise ValueError(f"{text[:_DIGITS_MAX]!r}... has more than {_DIGITS_MAX} digits")
    number = (
        float(match[1]) * _SIZE_UNITS[match[2]] if "." in match[1] else int(match[1]) * _SIZE_UNITS[match[2]]
    )
    if number != int(number):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(number)


def parse_duration(text: str, unit: str = "s") -> float:
    """Return the seconds of `100ms`, `5s`, `2h`, or of a plain number in `unit`. Raises ValueError."""
    match = _QUANTITY.match(text)
    if not match or (match[2] or unit) not in _TIME_UNITS:
        raise ValueError(f"{text!r} is not a duration such as 100ms, 5s or 2h")
    if len(match[1]) > _DIGITS_MAX:
        raise ValueError(f"{text[:_DIGITS_MAX]!r}... has more than {_DIGITS_MAX} digits")
    return float(match[1]) * _TIME_UNITS[match[2] or unit]


def parse_boolean(text: str) -> bool:
    """Return the truth value of `true`, `on`, `1` or their opposites. Raises ValueError for other texts."""
    try:
        return _WORDS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{text!r} is not true or false") from None
