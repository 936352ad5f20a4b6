"""Every stop point of the product, at its first, second and seventh pass.

A plan gives each incarnation of each actor a stop point at which it dies. The number of restarts therefore
shows which points were passed. The supervisor's own point has its own case (`cases.ends`).
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
"""Stop points that the load of this class never reaches. An actor that waits for one of them would never die
there, nor at any later point of its plan. tests/actors/test_dead_letters_engine.py and tests/spark cover
them."""
_ONCE_A_LIFE = ("recovery_before_copy", "recovery_after_copy", DRAIN_POINT)
_OF_ACTOR = {
    "compact_": COMPACTOR,
    "reclaim_": RECLAIMER,
    "relocate_": RELOCATOR,
    "ring_": GATEWAY,
    "route_": SCHEDULER,
}

Death = tuple[str, int]
"""A stop point and the number of its pass."""


def actor_of(point: str) -> str:
    """Return the kind of actor that has the stop point.

    `ring_after_publish` is in every client; the gateway is a client.
    """
    return next((kind for start, kind in _OF_ACTOR.items() if point.startswith(start)), WAL_SHARD)


def deaths(kinds: Iterable[str], passes: tuple[int, ...] = PASSES) -> dict[str, list[Death]]:
    """Return the deaths of these kinds of actors, one per start.

    Later passes come later: they need time, and recovery passes several log files only once these exist.
    """
    found: dict[str, list[Death]] = {kind: [] for kind in kinds}
    for n, point in itertools.product(passes, POINTS):
        if point in (SUPERVISOR_POINT, *OF_OTHER_LOADS) or (point in _ONCE_A_LIFE and n > 1):
            continue
        if actor_of(point) in found:
            found[actor_of(point)].append((point, n))
    return found


def plan_of(by_kind: dict[str, list[Death]]) -> str:
    """Return the plan in the engine's format.

    Entry n joins the n-th death of every kind, since stop points of different actors have different names.
    """
    lives = itertools.zip_longest(*by_kind.values())
    return ";".join(",".join(f"{point}:{n}:kill" for point, n in filter(None, life)) for life in lives)
