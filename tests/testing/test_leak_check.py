"""The leak check of every test must itself be able to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).parent.parent / "conftest.py"

LEAKS = {
    "child processes": """
import pathlib, subprocess, sys
children = []
def test_leak(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    children.append(child)
    pathlib.Path({notes!r}).write_text(str(child.pid))
""",
    "shared memory": """
import os, pathlib
def test_leak():
    os.mkdir("/dev/shm/ringlog-leak-{pid}")
    pathlib.Path({notes!r}).write_text("0")
""",
    "processes that work on its data directory": """
import pathlib, subprocess, sys
def test_leak(data_dir):
    waits = "import signal; signal.pause()"
    program = "import subprocess as s, sys; quiet = dict(stdout=s.DEVNULL, stderr=s.DEVNULL); "
    program += f"c = s.Popen([sys.executable, '-c', '{waits}', sys.argv[1]], **quiet); "
    program += "print(c.pid); c.returncode = 0"
    done = subprocess.run([sys.executable, "-c", program, str(data_dir)], stdout=subprocess.PIPE, text=True)
    pathlib.Path({notes!r}).write_text(done.stdout)
""",
    "": """
import subprocess, sys
def test_no_leak(data_dir, clock):
    subprocess.run([sys.executable, "-c", "", str(data_dir)], check=True)
""",
}


@pytest.mark.parametrize("what", LEAKS)
def test_a_leak_is_an_error_and_a_clean_test_passes(what, tmp_path):
    """The inner pytest run reports child processes, shared memory and processes on the data directory."""
    notes = tmp_path / "notes"
    source = LEAKS[what].replace("{notes!r}", repr(str(notes))).replace("{pid}", str(os.getpid()))
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text().replace("SETTLE_S = 5.0", "SETTLE_S = 0.2"))
    (tmp_path / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    # Without xdist's variables the inner run waits 0.2 s instead of half a minute. While it waits, its leak
    # exists, and the leak check of another xdist worker would report it for the wrong test.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = {**kept, "PYTHONPATH": str(CONFTEST.parent.parent)}
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=50
        )
    finally:
        clean_up(notes, Path(f"/dev/shm/ringlog-leak-{os.getpid()}"))
    if what:
        assert "1 passed, 1 error" in done.stdout, done.stdout + done.stderr
        assert f"the test left {what}" in done.stdout
    else:
        assert "1 passed in" in done.stdout, done.stdout + done.stderr


def clean_up(notes: Path, region: Path) -> None:
    """Kill the leaked process by its noted id, and remove the leaked memory."""
    if notes.exists() and (pid := int(notes.read_text())):
        os.kill(pid, signal.SIGKILL)
    if region.exists():
        region.rmdir()
