"""Conversion of reports to plain values, and progress output for users."""

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
"""Interval between polls of Spark's progress."""
LINE_EVERY = 10
"""Polls per output line: five seconds."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Positions after + 1 .. until of one epoch of a topic, which a job processed."""

    topic: str
    epoch: int
    after: int
    until: int


def facts_of(report: Any) -> dict[str, Any]:
    """Convert a report to plain values that can be encoded as JSON."""
    facts: dict[str, Any] = msgspec.to_builtins(report, enc_hook=str)
    return facts


class SparkJobProgress(Protocol):
    """Receives the progress of a job."""

    def show(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of `what` are done; total 0: not known yet."""
        ...


class SilentProgress:
    """Shows nothing."""

    def show(self, what: str, done: int, total: int) -> None:
        """Do nothing."""


class LineProgress:
    """Prints a line to stderr on every tenth call, and at the end."""

    def __init__(self) -> None:
        self._looks = 0

    def show(self, what: str, done: int, total: int) -> None:
        """Print a line if one is due."""
        if self._looks % LINE_EVERY == 0 or (total and done == total):
            of = f" of {total}" if total else ""
            sys.stderr.write(f"{what}: {done}{of}\n")
        self._looks += 1


class BarProgress:
    """Shows a progress bar of the package rich."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def show(self, what: str, done: int, total: int) -> None:
        """Update the bar of `what`."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what)
        self._bars.update(self._tasks[what], completed=done, total=total or None)


@contextmanager
def progress(is_shown: bool) -> Iterator[SparkJobProgress]:
    """Yield a progress display on stderr: bars if rich is installed, else lines; silent if not `is_shown`."""
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
    """While the block runs, show the number of finished Spark tasks.

    Shows nothing under Spark Connect, which does not report tasks.
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
