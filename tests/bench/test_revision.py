"""Benchmarks of another revision: its worktree, and the cleanup after complete and interrupted runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench import revision
from bench.against import main, order
from bench.revision import RevisionError, Tree, resolve, worktree

BENCH = """
import pathlib, signal, subprocess, sys, time
left = pathlib.Path("build/bench-left/data/meta")
left.mkdir(parents=True)
shm = pathlib.Path(sys.argv[1])
shm.mkdir(mode=0o700)
(left / "engine").write_text(str(shm))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path("child.new").write_text(str(child.pid))
pathlib.Path("child.new").rename("child")
time.sleep(60 if sys.argv[2] == "wait" else 0)
"""


RUN = """
import pathlib, sys
from bench import host, revision
from ringlog import hardening
tree, program, *arguments = sys.argv[1:]
hardening.become_subreaper()
host.stop_in_order_on_signals()
try:
    here = revision.Tree("here", pathlib.Path(tree))
    sys.exit(revision._run_to_end([sys.executable, "-c", program, *arguments], here))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits that replaces this one."""
    root = tmp_path / "repository"
    root.mkdir()
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=root, check=True, timeout=30
        )
    monkeypatch.setattr(revision, "ROOT", root)
    monkeypatch.setattr(revision, "PLACE", root / "build" / "bench-against")
    monkeypatch.setattr(revision.hardening, "become_subreaper", lambda: None)
    return root


def worktrees(root: Path) -> int:
    done = subprocess.run(
        ["git", "worktree", "list"], cwd=root, capture_output=True, text=True, check=True, timeout=30
    )
    return len(done.stdout.splitlines())


def test_a_worktree_is_removed_even_if_its_user_fails(repository: Path) -> None:
    commit = resolve("HEAD")
    seen: list[Path] = []

    def use(path: Path) -> None:
        seen.append(path)
        raise OSError(f"a checkout: {(path / '.git').exists()}")

    with pytest.raises(OSError, match="a checkout: True"), worktree(commit) as path:
        use(path)
    assert not seen[0].exists()
    assert worktrees(repository) == 1


def test_the_next_run_removes_the_worktree_of_a_killed_one(repository: Path) -> None:
    commit = resolve("HEAD")
    left = revision.PLACE / "tree-0123456789ab"
    subprocess.run(
        ["git", "worktree", "add", "-q", "--detach", str(left), commit],
        cwd=repository, check=True, timeout=30,
    )  # fmt: skip
    with worktree(commit):
        assert not left.exists()
    assert worktrees(repository) == 1


def test_two_comparisons_cannot_run_at_once(repository: Path) -> None:
    commit = resolve("HEAD")
    with worktree(commit), pytest.raises(RevisionError, match="another comparison"), worktree(commit):
        pass


def test_an_unknown_revision_is_named(repository: Path) -> None:
    with pytest.raises(RevisionError, match="must name a commit of this repository, got 'nothing'"):
        resolve("nothing")
    with pytest.raises(RevisionError):
        resolve("--all")


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM])
def test_a_run_leaves_no_process_file_or_shared_memory(tmp_path: Path, number: signal.Signals | None) -> None:
    """The benchmark creates a process in another session, a directory and shared memory."""
    shm = Path(f"/dev/shm/ringlog-{os.geteuid()}-{os.urandom(4).hex()}")
    child = tmp_path / "child"
    # The run is a separate process that adopts orphans.
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), BENCH, str(shm), "wait" if number else "end"],
        cwd=Path(__file__).parent.parent.parent,
    )
    deadline = time.monotonic() + 20
    while not child.exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if number:
        run.send_signal(number)
    assert run.wait(30) == (130 if number else 0)
    assert not psutil.pid_exists(int(child.read_text()))
    assert not (tmp_path / "build" / "bench-left").exists()
    assert not shm.exists()


def test_a_tree_imports_its_own_code() -> None:
    Tree("here", Path(__file__).parent.parent.parent).require_own_code()


def test_a_tree_that_would_run_its_sources_is_refused(repository: Path) -> None:
    for package in ("ringlog", "ringlog/client", "ringlog/client/connection"):
        (repository / package).mkdir()
        (repository / package / "__init__.py").touch()
    (repository / "ringlog" / "client" / "connection" / "shell.py").touch()
    Tree("there", repository, is_compiled=False).require_compiled()
    with pytest.raises(RevisionError, match="there would run its sources: run `make compiled`"):
        Tree("there", repository).require_compiled()


def test_a_tree_that_would_import_foreign_code_is_refused(repository: Path) -> None:
    with pytest.raises(RevisionError, match="imported from elsewhere"):
        Tree("there", repository).require_own_code()


def test_an_area_that_a_revision_lacks_is_refused_by_name(repository: Path) -> None:
    (repository / "bench").mkdir()
    (repository / "bench" / "__init__.py").touch()
    (repository / "bench" / "__main__.py").write_text('print("usage: bench {commit,queue}")')
    tree = Tree("there", repository)
    tree.require_area("queue", 1.0)
    with pytest.raises(RevisionError, match="there has no benchmark area peers"):
        tree.require_area("peers", 1.0)
    with pytest.raises(RevisionError, match="--scale"):
        tree.require_area("queue", 0.1)


def test_the_first_revision_of_a_pair_alternates() -> None:
    new, old = Tree("new", Path("new")), Tree("old", Path("old"))
    assert [order(i, new, old)[0].name for i in range(4)] == ["new", "old", "new", "old"]


def test_fewer_than_seven_pairs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rev", "HEAD", "--area", "commit", "--pairs", "6"])
    assert "must be >= 7, got 6" in capsys.readouterr().err


OLD_BENCH = """
import json, pathlib, sys
if "--help" in sys.argv:
    print("usage: bench {commit,queue}")
else:
    file = pathlib.Path("bench/results/commit.json")
    kept = json.loads(file.read_text())["rows"] if file.exists() else []
    file.write_text(json.dumps({"rows": [*kept, {"id": "now", "arguments": sys.argv[1:]}]}))
"""
NEW_BENCH = """
import json, pathlib, sys
if "--help" in sys.argv:
    print("usage: bench [--rows ROWS] {commit,queue}")
else:
    file = pathlib.Path(sys.argv[sys.argv.index("--rows") + 1])
    file.write_text(json.dumps({"rows": [{"id": "now", "arguments": sys.argv[1:6]}]}))
"""


def tree_with(root: Path, source: str) -> Tree:
    (root / "bench" / "results").mkdir(parents=True)
    (root / "bench" / "__init__.py").touch()
    (root / "bench" / "__main__.py").write_text(source)
    (root / "bench" / "results" / "commit.json").write_text('{"rows": [{"id": "of its commit"}]}')
    return Tree("there", root)


def test_an_old_revision_without_the_rows_option_returns_only_new_rows(
    repository: Path,
) -> None:
    tree = tree_with(repository, OLD_BENCH)
    arguments = ["commit", "--only", "lone", "--scale", "1.0"]
    for _ in range(2):
        assert tree.measure("commit", "lone", 1.0) == [{"id": "now", "arguments": arguments}]


def test_a_revision_with_the_rows_option_keeps_its_stored_results(repository: Path) -> None:
    tree = tree_with(repository, NEW_BENCH)
    revision.PLACE.mkdir(parents=True)
    arguments = ["commit", "--only", "lone", "--scale", "0.5"]
    assert tree.measure("commit", "lone", 0.5) == [{"id": "now", "arguments": arguments}]
    assert "of its commit" in (repository / "bench" / "results" / "commit.json").read_text()
    assert not list(revision.PLACE.iterdir())


def test_a_failed_benchmark_is_reported_with_its_exit_status(repository: Path) -> None:
    tree = tree_with(repository, "import sys; sys.exit(3 if '--help' not in sys.argv else 0)")
    with pytest.raises(RevisionError, match=r"there: the benchmark failed \(exit 3\)"):
        tree.measure("commit", "", 1.0)
