"""A shared-memory directory for one test."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """An empty 0700 directory in /dev/shm."""
    path = Path(f"/dev/shm/ringtest-{os.getuid()}-{secrets.token_hex(4)}")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)
