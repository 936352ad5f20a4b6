"""Directories for targets whose code reads files."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

_made: list[tempfile.TemporaryDirectory[str]] = []
"""Directories of this process, removed at its normal exit. Fuzzers do not exit normally; their temporary
directory is inside the class's scratch directory, which is removed afterwards."""


@functools.cache
def _root(name: str) -> Path:
    made = tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-")
    _made.append(made)
    return Path(made.name)


def own_directory(name: str) -> Path:
    """Return the directory of this process for a target. A forked process has its own."""
    found = _root(name) / str(os.getpid())
    found.mkdir(exist_ok=True)
    return found
