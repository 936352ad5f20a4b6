"""The settings max_topics and cold.dir in a real engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import ringlog
from ringlog.errors import Throttled
from ringlog.testing import engine

pytestmark = pytest.mark.slow

MOST = 6


def made(client: Any, names: list[str]) -> list[str]:
    """Return the topics that could be created. The others were refused by the limit."""
    found, refusals = [], []
    for name in names:
        try:
            client.topics.create(name)
        except Throttled as e:
            refusals.append((e.detail["limit"], e.detail["max"]))
        else:
            found.append(name)
    assert set(refusals) <= {("max_topics", MOST)}
    return found


@pytest.mark.timeout(120)
def test_max_topics_limits_the_engine_for_any_distribution_over_shards() -> None:
    with engine(wal={"shards": 4}, limits={"max_topics": MOST}) as running:

        def connect() -> Any:
            return ringlog.connect(running.url, wait=10, timeout_ms=3_000)

        with connect() as client:
            names = [f"t{number}" for number in range(MOST)]
            assert made(client, [*names, "one-more"]) == names
            client.topics.create(names[0], exist_ok=True)
            running.kill("wal_shard", shard=0)
            assert made(client, ["still-one-more"]) == []
            assert client.topics.delete(names[3])
            assert made(client, ["in-its-place", "again"]) == ["in-its-place"]
            for name in [*names, "in-its-place"]:
                client.topics.delete(name)

        def race(own: int) -> None:
            with connect() as client:
                found.extend(made(client, [f"race-{own}-{number}" for number in range(3)]))

        found: list[str] = []
        racers = [threading.Thread(target=race, args=(own,)) for own in range(4)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        with connect() as client:
            there = [each.topic for each in client.topics.list()]
        assert len(there) <= MOST
        assert sorted(there) == sorted(found)
        running.restart()
        with connect() as client:
            kept = len(list(client.topics.list()))
            assert len(made(client, [f"after-{number}" for number in range(MOST)])) == MOST - kept


@pytest.mark.timeout(120)
def test_an_engine_starts_without_its_cold_directory_and_logs_it(tmp_path: Path) -> None:
    cold = tmp_path / "not-mounted"
    with (
        engine(wal={"shards": 1}, storage={"enabled": True}, cold={"dir": str(cold)}) as running,
        ringlog.connect(running.url, wait=10) as client,
    ):
        client.topics.create("t", durability="fsync")
        client.append("t", b"x")
        assert f"there is no directory {cold}" in running.log_path.read_text()
        assert not cold.exists()
