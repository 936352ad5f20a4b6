"""Linearizability: is there an order of the operations that explains every result?

This is the search of Wing and Gong with Lowe's memoization. It takes any operation that began before every
open one returned, applies it to the model, and continues. A pair of done operations and state that failed
once is not tried again.

An operation with an unknown outcome never returns: it can take effect at any time after it began, or not at
all. The search is exponential at worst, so histories are short: one key, some dozens of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

FOREVER = 1 << 62
STEPS_MAX = 2_000_000
"""Number of states after which a search gives up."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one client. Times in nanoseconds."""

    invoked: int
    returned: int
    """FOREVER if the client never learned the outcome."""
    kind: str
    value: Hashable
    result: Any = None
    """Its result; ignored if the outcome is unknown."""


Apply = Callable[[Hashable, Op], "Iterable[Hashable]"]
"""(state, operation) -> possible next states; empty if the operation cannot have this result in this
state."""


class SearchTooLong(RuntimeError):
    """The search found neither an order nor its absence within STEPS_MAX states."""


def find_order(history: Sequence[Op], start: Hashable, apply: Apply) -> list[Op] | None:
    """Return an order that explains the history, or None. Raises SearchTooLong."""
    ops = sorted(history, key=lambda op: op.invoked)
    wanted = sum(1 << n for n, op in enumerate(ops) if op.returned < FOREVER)
    failed: set[tuple[int, Hashable]] = set()
    path: list[int] = []
    # One iterator per depth: the choices that remain there.
    stack = [_choices(ops, 0, start, apply)]
    done, steps = [0], 0
    while stack:
        if done[-1] & wanted == wanted:
            return [ops[n] for n in path]
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            done.pop()
            if path:
                path.pop()
            continue
        n, state = step
        key = (done[-1] | 1 << n, state)
        if key in failed:
            continue
        failed.add(key)
        steps += 1
        if steps > STEPS_MAX:
            raise SearchTooLong(f"{len(ops)} operations, {steps} states")
        path.append(n)
        done.append(key[0])
        stack.append(_choices(ops, key[0], state, apply))
    return None


def _choices(ops: list[Op], done: int, state: Hashable, apply: Apply) -> Any:
    """Yield (operation, next state): each open operation that began before every open one returned."""
    horizon = min((op.returned for n, op in enumerate(ops) if not done >> n & 1), default=FOREVER)
    for n, op in enumerate(ops):
        if op.invoked > horizon:
            return
        if done >> n & 1:
            continue
        for following in apply(state, op):
            yield n, following


# -- models ---------------------------------------------------------------------------------------------


def keyed_append(state: Hashable, op: Op) -> Iterable[Hashable]:
    """Model of one idempotency key: all appends return the seq of the first one, and a look reads this seq.

    The state is the seq, 0 before the first append. After an append with an unknown outcome the state is -1,
    until a later result gives the seq.
    """
    assert isinstance(state, int)
    if op.kind == "look":
        return [op.result] if state == op.result or (state == -1 and op.result) else []
    if op.returned == FOREVER:
        return [state or -1]
    return [op.result] if op.result and state in {0, -1, op.result} else []


def log(state: Hashable, op: Op) -> Iterable[Hashable]:
    """Model of one topic: an append returns its position, and a read returns all values."""
    assert isinstance(state, tuple)
    if op.kind == "read":
        return [state] if tuple(op.result) == state else []
    after = (*state, op.value)
    return [after] if op.returned == FOREVER or op.result == len(after) else []
