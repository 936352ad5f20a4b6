"""Simulates all actors in one thread, with a virtual clock, and with a disk and a network that fail.

The decisions come from production code: shards with recovery and log writer, gateway, compactor, reclaimer,
relocator on a cold directory, the supervisor's restart policy and identity file, the library's decoders. The
surroundings are simulated: memory of rings, sockets, clocks, disk, process table. One seed determines
workload, faults and scheduling. Each seed combines a random subset of these faults:

- Kill of any process at any effect or disk call, of all processes, or of the supervisor.
- Power loss with any legal damage, also during a start.
- Disk calls that fail, write partially, block or are slow, in both tiers.
- A full disk that later has space again.
- Paused processes; steps of the wall clock; answers lost with their sender.
- Clients that die and continue as another process; another number of shards at a start.

While a seed runs, a model of the acknowledged operations (model.py) and a monitor of syncs check it. After
the last fault, everything is read in two ways, the engine restarts twice, and the offline verifier runs
(examine.py).

Settings: `reshards` (run only seeds in which the number of shards may change).
Cases: `seed=123 steps=0..100 without=3,17`; `shrink seed=123` searches for a smaller failing case.
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
"""Distance between the first seeds of consecutive order seeds."""
SEEDS_PER_COLLECTION = 16
"""Seeds between garbage collections.

No collection runs within a seed, and each world leaves 2 MiB in cycles.
"""
SHARE = 0.97
"""Share of the time for seeds. The rest is for the end of the class."""


def run(order: Order, account: Account) -> None:
    """Run one seed after another until the time is over."""
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
            account.report_finding(e.what, str(Case(seed)), e.story)
            account.count_work("seeds")
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
    """Run one case. Raises Failed, and CannotRun if greenlet is not installed."""
    if importlib.util.find_spec("greenlet") is None:
        raise CannotRun("greenlet is not installed: pip install 'ringlog[fuzz]'")
    from chaos.world.simulation import Simulation

    simulation = Simulation(case.seed, first=case.first, upto=case.upto, without=case.without)
    simulation.run()
    return simulation


def note(done: Simulation, account: Account) -> None:
    """Count the work of one seed."""
    counts, met = done.engine.counts, done.engine.disk_faults.met
    late = met["slow sync"]
    account.count_work("seeds", 1, *(["RF-24"] if done.kinds_of_faults() > 1 else []))
    account.count_work("simulated_s", (done.loop.now_ns - done.began_ns) // 1_000_000_000)
    account.count_work("deaths", counts["deaths"])
    account.count_work("disk_faults", met.total() - late)
    account.count_work("slow_syncs", late)
    account.count_work("appends", done.model.counts["appends"])
    account.count_work("reads", done.model.counts["reads"])
    account.count_work("steps", len(done.steps))
    account.count_work("reshards", counts["reshards"], "RF-67")
    account.count_work("trimmed_while_read", counts["places gone while they were read"], "RF-119")
    account.count_work("whole_lives", len(done.topics_with_everything()), "RF-118")


def replay(order: Order, case: str) -> None:
    """Run a case again and print its events.

    `shrink CASE` prints a smaller case that fails in the same way.
    """
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
    """Return the failure of a case, or an empty string."""
    try:
        live(case)
    except Failed as e:
        return e.what
    return ""


__all__ = ["live", "replay", "run"]
