"""Dead letters: their origin, and the size of messages that contain them. For clients and schedulers."""

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
from ringlog.frame.metadata import NOT_JSON, fields_of
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


class DeadLetterConnection(Protocol):
    """Interface for queries about dead-letter topics."""

    def dead_letter_targets(self, topic: str) -> Pending[tuple[str, ...]]:
        """Query the dead-letter topics of a topic: the queue's own and those of its groups."""
        ...


def dead_letter_field(letter: Record, name: str) -> str | None:
    """Return a field that the engine stored in a dead letter: in its metadata, or in headers if the metadata
    had no room."""
    fields = _stamped(letter.meta_json or b"")
    if fields is not None:
        return _text_of(fields[name]) if name in fields else None
    value = letter.headers.get(name)
    return None if value is None else value.decode(errors="replace")


def _stamped(meta: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the metadata if it contains the engine's fields; None if the headers contain them.

    The job's own fields are not decoded: a client can write what no decoder takes, such as 1e999.
    """
    fields = fields_of(meta) if _FROM in meta else None
    return fields if fields is not None and DEAD_LETTER_FROM in fields else None


def _text_of(value: msgspec.Raw) -> str | None:
    try:
        found = msgspec.json.decode(value)
    except NOT_JSON:
        return None
    return None if found is None else str(found)


def is_dead_letter_of(topic: str, item: Record | Tombstone, group: str = "") -> bool:
    """Return True if this record of a dead-letter topic came from that queue, or from that group of that
    topic."""
    if not isinstance(item, Record):
        return True  # A lost record may have been one.
    return (
        dead_letter_field(item, DEAD_LETTER_FROM) == topic
        and (dead_letter_field(item, DEAD_LETTER_GROUP) or "") == group
    )


def src_seq_of_dead_letter(letter: Record, topic_id: int) -> int:
    """Return the seq in this topic of the record that a group's letter copies.

    0 = the letter came from another topic, or from an earlier topic of the same name.
    """
    seq = dead_letter_field(letter, DEAD_LETTER_SRC_SEQ) or ""
    is_here = dead_letter_field(letter, DEAD_LETTER_SRC_ID) == str(topic_id)
    return min(int(seq), SEQ_MAX) if is_here and seq.isdecimal() and len(seq) < _DIGITS_MAX else 0


def dead_letter_of(info: TopicInfo) -> str:
    """Return the dead-letter topic of a queue. Raises InvalidRequest if it has none."""
    name = info.config.get("dead_letter")
    if not name:
        raise InvalidRequest(
            "this queue has no dead-letter topic: set dead_letter", topic=info.topic, field="dead_letter"
        )
    return str(name)


def dead_letter_of_group(info: GroupInfo) -> str:
    """Return the dead-letter topic of a group. Raises InvalidRequest if it has none."""
    if not info.dead_letter:
        raise InvalidRequest(
            "this group has no dead-letter topic: create it with dead_letter", topic=info.topic,
            group=info.group, field="dead_letter",
        )  # fmt: skip
    return info.dead_letter


def walk_dead_letter_targets(topic: str, target: str) -> Generator[str, tuple[str, ...], None]:
    """Raise InvalidRequest if dead letters of `topic` that go to `target` could return to it.

    Yields topic names. The caller sends the dead-letter topics of each.
    """
    paths: dict[str, tuple[str, ...]] = {target: (topic, target)}
    waiting = [target]
    while waiting:
        at = waiting.pop(0)
        if at == topic:
            raise InvalidRequest(
                f"dead_letter must not form a cycle: {' -> '.join(paths[at])}",
                field="dead_letter", topic=topic, found=target,
            )  # fmt: skip
        for following in (yield at):
            if following in paths:
                continue
            if len(paths) >= DEAD_LETTER_TOPICS_MAX:
                raise InvalidRequest(
                    f"dead_letter must lead to at most {DEAD_LETTER_TOPICS_MAX} topics", field="dead_letter",
                    topic=topic, max=DEAD_LETTER_TOPICS_MAX,
                )  # fmt: skip
            paths[following] = (*paths[at], following)
            waiting.append(following)


def dead_letter_targets_of(config: Mapping[str, Any], groups: Iterable[GroupInfo]) -> tuple[str, ...]:
    """Return the dead-letter topics of a topic: a queue's own and those of its groups."""
    own = config.get("dead_letter") if config.get("type") == QUEUE else None
    found = [own, *(group.dead_letter for group in groups)]
    return tuple(str(name) for name in found if name)


def require_no_dead_letter_cycle(connection: DeadLetterConnection, topic: str, target: str) -> Steps[None]:
    """Raise InvalidRequest if dead letters of `topic` that go to `target` could return to it.

    Topics that do not exist or that this client must not read are not followed.
    """
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
    """Split records into parts that fit into one message, with at most `most` records each."""
    parts: list[Sequence[Record]] = []
    start = size = 0
    for at, record in enumerate(records):
        headers = sum(len(name) + len(value) for name, value in record.headers.items())
        length = len(record.data or b"") + len(record.meta_json or b"") + headers
        is_full = at - start >= most or size + length > DEAD_LETTERS_BYTES_PER_MOVE
        if at > start and is_full:
            parts.append(records[start:at])
            start, size = at, 0
        size += length
    return [*parts, records[start:]] if records else []
