"""Events of a watch besides pages and tombstones, and the cursor over all its topics."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import msgspec

from ringlog.client.read.pages import Cursor, Page, Tombstone
from ringlog.limits import SEQ_MAX
from ringlog.payload import V


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The watch has returned every existing record of the topic. Later records are new."""

    kind: ClassVar[str] = "caught-up"
    topic: str
    head_seq: int


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """The topic was deleted, or deleted and created again. The watch returns no more of this topic."""

    kind: ClassVar[str] = "topic-deleted"
    topic: str
    head_seq: int
    """Last head of the topic that the watch observed."""
    reason: str
    """`deleted` or `recreated`."""


@dataclass(frozen=True, slots=True)
class Lagged:
    """The reader fell behind on a topic with which it had caught up. The following records are read from
    storage.

    No record is skipped. A Tombstone reports records that retention removed meanwhile.
    """

    kind: ClassVar[str] = "lagged"
    topic: str
    behind: int
    """Number of positions between the reader and the head."""
    waited_s: float
    """Approximate age, in seconds, of the oldest record that the reader has not read."""


WatchEvent: TypeAlias = Page[V] | Tombstone | CaughtUp | TopicDeleted | Lagged


def encode_cursors(cursors: Mapping[str, Cursor]) -> str:
    """Encode the cursors of several topics as text: base64url of JSON, {topic: [epoch, seq]}."""
    plain = {topic: [cursor.epoch, cursor.seq] for topic, cursor in cursors.items()}
    return base64.urlsafe_b64encode(msgspec.json.encode(plain)).decode().rstrip("=")


def decode_cursors(text: str) -> dict[str, Cursor]:
    """Decode a text of `encode_cursors`. Invalid text gives an empty dict.

    Positions without an epoch are accepted as epoch 0, which means any life of the topic.
    """
    try:
        raw = base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4))
        plain = msgspec.json.decode(raw, type=dict[str, int | tuple[int, int]])
    except (ValueError, binascii.Error, RecursionError):
        return {}
    pairs = {topic: (0, value) if isinstance(value, int) else value for topic, value in plain.items()}
    return {
        topic: Cursor(epoch, seq)
        for topic, (epoch, seq) in pairs.items()
        if 0 <= epoch < 1 << 32 and 0 <= seq <= SEQ_MAX
    }
