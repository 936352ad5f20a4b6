"""What a core is: events in, effects out, nothing else.

A core imports no os, time, random, socket, zmq, mmap, threading or logging. Time arrives in `Tick`.
The shell performs effects in list order and hands completions back as events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringlog.envelope.messages import Message


@dataclass(slots=True)
class Tick:
    """Time has come this far. First event of every turn."""

    now_us: int
    monotonic_ns: int


@dataclass(slots=True)
class ControlReceived:
    """A request came in by socket. `client` is an opaque reply address; `attachment` are frames, private."""

    client: bytes
    corr: int
    message: Message
    attachment: bytearray | None = None
    opened: Any = None
    """What the shell opened for it beforehand, or a str: why that failed."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Finish what you hold, then ask for Stop."""


@dataclass(slots=True)
class Reply:
    """Answer a request."""

    client: bytes
    corr: int
    message: Message
    attachment: Any = None


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process with this errors.ExitCode; `reason` is for people."""

    code: int
    reason: str


class Core(Protocol):
    """A state machine that the runtime drives."""

    def handle(self, events: Sequence[Any]) -> list[Any]:
        """Take events in order, change the state, return the effects wanted, in order."""
        ...

    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which the next Tick is wanted even if nothing else happens."""
        ...
