"""The example of a queue: every block of its page runs in order, in a copy of the directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ringlog.testing.real_engine import TestEngine
from tests.support.engines import engine_fixture

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = ROOT / "examples" / "emails"

running = engine_fixture(wal={"shards": 2}, delivery={"schedulers": 1})


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_emails_example_survives_the_kills_of_its_page(running: TestEngine, tmp_path: Path) -> None:
    place = tmp_path / "emails"
    shutil.copytree(EXAMPLE, place)
    script = "\n".join(["set -eu", *BLOCK.findall((place / "README.md").read_text())])
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, call in (
        ("ringlog", "-c 'import sys; from ringlog.cli import main; sys.exit(main())'"),
        ("python", ""),
    ):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n')
        program.chmod(0o755)
    environ = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "RINGLOG_URL": running.url,
    }  # fmt: skip
    done = subprocess.Popen(
        ["bash", "-c", script], cwd=place, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = done.communicate(timeout=150)
    finally:
        for child in psutil.Process(done.pid).children(recursive=True) if done.poll() is None else []:
            child.kill()
        done.kill()
        done.wait()
    assert done.returncode == 0, f"{out}\n{err}\n{(place / 'worker.log').read_text()[-4_000:]}"
    assert "299 delivered, 0 missing" in out
    letter = json.loads(out.splitlines()[-1])
    assert (letter["src_seq"], letter["reason"]) == (13, "no address")
    assert sum(process.restarts for process in running.status().processes) >= 2, "both shards were killed"
