"""Fixtures of real engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ringlog
from ringlog.client import Client
from ringlog.testing.real_engine import TestEngine, engine


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
