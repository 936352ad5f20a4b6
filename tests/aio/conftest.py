"""Fixtures of the asyncio tests: the shared engine, and a client over rings, then through the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import ringlog.aio
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from ringlog.testing.real_engine import TestEngine

__all__ = ["ringlog_engine", "ringlog_topic"]


@pytest.fixture
async def client(ringlog_engine: TestEngine, transport: str) -> AsyncIterator[ringlog.aio.Client]:
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as connected:
        yield connected
