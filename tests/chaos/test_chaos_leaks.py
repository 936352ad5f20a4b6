"""Leftover processes of a class: every living process, except a multiprocessing tracker that is about to
exit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from chaos import doctor, leaks
from ringlog.testing.real_engine import TestEngine

SLEEPS = "import sys; print('up', flush=True); sys.stdin.read()"
ENDS = "import sys, threading; print('up', flush=True); threading.Event().wait(0.3)"


def started(mark: str, code: str, *words: str) -> subprocess.Popen[Any]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], env={**os.environ, leaks.MARK: mark}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    return child


def ended(child: subprocess.Popen[Any]) -> None:
    child.kill()
    child.communicate()


@pytest.fixture
def mark() -> str:
    return f"{os.getpid()}-leaks-{time.monotonic_ns()}"


def test_a_leftover_process_is_killed_and_reported(mark: str) -> None:
    child = started(mark, SLEEPS)
    try:
        (line,) = leaks.kill_marked(mark)
        assert f"process {child.pid} left behind" in line
        assert child.wait(10) < 0
        assert leaks.kill_marked(mark) == []
    finally:
        ended(child)


def test_the_engines_of_an_interrupted_run_are_removed_with_their_shared_memory(mark: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ringlog-test-") as root:
        running = TestEngine(Path(root), {}, {leaks.MARK: mark})
        region = Path(running.start().shm_dir)
        pid = running.pid
        lines = doctor.remove_processes(mark)
        assert f"killed {pid}" in lines
        assert f"removed shared memory {region}" in lines
        assert not region.exists()
        assert leaks.marked_processes(mark) == []
        running.stop()


def test_a_tracker_gets_time_to_exit_before_it_is_reported(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = started(mark, ENDS, "from multiprocessing.resource_tracker import main")
    try:
        assert leaks.kill_marked(mark) == []
    finally:
        ended(child)
    monkeypatch.setattr(leaks, "HELPERS_S", 0.1)
    child = started(mark, SLEEPS, "from multiprocessing.resource_tracker import main")
    try:
        assert len(leaks.kill_marked(mark)) == 1
    finally:
        ended(child)
