"""Dead letters: whose they are, and how many travel at once. For clients and for who moves them."""

from __future__ import annotations

from collections.abc import Sequence

from ringlog.client.pages import Record, Tombstone
from ringlog.envelope.messages import TopicInfo
from ringlog.errors import InvalidRequest
from ringlog.frame.columns import DEAD_LETTER_FROM
from ringlog.limits import DEAD_LETTERS_BYTES_PER_MOVE, DEAD_LETTERS_PER_MOVE


def is_letter_of(topic: str, item: Record | Tombstone) -> bool:
    """Did this record of a dead-letter topic come from that queue?"""
    if not isinstance(item, Record):
        return True  # What was lost may have been.
    if item.meta_json and DEAD_LETTER_FROM.encode() in item.meta_json:
        return bool(item.meta.get(DEAD_LETTER_FROM) == topic)
    return item.headers.get(DEAD_LETTER_FROM) == topic.encode()


def dead_letter_of(info: TopicInfo) -> str:
    """Where this queue's jobs go; raises InvalidRequest when they go nowhere."""
    name = info.config.get("dead_letter")
    if not name:
        raise InvalidRequest("this queue has no dead letters", topic=info.topic, field="dead_letter")
    return str(name)


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
