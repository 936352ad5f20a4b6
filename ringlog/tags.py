"""Which records a filter of tags selects: one matcher for readers, groups, routers and deletes (DL-2..DL-4).

A filter asks for one tag, for all that begin so, or for all whose levels match: a pattern as of MQTT, where
`/` stands between levels, `+` for any one level and a `#` at the end for all that follow, also none. What
begins with `$` is matched only by patterns that begin with it, too. Records without a tag are matched by
nothing.
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
    """Which tags are selected."""

    tag: bytes
    """The one; or how all of them begin."""
    is_prefix: bool = False
    levels: str = ""
    """A pattern that they match besides."""

    @property
    def test(self) -> Callable[[bytes], bool]:
        """Is this tag selected? b"" = no tag."""
        tag = self.tag
        if self.levels:
            matches = _matcher(self.levels)
            return lambda found: matches(found) is not None
        if self.is_prefix:
            return lambda found: found.startswith(tag) and found != b""
        return lambda found: found == tag and found != b""

    @property
    def text(self) -> str:
        """As it is kept: `=` and a tag, `^` and how tags begin, or `~` and a pattern."""
        if self.levels:
            return _LEVELS + self.levels
        return (_PREFIX if self.is_prefix else _EXACT) + self.tag.decode()


def parse_match(wanted: Any, field: str = "match") -> TagMatch:
    """Read a filter as requests have it; raises InvalidRequest naming what is wrong."""
    if isinstance(wanted, str):
        wanted = ("tag", "Glob" if wanted.endswith("*") else "Eq", wanted)
    if not isinstance(wanted, list | tuple) or len(wanted) != 3:
        raise InvalidRequest("not a filter of tags", field=field, found=repr(wanted)[:128], forms=FORMS)
    name, operator, value = wanted
    is_known = isinstance(operator, str) and operator in _OPERATORS
    if name != "tag" or not is_known or not isinstance(value, str):
        raise InvalidRequest("not a filter of tags", field=field, found=repr(wanted)[:128], forms=FORMS)
    if operator == "Glob" and not value.endswith("*"):
        raise InvalidRequest("a Glob pattern ends in *", field=field, found=value[:64])
    return parse_stored_match(_OPERATORS[operator] + (value[:-1] if operator == "Glob" else value), field)


def parse_stored_match(text: str, field: str = "match") -> TagMatch:
    """What a filter selects that is kept as `text`; raises InvalidRequest for what was never kept."""
    kind, value = text[:1], text[1:]
    if kind not in (_EXACT, _PREFIX, _LEVELS):
        raise InvalidRequest("not a filter of tags", field=field, found=text[:64], forms=FORMS)
    try:
        tag = value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("a tag is not text", field=field) from None
    if kind != _LEVELS:
        return TagMatch(tag, kind == _PREFIX)
    if len(tag) > TAG_BYTES_MAX:
        raise InvalidRequest("a pattern is too long", field=field, bytes=len(tag), max=TAG_BYTES_MAX)
    return TagMatch(_literal(_levels_of(value, field)).encode(), True, value)


def request_form(text: str) -> list[str] | None:
    """A kept filter as requests have it; None for "", which is none."""
    if not text:
        return None
    operator = next(name for name, kind in _OPERATORS.items() if kind == text[0])
    return ["tag", operator, text[1:] + "*" if operator == "Glob" else text[1:]]


def _levels_of(pattern: str, field: str) -> list[str]:
    """Raises InvalidRequest for a pattern with a + or # that is not a whole level, or a # before the end."""
    levels = pattern.split("/")
    for at, level in enumerate(levels):
        is_wild = level == "+" or (level == "#" and at == len(levels) - 1)
        if not is_wild and ("+" in level or "#" in level):
            raise InvalidRequest(
                "in a pattern + is a whole level, and # the last one", field=field, found=pattern[:64]
            )
    if not pattern:
        raise InvalidRequest("a pattern is empty", field=field)
    return levels


def _literal(levels: list[str]) -> str:
    """How everything begins that matches. `a/#` matches `a`, too."""
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
