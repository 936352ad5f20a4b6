"""Kills of the real program: every process, at every stop point and at random, under load.

Settings:

- `points_s`, `tidy_s`: maximum time for the stop points of shards, and of background processes
- `routers_s`: how long routers work under kills; 0: not at all
- `storm_s`: length of a storm; storms fill the remaining time
- `ends_rounds`: rounds of case `ends`
- `watch_rounds`: rounds of case `watches`
- `reshards`: starts with another number of shards
- `outage_kills`: kills with 64 MiB of log to replay
- `bulk_times`: appends in large frames, as a multiple of those in small ones
- `only`: names of cases; empty: all

A replay runs one case by its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from chaos.kills import cases, forwarding, watches
from chaos.kills.scene import BULK_TIMES, Stage
from chaos.order import Account, Order
from ringlog.drill.nursery import Nursery

DEFAULTS: dict[str, Any] = {
    "outage_kills": 4,
    "ends_rounds": 1,
    "watch_rounds": 6,
    "reshards": 4,
    "storm_s": 14.0,
    "points_s": 45.0,
    "tidy_s": 45.0,
    "routers_s": 0.0,
    "bulk_times": BULK_TIMES,
    "only": [],
}


def run(order: Order, account: Account) -> None:
    """Run all cases, then storms until the time is over."""
    settings = order.choose(DEFAULTS)
    end = time.monotonic() + order.seconds
    with Nursery("chaos.rigs.work") as nursery:
        stage = Stage(order, account, nursery)
        for name, case in _cases(settings).items():
            if not settings["only"] or name in settings["only"]:
                stage.run(name, case)
        while not settings["only"] and time.monotonic() + settings["storm_s"] < end and not account.findings:
            stage.run("storm", partial(cases.storm, seconds=settings["storm_s"]))
    _figures(stage)


def replay(order: Order, case: str) -> None:
    """Repeat one case by its name: one of `_cases`, or doomed."""
    name = case.partition(":")[0]
    Stage.replay(order, name, {**_cases(order.choose(DEFAULTS)), "doomed": cases.doomed}[name])


def _cases(settings: dict[str, Any]) -> dict[str, Callable[[Stage], None]]:
    return {
        "points": partial(cases.points, seconds=settings["points_s"]),
        "tidy": partial(cases.tidy, seconds=settings["tidy_s"]),
        "routers": partial(forwarding.routers, seconds=settings["routers_s"]),
        "storm": partial(cases.storm, seconds=settings["storm_s"]),
        "ends": partial(cases.ends, rounds=settings["ends_rounds"]),
        "watches": partial(watches.watches, rounds=settings["watch_rounds"]),
        "reshards": partial(cases.reshards, rounds=settings["reshards"]),
        "frozen": cases.frozen,
        "outage": partial(cases.outage, kills=settings["outage_kills"]),
    }


def _figures(stage: Stage) -> None:
    figures = stage.account.figures
    for name, values in (("kill_pause", stage.pauses_ms), ("pause", stage.outages_ms)):
        if values:
            figures[f"{name}_p50_ms"] = round(float(np.quantile(values, 0.5)), 1)
            figures[f"{name}_p99_ms"] = round(float(np.quantile(values, 0.99)), 1)
            figures[f"{name}_max_ms"] = round(max(values), 1)
