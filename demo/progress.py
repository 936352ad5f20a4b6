"""Progress of the demo: bars on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Context manager. `total` is the expected number of events; 0 if it is not known."""

    def __init__(self, total: int) -> None:
        self._bars: Any = None
        self._tasks: list[Any] = []
        if sys.stderr.isatty():
            self._open(total)

    def _open(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self._tasks = [self._bars.add_task(name, total=total) for name in ("acked", "followed", "read back")]
        self._bars.start()

    def show(self, acked: int, followed: int) -> None:
        """Update the bars of writing and following."""
        if self._bars is not None:
            self._bars.update(self._tasks[0], completed=acked)
            self._bars.update(self._tasks[1], completed=followed)

    def show_read_back(self, read: int) -> None:
        """Update the bar of reading back."""
        if self._bars is not None:
            self._bars.update(self._tasks[2], completed=read)

    def say(self, text: str) -> None:
        """Print one line of status."""
        if self._bars is not None:
            self._bars.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
