"""Reports as plain values, and progress for people."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_INTERVAL_S = 0.5
"""Between two looks at what Spark is doing."""
LINE_EVERY = 10
"""Looks for one plain line: five seconds."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Positions after + 1 .. until of one life of a topic: what a job looked at."""

    topic: str
    epoch: int
    after: int
    until: int


def facts_of(report: Any) -> dict[str, Any]:
    """A report as plain values that JSON takes."""
    facts: dict[str, Any] = msgspec.to_builtins(report, enc_hook=str)
    return facts


class SparkJobProgress(Protocol):
    """Told how far a job is."""

    def show(self, what: str, done: int, total: int) -> None:
        """`done` of `total` steps of `what`; total 0 = not known yet."""
        ...


class SilentProgress:
    """Shows nothing."""

    def show(self, what: str, done: int, total: int) -> None:
        """See Progress."""


class LineProgress:
    """A line now and then."""

    def __init__(self) -> None:
        self._looks = 0

    def show(self, what: str, done: int, total: int) -> None:
        """See Progress."""
        if self._looks % LINE_EVERY == 0 or (total and done == total):
            of = f" of {total}" if total else ""
            sys.stderr.write(f"{what}: {done}{of}\n")
        self._looks += 1


class BarProgress:
    """A bar of the package rich."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def show(self, what: str, done: int, total: int) -> None:
        """See Progress."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what)
        self._bars.update(self._tasks[what], completed=done, total=total or None)


@contextmanager
def progress(is_shown: bool) -> Iterator[SparkJobProgress]:
    """Bars on a terminal where rich is installed, else lines; nothing when not `is_shown`. To stderr."""
    if not is_shown:
        yield SilentProgress()
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bars
    except ImportError:
        yield LineProgress()
        return
    with Bars(console=Console(stderr=True), transient=True) as bars:
        yield BarProgress(bars)


@contextmanager
def show_task_progress(session: SparkSession, shown: SparkJobProgress, what: str) -> Iterator[None]:
    """While the block runs, tell how many tasks of Spark's are done. Connect cannot say, and nothing is
    shown.
    """
    if isinstance(shown, SilentProgress) or not hasattr(session, "_jsc"):
        yield
        return
    end = threading.Event()
    watcher = threading.Thread(target=_watch, args=(session, shown, what, end), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        end.set()
        watcher.join(10 * POLL_INTERVAL_S)


def _watch(session: SparkSession, shown: SparkJobProgress, what: str, end: threading.Event) -> None:
    tracker = session.sparkContext.statusTracker()
    while not end.wait(POLL_INTERVAL_S):
        stages = [tracker.getStageInfo(one) for one in tracker.getActiveStageIds()]
        found = [stage for stage in stages if stage is not None]
        if found:
            done = sum(stage.numCompletedTasks for stage in found)
            shown.show(what, done, sum(stage.numTasks for stage in found))
