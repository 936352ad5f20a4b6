"""The contract of a core: it receives events and returns effects. It does nothing else.

A core imports no os, time, random, socket, zmq, mmap, threading or logging. `Tick` carries the time. The
shell performs the effects in list order and returns their results as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringlog.envelope.messages import Message


@dataclass(slots=True)
class Tick:
    """The current time. First event of every pass."""

    now_us: int
    monotonic_ns: int


@dataclass(slots=True)
class ControlReceived:
    """A request from a socket. `client` is an opaque reply address, `attachment` an own copy of frames."""

    client: bytes
    corr: int
    message: Message
    attachment: bytearray | None = None
    opened: Any = None
    """What the shell opened for the request beforehand; a str is the reason why that failed."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A stop was requested: finish pending work, then return Stop."""


@dataclass(slots=True)
class Reply:
    """Send the reply to a request."""

    client: bytes
    corr: int
    message: Message
    attachment: Any = None


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process with this errors.ExitCode. `reason` is for people."""

    code: int
    reason: str
