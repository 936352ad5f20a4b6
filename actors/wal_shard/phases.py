"""In which states a shard's core can be: its life, what it waits for, whether there is room."""

from __future__ import annotations

from enum import Enum


class AwaitedCompletion(Enum):
    """What the core waits for; see the table of core.py."""

    NOTHING = 0
    WRITE = 1
    SYNC = 2
    FLUSH = 3
    ROLL = 4
    FILE = 5
    OPEN = 6
    VOLATILE = 7
    LEDGER = 8


class Room(Enum):
    """Whether what an event may add can be written."""

    NOW = 0
    LATER = 1
    """A file is being made."""
    NONE = 2
    """It is known that none can be made at present."""


class ShardPhase(Enum):
    """Life of a shard."""

    RECOVERING = 0
    ACTIVE = 1
    DRAINING = 2
    STOPPED = 3
