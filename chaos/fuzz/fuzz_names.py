"""Names and filters: topics, tags, files. Client and shard must agree on them, for any text."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ringlog.client.read.pages import node_filter
from ringlog.errors import InvalidRequest
from ringlog.limits import NODE_BYTES_MAX
from ringlog.names import check_topic_name, is_topic_name
from ringlog.placement import home_shard
from ringlog.segment.layout import parse_stem, split_part
from ringlog.storage.layout import parse_shard_dir, parse_wal_name
from ringlog.storage.snapshot import parse_snapshot_name
from ringlog.tags import parse_match, parse_stored_match, request_form

MAX_LEN = 300
SHARE = 2.5
LEVELS_MAX = 100
"""Maximum number of levels in a pattern. The matcher of this module recurses for each level."""


def check(data: bytes) -> None:
    """Check one input: a valid name is harmless as a path, and a filter means the same after storage."""
    text = data.decode("utf-8", "replace")
    _name(text)
    for parse in (parse_stem, split_part, parse_shard_dir, parse_wal_name, parse_snapshot_name):
        found = parse(text)
        if found is not None and ("\0" in text or ".." in text or text.startswith("/")):
            raise AssertionError(f"{parse.__name__} takes {text!r} for one of ours")
    _filter(text)
    if text.count("/") <= LEVELS_MAX:
        _levels(*text.partition(" ")[::2])
    if text[:1] == "[":
        try:
            _filter(json.loads(text))
        except (ValueError, RecursionError):
            return


def _name(text: str) -> None:
    legal = is_topic_name(text)
    try:
        check_topic_name(text)
    except InvalidRequest:
        if legal:
            raise AssertionError(f"{text!r} is legal and refused") from None
        return
    if (
        not legal
        or not text.isascii()
        or set(text) & set("/\\\0\n *%")
        or text[0] in ".-_:"
        or len(text) > 255
    ):
        raise AssertionError(f"{text!r} is taken for a name")
    if not 0 <= home_shard(text, 8) < 8:
        raise AssertionError("no such shard")


def _filter(wanted: object) -> None:
    try:
        match = parse_match(wanted)
    except InvalidRequest:
        return
    if parse_stored_match(match.text) != match or parse_match(request_form(match.text)) != match:
        raise AssertionError(f"{wanted!r} is another filter once it was kept")
    if match.test(b""):
        raise AssertionError(f"{wanted!r} matches what has no tag")
    if isinstance(wanted, str) and len(wanted.encode()) <= NODE_BYTES_MAX:
        node_filter(wanted)
    if isinstance(wanted, str):
        probe = (wanted.removesuffix("*") + "x").encode()
        if match.test(probe) != wanted.endswith("*"):
            raise AssertionError(f"{wanted!r} matches {probe!r} as if it were another filter")


def _levels(pattern: str, tag: str) -> None:
    """Match a tag with a pattern, and compare with the simple matcher of this module."""
    try:
        match = parse_match(["tag", "Levels", pattern])
    except InvalidRequest:
        return
    found = tag.encode()
    wanted = bool(tag) and _matches(pattern.split("/"), tag.split("/"))
    if tag.startswith("$") and pattern[:1] in "+#":
        wanted = False
    if match.test(found) != wanted or (wanted and not found.startswith(match.tag)):
        raise AssertionError(f"{pattern!r} and {tag!r}: {match}, {wanted}")


def _matches(pattern: list[str], tag: list[str]) -> bool:
    if not pattern or pattern == ["#"]:
        return bool(pattern) or not tag
    return bool(tag) and pattern[0] in ("+", tag[0]) and _matches(pattern[1:], tag[1:])


def seeds() -> Iterator[bytes]:
    """Yield names and filters of every kind, valid and almost valid."""
    for text in (
        "orders.eu", "a" * 255, "a" * 256, "..", "a/b", "packs/pack-0001000000000007",
        "topics/0000000000000001/seg-00000000000000000001-0001000003000001.idx", "wal-1-0.log", "shard-00",
        "snapshot-00.0000000000000001", "tag*", "*", "", "a\0b", '["tag","Eq","x"]', '["tag","Glob","x*"]',
        "[[[[", "a/+/c a/b/c", "a/# a", "# $SYS", "+/+ /a",
        '["tag","Levels","a/+/#"]', "wal-1-0.log\n", "shard-٣", "wal-" + "9" * 200 + "-1.log",
    ):  # fmt: skip
        yield text.encode()
