"""The process tree as data: which children there are, how they are restarted and in which order stopped.

Children are started from top to bottom and stopped by `stop_order`, lowest first: those who accept
work stop before those who keep promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringlog.board.processes import (
    COMPACTOR,
    GATEWAY,
    RECLAIMER,
    RELOCATOR,
    SCHEDULER,
    WAL_SHARD,
    scheduler_name,
    scheduler_slot,
    shard_name,
    shard_slot,
    slot_of,
)
from ringlog.config import Config
from ringlog.limits import PROCESSES_MAX

BACKGROUND: tuple[str, ...] = (COMPACTOR, RECLAIMER, RELOCATOR)
"""Kinds that tidy up behind the others, at low priority, and without which the engine serves as before: they
start behind them, and may be replaced."""
LOW_PRIORITY: tuple[str, ...] = (RECLAIMER, RELOCATOR)
"""Kinds whose whole process gives way to everybody. The compactor does so pass by pass, while it keeps up."""

_STOP_FIRST = 0
_STOP_LAST = 1


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child: what it is and how it is kept alive."""

    kind: str
    name: str
    """`wal_shard-00`; the stem of its socket and bell."""
    slot: int
    """Its process slot on the board."""
    stop_order: int
    restart_max: int
    """More deaths than this within the window and the child is given up."""
    restart_window_s: float
    stuck_after_s: float
    shard: int = -1

    def __str__(self) -> str:
        return (
            f"{self.name}  python -m actors.{self.kind}, slot {self.slot}, restarts <= {self.restart_max} "
            f"in {self.restart_window_s:g} s, stuck after {self.stuck_after_s:g} s, stops {self.stop_order}"
        )


@dataclass(frozen=True, slots=True)
class Tree:
    """All children, in the order in which they are started."""

    children: tuple[ChildSpec, ...]

    def __iter__(self) -> Iterator[ChildSpec]:
        return iter(self.children)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Each kind once."""
        return tuple(dict.fromkeys(child.kind for child in self))

    def of_kind(self, kind: str) -> tuple[ChildSpec, ...]:
        """The children of one kind."""
        return tuple(spec for spec in self.children if spec.kind == kind)

    def __str__(self) -> str:
        return "\n".join(["supervisor", *(f"  {spec}" for spec in self.children)])


def build_tree(config: Config) -> Tree:
    """The tree this configuration asks for."""
    supervisor = config.supervisor

    def child(kind: str, name: str, slot: int, stop_order: int, shard: int = -1) -> ChildSpec:
        return ChildSpec(
            kind=kind,
            name=name,
            slot=slot,
            stop_order=stop_order,
            restart_max=supervisor.restart_max,
            restart_window_s=supervisor.restart_window_s,
            stuck_after_s=supervisor.stuck_after_s,
            shard=shard,
        )

    shards = config.wal.shards
    children = [child(WAL_SHARD, shard_name(n), shard_slot(n), _STOP_LAST, n) for n in range(shards)]
    if config.gateway.enabled:
        children.append(child(GATEWAY, GATEWAY, slot_of(GATEWAY, shards), _STOP_FIRST))
    children += [
        child(SCHEDULER, scheduler_name(n), scheduler_slot(shards, n), _STOP_FIRST)
        for n in range(config.delivery.schedulers)
    ]
    # They ask the shards, who therefore stop behind them.
    children += [child(kind, kind, slot_of(kind, shards), _STOP_FIRST) for kind in _background(config)]
    assert 1 + len(children) <= PROCESSES_MAX
    return Tree(tuple(children))


def _background(config: Config) -> list[str]:
    """Kinds that this configuration asks for and nobody waits for."""
    has_cold = bool(config.cold.dir or config.cold.url)
    return [kind for kind in BACKGROUND if config.storage.enabled and (kind != RELOCATOR or has_cold)]
