"""Names for the small values that travel everywhere."""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

Seq = NewType("Seq", int)
TopicId = NewType("TopicId", int)
Epoch = NewType("Epoch", int)
Incarnation = NewType("Incarnation", int)
ProducerId = NewType("ProducerId", int)


class Durability(IntEnum):
    """What an ack of a write promises (docs/explanation/durability.md).

    The number is what a frame carries in the low two bits of its flags.
    """

    EPHEMERAL = 0
    MEMORY = 1
    DISK = 2
    FSYNC = 3

    @property
    def label(self) -> str:
        """Lower-case name used in configuration, messages and output."""
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> Durability:
        """Return the class called `text`; raises ValueError naming the four that exist."""
        try:
            return cls[text.upper()]
        except KeyError:
            raise ValueError(f"durability {text!r} is not one of ephemeral, memory, disk, fsync") from None


class Codec(IntEnum):
    """How a frame's body is stored."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


class PayloadKind(IntEnum):
    """What the payload bytes of a frame mean to readers that care (the engine does not)."""

    BYTES = 0
    JSON = 1
    TEXT = 2


SESSION_BIT = 1 << 63
"""Set in ids of producers that the client library draws at random; such a producer may be forgotten, a named
one not."""
