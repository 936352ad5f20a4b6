"""Two revisions of this repository to measure alternately: the working tree and a git worktree.

Both run in the same virtual environment with the same third-party packages. Each has its own code, compiled
cores and native kernel: PYTHONPATH puts its tree before the environment's entry for the project.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from bench.rows import Row
from ringlog import hardening
from ringlog.supervision.run_dir import remove_shm_dir

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "build" / "bench-against"
PEERS = ROOT / "build" / "peers"
STOP_S = 60.0
"""Time (s) for an interrupted benchmark to stop its engine and remove its files."""
ORPHANS_STOP_S = 20.0
_LEFT_BY_BENCH = ("bench-*", "spark-*")
"""Names below build/ that a killed benchmark leaves."""
_SHM_DIR = re.compile(rb"/dev/shm/ringlog-\d+-[0-9a-f]{8}")
_COMPILED = ("build/compiled/ringlog/_state__mypyc*", "ringlog/_cores/manifest.json")
"""Files of a compiled build, of this layout and of the one before."""
_PROBE = """
import importlib, pathlib, sys
tree = pathlib.Path(sys.argv[1]).resolve()
names = ("ringlog", "bench", "supervisor")
files = [importlib.import_module(name).__file__ for name in names]
foreign = [file for file in files if not pathlib.Path(file).resolve().is_relative_to(tree)]
sys.exit(f"imported from elsewhere: {foreign}" if foreign else 0)
"""
_COMPILED_PROBE = """
import ringlog.client.connection.shell as module
print(module.__file__.endswith(".py"))
"""
"""Prints True if the tree would run its sources."""


class RevisionError(Exception):
    """The revision cannot be created, built or measured. The text states the reason."""


@dataclass(frozen=True)
class Tree:
    """A built checkout."""

    name: str
    path: Path
    is_compiled: bool = True
    """False: measure the sources."""

    def require_own_code(self) -> None:
        """Raise RevisionError if the interpreter would import code of another tree."""
        done = self._python("-P", "-c", _PROBE, str(self.path), capture=True)
        if done.returncode:
            raise RevisionError(f"{self.name}: {done.stderr.strip()[-1_000:]}")

    @cached_property
    def _help(self) -> str:
        """Output of its benchmarks for --help."""
        return self._python("-m", "bench", "--help", capture=True).stdout

    @property
    def _takes_file(self) -> bool:
        """Whether its benchmarks can write rows to a given file."""
        return "--rows" in self._help

    def require_area(self, area: str, scale: float) -> None:
        """Raise RevisionError if it cannot measure that area with this scale."""
        if not re.search(rf"[{{,]{re.escape(area)}[,}}]", self._help):
            raise RevisionError(f"{self.name} has no benchmark area {area}, so there is nothing to compare")
        if not self._takes_file and scale != 1.0:
            raise RevisionError(
                f"{self.name} writes no rows with --scale: its benchmarks are too old for that"
            )

    def compiled(self) -> list[str]:
        """Return the kinds of compiled code that it has."""
        return [pattern for pattern in _COMPILED if self.is_compiled and any(self.path.glob(pattern))]

    @property
    def _has_setup(self) -> bool:
        """Whether a wheel of it contains compiled modules. Earlier revisions compile them in place."""
        return (self.path / "setup.py").exists()

    def require_compiled(self) -> None:
        """Raise RevisionError if it would run its sources."""
        if (
            self.is_compiled
            and self._python("-P", "-c", _COMPILED_PROBE, capture=True).stdout.strip() != "False"
        ):
            raise RevisionError(f"{self.name} would run its sources: run `make compiled`")

    def measure(self, area: str, only: str, scale: float) -> list[Row]:
        """Run one area in a separate process and return its rows. Raises RevisionError if it fails."""
        result = self.path / "bench" / "results" / f"{area}.json"
        if self._takes_file:
            result = PLACE / f"rows-{os.getpid()}.json"
        # An existing file would keep rows that are not measured now, of an earlier commit.
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench", area, "--only", only, "--scale", str(scale)]
        try:
            status = _run_to_end([*command, *(["--rows", str(result)] if self._takes_file else [])], self)
            if status or not result.exists():
                raise RevisionError(f"{self.name}: the benchmark failed (exit {status})")
            rows: list[Row] = json.loads(result.read_text())["rows"]
        finally:
            result.unlink(missing_ok=True)
        return rows

    def environ(self) -> dict[str, str]:
        """Return the environment variables of its processes."""
        path = f"{PEERS / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        package = [str(self.path / "build" / "compiled")] if self.is_compiled and self._has_setup else []
        imports = os.pathsep.join([*package, str(self.path)])
        return {**os.environ, "PYTHONPATH": imports, "PYTHONSAFEPATH": "1", "PATH": path}

    def _python(self, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.path,
            env=self.environ(),
            capture_output=capture,
            text=True,
            check=False,
        )


# -- the other revision -----------------------------------------------------------------------------------


def resolve(revision: str) -> str:
    """Return the full id of the commit that `revision` names. Raises RevisionError."""
    done = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode:
        raise RevisionError(f"--rev must name a commit of this repository, got {revision!r}")
    return done.stdout.strip()


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Yield a worktree of that commit below build/.

    Removes it afterwards, and those of killed runs before.
    """
    hardening.become_subreaper()
    others = _children()
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RevisionError(
                "another comparison is running in this checkout; wait for it or stop it"
            ) from None
        for left in PLACE.glob("tree-*"):
            _remove_worktree(left)
        path = PLACE / f"tree-{commit[:12]}"
        try:
            done = _git("worktree", "add", "--detach", "--force", str(path), commit)
            if done.returncode:
                raise RevisionError(f"git worktree add failed: {done.stderr.strip()}")
            yield path
        finally:
            with _signals_ignored():
                _end_descendants(others)
                _remove_worktree(path)


def build(tree: Tree) -> None:
    """Compile a worktree's kernel and cores with its own scripts, as `make setup compiled` does.

    Raises RevisionError with the output of the compiler.
    """
    with tempfile.TemporaryDirectory(prefix="bench-against-") as wheel:
        _build_step(tree, ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheel, "."])
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", "build/compiled"]
        _build_step(tree, [*install, *map(str, Path(wheel).glob("ringlog-*.whl"))])
    if tree.is_compiled and (tree.path / "compile_cores.py").exists():
        _build_step(tree, ["compile_cores.py", "--must"])  # A revision that compiles in place.
    if PEERS.exists():
        (tree.path / "build").mkdir(exist_ok=True)
        (tree.path / "build" / "peers").symlink_to(PEERS)


def compile_bytecode(tree: Tree) -> None:
    """Compile all modules in advance. Where Python stores no bytecode, each start would compile them."""
    packages = [p for p in ("actors", "bench", "pyspark_ringlog", "ringlog") if (tree.path / p).exists()]
    _build_step(tree, ["-m", "compileall", "-q", *packages, "supervisor.py"])


def _build_step(tree: Tree, command: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree.path,
        env=tree.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RevisionError(f"{tree.name} cannot be built ({' '.join(command)}):\n{done.stdout[-3_000:]}")


def _remove_worktree(path: Path) -> None:
    _git("worktree", "remove", "--force", "--force", str(path))
    shutil.rmtree(path, ignore_errors=True)
    _git("worktree", "prune")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


# -- one run ----------------------------------------------------------------------------------------------


def _run_to_end(command: Sequence[str], tree: Tree) -> int:
    """Run a benchmark and return its exit status. Removes everything it leaves, however it ends."""
    before, others = _left_in(tree.path), _children()
    with tempfile.TemporaryDirectory(prefix="bench-against-") as scratch:
        # In its own session, an interrupt from the terminal reaches the benchmark only through this process,
        # once.
        process = subprocess.Popen(
            command,
            cwd=tree.path,
            env={**tree.environ(), "TMPDIR": scratch},
            stdout=sys.stderr,  # Progress. Standard output is reserved for the comparison.
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            with _signals_ignored():
                _end(process, others)
                for path in _left_in(tree.path) - before:
                    _remove_engine(path)


def _end(process: subprocess.Popen[Any], others: set[psutil.Process]) -> None:
    """Interrupt the benchmark, which stops its engine, and then end its remaining descendants."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    _end_descendants(others)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def _end_descendants(others: set[psutil.Process]) -> None:
    """End all children except those that existed before. Call `become_subreaper` first."""
    # Orphaned descendants are children of this process now. A supervisor ends its own children.
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        is_first = stop is psutil.Process.terminate
        left = list(_children() - others)
        if not is_first:
            left += [below for each in left for below in _below(each)]
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(each)
        psutil.wait_procs(left, timeout=ORPHANS_STOP_S)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _left_in(tree: Path) -> set[Path]:
    """Return the directories of benchmarks below a tree's build/."""
    found = {path for pattern in _LEFT_BY_BENCH for path in (tree / "build").glob(pattern)}
    return found - {PLACE}


def _remove_engine(directory: Path) -> None:
    """Remove a directory that a benchmark left, and the shared memory of its engine."""
    for name in ("data/meta/engine", "data/run/engine.json", "data/run/starting.json"):
        with contextlib.suppress(OSError):
            for found in _SHM_DIR.findall((directory / name).read_bytes()):
                remove_shm_dir(found.decode())
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM within the block, so that they do not interrupt the clean-up."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
