"""Fixtures of real engines, and a shard that fails for good."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ringlog
from ringlog.client import Client
from ringlog.testing.real_engine import TestEngine, engine, wait_until


def engine_fixture(scope: Any = "function", *, ready: str = "", **settings: Any) -> Any:
    """Make a fixture with a running engine, as in `running = engine_fixture("module", wal={"shards": 2})`.

    `ready` is a process that the fixture waits for."""

    @pytest.fixture(scope=scope)
    def running() -> Iterator[TestEngine]:
        with engine(**settings) as found:
            if ready:
                found.wait_ready(ready)
            yield found

    return running


def client_fixture(*transports: str, **options: Any) -> Any:
    """Make a fixture with a client of `running`, over each of these transports."""

    @pytest.fixture(params=transports or None)
    def client(request: pytest.FixtureRequest, running: TestEngine) -> Iterator[Client]:
        transport = getattr(request, "param", "auto")
        with ringlog.connect(running.url, wait=20, transport=transport, **options) as connected:
            yield connected

    return client


def fail_shard(running: TestEngine, shard: int) -> None:
    """Kill the shard until the supervisor gives it up."""

    def is_given_up() -> bool:
        return any(
            process.kind == "wal_shard"
            and process.name.endswith(f"{shard:02}")
            and process.state == "given_up"
            for process in running.status().processes
        )

    running.kill("wal_shard", shard=shard)
    wait_until(is_given_up, 20, "the shard to be given up")
