"""The Python processes in which Spark runs tasks: kept for many of them, so what they cost is paid once."""

from __future__ import annotations

import gc
from functools import cache


def freeze_imports(kind: str) -> None:
    """At the end of a task: keep what it has imported out of the collections of garbage to come.

    Spark's workers collect all garbage behind each task, and that goes over every object there is: with our
    imports, Spark's and Arrow's, 20 ms of processor time for a task that may take 100. Objects that live as
    long as the process need not be looked at. Done once for each kind of task (a few: each brings imports of
    its own), or garbage would be kept with them, time and again. In a process that runs no task (a driver, a
    test) nothing is done: there the collector is not ours to set.
    """
    from pyspark import TaskContext

    if TaskContext.get() is not None:
        _freeze(kind)


@cache
def _freeze(kind: str) -> None:
    gc.freeze()
