"""What a watch gives besides pages of records and tombstones, and the cursor over all its topics."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import msgspec

from ringlog.client.read.pages import Cursor, Page, Tombstone
from ringlog.limits import SEQ_MAX


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All there was of the topic has been given; what comes now is new (SSE-19)."""

    kind: ClassVar[str] = "caught-up"
    topic: str
    head_seq: int


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """The topic was removed, or removed and made again; nothing more of it comes (SSE-26)."""

    kind: ClassVar[str] = "topic-deleted"
    topic: str
    head_seq: int
    """The last number that was seen of it."""
    reason: str
    """deleted or recreated"""


@dataclass(frozen=True, slots=True)
class Lagged:
    """The reader is far behind on a topic that it had caught up with: what follows is read from storage.

    Nothing was left out; what retention removed meanwhile a Tombstone says.
    """

    kind: ClassVar[str] = "lagged"
    topic: str
    behind: int
    """Positions between the reader and the head."""
    waited_s: float
    """How old the oldest is, about, that the reader does not have."""


WatchEvent: TypeAlias = Page | Tombstone | CaughtUp | TopicDeleted | Lagged


def encode_cursors(cursors: Mapping[str, Cursor]) -> str:
    """A composite cursor as text (E-13): base64url of JSON, {topic: [epoch, seq]}."""
    plain = {topic: [cursor.epoch, cursor.seq] for topic, cursor in cursors.items()}
    return base64.urlsafe_b64encode(msgspec.json.encode(plain)).decode().rstrip("=")


def decode_cursors(text: str) -> dict[str, Cursor]:
    """Inverse of encode_cursors; positions without a life are taken, too. Nothing for what is none (E-14)."""
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
