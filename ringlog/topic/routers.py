"""Routers of a destination: what its shard keeps of each, and when a pass may be applied. Pure.

A router's cursor is a fact of its destination: it moves with the copies, in one step, or not at all. So what
was forwarded once is never forwarded twice, whoever dies when (RT-18, RT-19, RT-30).
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
_EXACT, _PREFIX = "=", "^"


class RouterFlag(IntFlag):
    """How a router forwards, and under which conditions it was made."""

    PRESERVE_NODE = 1
    PRESERVE_TAG = 2
    CREATE_DEST = 4
    ALLOW_CYCLE = 8
    EXACTLY_ONCE = 16


_FLAGS = int(sum(RouterFlag))


class RouterPassOutcome(IntEnum):
    """What becomes of one router's part in a pass."""

    DONE = 0
    """Its copies are there: from this pass, or from one before."""
    GONE = 1
    """There is no such router."""
    ELSEWHERE = 2
    """It is at another position than the pass begins with."""
    FULL = 3
    """A cap of the destination refuses them."""
    CLOSED = 4
    """The destination takes nothing at present."""


@dataclass(slots=True)
class Router:
    """One router, as the shard of its destination keeps it."""

    number: int
    """Never used twice, in this data directory."""
    name: str
    source: str
    source_id: int
    source_epoch: int
    flags: int
    filter: str
    """As `filter_text` says it."""
    cursor: int
    """Position of the source up to which everything was forwarded, or passed over."""
    forwarded: int = 0
    """Copies made since its creation (RT-38)."""

    def advance(self, cursor: int, copies: int) -> None:
        """Copies of everything up to `cursor` are there. What was known already changes nothing."""
        if cursor > self.cursor:
            self.cursor = cursor
            self.forwarded += copies

    def outcome_of(self, start: int, stop: int) -> RouterPassOutcome | None:
        """What becomes of a pass from `start` to `stop`; None = it may be applied."""
        if self.cursor >= stop:
            return RouterPassOutcome.DONE
        return None if self.cursor == start else RouterPassOutcome.ELSEWHERE


def check_router_name(name: object) -> None:
    """Raise InvalidRequest unless `name` is a legal name of a router (N-2)."""
    if not is_router_name(name):
        raise InvalidRequest(
            "not a legal router name", field="router", found=str(name)[:64], max=ROUTER_NAME_BYTES_MAX,
            rule="as a topic's name, with > besides",
        )  # fmt: skip


def check_router_facts(name: str, source: str, dest: str, flags: int, text: str) -> None:
    """Raise InvalidRequest for facts of a router that no version can have made: what is kept is read by every
    later shard and scheduler."""
    check_router_name(name)
    check_topic_name(source, "source")
    check_topic_name(dest, "dest")
    if flags & ~_FLAGS:
        raise InvalidRequest("unknown flags of a router", field="flags", found=flags, max=_FLAGS)
    if text:
        parse_stored_match(text, "filter")
    if len(text.encode()) > ROUTER_FILTER_BYTES_MAX:
        raise InvalidRequest("filter too long", field="filter", max=ROUTER_FILTER_BYTES_MAX)


def filter_text(wanted: Any) -> str:
    """A filter (DL-2) as it is kept, "" = none; raises InvalidRequest for what is none."""
    if wanted is None:
        return ""
    text = parse_match(wanted, "filter").text
    if len(text.encode()) > ROUTER_FILTER_BYTES_MAX:
        raise InvalidRequest("filter too long", field="filter", max=ROUTER_FILTER_BYTES_MAX)
    return text
