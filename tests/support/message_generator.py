"""Requests with fields of the right types and arbitrary values: broken requests that a client can send.

A decoded message has fields of the declared types, and nothing else is known about it. An actor must accept
every one of these messages, and refuse an invalid one with a typed error. Any other outcome ends the actor's
process, and the client repeats its request to the next process.
"""

from __future__ import annotations

import random
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from pyroaring import BitMap64

T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)

NUMBERS = (
    0, 1, 2, 3, 4, 5, 7, 9, 100, 255, 256, 1_000, 1_001, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -(1 << 31), -(1 << 63),
)  # fmt: skip
TEXTS = (
    "", "a", "a*", "a/b", "a/+/#", "..", "$x", "t\0", "\0", "\n", "é", "\U0001f600", "a" * 300, "tag", "Eq",
    "Glob", "Levels", "log", "queue", "create", "upsert", "merge", "update", "seq", "fsync", "reject",
)  # fmt: skip
CONFIG = (
    "type", "ttl_ms", "cap_records", "cap_bytes", "discard", "durable", "durability", "priority", "lease_ms",
    "max_deliveries", "dead_letter", "record_priority", "priority_levels", "retain_until_acked",
    "leases_durable", "expire_unused_ms", "compression", "hard_cap_records", "idempotency_window_ms",
    "idempotency_max", "backoff_ms", "backoff_max_ms", "dead_letter_keep_expiry", "auto_create", "unknown",
)  # fmt: skip
DEPTH_MAX = 3


class Chooser(Protocol):
    """Source of choices."""

    def below(self, count: int) -> int:
        """Return a number in [0, count)."""
        ...


class SeededChoices:
    """Random choices from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        """Return a uniformly distributed number in [0, count)."""
        return self._random.randrange(count)


class ByteChoices:
    """Choices from bytes (for fuzzers); zeros after their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_over(self) -> bool:
        """Whether all bytes are used."""
        return self._at >= len(self._data)

    def below(self, count: int) -> int:
        """Return a number in [0, count) from the next byte, or the next two if `count` exceeds 256."""
        width = 1 if count <= 256 else 2
        found = int.from_bytes(self._data[self._at : self._at + width], "little")
        self._at += width
        return found % count


class MessageGenerator:
    """Generates messages from choices.

    `known`: valid values by field name. Fields of these names get them in three of four cases, so that the
    objects in the request often exist."""

    def __init__(self, chooser: Chooser, known: Mapping[str, Sequence[Any]]) -> None:
        self._chooser = chooser
        self._known = known

    def message(self, kind: type[M]) -> M | None:
        """Return a decoded message of this type; None if the choices cannot be encoded."""
        made = self._struct(kind)
        try:
            return msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=kind)
        except (msgspec.MsgspecError, OverflowError, UnicodeError):
            return None

    def attachment(self) -> bytearray | None:
        """Return an attachment, or None."""
        return None if self._below(2) else bytearray(self._bytes())

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of the choices."""
        return choices[self._below(len(choices))]

    def _below(self, count: int) -> int:
        return self._chooser.below(count)

    def _struct(self, kind: type[M]) -> M:
        hints = typing.get_type_hints(kind)
        given = {}
        for each in msgspec.structs.fields(kind):
            if each.required or self._below(3):
                given[each.name] = self._value(hints[each.name], each.name)
        return kind(**given)

    def _value(self, kind: Any, name: str, depth: int = 0) -> Any:
        known = self._known.get(name, ())
        if known and self._below(4):
            return self.pick(known)
        if kind is str:
            return self.pick(TEXTS)
        simple: dict[Any, Callable[[], Any]] = {
            int: self._number, bytes: self._bytes, bool: lambda: bool(self._below(2)), Any: self._anything,
        }  # fmt: skip
        if kind in simple:
            return simple[kind]()
        if kind is float:
            return self.pick((0.0, -1.0, 1e300, float("nan"), float("inf")))
        if name == "config":
            return {self.pick(CONFIG): self._anything() for _ in range(self._below(4))}
        return self._compound(kind, name, depth)

    def _compound(self, kind: Any, name: str, depth: int) -> Any:
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
        count = self.pick((0, 1, 1, 2, 5)) if depth < DEPTH_MAX else 0
        if origin in {typing.Union, types.UnionType}:
            return self._value(self.pick(parts), name, depth)
        if kind is type(None):
            return None
        if origin is dict:
            return {
                self._value(parts[0], "", depth + 1): self._value(parts[1], "", depth + 1)
                for _ in range(count)
            }
        if origin is list:
            return [self._value(parts[0], "", depth + 1) for _ in range(count)]
        if origin is tuple:
            return tuple(self._value(part, "", depth + 1) for part in parts)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(kind)
        raise TypeError(f"a field of a message has a type that nobody can write: {kind}")

    def _number(self) -> int:
        return self.pick(NUMBERS)

    def _bytes(self) -> bytes:
        """Return numbers, a bitmap of numbers, or random bytes."""
        match self._below(5):
            case 0:
                return b""
            case 1:
                return BitMap64([self.pick(NUMBERS[:20]) for _ in range(3)]).serialize()
            case 2:
                return bytes([self._below(256) for _ in range(self._below(24))])
        numbers = [self.pick(NUMBERS[:20]) for _ in range(self.pick((1, 2, 3, 8)))]
        whole = np.array(numbers, dtype="<u8").tobytes()
        return whole[: len(whole) - (1 if self._below(8) == 0 else 0)]

    def _anything(self, depth: int = 0) -> Any:
        """Return any value that MessagePack can encode."""
        choice = self._below(10)
        if choice == 0 and depth < DEPTH_MAX:
            return [self._anything(depth + 1) for _ in range(self._below(4))]
        if choice == 1 and depth < DEPTH_MAX:
            return {self.pick(TEXTS): self._anything(depth + 1) for _ in range(self._below(3))}
        if choice == 2:
            return ["tag", self.pick(("Eq", "Glob", "Levels")), self.pick(TEXTS)]
        if choice == 3 and depth < DEPTH_MAX:
            return [self._anything(depth + 1) for _ in range(3)]
        simple = (None, True, False, 1.5, float("nan"), self._number(), self.pick(TEXTS), self._bytes())
        return self.pick(simple)
