"""Functions that are called when something happens, by a class that does not know their owners. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Observers(Generic[P]):
    """Called in the order in which they subscribed; what one raises, whoever notifies gets.

    Example: `removed = Observers[Topic](); removed.subscribe(forget); removed.notify(topic)`.
    """

    __slots__ = ("_observers",)

    def __init__(self) -> None:
        self._observers: list[Callable[P, object]] = []

    def subscribe(self, observer: Callable[P, object]) -> None:
        """Have `observer` called from now on, after those that are there already."""
        self._observers.append(observer)

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call each with these arguments."""
        for observer in self._observers:
            observer(*args, **kwargs)
