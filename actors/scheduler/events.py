"""Events and effects of the scheduler's core."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.actors.scheduler.delivery.feeds import SchedulerFeed, SchedulerTopic
from ringlog.envelope.messages import Message

BoardMark = tuple[int, int]
"""(file_id, offset), as on the board."""


# -- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkRequestReceived:
    """A link sent a message. `attachment` is a private copy."""

    link: bytes
    corr: int
    message: Message
    attachment: bytearray | None = None


@dataclass(frozen=True, slots=True)
class NewsRows:
    """Rows of a shard's news, as in board/news.py, shape (n, 8). If not complete, rows were missed."""

    shard: int
    rows: NDArray[np.uint64]
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class DurableMarkMoved:
    """The shard's files are synced up to this mark."""

    shard: int
    mark: BoardMark


@dataclass(frozen=True, slots=True)
class DeliveryPressureChanged:
    """New instructions of the governors for delivery."""

    gaps_ns: tuple[int, ...]
    """For each shard: least time in ns between two wake-ups of one of its topics."""
    is_shedding: bool
    """Whether low bands get no grants."""


@dataclass(frozen=True, slots=True)
class ShardGivenUp:
    """A shard failed permanently. It is not restarted before the engine is."""

    shard: int


@dataclass(frozen=True, slots=True)
class TopicNamesChanged:
    """Topics of a shard were created or deleted."""

    shard: int


@dataclass(frozen=True, slots=True)
class GrantsUnsent:
    """Grants could not be sent. The link does not read at present, or it is disconnected."""

    send: SendToLink
    is_disconnected: bool


class SlotFacts(NamedTuple):
    """Content of a slot of a topic table."""

    topic_id: int
    epoch: int
    is_live: bool
    head: int
    base: int
    is_auto: bool
    is_logged: bool = True
    """Whether its records go to a log on disk, not only to shared memory."""


@dataclass(frozen=True, slots=True)
class SlotFactsRead:
    """Result of a ReadSlots."""

    request: ReadSlots
    facts: list[SlotFacts | None] | None
    """Facts by topic, None if its slot is being written. None instead of a list: the shard does not serve."""
    published: BoardMark = (0, 0)
    """The shard's published mark, read after the facts. It covers every head among them."""


# -- effects ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SendToLink:
    """Send a message to a link. With Grants (grants): their rows, and the feeds to restore if sending fails.

    The class is not frozen: creating a frozen object would cost more than the rest of a pass.
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
    """Message to send after the facts were processed and their grants were sent."""


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
