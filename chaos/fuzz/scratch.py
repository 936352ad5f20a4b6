"""A directory for targets whose subject reads files."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

_made: list[tempfile.TemporaryDirectory[str]] = []
"""Each is removed when the process that made it ends by itself. Fuzzers do not, and have a place for what is
temporary that is removed after them."""


@functools.cache
def _root(name: str) -> Path:
    made = tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-")
    _made.append(made)
    return Path(made.name)


def own_directory(name: str) -> Path:
    """Of this process, for the target of this name: what was forked has another."""
    found = _root(name) / str(os.getpid())
    found.mkdir(exist_ok=True)
    return found
