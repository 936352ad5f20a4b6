"""A cache that is bounded by bytes and evicts in insertion order. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByteBoundedCache(Generic[K, V]):
    """A dictionary with at most `bytes_max` bytes of values. The caller passes the size of each value."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._values: dict[K, V] = {}
        self._sizes: dict[K, int] = {}
        self._lock = threading.Lock()  # For changes. A lookup is one atomic operation on a dictionary.

    def get(self, key: K) -> V | None:
        """Return the value; None if there is none."""
        return self._values.get(key)

    def put(self, key: K, value: V, size: int) -> None:
        """Store a value of `size` bytes and evict the oldest ones. One above `bytes_max` is not stored."""
        with self._lock:
            self._drop(key)
            if size > self._bytes_max:
                return
            self._values[key], self._sizes[key] = value, size
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._values)))

    def drop_where(self, is_over: Callable[[K], bool]) -> None:
        """Remove all values whose key matches."""
        with self._lock:
            for key in [key for key in self._values if is_over(key)]:
                self._drop(key)

    def _drop(self, key: K) -> None:
        if self._values.pop(key, None) is not None:
            self._bytes -= self._sizes.pop(key)

    def __len__(self) -> int:
        return len(self._values)
