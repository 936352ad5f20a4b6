"""The whole program on a volume, under traffic whose journals are elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ringlog
from chaos.processes import raise_priority
from ringlog.drill.checks import GuaranteeBroken
from ringlog.drill.load import ACKED, REFUSED, UNKNOWN, Load
from ringlog.drill.nursery import Nursery
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError
from ringlog.link.shard_requests import Requester
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine

TOPICS = ("alpha", "beta", "gamma")
"""All of class `fsync`. With two and with three shards they are on more than one shard."""
BATCH = 20
PAYLOAD_BYTES = 300
ASK_S = 1.5
"""Timeout (s) of a write. It is short, because cases wait for it after the power is cut."""
READ_MS = 20_000
PAUSE_S = 0.02
FIRST_ACKS = 4
"""Number of batches of each topic."""
WAIT_S = 20.0


@contextlib.contextmanager
def program(root: Path, *, shards: int = 2, stop_points: str = "", **config: Any) -> Iterator[TestEngine]:
    """Run an engine with its data below `root`, with limits so small that everything happens soon."""
    settings = {
        "wal": {"shards": shards, "file_bytes": "1MiB"},
        "data": {"min_free_bytes": 0},
        "storage": {
            "enabled": True, "own_segment_bytes": "64KiB", "segment_bytes": "1MiB",
            "reclaim_interval_s": 0.2, "scrub_bytes_per_s": 0,
        },
        **config,
    }  # fmt: skip
    environ = {"RINGLOG_TEST_STOP_POINTS": stop_points} if stop_points else {}
    with engine(directory=root / "engine", environ=environ, **settings) as host:
        yield host


def data_of(root: Path) -> Path:
    """Return the data directory of a program that was started below `root`."""
    return root / "engine" / "data"


def settings_of_cold(root: Path) -> dict[str, Any]:
    """Return settings of a cold tier beside the data, to which segments move at once."""
    (root / "cold").mkdir(exist_ok=True)
    return {"cold": {"dir": str(root / "cold"), "interval_s": 0.2, "hot_segments": 0}}


class Traffic(Load):
    """Writers of one topic each, which append one frame at a time. Call `start_all` after each `end`."""

    def __init__(self, nursery: Nursery, folder: Path, url: str = "", ask_s: float = ASK_S) -> None:
        super().__init__(nursery, folder, url, list(TOPICS))
        self.ask_s = ask_s
        self.tolerates_errors = True

    @classmethod
    def begin(cls, nursery: Nursery, folder: Path, url: str, ask_s: float = ASK_S) -> Traffic:
        """Return running traffic whose first FIRST_ACKS batches per topic were acknowledged.

        Raises GuaranteeBroken.
        """
        traffic = cls(nursery, folder, url, ask_s)
        traffic.start_all()
        traffic.need_acks("before the fault", FIRST_ACKS)
        return traffic

    def start_all(self, url: str = "") -> None:
        """Create the topics and start the writers."""
        self.url = url or self.url
        with ringlog.connect(self.url, timeout_ms=READ_MS, wait=WAIT_S) as client:
            for name in TOPICS:
                client.topics.create(name, exist_ok=True, durability="fsync")
        for topic in range(len(TOPICS)):
            self.start(
                "produce_frames", topic=topic, batch=BATCH, record_bytes=PAYLOAD_BYTES, timeout_s=self.ask_s,
                per_s=BATCH / PAUSE_S,
            )  # fmt: skip

    @property
    def acked(self) -> int:
        """Number of acknowledged batches."""
        return self.count(ACKED) // BATCH

    def failed(self, since: int, topic: str = "") -> int:
        """Return the number of batches that were refused or have an unknown outcome."""
        return (self.count(UNKNOWN, since, topic) + self.count(REFUSED, since, topic)) // BATCH

    def need_acks(self, when: str, batches: int = 2, within_s: float = WAIT_S) -> None:
        """Wait until each topic has `batches` acknowledged batches that begin from now on.

        Raises GuaranteeBroken.
        """
        try:
            self.need(ACKED, None, batches * BATCH, within_s)
        except GuaranteeBroken as e:
            raise GuaranteeBroken(f"no acks {when}: {e}") from None


def checkpoint(host: TestEngine, timeout_s: float = 1.0) -> bool:
    """Request a checkpoint, with raised priority of the background processes.

    Returns False on timeout or error.
    """
    raise_priority(host.status().processes)
    asking = Requester("compactor", f"ipc://{host.info.shm_dir}/compactor.sock")
    try:
        asking.ask(m.CheckpointNow(), m.CheckpointMade, timeout_s=timeout_s)
    except RinglogError:
        return False
    finally:
        asking.close()
    return True


def until(condition: Callable[[], bool], seconds: float, pause_s: float = 0.01) -> bool:
    """Poll until the condition holds or the time is over. Returns whether it held."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True
