"""A real engine for the client's tests; one for the run where a test does not hurt it."""

from __future__ import annotations

import pytest

import ringlog
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic

__all__ = ["client", "ringlog_engine", "ringlog_topic"]


@pytest.fixture
def client(ringlog_engine):
    """A client of the shared engine."""
    with ringlog.connect(ringlog_engine.url, wait=10) as connected:
        yield connected
