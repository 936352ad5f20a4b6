"""The HTTP gateway dies and is attacked (RF-125, RF-126).

A storm kills the gateway, and now and then a shard, under writers, claimers and watchers that do no more than
repeat what got no answer (`storm.py`). After it, hostile clients send what no client should (`hostile.py`).
Storms and attacks alternate until the time is over. A case is `storm/SEED` or `ROW/SEED`.

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


@contextlib.contextmanager
def arena(root: Path) -> Iterator[TestEngine]:
    """Run an engine with the HTTP gateway, two shards and a scheduler, whose actors may die often."""
    with engine(
        directory=root / "engine", wal={"shards": SHARDS}, delivery={"schedulers": 1},
        http={"enabled": True, "port": 0}, supervisor={"restart_max": 1_000, "restart_window_s": 1},
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


def _storm(account: Account, running: TestEngine, seed: int, seconds: float) -> None:
    story = storm.Storm(running, random.Random(f"storm/{seed}"), f"s{seed}", seconds)
    try:
        found = story.run()
    except RinglogError as e:
        account.report_finding(f"storm: {str(e)[:500]}", f"storm/{seed}", str(e))
        return
    for what, times in story.counts.items():
        account.count_work(what, times)
    account.faults[STORM] += 1
    for what in found:
        account.report_finding(f"storm: {what}", f"storm/{seed}", what)


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
    with arena(order.scratch) as running:
        if name == "storm":
            _storm(account, running, int(seed or 1), given["storm_s"])
        else:
            rows = hostile.rows_of([name], idle=given["idle"])
            _attack(account, running, rows, int(seed or 1), {**given, "rows": [name]})
    account.print_report()
