"""Types and parsers of arguments: bounds of numbers, bytes, durations, sizes, times, start positions, tags.

Every number and text of every command is checked before the command runs: by `check_argument`, or by what
its annotation has instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from ringlog.clock import Clock
from ringlog.errors import UsageError
from ringlog.limits import COUNT_MAX, DURATION_MS_MAX
from ringlog.quantities import parse_duration, parse_size
from ringlog.types import Durability

if TYPE_CHECKING:
    from ringlog.client.read.pages import Start, TagFilter

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_START_FORMS = "a number, a time such as 2026-03-01T12:00:00Z or -15m, epoch:seq, start or end"
_DURATION_FORMS = "a duration such as 100ms, 5s or 2h"
_TIME_FORMS = "a time with its zone such as 2026-03-01T12:00:00Z, or a duration before now such as -15m"


def check_argument(_: Any, value: Any) -> None:
    """Raise ValueError for a number below 0 or above COUNT_MAX, and for text that is not UTF-8.

    The messages of the engine have no place for other numbers and texts.
    """
    if isinstance(value, int | float):
        within(0, COUNT_MAX)(_, value)
    elif isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("Text must be UTF-8; under LC_ALL=C set PYTHONUTF8=1.") from None
    elif isinstance(value, tuple | list):
        for each in value:
            check_argument(_, each)
    elif is_dataclass(value):  # Options that several commands have; cyclopts checks them together.
        for name, each in vars(value).items():
            try:
                check_argument(_, each)
            except ValueError as e:
                raise ValueError(f"{name}: {e}") from None


def within(low: float, high: float) -> Callable[[Any, Any], None]:
    """Return a validator of a number from `low` to `high`, or of None."""

    def check(_: Any, value: Any) -> None:
        # A NaN is not within any bounds.
        if value is not None and not low <= value <= high:
            raise ValueError(f"It must be from {low:,} to {high:,}.")

    return check


def _bytes_of(_: Any, tokens: Sequence[Token]) -> bytes:
    return os.fsencode(tokens[0].value)


Limit = Annotated[int, Parameter(name=["--limit", "-n"], validator=within(1, COUNT_MAX))]
"""Number of results, at least 1."""
Count = Annotated[int, Parameter(name=["--count", "-n"], validator=within(1, COUNT_MAX))]
"""Number of jobs, at least 1."""
Rate = Annotated[float, Parameter(validator=within(0.001, 1_000_000_000))]
"""Number of items in a second."""
AnyBytes = Annotated[bytes, Parameter(converter=_bytes_of)]
"""Bytes as the shell passes them, also if they are not UTF-8."""
AnyPath = Annotated[str, Parameter(validator=())]
"""Name of a file, which may have bytes that are not UTF-8."""


def parse_durability(text: str) -> Durability:
    """Parse the name of a durability; raise UsageError."""
    try:
        return Durability.parse(text)
    except ValueError as e:
        raise UsageError(str(e)) from None


def parse_timeout(text: str, name: str) -> float:
    """Parse `5s`, `100ms` or a number of seconds to seconds; raise UsageError unless it is above 0."""
    seconds = _seconds(text, "s", name)
    if not seconds > 0:
        raise UsageError(f"{name} must be longer than 0 s, got {text!r}")
    return seconds


def parse_milliseconds(text: str, name: str) -> int:
    """Parse `7d`, `100ms` or a number of milliseconds to whole milliseconds; raise UsageError."""
    return round(_seconds(text, "ms", name) * 1000)


def _seconds(text: str, unit: str, name: str) -> float:
    try:
        seconds = parse_duration(text, unit)
    except ValueError:
        raise UsageError(f"{name} must be {_DURATION_FORMS}, got {text!r}") from None
    if seconds > DURATION_MS_MAX / 1_000:
        raise UsageError(f"{name} must be at most {DURATION_MS_MAX:,} ms, got {text!r}")
    return seconds


def parse_bytes(text: str, name: str) -> int:
    """Parse `64MiB` or a number of bytes; raise UsageError."""
    try:
        size = parse_size(text)
    except ValueError:
        raise UsageError(f"{name} must be a size such as 67108864, 64MiB or 1GB, got {text!r}") from None
    if size > COUNT_MAX:
        raise UsageError(f"{name} must be at most {COUNT_MAX:,} bytes, got {text!r}")
    return size


def parse_seq(text: str) -> int | None:
    """Parse the digits of a number up to COUNT_MAX; None for other texts."""
    is_short = text.isdecimal() and text.isascii() and len(text) <= len(str(COUNT_MAX))
    return int(text) if is_short and int(text) <= COUNT_MAX else None


def parse_moment(text: str, clock: Clock, name: str, forms: str = _TIME_FORMS) -> datetime:
    """Parse RFC 3339 with a zone, or a duration before now (`-15m` or `15m`); raise UsageError."""
    try:
        ago = parse_duration(text.removeprefix("-"), "none")
    except (ValueError, KeyError):
        return _parse_rfc3339(text, name, forms)
    now = _EPOCH + timedelta(microseconds=clock.now_us())
    try:
        return now - timedelta(seconds=ago)
    except OverflowError:
        raise UsageError(f"{name} must be at most some 2,000 years ago, got {text!r}") from None


def _parse_rfc3339(text: str, name: str, forms: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{name} must be {forms}, got {text!r}") from None
    if moment.tzinfo is None:
        raise UsageError(f"{name} must be a time with its zone, such as Z or +02:00, got {text!r}")
    return moment


def parse_start(text: str, clock: Clock, name: str) -> Start:
    """Parse a start position for the client. A number is inclusive, a cursor exclusive."""
    from ringlog.client.read.pages import EARLIEST, LATEST, Cursor

    if text in {"start", "earliest"}:
        return EARLIEST
    if text in {"end", "latest"}:
        return LATEST
    if (seq := parse_seq(text)) is not None:
        return seq
    if text.replace(":", "", 1).isdecimal() and text.count(":") == 1:
        return Cursor.parse(text)
    return parse_moment(text, clock, name, _START_FORMS)


def rfc3339(at_us: int) -> str:
    """Format microseconds since the epoch as UTC time with milliseconds."""
    moment = _EPOCH + timedelta(microseconds=at_us)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def human_bytes(count: float) -> str:
    """Format a number of bytes with at most three digits: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_count(count: float) -> str:
    """Format a number: `12,345`, or `1.23 M` from one million."""
    if count >= 1e6:
        return f"{count / 1e6:.2f} M"
    return f"{count:,.0f}"


def tags_of(tag: str | None, levels: str | None, name: str = "--tag") -> TagFilter | None:
    """Return the tag filter of two exclusive options; raise UsageError if both are given."""
    if levels is None:
        return tag
    if tag is not None:
        raise UsageError(f"give {name} or --levels: they exclude one another")
    return ["tag", "Levels", levels]
