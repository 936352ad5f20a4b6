"""Fixtures of the asyncio tests: the shared engine."""

from __future__ import annotations

from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic

__all__ = ["ringlog_engine", "ringlog_topic"]
