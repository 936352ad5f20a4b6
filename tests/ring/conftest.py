"""Rings in the shared-memory directory of one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ringlog.ring.region import create_ring


@pytest.fixture
def make_ring(shm_dir: Path) -> Callable[..., str]:
    """Return make_ring(**changes), which creates a ring of 64 KiB with 64 settle entries and returns its
    path."""

    def make(name: str = "ring", **changes: object) -> str:
        path = str(shm_dir / name)
        facts: dict = {
            "ring_bytes": 65_536,
            "settle_entries": 64,
            "shard": 3,
            "engine_id": "e",
            "client": "c",
        }
        create_ring(path, **{**facts, **changes})
        return path

    return make
