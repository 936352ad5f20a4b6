"""Fixtures of the client's tests: one real engine for the whole run.

Tests that damage an engine start their own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringlog.client import Client
from ringlog.client.queue import Queue
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from tests.support.queue_jobs import LONG_MS

__all__ = ["ringlog_engine", "ringlog_topic"]


@pytest.fixture
def queue(client: Client, ringlog_topic: Callable[[str], str]) -> Queue:
    """A new queue, as its worker uses it."""
    name = ringlog_topic("queue")
    client.topics.create(name, type="queue", durability="fsync", lease_ms=LONG_MS)
    return client.queue(name, node="worker")
