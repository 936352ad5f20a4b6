"""Tag filters: one matcher for readers, consumer groups, routers and deletes.

A filter selects one tag, all tags with a prefix, or all tags that match an MQTT topic filter. In the latter
`/` separates levels, `+` matches one level, and `#` at the end matches any number of levels, also none. A
topic filter that starts with `+` or `#` does not match tags that start with `$`; the empty prefix does. Tag
filters never match untagged records.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from ringlog.errors import InvalidRequest
from ringlog.limits import TAG_BYTES_MAX

FORMS = 'a tag, a prefix ending in *, or ["tag", "Eq" | "Glob" | "Levels", text]'
_EXACT, _PREFIX, _LEVELS = "=", "^", "~"
_OPERATORS = {"Eq": _EXACT, "Glob": _PREFIX, "Levels": _LEVELS}


class TagMatch(NamedTuple):
    """A parsed tag filter."""

    tag: bytes
    """The exact tag, or the prefix of all matching tags."""
    is_prefix: bool = False
    levels: str = ""
    """An MQTT pattern that tags must match as well; empty if there is none."""

    @property
    def test(self) -> Callable[[bytes], bool]:
        """Predicate on an encoded tag; b"" = untagged, which never matches."""
        tag = self.tag
        if self.levels:
            matches = _matcher(self.levels)
            return lambda found: matches(found) is not None
        if self.is_prefix:
            return lambda found: found.startswith(tag) and found != b""
        return lambda found: found == tag and found != b""

    @property
    def text(self) -> str:
        """Stored form: `=` and a tag, `^` and a prefix, or `~` and a pattern."""
        if self.levels:
            return _LEVELS + self.levels
        return (_PREFIX if self.is_prefix else _EXACT) + self.tag.decode()


def parse_match(wanted: Any, field: str = "match") -> TagMatch:
    """Parse a filter in the form of requests. Raises InvalidRequest, which names the error."""
    if isinstance(wanted, str):
        wanted = ("tag", "Glob" if wanted.endswith("*") else "Eq", wanted)
    if not isinstance(wanted, list | tuple) or len(wanted) != 3:
        raise InvalidRequest("invalid tag filter", field=field, found=repr(wanted)[:128], forms=FORMS)
    name, operator, value = wanted
    is_known = isinstance(operator, str) and operator in _OPERATORS
    if name != "tag" or not is_known or not isinstance(value, str):
        raise InvalidRequest("invalid tag filter", field=field, found=repr(wanted)[:128], forms=FORMS)
    if operator == "Glob" and not value.endswith("*"):
        raise InvalidRequest("a Glob pattern ends in *", field=field, found=value[:64])
    return parse_stored_match(_OPERATORS[operator] + (value[:-1] if operator == "Glob" else value), field)


def parse_stored_match(text: str, field: str = "match") -> TagMatch:
    """Parse a filter in its stored form. Raises InvalidRequest for an invalid one."""
    kind, value = text[:1], text[1:]
    if kind not in (_EXACT, _PREFIX, _LEVELS):
        raise InvalidRequest("invalid tag filter", field=field, found=text[:64], forms=FORMS)
    try:
        tag = value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("a tag must be UTF-8 text", field=field) from None
    if kind != _LEVELS:
        return TagMatch(tag, kind == _PREFIX)
    if len(tag) > TAG_BYTES_MAX:
        raise InvalidRequest(
            f"a tag pattern must have at most {TAG_BYTES_MAX} bytes",
            field=field,
            bytes=len(tag),
            max=TAG_BYTES_MAX,
        )
    return TagMatch(_literal(_levels_of(value, field)).encode(), True, value)


def request_form(text: str) -> list[str] | None:
    """Return a stored filter in the form of requests; None for "", which means no filter."""
    if not text:
        return None
    operator = next(name for name, kind in _OPERATORS.items() if kind == text[0])
    return ["tag", operator, text[1:] + "*" if operator == "Glob" else text[1:]]


def _levels_of(pattern: str, field: str) -> list[str]:
    """Split a pattern into levels.

    Raises InvalidRequest if it is empty, if + or # is only a part of a level, or if # is not the last level.
    """
    levels = pattern.split("/")
    for at, level in enumerate(levels):
        is_wild = level == "+" or (level == "#" and at == len(levels) - 1)
        if not is_wild and ("+" in level or "#" in level):
            raise InvalidRequest(
                "in a tag pattern + must be a whole level, and # must be the last level",
                field=field,
                found=pattern[:64],
            )
    if not pattern:
        raise InvalidRequest("tag pattern must not be empty", field=field)
    return levels


def _literal(levels: list[str]) -> str:
    """Return the literal prefix of everything that the pattern matches. `a/#` also matches `a`."""
    at = next((n for n, level in enumerate(levels) if level in "+#" and level), len(levels))
    begin = "/".join(levels[:at])
    return begin + "/" if 0 < at < len(levels) and levels[at] == "+" else begin


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> Callable[[bytes], Any]:
    levels = pattern.split("/")
    has_rest = levels[-1] == "#"
    parts = ["[^/]*" if level == "+" else re.escape(level) for level in levels[: -1 if has_rest else None]]
    rule = "/".join(parts)
    if has_rest:
        rule = f"{rule}(?:/.*)?" if parts else ".*"
    if levels[0] in ("+", "#"):
        rule = rf"(?!\$){rule}"
    found = re.compile(rf"(?!\Z)(?:{rule})".encode(), re.DOTALL)
    return found.fullmatch
