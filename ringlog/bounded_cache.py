"""What is kept for others, bounded by bytes: what was left first goes first. Any thread may call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedByBytes(Generic[K, V]):
    """A dictionary that holds at most `bytes_max` bytes of values, by the sizes that are told."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._values: dict[K, V] = {}
        self._sizes: dict[K, int] = {}
        self._lock = threading.Lock()  # For changes; looking is one operation on a dictionary.

    def get(self, key: K) -> V | None:
        """What is kept there; None = nothing is."""
        return self._values.get(key)

    def put(self, key: K, value: V, size: int) -> None:
        """Keep it instead of what there was; one that is too large alone is not kept."""
        with self._lock:
            self._drop(key)
            if size > self._bytes_max:
                return
            self._values[key], self._sizes[key] = value, size
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._values)))

    def drop_where(self, is_over: Callable[[K], bool]) -> None:
        """Forget all whose key is told to be over."""
        with self._lock:
            for key in [key for key in self._values if is_over(key)]:
                self._drop(key)

    def _drop(self, key: K) -> None:
        if self._values.pop(key, None) is not None:
            self._bytes -= self._sizes.pop(key)

    def __len__(self) -> int:
        return len(self._values)
