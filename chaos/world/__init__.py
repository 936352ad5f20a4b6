"""A simulated world: every actor in one thread, under virtual time, on a disk and a network that fail (T-5).

What decides is production code: shards with their recovery and log writer, gateway, compactor, reclaimer,
relocator over a cold directory, the supervisor's policy and identity, the library's decoding of what is read.
What is simulated is what surrounds them: rings' memory, sockets, clocks, the disk, the table of processes.
One seed decides everything: workload, faults, who runs when. Each seed mixes a random subset of

  kills of any process at any effect or disk call, of everything, of the supervisor; power loss with any legal
  damage, also while the engine starts; failed, short, stuck and late disk calls, hot and cold; a full disk
  and room again; paused processes; steps of the wall clock; answers lost with their sender; clients that die
  and go on as another process; other numbers of shards at a start

and is judged while it runs by a model of what was promised (model.py) and a monitor of syncs, and at its end,
when all is calm, by reading everything by two ways, restarting twice, and the offline verifier (examine.py).

Settings: `reshards` (only seeds in which the number of shards may change).
Cases: `seed=123 steps=0..100 without=3,17`; `shrink seed=123` looks for a smaller one.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections import Counter
from typing import TYPE_CHECKING

from chaos.order import Account, CannotRun, Order
from chaos.processes import suppress_logging
from chaos.world.plan import Case, Failed, options_of, parse_case, shrink

if TYPE_CHECKING:
    from chaos.world.simulation import Simulation

SEEDS_APART = 100_000
"""Seeds of a run with order seed n begin at n times this."""
SEEDS_PER_COLLECTION = 16
"""A world is full of cycles, and none is looked for while one runs: 2 MiB stay behind each otherwise."""
SHARE = 0.97
"""Of the time, for seeds; the rest is for the end."""


def run(order: Order, account: Account) -> None:
    """One seed after the other until the time is over."""
    only_reshards = order.choose({"reshards": False})["reshards"]
    with suppress_logging():
        _run(order, account, only_reshards=only_reshards)


def _run(order: Order, account: Account, *, only_reshards: bool) -> None:
    until = time.monotonic() + order.seconds * SHARE
    seed, total = order.seed * SEEDS_APART, Counter[str]()
    while time.monotonic() < until and not order.is_enough(account.counts):
        if only_reshards and not options_of(seed)["reshards"]:
            seed += 1
            continue
        try:
            done = live(Case(seed))
        except Failed as e:
            account.found(e.what, str(Case(seed)), e.story)
            account.did("seeds")
        else:
            total += done.facts()
            note(done, account)
            del done
        seed += 1
        if seed % SEEDS_PER_COLLECTION == 0:
            gc.collect()
    for name, number in sorted(total.items()):
        account.figures[f"{name.replace(' ', '_')}_total"] = float(number)


def live(case: Case) -> Simulation:
    """Run one case; raises Failed, and CannotRun without the package that tasks are made of."""
    if importlib.util.find_spec("greenlet") is None:
        raise CannotRun("greenlet is not installed: pip install 'ringlog[fuzz]'")
    from chaos.world.simulation import Simulation

    simulation = Simulation(case.seed, first=case.first, upto=case.upto, without=case.without)
    simulation.run()
    return simulation


def note(done: Simulation, account: Account) -> None:
    """Count what a seed did."""
    counts, met = done.engine.counts, done.engine.weather.met
    late = met["slow sync"]
    account.did("seeds", 1, *(["RF-24"] if done.kinds_of_faults() > 1 else []))
    account.did("simulated_s", (done.loop.now_ns - done.began_ns) // 1_000_000_000)
    account.did("deaths", counts["deaths"])
    account.did("disk_faults", met.total() - late)
    account.did("slow_syncs", late)
    account.did("appends", done.model.counts["appends"])
    account.did("reads", done.model.counts["reads"])
    account.did("steps", len(done.steps))
    account.did("reshards", counts["reshards"], "RF-67")
    account.did("trimmed_while_read", counts["places gone while they were read"], "RF-119")
    account.did("whole_lives", len(done.topics_with_everything()), "RF-118")


def replay(order: Order, case: str) -> None:
    """Run a case again and print its story; `shrink CASE` prints a smaller one that fails in the same way."""
    with suppress_logging():
        _again(order, case)


def _again(order: Order, case: str) -> None:
    if case.startswith("shrink "):
        print(f"python -m chaos replay {order.name} '{shrink(parse_case(case[7:]), how_it_fails)}'")
        return
    try:
        done = live(parse_case(case))
    except Failed as e:
        print(e.story)
        raise
    print(done.story(""))
    print(f"{case}: every promise held; {dict(done.facts())}")


def how_it_fails(case: Case) -> str:
    """What breaks in a case; empty when nothing does."""
    try:
        live(case)
    except Failed as e:
        return e.what
    return ""


__all__ = ["live", "replay", "run"]
