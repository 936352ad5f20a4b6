"""Tests that mount file systems run their code in a process with its own mount namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from chaos.rigs.mount import KINDS

ROOT = Path(__file__).parents[2]
DONE_S = 50.0

needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0
    or not os.access("/dev/fuse", os.R_OK | os.W_OK)
    or not Path("/dev/loop-control").exists(),
    reason="needs root, loop devices and FUSE",
)


def in_private_mounts(code: str, scratch: Path, *args: str) -> str:
    """Run code with `scratch` (a Path) and `args` defined, and return its output. Its mounts disappear
    afterwards."""
    for kind in KINDS:
        if (
            kind in args
            and shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
        ):
            pytest.skip(f"no mkfs.{kind} on this machine")
    text = "import sys\nfrom pathlib import Path\nscratch, args = Path(sys.argv[1]), sys.argv[2:]\n"
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c",
         text + textwrap.dedent(code), str(scratch), *args],
        capture_output=True, text=True, timeout=DONE_S, check=False, cwd=ROOT,
        env={**os.environ, "RINGLOG_ALLOW_ROOT": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
