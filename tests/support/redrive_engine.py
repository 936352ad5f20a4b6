"""An engine whose scheduler stops in the middle of a redrive.

The scheduler is killed or paused after the dead letters are appended to their queue and before they are
deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ringlog
from ringlog.client import Client
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine

VARIABLE = "RINGLOG_TEST_STOP_POINTS"


@contextmanager
def half_way(how: str, directory: Path) -> Iterator[tuple[TestEngine, Client]]:
    """Start the engine and a client.

    `how` is `kill` (the scheduler dies and restarts) or `power` (the scheduler pauses until `lose_power`).
    """
    action = "kill" if how == "kill" else "pause"
    with (
        engine(
            wal={"shards": 2}, delivery={"schedulers": 1}, supervisor={"restart_max": 100},
            directory=directory, environ={VARIABLE: f"redrive_after_append:1:{action}"},
        ) as found,
        ringlog.connect(found.url, wait=20, timeout_ms=5_000) as client,
    ):  # fmt: skip
        yield found, client


def lose_power(found: TestEngine) -> None:
    """Simulate a power loss and start the engine again, this time without the stop point."""
    found.power_off()
    found._environ.pop(VARIABLE)
    found.start()
    found.wait_ready()
