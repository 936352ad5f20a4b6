"""The HTTP gateway dies and is attacked (RF-125, RF-126).

A storm kills the gateway, and now and then a shard, under writers, claimers and watchers that do no more than
repeat what got no answer (`storm.py`). After it, hostile clients send what no client should (`hostile.py`).
Storms and attacks alternate until the time is over; then comes a storm over several gateways on one port. A
case is `storm/SEED`, `several/SEED` or `ROW/SEED`.

Settings: `storm_s`: length of a storm; `rows`: names of the hostile rows (empty: all, ["none"]: none);
`idle`: connections of the flood; `slow_bodies`: whether to wait for the deadline of bodies, half a minute.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.http import hostile, storm
from chaos.http.place import Place
from chaos.order import Account, Order
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RinglogError
from ringlog.testing.real_engine import TestEngine, engine

KNOWN = {"storm_s": 6.0, "rows": [], "idle": hostile.IDLE_CONNECTIONS, "slow_bodies": False}
STORM, ATTACK = "RF-125", "RF-126"
SHARDS = 2
SEVERAL = 3
"""Gateway processes of the last storm."""


@contextlib.contextmanager
def arena(root: Path, gateways: int = 1) -> Iterator[TestEngine]:
    """Run an engine with HTTP gateways, two shards and a scheduler, whose actors may die often."""
    with engine(
        directory=root / f"engine-{gateways}", wal={"shards": SHARDS}, delivery={"schedulers": 1},
        http={"enabled": True, "port": 0, "processes": gateways},
        supervisor={"restart_max": 1_000, "restart_window_s": 1},
    ) as running:  # fmt: skip
        running.wait_ready("http_gateway")
        yield running


def run(order: Order, account: Account) -> None:
    """Alternate storms and attacks until the time is over."""
    given = order.choose(KNOWN)
    rows = hostile.rows_of(given["rows"], idle=given["idle"])
    with arena(order.scratch) as running:
        begun, number = time.monotonic(), 0
        while not number or time.monotonic() - begun < order.seconds:
            seed = order.seed + number
            _storm(account, running, seed, given["storm_s"])
            if given["rows"] != ["none"]:
                _attack(account, running, rows, seed, given)
            number += 1
    _several(order, account, order.seed, given["storm_s"])


def _several(order: Order, account: Account, seed: int, seconds: float) -> None:
    with arena(order.scratch, SEVERAL) as running:
        _storm(account, running, seed, seconds, SEVERAL)
    account.count_work("storms over several gateways")


def _storm(account: Account, running: TestEngine, seed: int, seconds: float, gateways: int = 1) -> None:
    case = f"several/{seed}" if gateways > 1 else f"storm/{seed}"
    story = storm.Storm(running, random.Random(case), f"s{seed}", seconds, gateways)
    try:
        found = story.run()
    except RinglogError as e:
        account.report_finding(f"storm: {str(e)[:500]}", case, str(e))
        return
    for what, times in story.counts.items():
        account.count_work(what, times)
    account.faults[STORM] += 1
    for what in found:
        account.report_finding(f"storm: {what}", case, what)


def _attack(
    account: Account, running: TestEngine, rows: dict[str, hostile.Row], seed: int, given: dict[str, Any]
) -> None:
    with contextlib.ExitStack() as stack:
        place = Place(running)
        if not given["rows"] or hostile.SLOW_SENDERS in given["rows"]:
            slow = hostile.SlowSenders(place, with_bodies=given["slow_bodies"])
            stack.callback(slow.close)
            rows = {**rows, hostile.SLOW_SENDERS: slow.judge}
        for name, row in rows.items():
            begun = time.monotonic()
            try:
                cases = row(place, random.Random(f"{name}/{seed}"))
                place.judge()
            except (GuaranteeBroken, RinglogError, OSError) as e:
                account.report_finding(f"{name}: {str(e)[:500]}", f"{name}/{seed}", str(e))
                # What follows would be judged against a gateway that is damaged, or another one.
                return
            finally:
                account.figures[f"{name}_s"] = round(time.monotonic() - begun, 2)
            account.count_work("cases", cases)
            account.count_work("rows", 1, ATTACK)
        account.figures["grown_mib"] = max(account.figures.get("grown_mib", 0.0), place.grown_mib)


def replay(order: Order, case: str) -> None:
    """Repeat one storm or one hostile row. Raises GuaranteeBroken."""
    name, _, seed = case.partition("/")
    given, account = order.choose(KNOWN), Account()
    if name == "several":
        _several(order, account, int(seed or 1), given["storm_s"])
        account.print_report()
        return
    with arena(order.scratch) as running:
        if name == "storm":
            _storm(account, running, int(seed or 1), given["storm_s"])
        else:
            rows = hostile.rows_of([name], idle=given["idle"])
            _attack(account, running, rows, int(seed or 1), {**given, "rows": [name]})
    account.print_report()
