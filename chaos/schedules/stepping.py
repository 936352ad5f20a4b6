"""Calls of the product, one access to shared memory at a time, and every state that such steps lead to.

A Python call cannot be suspended in the middle and copied. A suspended one is kept as the results of the
accesses it has made: to take one step further it runs again from its beginning, recorded accesses give their
recorded results and touch nothing, the next one is made for real, the one after that ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

_World = TypeVar("_World", bound=Hashable)


class Suspended(BaseException):
    """A call made its one access and wants another. Nothing of the product may catch it."""


class Stepped:
    """What a call reaches memory through: recorded accesses, one real one, no more."""

    def __init__(self, done: Sequence[Any]) -> None:
        self.done = list(done)
        self.cursor = 0
        self.is_spent = False

    def access(self, perform: Callable[[], Any]) -> Any:
        """One access."""
        if self.cursor == len(self.done):
            if self.is_spent:
                raise Suspended
            self.is_spent = True
            self.done.append(perform())
        self.cursor += 1
        return self.done[self.cursor - 1]


def count_states(first: _World, following: Callable[[_World], Iterable[_World]]) -> int:
    """Visit every state once; returns how many there are."""
    seen, stack = {first}, [first]
    while stack:
        for after in following(stack.pop()):
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return len(seen)
