"""The selection of `make quick`: tests of the product that start no process. The run fails one that does.

The mark `slow` leaves a test out. Tests that use an engine by a fixture get the mark here.
"""

from __future__ import annotations

import multiprocessing.process
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support import engines

TESTS = Path(__file__).parent.parent
ELSEWHERE = {"bench", "chaos", "source"}
"""Tests of what measures and breaks the product, and what `make check` runs."""
SLOW_MODULE = re.compile(r"^pytestmark = .*\bmark\.slow\b", re.MULTILINE)
STARTS = [
    (subprocess.Popen, "__init__"), (multiprocessing.process.BaseProcess, "start"), (os, "fork"),
    (os, "forkpty"), (os, "posix_spawn"), (os, "posix_spawnp"),
]  # fmt: skip
"""Everything that starts a process."""


def is_left_out(path: Path) -> bool:
    """Whether no test of a module or folder is quick. Then it is not even imported."""
    if path.parent == TESTS and path.name in ELSEWHERE:
        return True
    return path.suffix == ".py" and SLOW_MODULE.search(path.read_text()) is not None


def has_engine(item: pytest.Item) -> bool:
    """Whether the test uses an engine by a fixture."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(
        name == "ringlog_engine" or found[-1].func.__module__ == engines.__name__
        for name, found in known.items()
    )


def refuse_processes() -> Iterator[None]:
    """Fail each test that starts a process."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail("`make quick` runs no test that starts a process: mark this one with pytest.mark.slow")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STARTS:
            patch.setattr(owner, name, refuse)
        yield
