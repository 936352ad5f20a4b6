"""What clients saw, line by line, and the judge that holds it against what the engine says afterwards.

A line is `kind topic number seq invoked_ns done_ns text`. Kinds: `a` acknowledged, `f` refused for certain
(not applied), `u` outcome unknown, `r` read and right, `w` read and wrong, `e` a read that ended in an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from chaos.order import Broken, require

ACKED, REFUSED, UNKNOWN, READ, WRONG, READ_ERROR = "a", "f", "u", "r", "w", "e"


def payload_of(topic: str, number: int, size: int = 64) -> bytes:
    """What write number `number` to a topic holds."""
    return f"{topic}:{number}:".encode().ljust(size, b".")


def number_in(payload: bytes) -> int:
    """The number of a payload; raises ValueError when it is none of ours."""
    return int(payload.split(b":")[1])


@dataclass(frozen=True, slots=True)
class Line:
    """One operation of a client. Times are monotonic nanoseconds, comparable over processes."""

    kind: str
    topic: str
    number: int
    seq: int
    invoked_ns: int
    done_ns: int
    text: str = ""

    def encode(self) -> str:
        """As it stands in the file."""
        facts = (self.kind, self.topic, self.number, self.seq, self.invoked_ns, self.done_ns, self.text)
        return " ".join(map(str, facts)) + "\n"

    @classmethod
    def decode(cls, text: str) -> Line:
        """Inverse of encode; raises ValueError."""
        kind, topic, number, seq, invoked, done, rest = text.split(" ", 6)
        return cls(kind, topic, int(number), int(seq), int(invoked), int(done), rest)


@dataclass(slots=True)
class History:
    """A growing file of lines."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    _offset: int = 0

    def look(self) -> list[Line]:
        """Take what was written since; returns all lines."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.lines += map(Line.decode, whole.decode().splitlines())
        return self.lines

    def since(self, kind: str, invoked_ns: int) -> list[Line]:
        """Operations of a kind that began at or after this moment."""
        return [line for line in self.look() if line.kind == kind and line.invoked_ns >= invoked_ns]


class Item(Protocol):
    """What is read back: a record."""

    @property
    def seq(self) -> int: ...
    @property
    def ts(self) -> int: ...
    @property
    def data(self) -> bytes: ...


def judge(topic: str, lines: Iterable[Line], found: list[Item], *, floor: int = 0) -> int:
    """Hold one topic's records against its history; returns how many acknowledged ones were checked.

    `floor`: what was deleted or expired on purpose ends there. Raises Broken: lost, doubled, moved, altered,
    out of order, a gap, a stamp that goes back, or a refused write that is there.
    """
    by_number: dict[int, int] = {}
    last_number, last_seq, last_ts = -1, floor, 0
    for item in found:
        number = number_in(item.data)
        require(item.data.startswith(f"{topic}:{number}:".encode()), f"{topic}: record {item.seq} is altered")
        require(item.seq == last_seq + 1, f"{topic}: a gap before {item.seq}, after {last_seq}")
        require(number not in by_number, f"{topic}: write {number} is there twice")
        require(number > last_number, f"{topic}: write {number} lies behind {last_number}")
        require(item.ts >= last_ts, f"{topic}: stamp of {item.seq} goes back from {last_ts} to {item.ts}")
        by_number[number] = item.seq
        last_number, last_seq, last_ts = number, item.seq, item.ts
    checked = 0
    for line in lines:
        if line.topic != topic:
            continue
        if line.kind == ACKED and line.seq > floor:
            seq = by_number.get(line.number)
            require(seq is not None, f"{topic}: lost: write {line.number} was acknowledged as {line.seq}")
            require(seq == line.seq, f"{topic}: write {line.number} was {line.seq} and is {seq}")
            checked += 1
        elif line.kind == REFUSED and line.number in by_number:
            raise Broken(f"{topic}: write {line.number} was refused for certain and is there: {line.text}")
        elif line.kind == WRONG:
            raise Broken(f"{topic}: read wrong: {line.text}")
    return checked
