"""The selection of `make quick` must leave engines out, and fail a test that starts a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).parent.parent / "conftest.py"
TESTS = """
import multiprocessing, os, subprocess
import pytest
from tests.support.engines import client_fixture, engine_fixture

running = engine_fixture()
client = client_fixture()

def test_client(client): ...
def test_shared_engine(ringlog_engine): ...
@pytest.mark.slow
def test_slow(): ...
def test_program(): subprocess.run(["true"])
def test_fork(): os.fork()
def test_process(): multiprocessing.get_context("spawn").Process().start()
def test_nothing(): ...
"""


def test_only_tests_that_start_no_process_pass(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    # Without the summary: it repeats the messages, cut to the width of the terminal unless CI is set.
    options = ["-q", "-r", "N", "--quick", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert "3 failed, 1 passed, 3 deselected" in done.stdout, done.stdout
    assert done.stdout.count("Failed: `make quick` runs no test that starts a process") == 3
