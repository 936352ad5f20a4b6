"""The rows of bench/peers.py while every CPU is busy: `make bench AREA=peers-busy`.

One process of normal priority computes on each CPU, so that clients and servers compete for CPU time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from bench.peers import PEERS, Figure, comparison_rows, figures, measured
from bench.rows import Row

_BURN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1_000_000))
"""


def rows(only: str = "") -> list[Row]:
    """Return all rows of the area, or those of parts whose name contains `only`."""
    with burners(os.cpu_count() or 1):
        found = measured(PEERS, only)
    return comparison_rows([busy(figure) for figure in figures()], found, PEERS)


def busy(figure: Figure) -> Figure:
    """Return a row with its target on busy CPUs: the p50 of a delivery is at most twice that of Redis."""
    is_delivery = figure.id.startswith("delivery_") and figure.id.endswith("_p50")
    return replace(figure, reach={"ratio_max": 2.0} if is_delivery else {}, reach_to={})


@contextmanager
def burners(count: int) -> Iterator[list[int]]:
    """Run `count` computing processes within the block.

    Yields their pids. They also exit with this process.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", _BURN]))  # noqa: PERF401
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
