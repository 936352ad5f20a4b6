"""The type of every public name is stated, so that all type checkers see the same (pyright --verifytypes)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


def findings(package: str, site: Path) -> list[str]:
    """Return what pyright cannot know of a package that is installed in `site`, one line each.

    It looks up the packages that this one imports with the first Python of PATH.
    """
    lint = Path(sys.prefix) / "lint"  # See the Makefile.
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from basedpyright.pyright import main; main()"
    options = ["--verifytypes", package, "--ignoreexternal", "--outputjson"]
    done = subprocess.run(
        [sys.executable, "-c", program, str(lint), *options],
        capture_output=True, text=True, check=False, cwd=site, timeout=300,
        env={**os.environ, "PATH": search, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    types = json.loads(done.stdout)["typeCompleteness"]
    assert Path(types["packageRootDirectory"]) == site / package
    assert types["exportedSymbolCounts"]["withKnownType"] > 0
    return [
        f"{symbol['name']}: {each['message']}"
        for symbol in types["symbols"]
        if symbol["isExported"]
        for each in symbol["diagnostics"]
        if each["severity"] == "error"
    ]


@pytest.mark.timeout(300)
def test_the_type_of_every_public_name_is_known(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "ringlog", tmp_path / "ringlog", ignore=ignored)
    assert findings("ringlog", tmp_path) == []


def test_a_type_that_checkers_infer_is_found(tmp_path: Path) -> None:
    package = tmp_path / "example"
    package.mkdir()
    (package / "py.typed").touch()
    (package / "__init__.py").write_text("def f(a):\n    return a\nb = f(1)\nc: int = 2\n")
    names = {each.partition(":")[0] for each in findings("example", tmp_path)}
    assert names == {"example.f", "example.b"}
