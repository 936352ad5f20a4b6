"""Fixtures of a topic's log, written without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringlog.testing.log_world import LogWorld


def log_world_fixture() -> Any:
    """Make a fixture with an empty log."""

    @pytest.fixture
    def world(tmp_path: Path) -> Iterator[LogWorld]:
        made = LogWorld(str(tmp_path))
        yield made
        made.close()

    return world
