"""Dead letters: whose they are, and how many travel at once. For clients and for who moves them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ringlog.client.read.pages import Record, Tombstone
from ringlog.envelope.messages import GroupInfo, TopicInfo
from ringlog.errors import Forbidden, InvalidRequest, TopicNotFound
from ringlog.frame.columns import (
    DEAD_LETTER_FROM,
    DEAD_LETTER_GROUP,
    DEAD_LETTER_SRC_ID,
    DEAD_LETTER_SRC_SEQ,
)
from ringlog.limits import (
    DEAD_LETTER_TOPICS_MAX,
    DEAD_LETTERS_BYTES_PER_MOVE,
    DEAD_LETTERS_PER_MOVE,
    SEQ_MAX,
)
from ringlog.link.futures import Pending, Steps
from ringlog.settings import QUEUE

_DIGITS_MAX = 20
_FROM = DEAD_LETTER_FROM.encode()
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class DeadLetterConnection(Protocol):
    """What asks about topics by their names."""

    def dead_letter_targets(self, topic: str) -> Pending[tuple[str, ...]]:
        """Ask where the dead letters of a topic go, the queue's and those of its groups."""
        ...


def dead_letter_field(letter: Record, name: str) -> str | None:
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


def is_dead_letter_of(topic: str, item: Record | Tombstone, group: str = "") -> bool:
    """Did this record of a dead-letter topic come from that queue, or from that group of that topic?"""
    if not isinstance(item, Record):
        return True  # What was lost may have been.
    return (
        dead_letter_field(item, DEAD_LETTER_FROM) == topic
        and (dead_letter_field(item, DEAD_LETTER_GROUP) or "") == group
    )


def src_seq_of_dead_letter(letter: Record, topic_id: int) -> int:
    """The number in this topic of the record that a group's letter is a copy of; 0 = it came from elsewhere,
    from an earlier topic of the same name perhaps."""
    seq = dead_letter_field(letter, DEAD_LETTER_SRC_SEQ) or ""
    is_here = dead_letter_field(letter, DEAD_LETTER_SRC_ID) == str(topic_id)
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


def walk_dead_letter_targets(topic: str, target: str) -> Generator[str, tuple[str, ...], None]:
    """Raise InvalidRequest if dead letters of `topic` that go to `target` may come back to it.

    Yields names of topics, and is sent where the dead letters of each go.
    """
    paths: dict[str, tuple[str, ...]] = {target: (topic, target)}
    waiting = [target]
    while waiting:
        at = waiting.pop(0)
        if at == topic:
            raise InvalidRequest(
                f"dead letters must not come back to where they are from: {' -> '.join(paths[at])}",
                field="dead_letter", topic=topic, found=target,
            )  # fmt: skip
        for following in (yield at):
            if following in paths:
                continue
            if len(paths) >= DEAD_LETTER_TOPICS_MAX:
                raise InvalidRequest(
                    "dead letters lead to too many topics", field="dead_letter", topic=topic,
                    max=DEAD_LETTER_TOPICS_MAX,
                )  # fmt: skip
            paths[following] = (*paths[at], following)
            waiting.append(following)


def dead_letter_targets_of(config: Mapping[str, Any], groups: Iterable[GroupInfo]) -> tuple[str, ...]:
    """Where dead letters of a topic go: a queue's own, and those of its groups."""
    own = config.get("dead_letter") if config.get("type") == QUEUE else None
    found = [own, *(group.dead_letter for group in groups)]
    return tuple(str(name) for name in found if name)


def require_no_dead_letter_cycle(connection: DeadLetterConnection, topic: str, target: str) -> Steps[None]:
    """Raise InvalidRequest if dead letters of `topic` that go to `target` may come back to it, as far as the
    topics on the way may be looked at."""
    walk = walk_dead_letter_targets(topic, target)
    try:
        name = next(walk)
        while True:
            try:
                found: tuple[str, ...] = yield connection.dead_letter_targets(name)
            except (TopicNotFound, Forbidden):
                found = ()
            name = walk.send(found)
    except StopIteration:
        return


def split_for_move(records: Sequence[Record], most: int = DEAD_LETTERS_PER_MOVE) -> list[Sequence[Record]]:
    """As many at once as one message takes, at most so many."""
    parts: list[Sequence[Record]] = []
    check_start = size = 0
    for at, record in enumerate(records):
        headers = sum(len(name) + len(value) for name, value in record.headers.items())
        length = len(record.data or b"") + len(record.meta_json or b"") + headers
        is_full = at - check_start >= most or size + length > DEAD_LETTERS_BYTES_PER_MOVE
        if at > check_start and is_full:
            parts.append(records[check_start:at])
            check_start, size = at, 0
        size += length
    return [*parts, records[check_start:]] if records else []
