"""The previous release and this one are compatible: clients, engines, and stored data.

The previous release is the newest tag, or the commit below if there is none. It is built in a worktree, so
the test needs the history of the repository. `make test-releases` runs it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.revision import ROOT, RevisionError, Tree, build, resolve, worktree
from ringlog.envelope.wire import PROTOCOL

FIRST = "705fe126eda2cd31dd15beb715410551f9b1a819"
PROGRAM = Path(__file__).parent / "program.py"
START_S, STOP_S, USE_S = 60.0, 60.0, 120.0
pytestmark = [pytest.mark.releases, pytest.mark.timeout(600)]


def newest() -> str:
    """Return the commit of the previous release."""
    asked = ["git", "describe", "--tags", "--abbrev=0", "HEAD^"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return resolve(done.stdout.strip() or FIRST)


@pytest.fixture(scope="module")
def before() -> Iterator[Tree]:
    try:
        commit = newest()
    except RevisionError as e:
        pytest.skip(f"the history of this checkout does not reach the release before: {e}")
    with worktree(commit) as path:
        tree = Tree(commit[:12], path, is_compiled=(path / "setup.py").exists())
        build(tree)
        tree.require_own_code()
        yield tree


@pytest.fixture(scope="module")
def now() -> Tree:
    return Tree("working tree", ROOT, is_compiled=False)


@contextlib.contextmanager
def running(tree: Tree, directory: Path) -> Iterator[str]:
    """Run an engine of that release. Yield its URL."""
    process = subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM), "engine", str(directory)], env=tree.environ(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "the engine did not start"
            yield url
        finally:
            process.stdin.close()
            assert process.wait(STOP_S) == 0


def told(tree: Tree, *arguments: str) -> dict[str, Any]:
    """Run the program with that release and return its results."""
    done = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), *arguments], env=tree.environ(), text=True, timeout=USE_S,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def protocol_of(tree: Tree) -> int:
    code = "from ringlog.envelope.wire import PROTOCOL; print(PROTOCOL)"
    return int(subprocess.check_output([sys.executable, "-P", "-c", code], env=tree.environ()))


@pytest.mark.parametrize("transport", ["ring", "ipc"])
@pytest.mark.parametrize("is_newer_client", [True, False])
def test_a_client_of_one_release_works_with_an_engine_of_the_other(
    before: Tree, now: Tree, tmp_path: Path, transport: str, is_newer_client: bool
) -> None:
    client, served = (now, before) if is_newer_client else (before, now)
    with running(served, tmp_path / "engine") as url:
        found = told(client, "use", url, transport, "t")
        if protocol_of(before) == PROTOCOL:
            assert found == told(served, "use", url, transport, "t2"), "as one of its own release"
            assert found["records"] == 2_003
        else:
            assert found["error"] == "VersionMismatch"
            assert str(PROTOCOL) in found["text"]
            assert str(protocol_of(before)) in found["text"]


def test_data_of_one_release_can_be_read_by_the_other(before: Tree, now: Tree, tmp_path: Path) -> None:
    """An upgrade keeps all data. A downgrade keeps it too if both releases have the same protocol version."""
    directory = tmp_path / "engine"
    with running(before, directory) as url:
        written = told(before, "use", url, "ring", "old")
    with running(now, directory) as url:
        assert told(now, "read", url, "old").items() <= written.items()
        newer = told(now, "use", url, "ring", "new")
    if protocol_of(before) == PROTOCOL:
        with running(before, directory) as url:
            assert told(before, "read", url, "old").items() <= written.items()
            assert told(before, "read", url, "new").items() <= newer.items()
