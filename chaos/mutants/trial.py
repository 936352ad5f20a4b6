"""Trial of a mutant: a copy of the program, changed or not, judged by a fault class or by tests."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from chaos.mutants.catalogue import Mutant
from chaos.plan import Entry
from chaos.processes import private_tmpfs
from chaos.run import ROOT, run_entry
from ringlog.environment import TEST_PACKAGE

COPIED = ("ringlog", "actors", "chaos", "supervisor.py", "pyproject.toml")
WITH_TESTS = (*COPIED, "tests", "docs", "demo", "bench", "README.md", "Makefile")
OUTPUT_CHARS_MAX = 4_000
SHORT_PATHS = "/tmp"


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial."""

    noticed: str
    """The first finding that contains the required text; empty if there is none."""
    skipped: str
    seconds: float
    output: str
    other: str
    """The first finding, whatever its text."""


def try_mutant(mutant: Mutant, scratch: Path, seed: int) -> Trial:
    """Apply the mutant to a copy and judge it."""
    return _try(mutant, scratch, seed, is_changed=True)


def try_unchanged(mutant: Mutant, scratch: Path, seed: int) -> Trial:
    """Judge an unchanged copy in the same way."""
    return _try(mutant, scratch, seed, is_changed=False)


def _try(mutant: Mutant, scratch: Path, seed: int, *, is_changed: bool) -> Trial:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=scratch) as work:
        root = Path(work) / "program"
        _copy(root, WITH_TESTS if mutant.tests else COPIED, scratch)
        if is_changed:
            mutant.apply(root)
        judge = _by_tests if mutant.tests else _by_class
        seen = judge(mutant, root, Path(work), seed, is_changed=is_changed)
    seconds = time.monotonic() - begun
    return Trial(seen.noticed, seen.skipped, seconds, seen.output[-OUTPUT_CHARS_MAX:], seen.other)


def _copy(root: Path, names: tuple[str, ...], scratch: Path) -> None:
    """Copy the program and compile its byte code once.

    Otherwise each process of an engine would compile it.
    """
    base = scratch / f"base-{len(names)}"
    if not base.exists():
        base.mkdir()
        ignored = shutil.ignore_patterns("results", "corpus", "__pycache__")
        for name in names:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, base / name, ignore=ignored, symlinks=True)
            elif source.exists():
                shutil.copy2(source, base / name)
        compileall.compile_dir(base, quiet=2, maxlevels=8)
    shutil.copytree(base, root, symlinks=True)


class _Seen(NamedTuple):
    """What the judge found."""

    noticed: str
    skipped: str
    """Reason why the judge could not run."""
    output: str
    other: str = ""


def _by_class(mutant: Mutant, root: Path, work: Path, seed: int, *, is_changed: bool) -> _Seen:
    """Judge by a fault class.

    A crash of the class does not count as a detection. On the unchanged program every complaint counts.
    """
    entry = Entry(
        name=mutant.by, target="T-16", seconds=mutant.seconds, limit_s=mutant.limit_s, seed=seed,
        settings=mutant.settings, required=False, private_mounts=mutant.private_mounts,
    )  # fmt: skip
    wanted = mutant.says if is_changed else None
    verdict = run_entry(entry, work, seed=seed, root=root, wanted=wanted)
    found = [each.what for each in verdict.account.findings]
    complaints = [what for what in found if mutant.says in what] if is_changed else verdict.wrong
    skipped = ""
    if not verdict.account.counts and not verdict.wrong:
        skipped = "; ".join(f"{skip.what}: {skip.why}" for skip in verdict.account.skipped)
    output = "\n".join([*verdict.wrong, verdict.output])
    return _Seen(_first(complaints), skipped, output, _first(found))


def _first(said: list[str]) -> str:
    return said[0] if said else ""


def _by_tests(mutant: Mutant, root: Path, work: Path, seed: int, *, is_changed: bool) -> _Seen:
    environ = {**os.environ, "PYTHONPATH": str(root), "RINGLOG_ALLOW_ROOT": "1"}
    environ.pop(TEST_PACKAGE, None)  # A compiled build does not contain the mutant.
    # A short path: in the scratch directory, socket paths would be too long.
    with tempfile.TemporaryDirectory(prefix="rl-", dir=SHORT_PATHS) as base:
        # Tests complain about leftover shared memory of engines. Classes that run in parallel kill engines
        # and leave some for a moment. With a shared /dev/shm, such a complaint could stop pytest before the
        # relevant test.
        apart = private_tmpfs("/dev/shm")
        command = [*apart, sys.executable, "-m", "pytest", "-q", "-x", f"--basetemp={base}/t"]
        try:
            done = subprocess.run(
                [*command, *mutant.tests],
                cwd=root,
                env=environ,
                capture_output=True,
                text=True,
                timeout=mutant.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            late = f"tests not done after {mutant.limit_s:.0f} s"
            return _Seen("" if is_changed else late, "", "", late)
    every = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    failed = [line for line in every if line.startswith("FAILED") and mutant.says in line]
    if not is_changed and done.returncode:
        failed = failed or [f"pytest ended with status {done.returncode}"]
    return _Seen(_first(failed), "", done.stdout, _first(every))
