"""pytest fixtures for programs that use ringlog. pytest loads them if ringlog is installed.

def test_orders_are_kept(ringlog_engine, ringlog_topic):
    with ringlog.connect(ringlog_engine.url) as client:
        client.append(ringlog_topic("orders"), b"…")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ringlog.testing.real_engine import TestEngine

_SHOWN_CHARS_MAX = 80


@pytest.fixture(scope="session")
def ringlog_engine() -> Iterator[TestEngine]:
    """Run one real engine with two shards, a gateway and a scheduler for the session; see `ringlog_topic`."""
    from ringlog.testing.real_engine import engine  # Imported here, so that other test runs load faster.

    with engine(wal={"shards": 2}, gateway={"enabled": True}, delivery={"schedulers": 1}) as running:
        yield running


@pytest.fixture
def ringlog_topic(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Return a function that makes topic names which no other test of the run uses."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.nodeid)[-_SHOWN_CHARS_MAX:].strip("-._")
    prefix = f"t{abs(hash(request.node.nodeid)):x}.{plain}"

    def name(topic: str = "topic") -> str:
        return f"{prefix}:{topic}"

    return name
