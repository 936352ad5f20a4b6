"""Dead letters: whose they are, and how many travel at once. For clients and for who moves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ringlog.client.pages import Record, Tombstone
from ringlog.envelope.messages import GroupInfo, TopicInfo
from ringlog.errors import InvalidRequest
from ringlog.frame.columns import (
    DEAD_LETTER_FROM,
    DEAD_LETTER_GROUP,
    DEAD_LETTER_SRC_ID,
    DEAD_LETTER_SRC_SEQ,
)
from ringlog.limits import DEAD_LETTERS_BYTES_PER_MOVE, DEAD_LETTERS_PER_MOVE, SEQ_MAX

_DIGITS_MAX = 20
_FROM = DEAD_LETTER_FROM.encode()
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def noted(letter: Record, name: str) -> str | None:
    """What was noted when the record was given up: in its metadata, or in headers where there was no room."""
    fields = _stamped(letter.meta_json or b"")
    if fields is not None:
        found = fields.get(name)
        return None if found is None else str(found)
    value = letter.headers.get(name)
    return None if value is None else value.decode(errors="replace")


def _stamped(meta: bytes) -> dict[str, Any] | None:
    """Metadata in which it was noted; None where the headers say it."""
    if _FROM not in meta:
        return None
    try:
        fields: dict[str, Any] = _decode(meta)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return fields if DEAD_LETTER_FROM in fields else None


def is_letter_of(topic: str, item: Record | Tombstone, group: str = "") -> bool:
    """Did this record of a dead-letter topic come from that queue, or from that group of that topic?"""
    if not isinstance(item, Record):
        return True  # What was lost may have been.
    return noted(item, DEAD_LETTER_FROM) == topic and (noted(item, DEAD_LETTER_GROUP) or "") == group


def place_of(letter: Record, topic_id: int) -> int:
    """The number in this topic of the record that a group's letter is a copy of; 0 = it came from elsewhere,
    from an earlier topic of the same name perhaps."""
    seq = noted(letter, DEAD_LETTER_SRC_SEQ) or ""
    is_here = noted(letter, DEAD_LETTER_SRC_ID) == str(topic_id)
    return min(int(seq), SEQ_MAX) if is_here and seq.isdecimal() and len(seq) < _DIGITS_MAX else 0


def dead_letter_of(info: TopicInfo) -> str:
    """Where this queue's jobs go; raises InvalidRequest when they go nowhere."""
    name = info.config.get("dead_letter")
    if not name:
        raise InvalidRequest("this queue has no dead letters", topic=info.topic, field="dead_letter")
    return str(name)


def dead_letter_of_group(info: GroupInfo) -> str:
    """Where this group's records go; raises InvalidRequest when they go nowhere."""
    if not info.dead_letter:
        raise InvalidRequest(
            "this group has no dead letters", topic=info.topic, group=info.group, field="dead_letter"
        )
    return info.dead_letter


def in_parts(records: Sequence[Record], most: int = DEAD_LETTERS_PER_MOVE) -> list[Sequence[Record]]:
    """As many at once as one message takes, at most so many."""
    parts: list[Sequence[Record]] = []
    start_at = size = 0
    for at, record in enumerate(records):
        length = len(record.data) + len(record.meta_json or b"")
        is_full = at - start_at >= most or size + length > DEAD_LETTERS_BYTES_PER_MOVE
        if at > start_at and is_full:
            parts.append(records[start_at:at])
            start_at, size = at, 0
        size += length
    return [*parts, records[start_at:]] if records else []
