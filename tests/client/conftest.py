"""Fixtures of the client's tests: one real engine for the whole run.

Tests that damage an engine start their own.
"""

from __future__ import annotations

from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic

__all__ = ["ringlog_engine", "ringlog_topic"]
