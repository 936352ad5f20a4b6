"""Is there an order of these operations that explains every answer? (linearizability)

The search of Wing and Gong with Lowe's memo: take any operation that began before every one still open
returned, apply it to the model, go on; a set of done operations and a state that failed once are not tried
again. An operation whose outcome is unknown returns never: it may be put anywhere after its beginning, or
left out. Exponential at worst, so histories are short: one key, some dozens of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

FOREVER = 1 << 62
STEPS_MAX = 2_000_000
"""States looked at before a search is given up."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one client. Times in nanoseconds."""

    invoked: int
    returned: int
    """FOREVER when the client never learned the outcome."""
    kind: str
    value: Hashable
    result: Any = None
    """What it returned; not looked at when the outcome is unknown."""


Apply = Callable[[Hashable, Op], "Iterable[Hashable]"]
"""(state, operation) -> states it may lead to: none when the operation cannot have this result there."""


class SearchTooLong(RuntimeError):
    """Neither an order nor the absence of one was found within STEPS_MAX states."""


def find_order(history: Sequence[Op], start: Hashable, apply: Apply) -> list[Op] | None:
    """An order that explains the history, or None; raises SearchTooLong."""
    ops = sorted(history, key=lambda op: op.invoked)
    wanted = sum(1 << n for n, op in enumerate(ops) if op.returned < FOREVER)
    failed: set[tuple[int, Hashable]] = set()
    path: list[int] = []
    # One frame a depth: what may still be tried there.
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
    """Operations that may be next: nobody who is not done returned before they began."""
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
    """One idempotency key: the first append gets a number, all others that same number; a look says which.

    State: the number, 0 before. An append of unknown outcome gets a number that a later answer tells: until
    then the state is -1.
    """
    assert isinstance(state, int)
    if op.kind == "look":
        return [op.result] if state == op.result or (state == -1 and op.result) else []
    if op.returned == FOREVER:
        return [state or -1]
    return [op.result] if op.result and state in {0, -1, op.result} else []


def log(state: Hashable, op: Op) -> Iterable[Hashable]:
    """One topic: an append's number is its position; a read gives everything there is."""
    assert isinstance(state, tuple)
    if op.kind == "read":
        return [state] if tuple(op.result) == state else []
    after = (*state, op.value)
    return [after] if op.returned == FOREVER or op.result == len(after) else []
