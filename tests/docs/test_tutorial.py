"""The tutorial and the README's example, run block by block against a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlog.testing.real_engine import TestEngine
from tests.support.doc_blocks import Block, blocks_of, page_runner


def run_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run all blocks of a page in order. Return the number of restarts of the engine's processes."""
    with page_runner(page, tmp_path, monkeypatch) as runner:
        for block in blocks_of(page):
            runner.run(block)
        return restarts_of(runner.engine)


def restarts_of(engine: TestEngine) -> int:
    return sum(process.restarts for process in engine.status().processes)


def readme_blocks() -> list[Block]:
    return [block for block in blocks_of("README.md") if block.info == "python"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_block_of_the_tutorial_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarts = run_page("docs/tutorial.md", tmp_path, monkeypatch)
    assert restarts >= 2, "both shards were killed and came back"


@pytest.mark.slow
def test_the_readmes_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("README.md", tmp_path, monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1000
    assert printed[0] == "1 b'customer-0' {'order': 0}"


def test_the_readmes_example_is_short() -> None:
    (block,) = readme_blocks()
    assert len(block.code.strip().splitlines()) <= 10
