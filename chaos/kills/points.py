"""Every stop point of the product, at its first, second and seventh pass; one engine dies through many.

A plan gives each incarnation of each actor a place to die at, so that the number of restarts tells which
points were passed. The supervisor's own point has engines of its own (ends.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ringlog.board.processes import (
    COMPACTOR,
    GATEWAY,
    RECLAIMER,
    RELOCATOR,
    SCHEDULER,
    WAL_SHARD,
)
from ringlog.stop_points import POINTS

PASSES = (1, 2, 7)
SUPERVISOR_POINT = "supervisor_before_respawn"
DRAIN_POINT = "drain_mid"
OF_OTHER_LOADS = (
    "dead_letter_after_append",
    "redrive_after_append",
    *(point for point in POINTS if point.startswith("sink_")),
)
"""Points that the load here never passes: a life that waited for one would never end, and its actor die at
none of those behind it. tests/actors/test_dead_letters_engine.py and tests/spark die there."""
_ONCE_A_LIFE = ("recovery_before_copy", "recovery_after_copy", DRAIN_POINT)
_OF_ACTOR = {
    "compact_": COMPACTOR,
    "reclaim_": RECLAIMER,
    "relocate_": RELOCATOR,
    "ring_": GATEWAY,
    "route_": SCHEDULER,
}

Death = tuple[str, int]
"""A point and its pass."""


def actor_of(point: str) -> str:
    """Whose code the point is in. `ring_after_publish` is in every client; the gateway is one."""
    return next((kind for start, kind in _OF_ACTOR.items() if point.startswith(start)), WAL_SHARD)


def deaths(kinds: Iterable[str], passes: tuple[int, ...] = PASSES) -> dict[str, list[Death]]:
    """How each of these kinds of actor is to die, life by life. Later passes come later: their points
    need time, and recovery passes several log files only when there are some."""
    found: dict[str, list[Death]] = {kind: [] for kind in kinds}
    for n, point in itertools.product(passes, POINTS):
        if point in (SUPERVISOR_POINT, *OF_OTHER_LOADS) or (point in _ONCE_A_LIFE and n > 1):
            continue
        if actor_of(point) in found:
            found[actor_of(point)].append((point, n))
    return found


def plan_of(by_kind: dict[str, list[Death]]) -> str:
    """The plan as the engine takes it: points of different actors have different names, so lives join."""
    lives = itertools.zip_longest(*by_kind.values())
    return ";".join(",".join(f"{point}:{n}:kill" for point, n in filter(None, life)) for life in lives)
