"""Options in words: `5s`, `-15m`, RFC 3339, a number, `start`, `end`, `epoch:seq`; and filters of tags."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ringlog.clock import Clock
from ringlog.config import parse_duration
from ringlog.errors import UsageError

if TYPE_CHECKING:
    from ringlog.client.pages import Start, TagFilter

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_START_FORMS = "a number, a time such as 2026-03-01T12:00:00Z or -15m, epoch:seq, start or end"


def parse_timeout(text: str) -> float:
    """Seconds of `5s`, `100ms` or a bare number of seconds; raises UsageError unless it is above 0."""
    try:
        seconds = parse_duration(text, "s")
    except ValueError as e:
        raise UsageError(str(e)) from None
    if not seconds > 0:
        raise UsageError("a timeout is longer than nothing", found=text)
    return seconds


def parse_milliseconds(text: str) -> int:
    """Whole milliseconds of `7d`, `100ms` or a bare number of milliseconds; raises UsageError."""
    try:
        return round(parse_duration(text, "ms") * 1000)
    except ValueError as e:
        raise UsageError(str(e)) from None


def parse_moment(text: str, clock: Clock) -> datetime:
    """An instant: RFC 3339 with its zone, or a duration before now (`-15m`, `2h` ago); raises UsageError."""
    try:
        ago = parse_duration(text.removeprefix("-"), "none")
    except (ValueError, KeyError):
        return _parse_rfc3339(text)
    now = _EPOCH + timedelta(microseconds=clock.now_us())
    try:
        return now - timedelta(seconds=ago)
    except OverflowError:
        raise UsageError("that long ago there was no calendar", found=text) from None


def _parse_rfc3339(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is not {_START_FORMS}") from None
    if moment.tzinfo is None:
        raise UsageError("a time needs its zone, such as Z or +02:00", found=text)
    return moment


def parse_start(text: str, clock: Clock) -> Start:
    """Where to begin reading. A number is the first record wanted, not the one before it."""
    from ringlog.client.pages import EARLIEST, LATEST, Cursor

    if text in {"start", "earliest"}:
        return EARLIEST
    if text in {"end", "latest"}:
        return LATEST
    if text.isdecimal() and text.isascii():
        return max(int(text) - 1, 0)
    if text.replace(":", "", 1).isdecimal() and text.count(":") == 1:
        return Cursor.parse(text)
    return parse_moment(text, clock)


def rfc3339(at_us: int) -> str:
    """UTC time of microseconds since the epoch, to the millisecond."""
    moment = _EPOCH + timedelta(microseconds=at_us)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def human_bytes(count: float) -> str:
    """`1.5 MiB`: three digits at most."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_count(count: float) -> str:
    """`12,345`, and `1.23 M` from a million on."""
    if count >= 1e6:
        return f"{count / 1e6:.2f} M"
    return f"{count:,.0f}"


def tags_of(tag: str | None, levels: str | None, name: str = "--tag") -> TagFilter | None:
    """The filter that these two options stand for; raises UsageError for both at once."""
    if levels is None:
        return tag
    if tag is not None:
        raise UsageError(f"{name} and --levels exclude one another")
    return ["tag", "Levels", levels]
