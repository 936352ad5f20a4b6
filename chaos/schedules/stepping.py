"""Executes production code one shared-memory access at a time, and visits every state that this can reach.

Python cannot suspend a call in the middle and copy it. So a suspended call is stored as the results of its
accesses. To advance by one step, the call runs again from its start. Recorded accesses return their recorded
results and touch nothing. The next access is performed, and the one after it ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

_World = TypeVar("_World", bound=Hashable)


class Suspended(BaseException):
    """A call made its one access and needs another. Production code must not catch this exception."""


class Stepped:
    """Access to memory for a call: recorded accesses, then one real access, then Suspended."""

    def __init__(self, done: Sequence[Any]) -> None:
        self.done = list(done)
        self.cursor = 0
        self.is_spent = False

    def access(self, perform: Callable[[], Any]) -> Any:
        """Return the recorded result of this access, or perform it.

        Raises Suspended after one real access.
        """
        if self.cursor == len(self.done):
            if self.is_spent:
                raise Suspended
            self.is_spent = True
            self.done.append(perform())
        self.cursor += 1
        return self.done[self.cursor - 1]


def count_states(first: _World, following: Callable[[_World], Iterable[_World]]) -> int:
    """Visit every reachable state once; return their number."""
    seen, stack = {first}, [first]
    while stack:
        for after in following(stack.pop()):
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return len(seen)
