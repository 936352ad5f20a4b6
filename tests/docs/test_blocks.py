"""Run every Python and shell block of every page of docs/, in the order of its page, against a real engine.

The info string of a block determines what the test does with it:

- `python`: runs. Blocks of one page share their variables and the directory. `await` works at the top level.
- `sh`, `console`: runs under `bash` with `set -eu` and must exit with 0. If the first line begins with `$ `,
  only such lines run (and their continuations after a backslash); the other lines show output.
- `toml`: must parse. A block with a section of the engine's configuration must load as a configuration file.
- `text`, `ini`, `yaml`, ... (see `DATA`) and directives such as `{toctree}` never run.

A block without an info string is an error. A comment on its own line before a block changes what happens:

- `<!-- not run: reason -->`: the block cannot run here.
- `<!-- file: mail.py -->`: the test writes the block to this file in the page's directory.
- `<!-- exit: 3 -->`: the shell block must exit with this status.
- `<!-- raises: LeaseLost -->`: the Python block must raise this exception of `ringlog.errors` or `builtins`.

Some comments apply to a whole page:

- `<!-- engine: gateway.enabled=true -->` changes a setting of the page's engine.
- `<!-- engine stops -->` and `<!-- engine starts -->` stop and start the engine at that position.

Each page has an engine with two shards and one scheduler. `RINGLOG_URL` names it, `./ringlog-data` is its
data directory. With `http.enabled`, `HTTP` is the address of the HTTP gateway. The test ends the processes
that a shell block leaves in the background when the page ends.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ringlog import config_sources, environment
from tests.support.doc_blocks import blocks_of, page_runner

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN_ELSEWHERE = {
    "docs/tutorial.md": "tests/docs/test_tutorial.py",
    "docs/how-to/spark.md": "tests/spark/test_docs.py",
}
"""Page -> the test that runs its blocks."""
DATA = {"text", "toml", "ini", "yaml", "json", "dockerfile", "sql", "scala", "xml", "hex", "board", "ring"}
NOT_RUN_MAX = 40
"""Maximum number of Python and shell blocks with `not run`, over all pages."""
LOOKS_RUNNABLE = re.compile(r"(\$ |ringlog [a-z]|import |from \w+ import )")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


BLOCKS = {name(page): blocks_of(name(page)) for page in PAGES}
RUN_HERE = [page for page, blocks in BLOCKS.items() if page not in RUN_ELSEWHERE and any(
    block.is_code and "not run" not in block.options for block in blocks
)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN_HERE)
def test_every_block_of_a_page_runs_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with page_runner(page, tmp_path, monkeypatch) as runner:
        for block in BLOCKS[page]:
            runner.run(block)


@pytest.mark.parametrize("page", BLOCKS)
def test_every_block_has_a_known_info_string(page: str) -> None:
    wrong = []
    for block in BLOCKS[page]:
        if block.info == "engine" or block.info.startswith("{") or block.is_code:
            continue
        if block.info not in DATA:
            wrong.append(f"{block.where}: {block.info or 'no'} info string")
        elif block.info == "text" and LOOKS_RUNNABLE.match(block.code) and not block.options:
            wrong.append(f"{block.where}: text that could run: {block.code.splitlines()[0]}")
    assert not wrong


@pytest.mark.parametrize("page", BLOCKS)
def test_configuration_blocks_can_be_loaded(page: str, tmp_path: Path) -> None:
    sections = {key.partition(".")[0] for key in environment.SETTING_VARIABLES} | {"topics"}
    for block in BLOCKS[page]:
        if (
            block.info == "toml"
            and "not run" not in block.options
            and sections & set(tomllib.loads(block.code))
        ):
            (tmp_path / "ringlog.toml").write_text(block.code)
            config_sources.load_config(environ={}, cwd=str(tmp_path))


def test_few_blocks_are_not_run() -> None:
    not_run = [
        f"{block.where}: {block.options['not run']}"
        for blocks in BLOCKS.values() for block in blocks if block.is_code and "not run" in block.options
    ]  # fmt: skip
    assert len(not_run) <= NOT_RUN_MAX, "\n".join(not_run)


def test_pages_that_other_tests_run_exist() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert page in BLOCKS, page
        assert (ROOT / test).exists(), test
