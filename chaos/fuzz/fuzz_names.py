"""Names and filters: topics, tags, files. Fast, total, and of one opinion on client and shard."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ringlog.client.pages import node_filter, tag_filter
from ringlog.errors import InvalidRequest
from ringlog.segment.layout import parse_stem, split_part
from ringlog.storage.layout import parse_shard_dir, parse_wal_name
from ringlog.storage.snapshot import parse_snapshot_name
from ringlog.topic.names import check_topic_name, home_shard, is_topic_name
from ringlog.topic.retention import parse_match

MAX_LEN = 300
SHARE = 2.5


def check(data: bytes) -> None:
    """A legal name is harmless anywhere; a filter means the same to a reader and to a delete."""
    text = data.decode("utf-8", "replace")
    _name(text)
    for parse in (parse_stem, split_part, parse_shard_dir, parse_wal_name, parse_snapshot_name):
        found = parse(text)
        if found is not None and ("\0" in text or ".." in text or text.startswith("/")):
            raise AssertionError(f"{parse.__name__} takes {text!r} for one of ours")
    _filter(text)
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
    reads = deletes = None
    try:
        reads = tag_filter(wanted)  # type: ignore[arg-type]
    except (InvalidRequest, TypeError, UnicodeEncodeError):
        reads = None
    try:
        deletes = parse_match(wanted)
    except InvalidRequest:
        deletes = None
    if isinstance(wanted, str):
        node_ok = len(wanted.encode("utf-8", "surrogatepass")) <= 128
        if node_ok:
            node_filter(wanted)
        if (reads is None) != (deletes is None):
            raise AssertionError(f"{wanted!r} is a filter for one of reading and deleting only")
        probe = (wanted.removesuffix("*") + "x").encode()
        if reads is not None and bool(reads(probe)) != wanted.endswith("*"):
            raise AssertionError(f"{wanted!r} matches {probe!r} as if it were another filter")


def seeds() -> Iterator[bytes]:
    """Names of everything, and almost."""
    for text in (
        "orders.eu", "a" * 255, "a" * 256, "..", "a/b", "packs/pack-0001000000000007",
        "topics/0000000000000001/seg-00000000000000000001-0001000003000001.idx", "wal-1-0.log", "shard-00",
        "snapshot-00.0000000000000001", "tag*", "*", "", "a\0b", '["tag","Eq","x"]', '["tag","Glob","x*"]',
        "[[[[", "wal-1-0.log\n", "shard-٣", "wal-" + "9" * 200 + "-1.log",
    ):  # fmt: skip
        yield text.encode()
