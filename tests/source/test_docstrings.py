"""Docstrings of what programs import name every argument and what is returned (pydoclint)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
CHECKED = (
    "ringlog/aio", "ringlog/client", "ringlog/errors.py", "ringlog/payload.py", "ringlog/spark",
    "ringlog/testing", "ringlog/types.py", "ringlog/worker",
)  # fmt: skip
OPTIONS = (
    "--quiet", "--style=google", "--arg-type-hints-in-docstring=False", "--check-return-types=False",
    "--skip-checking-short-docstrings=True", "--skip-checking-raises=True", "--check-class-attributes=False",
    "--allow-init-docstring=True",
)  # fmt: skip
"""One sentence is enough for a plain function. Errors that a callee raises cannot be checked."""
STEPS = " DOC405: "
"""A generator with a result: an operation in steps yields what it waits for, and returns its result."""
CONSTRUCTOR = re.compile(r"`(\w+)\.__init__`")
MADE_BY_CLIENT = frozenset({
    "Client", "Group", "Job", "NumberedProducer", "Page", "Producer", "Queue", "Reader", "Routers", "Tailer",
    "Ticket", "Topics", "Watch",
})  # fmt: skip
"""Programs get these from a method, so their constructors are not documented."""


def findings(*paths: str) -> list[str]:
    """Return what pydoclint finds, one line each, with its file."""
    command = [sys.executable, "-m", "pydoclint.main", *OPTIONS, *paths]
    environ = {**os.environ, "PYTHONPATH": str(Path(sys.prefix) / "lint")}  # See the Makefile.
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120, env=environ
    )
    found, file = [], ""
    for line in (done.stdout + done.stderr).splitlines():
        if line.endswith(".py"):
            file = line.strip()
        elif " DOC" in line and STEPS not in line:
            constructor = CONSTRUCTOR.search(line)
            if constructor is None or constructor[1] not in MADE_BY_CLIENT | {"RinglogError"}:
                found.append(f"{file}:{line.strip()}")
    assert done.returncode == 0 or " DOC" in done.stdout + done.stderr, done.stderr
    return found


def test_public_docstrings_name_arguments_and_results() -> None:
    assert findings(*CHECKED) == []


def test_a_missing_argument_is_found(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    docstring = '"""Add.\n\n    Args:\n        a: One.\n    """'
    path.write_text(f"def f(a: int, b: int) -> int:\n    {docstring}\n    return a + b\n")
    assert any("DOC101" in each for each in findings(str(path)))
    assert any("DOC201" in each for each in findings(str(path)))
