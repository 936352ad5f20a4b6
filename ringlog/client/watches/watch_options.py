"""Options of a watch, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ringlog.client.read.pages import EARLIEST, Cursor, Start, TagFilter, node_filter
from ringlog.client.requests.validation import (
    check_bool,
    check_int_range,
    check_nodes,
    check_sequence,
    check_start,
    check_str,
    check_tag_filter,
)
from ringlog.client.watches.events import decode_cursors
from ringlog.errors import UsageError
from ringlog.limits import (
    CREDIT_DEFAULT,
    CREDIT_MAX,
    FEEDS_PER_SUBSCRIPTION_MAX,
    READ_BYTES_DEFAULT,
    READ_BYTES_MAX,
    WATCH_LIMIT_DEFAULT,
    WATCH_LIMIT_MAX,
)

Topics: TypeAlias = str | Iterable[str] | Mapping[str, Start]
Consistency: TypeAlias = Literal["eventual", "strong"]
WILDCARD = "*"


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Checked options of a watch."""

    exact: dict[str, Start]
    patterns: dict[str, Start]
    tags: TagFilter | None
    node: str | list[str] | None
    limit: int
    max_bytes: int
    consistency: Consistency
    credit: int
    lenient: bool
    cursors: dict[str, Cursor]


def watch_options(
    topics: Topics, *, start: Start = EARLIEST, cursor: str = "", tags: TagFilter | None = None,
    node: str | list[str] | None = None, limit: int = 0, max_bytes: int = 0,
    consistency: Consistency = "eventual", credit: int = CREDIT_DEFAULT, lenient: bool = False,
) -> WatchOptions:  # fmt: skip
    """Check the arguments of `watch`. Raises UsageError or InvalidRequest."""
    if isinstance(topics, Mapping):
        wanted = {check_str(name, "topics"): check_start(where, "topics") for name, where in topics.items()}
    else:
        names = [topics] if isinstance(topics, str) else check_sequence(topics, "topics")
        wanted = dict.fromkeys([check_str(name, "topics") for name in names], check_start(start))
    if not 1 <= len(wanted) <= FEEDS_PER_SUBSCRIPTION_MAX:
        raise UsageError(
            f"topics must have 1 to {FEEDS_PER_SUBSCRIPTION_MAX} names, got {len(wanted)}", found=len(wanted),
            min=1, max=FEEDS_PER_SUBSCRIPTION_MAX,
        )  # fmt: skip
    if check_str(consistency, "consistency") not in {"eventual", "strong"}:
        raise UsageError(
            f"consistency must be eventual or strong, got {consistency[:64]!r}", found=consistency
        )
    limit, max_bytes = check_int_range(limit, "limit"), check_int_range(max_bytes, "max_bytes")
    node = check_nodes(node)
    node_filter(node)
    return WatchOptions(
        {name: where for name, where in wanted.items() if WILDCARD not in name},
        {name: where for name, where in wanted.items() if WILDCARD in name},
        check_tag_filter(tags), node, min(limit or WATCH_LIMIT_DEFAULT, WATCH_LIMIT_MAX),
        min(max_bytes or READ_BYTES_DEFAULT, READ_BYTES_MAX), consistency,
        check_int_range(credit, "credit", 1, CREDIT_MAX), check_bool(lenient, "lenient"),
        decode_cursors(check_str(cursor, "cursor")),
    )  # fmt: skip
