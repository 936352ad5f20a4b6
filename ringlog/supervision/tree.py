"""The process tree as data: the children, their restart limits, and the order in which they stop.

Children start from top to bottom. They stop in ascending `stop_order`: processes that accept work stop before
the shards, which must settle what they accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringlog.board.processes import (
    COMPACTOR,
    GATEWAY,
    HTTP_GATEWAY,
    RECLAIMER,
    RELOCATOR,
    SCHEDULER,
    WAL_SHARD,
    http_gateway_name,
    http_gateway_slot,
    scheduler_name,
    scheduler_slot,
    shard_name,
    shard_slot,
    slot_of,
)
from ringlog.config import Config
from ringlog.limits import PROCESSES_MAX

BACKGROUND: tuple[str, ...] = (COMPACTOR, RECLAIMER, RELOCATOR)
"""Background kinds at low priority. The engine serves clients without them. They start after the other
processes, and the supervisor may replace them."""
LOW_PRIORITY: tuple[str, ...] = (RECLAIMER, RELOCATOR)
"""Kinds whose whole process runs at the lowest priority. The compactor changes its priority for each pass."""

_STOP_FIRST = 0
_STOP_LAST = 1


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """Specification of one child: what it is, and the limits under which it is restarted."""

    kind: str
    name: str
    """For example `wal_shard-00`. Also the stem of its socket's and its bell's file name."""
    slot: int
    """Index of its process slot on the board."""
    stop_order: int
    restart_max: int
    """Deaths within `restart_window_s` beyond which the supervisor gives the child up."""
    restart_window_s: float
    stuck_after_s: float
    shard: int = -1

    def __str__(self) -> str:
        return (
            f"{self.name}  python -m ringlog.actors.{self.kind}, slot {self.slot}, "
            f"restarts <= {self.restart_max} in {self.restart_window_s:g} s, "
            f"stuck after {self.stuck_after_s:g} s, stops {self.stop_order}"
        )


@dataclass(frozen=True, slots=True)
class Tree:
    """All children, in the order of their start."""

    children: tuple[ChildSpec, ...]

    def __iter__(self) -> Iterator[ChildSpec]:
        return iter(self.children)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Each kind once, in the order of the start."""
        return tuple(dict.fromkeys(child.kind for child in self))

    def of_kind(self, kind: str) -> tuple[ChildSpec, ...]:
        """Return the children of one kind."""
        return tuple(spec for spec in self.children if spec.kind == kind)

    def __str__(self) -> str:
        return "\n".join(["supervisor", *(f"  {spec}" for spec in self.children)])


def build_tree(config: Config) -> Tree:
    """Return the process tree for this configuration."""
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
    if config.http.enabled:
        children += [
            child(HTTP_GATEWAY, http_gateway_name(n), http_gateway_slot(n), _STOP_FIRST)
            for n in range(config.http.processes)
        ]
    children += [
        child(SCHEDULER, scheduler_name(n), scheduler_slot(shards, n), _STOP_FIRST)
        for n in range(config.delivery.schedulers)
    ]
    # Background processes send requests to the shards, so the shards must stop after them.
    children += [child(kind, kind, slot_of(kind, shards), _STOP_FIRST) for kind in _background(config)]
    assert 1 + len(children) <= PROCESSES_MAX
    return Tree(tuple(children))


def _background(config: Config) -> list[str]:
    """Return the background kinds that this configuration enables."""
    has_cold = bool(config.cold.dir or config.cold.url)
    return [kind for kind in BACKGROUND if config.storage.enabled and (kind != RELOCATOR or has_cold)]
