"""Two revisions of this repository to measure in turns: the working tree, and one in a git worktree.

Both run in the same virtual environment with the same third-party packages, each with its own code, compiled
cores and native kernel: PYTHONPATH puts its tree before the environment's own entry for the project.
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
"""How long an interrupted benchmark may take to stop its engine and remove its files."""
ORPHANS_STOP_S = 20.0
_LEFT_BY_BENCH = ("bench-*", "spark-*")
"""Names below build/ of what a benchmark that was killed leaves."""
_SHM_DIR = re.compile(rb"/dev/shm/ringlog-\d+-[0-9a-f]{8}")
_COMPILED = ("ringlog/_kernel*.so", "ringlog/_cores/manifest.json")
_PROBE = """
import importlib, pathlib, sys
tree = pathlib.Path(sys.argv[1]).resolve()
names = ("ringlog", "actors", "bench", "supervisor")
files = [importlib.import_module(name).__file__ for name in names]
foreign = [file for file in files if not pathlib.Path(file).resolve().is_relative_to(tree)]
sys.exit(f"imported from elsewhere: {foreign}" if foreign else 0)
"""
_CORES_PROBE = """
import ringlog
try:
    from ringlog.cores import disabled_reason
except ImportError:
    disabled_reason = str
print(disabled_reason())
"""
"""Prints why a tree runs without compiled cores; nothing where it has them, or knows of none."""


class RevisionError(Exception):
    """The revision cannot be made, built or measured; the text says why."""


@dataclass(frozen=True)
class Tree:
    """A checkout that is built."""

    name: str
    path: Path
    has_cores: bool = True
    """False: measured without compiled cores."""

    def require_own_code(self) -> None:
        """Raise RevisionError when its interpreter would import another tree's code."""
        done = self._python("-P", "-c", _PROBE, str(self.path), capture=True)
        if done.returncode:
            raise RevisionError(f"{self.name}: {done.stderr.strip()[-1_000:]}")

    @cached_property
    def _help(self) -> str:
        """What its benchmarks print for --help."""
        return self._python("-m", "bench", "--help", capture=True).stdout

    @property
    def _takes_file(self) -> bool:
        """Can its benchmarks write rows to a given file?"""
        return "--rows" in self._help

    def require_area(self, area: str, scale: float) -> None:
        """Raise RevisionError when it cannot measure that area in that way."""
        if not re.search(rf"[{{,]{re.escape(area)}[,}}]", self._help):
            raise RevisionError(f"{self.name} has no area {area}: there is nothing to compare")
        if not self._takes_file and scale != 1.0:
            raise RevisionError(
                f"{self.name} writes no rows with --scale: its benchmarks are too old for that"
            )

    def compiled(self) -> list[str]:
        """Kinds of compiled code that it has."""
        patterns = _COMPILED if self.has_cores else _COMPILED[:1]
        return [pattern for pattern in patterns if any(self.path.glob(pattern))]

    def require_cores(self) -> None:
        """Raise RevisionError when it would run without compiled cores, because they are stale, say."""
        reason = self._python("-P", "-c", _CORES_PROBE, capture=True).stdout.strip()
        if self.has_cores and reason:
            raise RevisionError(
                f"{self.name} would run without compiled cores ({reason}): run `make compiled`"
            )

    def measure(self, area: str, only: str, scale: float) -> list[Row]:
        """Run one area in a process of its own and return its rows; raises RevisionError when it fails."""
        result = self.path / "bench" / "results" / f"{area}.json"
        if self._takes_file:
            result = PLACE / f"rows-{os.getpid()}.json"
        # An older one would keep rows that are not measured now: those of its commit.
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
        """Variables of its processes."""
        path = f"{PEERS / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        found = {**os.environ, "PYTHONPATH": str(self.path), "PATH": path}
        return found if self.has_cores else {**found, "RINGLOG_CORES": "0"}

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
    """Return the full id of the commit that `revision` names; raises RevisionError."""
    done = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode:
        raise RevisionError(f"{revision!r} names no commit of this repository")
    return done.stdout.strip()


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A worktree of that commit below build/; removed afterwards, as are those of runs that were killed."""
    hardening.become_subreaper()
    others = _children()
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RevisionError("another comparison runs in this checkout") from None
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

    Raises RevisionError with what the compiler printed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-against-") as wheel:
        # Building the wheel is what compiles the kernel; it lies in the tree then. The wheel is not used.
        _build_step(tree, ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheel, "."])
    if tree.has_cores and (tree.path / "compile_cores.py").exists():
        _build_step(tree, ["compile_cores.py", "--must"])
    if PEERS.exists():
        (tree.path / "build").mkdir(exist_ok=True)
        (tree.path / "build" / "peers").symlink_to(PEERS)


def compile_bytecode(tree: Tree) -> None:
    """Compile all modules beforehand: where Python keeps no bytecode, each start would compile them anew."""
    packages = [p for p in ("actors", "bench", "pyspark_ringlog", "ringlog") if (tree.path / p).exists()]
    _build_step(tree, ["-m", "compileall", "-q", *packages, "supervisor.py"])


def _build_step(tree: Tree, command: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree.path,
        env={**tree.environ(), "RINGLOG_BUILD_CORES": "0"},
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
    """Run a benchmark and return its exit status. However it ends, nothing of it is left."""
    before, others = _left_in(tree.path), _children()
    with tempfile.TemporaryDirectory(prefix="bench-against-") as scratch:
        # A session of its own: an interrupt from the terminal reaches it from here alone, once.
        process = subprocess.Popen(
            command,
            cwd=tree.path,
            env={**tree.environ(), "TMPDIR": scratch},
            stdout=sys.stderr,  # Progress; standard output has the comparison alone.
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
    """Interrupt the benchmark, which stops its engine; then end whatever is left of its descendants."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    _end_descendants(others)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def _end_descendants(others: set[psutil.Process]) -> None:
    """End all of them, but for children that were there before. `become_subreaper` was called first."""
    # Those whose parent has ended are our children now. A supervisor ends its own.
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
    """Directories of benchmarks below a tree's build/."""
    found = {path for pattern in _LEFT_BY_BENCH for path in (tree / "build").glob(pattern)}
    return found - {PLACE}


def _remove_engine(directory: Path) -> None:
    """Remove a directory that a benchmark left, and the shared memory of the engine whose data lies in it."""
    for name in ("data/meta/engine", "data/run/engine.json", "data/run/starting.json"):
        with contextlib.suppress(OSError):
            for found in _SHM_DIR.findall((directory / name).read_bytes()):
                remove_shm_dir(found.decode())
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Nothing interrupts cleaning up."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
