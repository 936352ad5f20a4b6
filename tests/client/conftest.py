"""Fixtures of the client's tests: one real engine for the whole run.

Tests that damage an engine start their own.
"""

from __future__ import annotations

import pytest

import ringlog
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic

__all__ = ["client", "ringlog_engine", "ringlog_topic"]


@pytest.fixture
def client(ringlog_engine):
    """A client that is connected to the shared engine."""
    with ringlog.connect(ringlog_engine.url, wait=10) as connected:
        yield connected
