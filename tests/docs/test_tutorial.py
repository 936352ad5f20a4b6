"""The tutorial and the README's example, run block by block against a real engine."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringlog.testing.real_engine import TestEngine, engine

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RINGLOG = f"{sys.executable} -c 'import sys; from ringlog.cli import main; sys.exit(main())'"


def blocks(page: str) -> list[tuple[str, str, int]]:
    """(language, code, line number) of every block that is meant to be run."""
    text = (ROOT / page).read_text()
    return [(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in BLOCK.finditer(text)]


@pytest.fixture
def fresh_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestEngine]:
    with engine(wal={"shards": 2}, delivery={"schedulers": 1}) as running:
        monkeypatch.setenv("RINGLOG_URL", running.url)
        yield running


def run_shell(code: str, page: str, line: int) -> str:
    script = f'set -eu\nringlog() {{ {RINGLOG} "$@"; }}\n{code}'
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", script], check=False, capture_output=True, text=True, timeout=30, env=environ
    )
    assert done.returncode == 0, f"{page}:{line}\n{code}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_page(page: str) -> dict[str, object]:
    """Run all blocks in order; Python blocks share their names, as in one session."""
    names: dict[str, object] = {"__name__": page}
    for language, code, line in blocks(page):
        if language == "sh":
            run_shell(code, page, line)
        else:
            exec(compile("\n" * (line - 1) + code, page, "exec"), names)
    return names


@pytest.mark.slow
def test_every_block_of_the_tutorial_runs_in_order(fresh_engine: TestEngine) -> None:
    names = run_page("docs/tutorial.md")
    with contextlib.suppress(AttributeError):
        names["log"].close()
    restarts = sum(process.restarts for process in fresh_engine.status().processes)
    assert restarts >= 2, "both shards were killed and came back"


@pytest.mark.slow
def test_the_readmes_example_runs(fresh_engine: TestEngine, capsys: pytest.CaptureFixture[str]) -> None:
    languages = [language for language, _, _ in blocks("README.md")]
    assert languages == ["python"]
    run_page("README.md")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1000
    assert printed[0] == "1 b'customer-0' {'order': 0}"


def test_the_readmes_example_is_short() -> None:
    ((_, code, _),) = blocks("README.md")
    assert len(code.strip().splitlines()) <= 10
