"""Compiled cores are taken for exactly the sources they were made of, by the engine's processes alone."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ringlog import cores
from ringlog.testing import engine
from ringlog.testing.real_engine import wait_until

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """A tree with one source, and what says that it was compiled."""
    (tmp_path / "a.py").write_text("x = 1\n")
    target = tmp_path / "cores"
    target.mkdir()
    manifest = {"suffix": SUFFIX, "sources": {"a.py": cores.digest(tmp_path / "a.py")}}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target, tmp_path


def test_what_was_made_of_these_sources_is_taken(made) -> None:
    assert cores.why_not(*made) == ""


def test_a_change_of_a_source_is_not_hidden_by_what_was_compiled_before_it(made) -> None:
    target, root = made
    (root / "a.py").write_text("x = 2\n")
    assert cores.why_not(target, root) == "a.py has changed since"
    (root / "a.py").unlink()
    assert cores.why_not(target, root) == "not compiled"


def test_another_interpreter_runs_the_sources(made) -> None:
    target, root = made
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps(manifest | {"suffix": ".other.so"}))
    assert cores.why_not(target, root) == "compiled for another Python"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"suffix": 1, "sources": 2}', "\xff"])
def test_a_manifest_that_makes_no_sense_is_none(made, text: str) -> None:
    target, root = made
    (target / "manifest.json").write_bytes(text.encode("latin-1"))
    assert cores.why_not(target, root) in {"not compiled", "compiled for another Python"}


def test_nothing_is_taken_beside_what_was_imported_from_its_source() -> None:
    """Its classes would be others."""
    code = (
        "import ringlog.topic.state; from ringlog import cores; print(cores.use()); print(cores.are_used())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "False"
    assert said.splitlines()[0] in {"not compiled", "RINGLOG_CORES=0"} or "is imported already" in said


def test_this_process_is_none_of_the_engines() -> None:
    assert not cores.is_actor()


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["1", "0"])
def test_an_engines_shards_say_what_they_run(wish: str) -> None:
    """Compiled where that was done, and never where it is not wanted."""
    is_compiled = wish == "1" and not cores.why_not(cores.TARGET, cores.ROOT)

    def said() -> list[str]:
        lines = running.log_path.read_text().splitlines()
        return [each for each in lines if '"event":"ready","actor":"wal_shard' in each]

    with engine(environ={"RINGLOG_CORES": wish}, wal={"shards": 1}) as running:
        wait_until(lambda: bool(said()), 20, "the shard to say it")
        assert json.loads(said()[0])["compiled"] is is_compiled
