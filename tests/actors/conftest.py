"""The shard that most tests of the shard's core begin with."""

from __future__ import annotations

import pytest

from tests.support.shard_world import World
from tests.support.shard_worlds import started


@pytest.fixture
def world() -> World:
    """A started shard without topics."""
    return started()
