"""What a scheduler is told, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.scheduler.delivery.feeds import SchedulerFeed, SchedulerTopic
from ringlog.envelope.messages import Message

BoardMark = tuple[int, int]
"""(file_id, offset), as on the board."""


# -- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkRequestReceived:
    """A link said something. `attachment` is private."""

    link: bytes
    corr: int
    message: Message
    attachment: bytearray | None = None


@dataclass(frozen=True, slots=True)
class NewsRows:
    """What a shard published: rows as in board/news.py, shape (n, 8). Unless complete, more than that."""

    shard: int
    rows: NDArray[np.uint64]
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class DurableMarkMoved:
    """A shard's files are synced up to this mark."""

    shard: int
    mark: BoardMark


@dataclass(frozen=True, slots=True)
class DeliveryPressureChanged:
    """What the governors have delivery do from now on."""

    gaps_ns: tuple[int, ...]
    """For each shard: least time between two wake-ups of one of its topics."""
    is_shedding: bool
    """The lowest band gets no credit."""


@dataclass(frozen=True, slots=True)
class ShardGivenUp:
    """A shard failed, and none comes after it in this life of the engine."""

    shard: int


@dataclass(frozen=True, slots=True)
class TopicNamesChanged:
    """Topics of a shard were made or removed."""

    shard: int


@dataclass(frozen=True, slots=True)
class GrantsUnsent:
    """These turns did not get away. The link does not read at present, or it is gone."""

    send: SendToLink
    is_disconnected: bool


class SlotFacts(NamedTuple):
    """What a slot of a topic table says."""

    topic_id: int
    epoch: int
    is_live: bool
    head: int
    base: int
    is_auto: bool
    is_logged: bool = True
    """Its records go to a log that is synced, rather than to memory alone."""


@dataclass(frozen=True, slots=True)
class SlotFactsRead:
    """What came of a ReadSlots."""

    request: ReadSlots
    facts: list[SlotFacts | None] | None
    """For each topic; None for one that cannot be read just now. None for all: the shard does not serve."""
    published: BoardMark = (0, 0)
    """The shard's published mark, read after the facts: it covers every head among them."""


# -- effects ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SendToLink:
    """Say something to a link. With Turns: the rows, and whose they are, to be handed back if unsent.

    Not frozen, which would cost more to make than the rest of a turn.
    """

    link: bytes
    message: Message
    corr: int = 0
    rows: Any = None
    feeds: tuple[SchedulerFeed, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadSlots:
    """Read the slots of these topics of one shard."""

    shard: int
    topics: tuple[SchedulerTopic, ...]
    reply: SendToLink | None = field(default=None)
    """To be told once what was seen has been told."""


Event = (
    LinkRequestReceived
    | NewsRows
    | DurableMarkMoved
    | DeliveryPressureChanged
    | ShardGivenUp
    | TopicNamesChanged
    | GrantsUnsent
    | SlotFactsRead
)
