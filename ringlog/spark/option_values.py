"""Parsers of option values: text in, validated value out.

Pure. Invalid text raises OptionError with the option.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from ringlog.errors import UsageError
from ringlog.limits import SEQ_MAX, TOPIC_NAME_BYTES_MAX
from ringlog.link.address import parse_url
from ringlog.spark.errors import OptionError
from ringlog.types import Durability

EARLIEST = -2
"""Kafka's number for the first retained record."""
LATEST = -1
"""Kafka's number for the end of the topic."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kb": 1 << 10,
    "m": 1 << 20,
    "mb": 1 << 20,
    "g": 1 << 30,
    "gb": 1 << 30,
}
_TRUE, _FALSE = frozenset({"true", "1", "yes"}), frozenset({"false", "0", "no"})
NEAR_NAMES_MAX = 3
TOPIC_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:-]{{0,{TOPIC_NAME_BYTES_MAX - 1}}}")


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """Offsets in the numbering of Kafka: by topic name, and `default` for all other topics.

    EARLIEST and LATEST are valid offsets. A starting offset is the first seq to read. An ending offset is the
    first seq not to read.
    """

    default: int
    by_topic: tuple[tuple[str, int], ...] = ()

    def of(self, topic: str) -> int:
        """Return the offset of one topic."""
        return dict(self.by_topic).get(topic, self.default)

    @property
    def topics(self) -> tuple[str, ...]:
        """Names of the topics with an offset of their own."""
        return tuple(name for name, _ in self.by_topic)


@dataclass(frozen=True, slots=True)
class TopicTimes:
    """Commit times in microseconds since the epoch: by topic, and `default` (or None) for others."""

    default: int | None = None
    by_topic: tuple[tuple[str, int], ...] = ()

    def of(self, topic: str) -> int | None:
        """Return the time of one topic, or None if it has none."""
        return dict(self.by_topic).get(topic, self.default)

    @property
    def topics(self) -> tuple[str, ...]:
        """Names of the topics with a time of their own."""
        return tuple(name for name, _ in self.by_topic)


def cursor_of(starting_offset: int) -> int:
    """Return the last processed position for a `starting_offset`, which is the first position to read."""
    return starting_offset - 1


def bound_of(ending_offset: int) -> int:
    """Return the last position to read for an `ending_offset`, which is the first position not to read."""
    return ending_offset - 1


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the names in `known` that resemble `name`, ignoring case; at most NEAR_NAMES_MAX."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=NEAR_NAMES_MAX, cutoff=0.6)
    return [by_lower[each] for each in close]


class RawOptions:
    """Unparsed option values, under their canonical names. Unknown names raise OptionError."""

    def __init__(self, raw: Mapping[str, str], known: Iterable[str], refused: Mapping[str, str]) -> None:
        by_lower = {name.lower(): name for name in known}
        self._values: dict[str, str] = {}
        for key, value in raw.items():
            lower = key.lower()
            if lower not in by_lower:
                reject_option(key, by_lower.values(), refused)
            self._values[by_lower[lower]] = str(value)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def parse_option(self, name: str, parse: Callable[[str, str], Any], default: Any) -> Any:
        """Return the parsed value, or `default` if the option is not set."""
        text = self._values.get(name)
        return default if text is None else parse(name, text)


def reject_option(key: str, known: Iterable[str], refused: Mapping[str, str]) -> NoReturn:
    """Raise OptionError for a name: with its entry in `refused`, or with similar names from `known`."""
    lower = key.lower()
    if lower in refused:
        raise OptionError(f"{key} is not supported: {refused[lower]}", option=key)
    if lower.startswith("kafka."):
        raise OptionError(
            f"{key} is a setting of the Kafka client, which this source does not use", option=key
        )
    near = ", ".join(near_names(key, known))
    raise OptionError(f"unknown option {key}; did you mean {near}?" if near else f"unknown option {key}")


def boolean(name: str, text: str) -> bool:
    """Parse a boolean: true, 1, yes, false, 0 or no, in any case."""
    lower = text.strip().lower()
    if lower in _TRUE | _FALSE:
        return lower in _TRUE
    raise OptionError(f"{name} must be true or false", option=name, found=text)


def integer(name: str, text: str, least: int, most: int) -> int:
    """Parse a whole number in [least, most]."""
    try:
        value = int(text.strip())
    except ValueError:
        raise OptionError(f"{name} must be a whole number", option=name, found=text) from None
    if not least <= value <= most:
        raise OptionError(
            f"{name} must be from {least} to {most}", option=name, found=value, min=least, max=most
        )
    return value


def byte_count(name: str, text: str, least: int, most: int) -> int:
    """Parse a number of bytes, plain or with a Spark unit: 64m, 1g, 512kb."""
    lower = text.strip().lower()
    digits = lower.rstrip("bkmg")
    unit = _UNITS.get(lower[len(digits) :])
    if unit is None or not digits.isascii() or not digits.isdigit():
        raise OptionError(
            f"{name} must be a number of bytes, such as 67108864 or 64m", option=name, found=text
        )
    return integer(name, str(int(digits) * unit), least, most)


def choice(name: str, text: str, known: Iterable[str]) -> str:
    """Parse one of the `known` words, in any case."""
    words = list(known)
    if text.strip().lower() in words:
        return text.strip().lower()
    raise OptionError(f"{name} must be one of {', '.join(words)}", option=name, found=text)


def comma_list(name: str, text: str) -> tuple[str, ...]:
    """Parse a comma-separated list, or a JSON array for values that contain commas.

    Duplicates are removed. An empty value raises OptionError.
    """
    if text.lstrip().startswith("["):
        found = _json(name, text)
        if not all(isinstance(each, str) for each in found):
            raise OptionError(f"{name} must be a JSON array of strings", option=name, found=text)
        values = [str(each) for each in found]
    else:
        values = [each.strip() for each in text.split(",")]
    if not values or not all(values):
        raise OptionError(f"{name} must not contain an empty value", option=name, found=text)
    return tuple(dict.fromkeys(values))


def offsets(name: str, text: str, *, default: int, allowed: Mapping[str, int]) -> TopicOffsets:
    """Parse a word of `allowed`, or JSON {topic: offset}.

    In the JSON, -2 and -1 are valid if `allowed` contains them. Topics that the JSON omits get `default`.
    """
    stripped = text.strip()
    if not stripped.startswith("{"):
        return TopicOffsets(allowed[choice(name, stripped, allowed)])
    found: list[tuple[str, int]] = []
    for topic, value in _topic_map(name, stripped):
        if isinstance(value, bool) or not isinstance(value, int):
            raise OptionError(
                f"{name}: an offset must be a whole number", option=name, topic=topic, found=value
            )
        is_place = value in {EARLIEST, LATEST}
        if is_place and value not in allowed.values():
            word = "earliest" if value == EARLIEST else "latest"
            raise OptionError(
                f"{name}: {value} ({word}) is not allowed for this option", option=name, topic=topic
            )
        if not is_place and not 1 <= value <= SEQ_MAX:
            raise OptionError(
                f"{name}: an offset must be from 1 to {SEQ_MAX}", option=name, topic=topic, found=value
            )
        found.append((topic, value))
    return TopicOffsets(default, tuple(found))


def time_us(name: str, value: Any) -> int:
    """Parse epoch milliseconds, or ISO 8601 with a time zone; return microseconds since the epoch."""
    text = str(value).strip()
    if text.isascii() and text.lstrip("-").isdigit() and not isinstance(value, bool):
        return max(integer(name, text, -SEQ_MAX, SEQ_MAX // 1000) * 1000, 0)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(
            f"{name} must be epoch milliseconds or ISO 8601, such as 2026-01-31T12:00:00Z",
            option=name,
            found=text,
        ) from None
    if moment.tzinfo is None:
        raise OptionError(f"{name} must have a time zone, such as Z or +01:00", option=name, found=text)
    return max((moment - _EPOCH) // timedelta(microseconds=1), 0)


def times_by_topic(name: str, text: str) -> TopicTimes:
    """Parse JSON {topic: time}."""
    if not text.strip().startswith("{"):
        raise OptionError(
            f'{name} must be JSON, such as {{"orders": 1767225600000}}', option=name, found=text
        )
    return TopicTimes(None, tuple((topic, time_us(name, value)) for topic, value in _topic_map(name, text)))


def directory(name: str, text: str) -> str:
    """Parse a path on this host; return it as an absolute path."""
    path = text.strip().removeprefix("file://")
    if not path:
        raise OptionError(f"{name} must not be empty", option=name)
    if "://" in path:
        raise OptionError(f"{name} must be a directory on this host, not a URL", option=name, found=text)
    return os.path.abspath(path)


def directory_or_url(name: str, text: str) -> str:
    """Parse a path on this host (returned as an absolute path) or a bucket URL (unchanged)."""
    path = text.strip()
    return path if "://" in path.removeprefix("file://") else directory(name, text)


def regular_expression(name: str, text: str) -> str:
    """Check that the text is a Python regular expression."""
    try:
        re.compile(text)
    except re.error as e:
        raise OptionError(
            f"{name} must be a Python regular expression", option=name, found=text, reason=str(e)
        ) from None
    return text


def tag_list(name: str, text: str) -> tuple[str, ...]:
    """Parse exact tags and prefixes `prefix*`. The tag `*` matches every tagged record."""
    found = comma_list(name, text)
    for tag in found:
        if "*" in tag[:-1]:
            raise OptionError(
                f"{name}: * is allowed only at the end of a tag, for a prefix", option=name, found=tag
            )
    return found


def topic_name(name: str, text: str) -> str:
    """Check that the text is a valid topic name."""
    if not TOPIC_NAME.fullmatch(text):
        raise OptionError(
            f"{name} must be a topic name: 1 to {TOPIC_NAME_BYTES_MAX} characters of A-Z a-z 0-9 . _ : -, "
            "the first a letter or a digit",
            option=name,
            found=text,
        )
    return text


def not_empty(name: str, text: str) -> str:
    """Check that the text contains more than white space."""
    if not text.strip():
        raise OptionError(f"{name} must not be empty", option=name)
    return text


def durability(name: str, text: str) -> Durability:
    """Parse the name of a durability class."""
    try:
        return Durability.parse(text.strip())
    except ValueError as e:
        raise OptionError(f"{name}: {e}", option=name, found=text) from None


def address(name: str, text: str) -> str:
    """Check that the text is an engine address, ringlog://…"""
    try:
        parse_url(text)
    except UsageError as e:
        raise OptionError(
            f"{name} must be an engine address such as ringlog://host:port: {e}", option=name
        ) from None
    return text


def _topic_map(name: str, text: str) -> list[tuple[str, Any]]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise OptionError(f"{name} must name each topic once", option=name, found=text)
        return dict(pairs)

    found = _json(name, text, once)
    if not isinstance(found, dict) or not found:
        raise OptionError(f"{name} must be a JSON object with at least one topic", option=name, found=text)
    return sorted(found.items())


def _json(name: str, text: str, pairs: Any = None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except ValueError as e:
        raise OptionError(f"{name} must be valid JSON", option=name, found=text, reason=str(e)) from None
