"""Fixtures of commands that run in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringlog.testing.real_engine import TestEngine
from tests.support.shell import Shell


@pytest.fixture
def shell(running: TestEngine) -> Iterator[Shell]:
    """A shell whose commands use the running engine."""
    made = Shell(running.url)
    yield made
    made.end()
