"""States of a shard's core: its phase, the completion it waits for, and the room in the log."""

from __future__ import annotations

from enum import Enum


class AwaitedCompletion(Enum):
    """The completion that the core waits for; see the table in core.py."""

    NOTHING = 0
    WRITE = 1
    SYNC = 2
    FLUSH = 3
    ROLL = 4
    FILE = 5
    OPEN = 6
    VOLATILE = 7
    STORAGE = 8


class Room(Enum):
    """Whether there is room in the log for what an event may add."""

    NOW = 0
    LATER = 1
    """Not yet: a file is being created, or another completion is pending."""
    NONE = 2
    """No file can be created at present, or the shard is read-only."""


class ShardPhase(Enum):
    """Phase of a shard, from recovery to its stop."""

    RECOVERING = 0
    ACTIVE = 1
    DRAINING = 2
    STOPPED = 3
