"""Explores every order of the steps of two processes that share memory or a directory.

The explored code is the production code: producer and consumer of a ring, the board's seqlock, the sleep of
the shard and the wake-up by the client, and the supervisor's lock of its directories. Spaces and bounds:

ring      capacity of two frames, three frames, one crash of each side at any step (RF-115), 8-byte words
          (RF-26)
late      the same with one crash in all, and stores that the other side sees late but in order (RF-34), each
          frame in a push of its own (`push_one`); "late-consumer" pushes runs, and so does "late-run"
seqlock   two writers in sequence, the first dies at any step, three readers (RF-116)
bell      a sleeper and a ringer, lost and doubled bells, stores that are seen late (RF-35)
starts    two engines start on one directory, and either may be killed (RF-120)

`schedules` is the number of paths through the explored graphs of the ring. It is exact, because each state is
visited once and the counts of its successors are added. It is capped at 2^62; its logarithm is in the
figures. `transitions_executed` counts steps that the production code executed. `executed_schedules` counts
schedules that were executed from first to last step without remembered states.

Settings: `switches` (number of switches between the engines of `starts` up to which every order is explored),
`spaces` ("ci" or "night"), `only` (list of spaces to explore completely, without whole schedules; empty:
all).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaos.order import Account, Order
from chaos.schedules import bell, ring, seqlock, starts
from chaos.schedules.ring_memory import World
from ringlog.board import seqlock as product
from ringlog.drill.checks import GuaranteeBroken

SCHEDULES_MAX = 1 << 62
"""Cap of counts. Some readers of the report cannot represent larger numbers."""
SETTINGS: dict[str, Any] = {"switches": 1, "spaces": "ci", "only": []}
WALK_SHARE = 0.15
"""Share of the time for schedules that are executed from first to last step."""
STARTS_SHARE = 0.4
_TWO_FRAMES = 2 * ring.FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Space:
    """A plan of the ring's explorer, and the rows of the fault matrix that it covers."""

    plan: ring.Plan
    rows: tuple[str, ...]


RING_SPACES = {
    "ring": Space(ring.Plan(_TWO_FRAMES, frames=3), ("RF-115", "RF-26")),
    "late": Space(
        ring.Plan(_TWO_FRAMES, frames=3, late=2, consumer_crashes=0, push="push_one"), ("RF-34", "RF-115")
    ),
    "late-consumer": Space(ring.Plan(_TWO_FRAMES, frames=2, late=2, producer_crashes=0), ("RF-34", "RF-115")),
}
NIGHT_SPACES = {
    "one": Space(ring.Plan(_TWO_FRAMES, frames=3, push="push_one"), ("RF-115", "RF-26")),
    "late-run": Space(ring.Plan(_TWO_FRAMES, frames=3, late=2, consumer_crashes=0), ("RF-34", "RF-115")),
    "padded-one": Space(ring.Plan(_TWO_FRAMES + 8, frames=3, push="push_one"), ("RF-115", "RF-26")),
    "padded": Space(ring.Plan(_TWO_FRAMES + 8, frames=3), ("RF-115", "RF-26")),
    "resend": Space(ring.Plan(_TWO_FRAMES + 8, frames=3, resend=True), ("RF-115",)),
    "one-entry": Space(ring.Plan(_TWO_FRAMES + 8, frames=3, settle_entries=1), ("RF-115",)),
    "twice-producer": Space(ring.Plan(_TWO_FRAMES + 8, frames=3, producer_crashes=2), ("RF-115",)),
    "twice-consumer": Space(ring.Plan(_TWO_FRAMES + 8, frames=3, consumer_crashes=2), ("RF-115",)),
    "late-both": Space(ring.Plan(_TWO_FRAMES, frames=2, late=2), ("RF-34", "RF-115")),
    "run": Space(ring.Plan(56, frames=4, settle_entries=3, push="push_run", batch=2), ("RF-115",)),
    "buffer": Space(ring.Plan(56, frames=4, settle_entries=3, push="push_buffer", batch=2), ("RF-115",)),
}
BELL_SPACES = {
    "bell": bell.Plan(),
    "bell-lost": bell.Plan(lost=2, doubled=1),
    "bell-late": bell.Plan(is_late=True, lost=1, doubled=1),
    "calls": bell.Plan(through_calls=True),
    "calls-lost": bell.Plan(through_calls=True, lost=2, doubled=1),
    "calls-late": bell.Plan(through_calls=True, is_late=True, lost=1, doubled=1),
}


def ring_spaces(which: str) -> dict[str, Space]:
    """Return the spaces of the ring by name. Raises ValueError for an unknown set."""
    if which not in {"ci", "night"}:
        raise ValueError(f"spaces must be ci or night, got {which!r}")
    return RING_SPACES | NIGHT_SPACES if which == "night" else RING_SPACES


def run(order: Order, account: Account) -> None:
    """Explore every space completely, execute random whole schedules, then explore orders of starts."""
    settings = order.choose(SETTINGS)
    began = time.monotonic()
    spaces, only = ring_spaces(settings["spaces"]), settings["only"]

    def is_wanted(name: str) -> bool:
        return not only or name in only

    for name, plan in BELL_SPACES.items():
        if is_wanted(name):
            _bell(name, plan, account)
    if is_wanted("seqlock"):
        _seqlock(account)
    for name, space in spaces.items():
        if is_wanted(name):
            _ring(name, space, account)
    if not only:
        _walks(order, spaces, account)
    if is_wanted("starts"):
        _starts(order, int(settings["switches"]), began + order.seconds, account)


def replay(order: Order, case: str) -> None:
    """Repeat one case.

    `SPACE` explores the space again, `SPACE:CHOICES` executes one schedule of a ring, `starts:ORDER` one
    order.
    """
    name, _, rest = case.partition(":")
    if name == "starts":
        for action, alive in starts.Starts(order.scratch).run_order(rest):
            print(f"{action} of {alive}")
    elif name in BELL_SPACES:
        print(bell.explore(BELL_SPACES[name]))
    elif name == "seqlock":
        print(explore_seqlock().states, "states")
    else:
        space = ring_spaces("night")[name]
        choices = iter(int(each) for each in rest.split(",") if each)
        ring.Explorer(space.plan).walk(lambda successors: next(choices, 0), _tell)


def _tell(world: World) -> None:
    print(
        f"words {world.words} log {world.log} told {world.told} producer {world.producer.op or '-'}"
        f" {len(world.producer.done)} consumer {world.consumer.op or '-'} {len(world.consumer.done)}"
    )


def _ring(name: str, space: Space, account: Account) -> None:
    explorer = ring.Explorer(space.plan)
    try:
        explorer.run()
    except GuaranteeBroken as e:
        account.report_finding(f"{name}: {e}", f"{name}:{','.join(map(str, e.path))}")
        return
    account.counts["schedules"] = min(account.counts["schedules"] + explorer.schedules, SCHEDULES_MAX)
    account.figures[f"log10_schedules_{name}"] = round(math.log10(explorer.schedules), 1)
    account.count_work("states", explorer.states)
    account.count_work("transitions_executed", explorer.steps, *space.rows)


def _walks(order: Order, spaces: dict[str, Space], account: Account) -> None:
    """Execute random schedules completely. Results of the remembered states must hold for them as well."""
    chance = order.random("walks")
    until = time.monotonic() + order.seconds * WALK_SHARE
    explorers = {name: ring.Explorer(space.plan) for name, space in spaces.items()}
    while time.monotonic() < until:
        for name, explorer in explorers.items():
            try:
                explorer.walk(lambda successors: chance.randrange(len(successors)))
            except GuaranteeBroken as e:
                account.report_finding(f"{name}: {e}", f"{name}:{','.join(map(str, e.path))}")
            account.count_work("executed_schedules")
    account.count_work("transitions_executed", sum(explorer.steps for explorer in explorers.values()))


def _bell(name: str, plan: bell.Plan, account: Account) -> None:
    try:
        explored = bell.explore(plan)
    except GuaranteeBroken as e:
        account.report_finding(f"{name}: {e}", name)
        return
    if (plan.lost or plan.is_late) and not explored.missed:
        account.report_finding(
            f"{name}: no lost bell delayed the sleeper, so the harness tests nothing", name
        )
    account.count_work("states", explored.states)
    account.count_work("transitions_executed", explored.steps)
    account.count_work("missed_bells", explored.missed, "RF-35")


def _seqlock(account: Account) -> None:
    try:
        explored = explore_seqlock()
    except seqlock.Torn as e:
        account.report_finding(f"seqlock: {e}", "seqlock")
        return
    account.count_work("states", explored.states)
    account.count_work("transitions_executed", explored.steps, "RF-116")


def explore_seqlock(
    read: Callable[[seqlock.StepWords], object] | None = None, readers: int = 3
) -> seqlock.SeqlockExplorer:
    """Explore two writers of two words in sequence, and readers. Raises seqlock.Torn."""
    values = [(0, 0), (1, 10), (2, 20)]
    lives = [[_writes(value)] for value in values[1:]]
    explored = seqlock.SeqlockExplorer(3, lives, values, read or _try_read, readers).run()
    if not {*values, seqlock.UNSTABLE} <= explored.seen:
        raise seqlock.Torn(f"readers saw no more than {explored.seen}")
    return explored


def _writes(value: tuple[int, int]) -> seqlock.Write:
    return lambda words: product.write(words, 0, value)


def _try_read(words: seqlock.StepWords) -> object:
    found = product.try_read(words, 0, 2)
    return seqlock.UNSTABLE if found is None else tuple(found)


def _starts(order: Order, switches: int, until: float, account: Account) -> None:
    tried = starts.Starts(order.scratch)
    until = max(until, time.monotonic() + order.seconds * STARTS_SHARE)
    tried.explore(switches, until, lambda e, path: account.report_finding(f"starts: {e}", f"starts:{path}"))
    if not tried.refused:
        account.report_finding(
            "starts: no engine was refused in any order, so the harness tests nothing", "starts:"
        )
    account.count_work("start_orders", tried.orders, "RF-120")
    account.count_work("executed_schedules", tried.orders)
    account.count_work("kills", tried.kills)
    account.figures["switches_exhausted"] = tried.exhausted
