"""Callbacks for events of a class that does not know its callers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Observers(Generic[P]):
    """Callbacks, called in the order of subscription. An exception of a callback propagates to `notify`.

    Example: `removed = Observers[Topic](); removed.subscribe(forget); removed.notify(topic)`.
    """

    __slots__ = ("_observers",)

    def __init__(self) -> None:
        self._observers: list[Callable[P, object]] = []

    def subscribe(self, observer: Callable[P, object]) -> None:
        """Add `observer` after the existing ones."""
        self._observers.append(observer)

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all observers with these arguments."""
        for observer in self._observers:
            observer(*args, **kwargs)
