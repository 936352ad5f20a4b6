"""Routers of a destination: their stored state, and the test whether a forward request may be applied.

Pure.

A router's cursor is stored with its destination. It moves in the same step as the copies (F1). Records that
were forwarded once are therefore never forwarded again, whichever process crashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

from ringlog.errors import InvalidRequest
from ringlog.limits import ROUTER_FILTER_BYTES_MAX, ROUTER_NAME_BYTES_MAX
from ringlog.names import check_topic_name, is_router_name
from ringlog.tags import parse_match, parse_stored_match

AT_LEAST_ONCE = "at_least_once"
EXACTLY_ONCE = "exactly_once"


class RouterFlag(IntFlag):
    """How a router forwards, and the options of its creation."""

    PRESERVE_NODE = 1
    PRESERVE_TAG = 2
    CREATE_DEST = 4
    ALLOW_CYCLE = 8
    EXACTLY_ONCE = 16


_FLAGS = int(sum(RouterFlag))


class RouterPassOutcome(IntEnum):
    """Result of one router's part of a forward request."""

    DONE = 0
    """The copies exist, from this request or an earlier one."""
    GONE = 1
    """There is no such router."""
    ELSEWHERE = 2
    """The router's cursor is not at the start of the request."""
    FULL = 3
    """A cap of the destination refuses the copies."""
    CLOSED = 4
    """The destination accepts nothing at present."""


@dataclass(slots=True)
class Router:
    """One router, as the shard of its destination stores it."""

    number: int
    """Never reused within this data directory."""
    name: str
    source: str
    source_id: int
    source_epoch: int
    flags: int
    filter: str
    """In the format of `filter_text`."""
    cursor: int
    """Position of the source up to which every record was forwarded or skipped."""
    forwarded: int = 0
    """Number of copies since its creation."""

    def advance(self, cursor: int, copies: int) -> None:
        """Move the cursor after copies were appended. A smaller cursor changes nothing."""
        if cursor > self.cursor:
            self.cursor = cursor
            self.forwarded += copies

    def outcome_of(self, start: int, stop: int) -> RouterPassOutcome | None:
        """Return the result of a forward request from `start` to `stop`; None = it may be applied."""
        if self.cursor >= stop:
            return RouterPassOutcome.DONE
        return None if self.cursor == start else RouterPassOutcome.ELSEWHERE


def check_router_name(name: object) -> None:
    """Raise InvalidRequest unless `name` is a legal router name."""
    if not is_router_name(name):
        raise InvalidRequest(
            f"router must be a legal name of at most {ROUTER_NAME_BYTES_MAX} bytes, got {str(name)[:64]!r}",
            field="router", found=str(name)[:64], max=ROUTER_NAME_BYTES_MAX,
            rule="the characters of topic names, and >",
        )  # fmt: skip


def check_router_facts(name: str, source: str, dest: str, flags: int, text: str) -> None:
    """Raise InvalidRequest for facts of a router that no version can have made.

    Every later shard and scheduler reads the stored facts."""
    check_router_name(name)
    check_topic_name(source, "source")
    check_topic_name(dest, "dest")
    if flags & ~_FLAGS:
        raise InvalidRequest(
            f"flags must be from 0 to {_FLAGS}, got {flags}", field="flags", found=flags, max=_FLAGS
        )
    if text:
        parse_stored_match(text, "filter")
    if len(text.encode()) > ROUTER_FILTER_BYTES_MAX:
        raise InvalidRequest(
            f"filter must have at most {ROUTER_FILTER_BYTES_MAX} bytes, got {len(text.encode())}",
            field="filter", max=ROUTER_FILTER_BYTES_MAX,
        )  # fmt: skip


def filter_text(wanted: Any) -> str:
    """Return the stored form of a filter, "" = none. Raises InvalidRequest for an invalid filter."""
    if wanted is None:
        return ""
    text = parse_match(wanted, "filter").text
    if len(text.encode()) > ROUTER_FILTER_BYTES_MAX:
        raise InvalidRequest(
            f"filter must have at most {ROUTER_FILTER_BYTES_MAX} bytes, got {len(text.encode())}",
            field="filter", max=ROUTER_FILTER_BYTES_MAX,
        )  # fmt: skip
    return text
