"""Generates every legal disk state after a crash of a recorded run, recovers it and checks the result.

Rows of the fault matrix: RF-57 to RF-60, RF-66, RF-68, RF-69.

- workload.py runs a short history on a recorded disk, with compactor, relocator and reclaimer
  (chaos/rigs/storage.py).
- images.py generates, for a cut after each disk call, the disk images that some file system may leave.
- membership.py decides whether a given image is one of them.
- judge.py recovers each image twice and compares the result with the submitted and acknowledged operations.
- offline.py compares it with the result of the offline verifier.
- explore.py runs this for all short histories; edges.py edits images into states that no history reaches.

Settings: `longest` (explore all sequences of up to this many operations), the fields of `explore.Share`,
`processes` (number of processes; they divide the sequences by their first two steps), `only` (explore only
these sequences ("append+seal") and edited images ("edges/RF-60")). The remaining time is used for longer
sequences drawn from the seed, which are counted separately.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial

import numpy as np

from chaos.order import Account, Order
from chaos.processes import subprocess_task, suppress_logging
from chaos.states import edges
from chaos.states.explore import ALONE, Explorer, Part, Share, Steps, Tally, histories, record
from chaos.states.judge import Depth
from chaos.states.offline import Offline
from chaos.states.replaying import replay_state
from chaos.states.workload import ALPHABET
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RinglogError

_EDGES = f"{edges.EDGES}/"
LATE = 1.4
"""Multiple of `order.seconds` after which no further sequence starts.

The minimum counts then show the gap.
"""
SENDS_AGAIN_EVERY = 3
GOES_ON_EVERY = 40
"""Of the edited images, one in SENDS_AGAIN_EVERY gets all frames again, and one in GOES_ON_EVERY gets a
round of the other actors."""


def run(order: Order, account: Account) -> None:
    """Explore the edited images and all short histories, then longer ones while time remains."""
    defaults = {
        "longest": 2,
        "only": [],
        "processes": 1,
        **{each.name: getattr(Share(), each.name) for each in fields(Share)},
    }
    chosen = order.choose(defaults)
    longest, only, parts = int(chosen.pop("longest")), list(chosen.pop("only")), int(chosen.pop("processes"))
    share = Share(**{**chosen, "seed": order.seed})
    with _undisturbed():
        if only:
            _run(order, account, share, _chosen(only), [each for each in only if each.startswith(_EDGES)])
            return
        others = [
            subprocess_task(partial(_part, order, share=share, longest=longest, part=Part(n, parts)))
            for n in range(1, parts)
        ]
        _part(order, account, share=share, longest=longest, part=Part(0, parts))
        for collect in others:
            collect(account)
        if others:
            _count_once(order, account, parts)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Suppress the warnings about torn tails, and garbage collection in the middle of a history."""
    gc.disable()
    gc.freeze()  # existing objects stay, so collections scan only the objects of a history
    try:
        with suppress_logging():
            yield
    finally:
        gc.unfreeze()
        gc.enable()


def _chosen(only: list[str]) -> Iterator[tuple[Steps, bool]]:
    return ((tuple(each.split("+")), False) for each in only if not each.startswith(_EDGES))


def _part(order: Order, account: Account, *, share: Share, longest: int, part: Part) -> None:
    """Run one of the processes. The first one also judges the edited images."""
    rows = [f"{_EDGES}{row}" for row in edges.ROWS] if part.number == 0 else []
    tally = _run(order, account, share, _all(order, longest, part), rows, part)
    if part.of > 1:
        np.array(sorted(tally.seen), dtype=np.int64).tofile(order.scratch / f"seen-{part.number}")


def _count_once(order: Order, account: Account, parts: int) -> None:
    """Count images that two processes judged once. Hashes agree in processes that were forked from one."""
    seen = [np.fromfile(order.scratch / f"seen-{n}", dtype=np.int64) for n in range(parts)]
    twice = sum(map(len, seen)) - len(np.unique(np.concatenate(seen)))
    account.counts["recovered"] -= twice
    account.figures["recovered_in_two_processes"] = float(twice)


def _run(
    order: Order, account: Account, share: Share, histories: Iterator[tuple[Steps, bool]], rows: list[str],
    part: Part = ALONE,
) -> Tally:  # fmt: skip
    begun, cpu = time.monotonic(), time.process_time()
    scratch = order.scratch / f"part-{part.number}"
    scratch.mkdir(exist_ok=True)
    offline = Offline(scratch)
    _edges(account, offline, [row.removeprefix(_EDGES) for row in rows])
    explorer = Explorer(Tally(), share, offline, part)
    for steps, is_extra in histories:
        if time.monotonic() - begun > order.seconds * (1 if is_extra else LATE):
            break
        if is_extra and part.of == 1 and order.is_enough(_counts(account, explorer.tally, offline)):
            break
        try:
            explorer.one(steps)
        except GuaranteeBroken as e:
            account.report_finding(str(e)[:300], e.case, str(e))
        except (RinglogError, AssertionError) as e:
            account.report_finding(
                f"{'+'.join(steps)} fails without a crash: {e}"[:300], "+".join(steps), str(e)
            )
        account.count_work("longer_sequences" if is_extra else "sequences", 1, "RF-58")
        gc.collect()
        gc.freeze()  # otherwise scanning the remembered hashes takes a seventh of the time
    _count(account, explorer.tally, offline)
    account.figures[f"cpu_s{part.suffix}"] = round(time.process_time() - cpu, 1)
    account.figures[f"wall_s{part.suffix}"] = round(time.monotonic() - begun, 1)
    return explorer.tally


def _all(order: Order, longest: int, part: Part) -> Iterator[tuple[Steps, bool]]:
    """Yield (sequence, is longer than `longest`) of a part."""
    rng = order.random("order")
    for length in range(1, longest + 1):
        exactly = [steps for steps in histories(length) if len(steps) == length and part.has(steps)]
        rng.shuffle(exactly)
        yield from ((steps, False) for steps in exactly)
    while True:
        steps = tuple(rng.choices(ALPHABET, k=longest + 1))
        if part.has(steps):
            yield steps, True


def _edges(account: Account, offline: Offline, rows: list[str]) -> None:
    for row in rows:
        for number, edge in enumerate(edges.edges(row)):
            depth = Depth(
                offline, row == "RF-66" or number % SENDS_AGAIN_EVERY == 0, number % GOES_ON_EVERY == 0
            )
            try:
                edges.judge_edge(row, edge, depth)
            except GuaranteeBroken as e:
                account.report_finding(f"{row}: {e}"[:300], f"{edges.EDGES}/{row}/{number}", str(e))
            account.count_work("edited", 1, row)
        gc.collect()


def _counts(account: Account, tally: Tally, offline: Offline) -> Counter[str]:
    """Return all counts, including those that are added to the account only at the end."""
    edited = account.counts["edited"]
    return account.counts + Counter(
        images=tally.images + edited, recovered=tally.judged + edited,
        recovered_in_recovery=tally.recoveries, verified=offline.checks, cuts=tally.cuts, acked=tally.acked,
        deleted=tally.deleted, sent_again=tally.sent_again, went_on=tally.went_on,
    )  # fmt: skip


def _count(account: Account, tally: Tally, offline: Offline) -> None:
    account.counts = _counts(account, tally, offline)
    account.faults["RF-57"] += account.counts["recovered"]
    account.faults["RF-59"] += account.counts["recovered_in_recovery"]


def replay(order: Order, case: str) -> None:
    """Generate and judge one image again; print the history up to the cut.

    Raises GuaranteeBroken, or ValueError if `case` is not valid.
    """
    if "@" not in case and "/" not in case:
        record(case.split("+"))
        return
    if not case.startswith(f"{edges.EDGES}/"):
        replay_state(case, order.scratch)
        return
    _, row, number = case.split("/")
    for at, edge in enumerate(edges.edges(row)):
        if at == int(number):
            for path, data in sorted(edge[0].files.items()):
                print(f"  {path}: {len(data)} bytes, {len(data.rstrip(bytes(1)))} up to the zeros at its end")
            edges.judge_edge(row, edge, Depth(Offline(order.scratch), goes_on=True))
            return
    raise ValueError(f"{row} has no case {number}")


__all__ = ["replay", "run"]
