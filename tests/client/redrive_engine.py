"""An engine whose scheduler dies, or stops for good, when letters have come back and are not deleted yet."""

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
    """`how`: `kill` or `power`."""
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
    """Power goes, and the engine starts again; nobody stops it this time."""
    found.power_off()
    found._environ.pop(VARIABLE)
    found.start()
    found.wait_ready()
