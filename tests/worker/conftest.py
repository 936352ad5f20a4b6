"""Fixtures: a real engine, and workers as subprocesses that start like from a shell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ringlog
from ringlog.client.queue import Queue
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from ringlog.testing.real_engine import TestEngine
from tests.support.workers import Workers

__all__ = ["ringlog_engine", "ringlog_topic"]


@pytest.fixture
def workers(ringlog_engine: TestEngine, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(ringlog_engine.url, tmp_path)
    yield made
    made.end()


@pytest.fixture
def queue(ringlog_engine: TestEngine, ringlog_topic: Callable[[str], str]) -> Iterator[Queue]:
    name = ringlog_topic("jobs")
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        client.topics.create(name, type="queue", durability="fsync", dead_letter=f"{name}.dead")
        yield client.queue(name)
