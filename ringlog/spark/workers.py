"""Python worker processes of Spark: Spark reuses them for many tasks, so setup costs are paid once."""

from __future__ import annotations

import gc
from functools import cache


def freeze_imports(kind: str) -> None:
    """Exclude all imported objects from later garbage collections. Call it at the end of a task.

    Spark's workers run a full garbage collection after each task. With the imports of ringlog, Spark and
    Arrow this takes 20 ms of CPU time, for a task that may take 100 ms. Imported objects live as long as the
    process and need no check. The freeze happens once for each `kind` of task, because each kind has its own
    imports. More freezes would also keep garbage. Outside of a task (driver, test) the function does nothing:
    there the collector belongs to the program.
    """
    from pyspark import TaskContext

    if TaskContext.get() is not None:
        _freeze(kind)


@cache
def _freeze(kind: str) -> None:
    gc.freeze()
