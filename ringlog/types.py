"""Small enumerations that are used everywhere."""

from __future__ import annotations

from enum import IntEnum


class Durability(IntEnum):
    """Durability class: what an ack of a write promises (docs/explanation/durability.md).

    The number is stored in the low two bits of a frame's flags.
    """

    EPHEMERAL = 0
    MEMORY = 1
    DISK = 2
    FSYNC = 3

    @property
    def label(self) -> str:
        """Lower-case name in configuration, messages and output."""
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> Durability:
        """Return the class with the name `text`. Raises ValueError, which lists the four names."""
        try:
            return cls[text.upper()]
        except KeyError:
            raise ValueError(f"durability {text!r} is not one of ephemeral, memory, disk, fsync") from None


class Codec(IntEnum):
    """Compression of a frame's body."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


class PayloadKind(IntEnum):
    """Kind of the payload bytes, for readers. The engine does not interpret it."""

    BYTES = 0
    JSON = 1
    TEXT = 2


SESSION_BIT = 1 << 63
"""Bit that is set in the random ids of session producers. A shard may forget a session producer, but never a
named one."""
