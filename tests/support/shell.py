"""Commands, each in its own process as a shell runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ringlog.cli.outcome import CliExit

ROOT = Path(__file__).parent.parent.parent

MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from ringlog.cli import main; sys.exit(main())"
)

COMMAND = [sys.executable, "-c", MAIN]


class Shell:
    """Runs commands with RINGLOG_URL set."""

    def __init__(self, url: str) -> None:
        self.environ = os.environ | {"RINGLOG_URL": url, "PYTHONPATH": str(ROOT)}
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            capture_output=True,
            check=False,
            timeout=40,
            env=self.environ,
        )

    def ok(self, *arguments: str, stdin: bytes = b"") -> list[Any]:
        """Run a command that must succeed. Return its NDJSON output."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return [json.loads(line) for line in done.stdout.splitlines()]

    def fails(self, code: CliExit, *arguments: str, stdin: bytes = b"") -> str:
        """Run a command that must fail with this code. Return its error line."""
        done = self.run(*arguments, stdin=stdin)
        lines = done.stderr.decode().splitlines()
        assert (done.returncode, len(lines)) == (code, 1), done.stderr.decode()
        return lines[0]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        started = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environ
        )
        self._started.append(started)
        return started

    def end(self) -> None:
        """Kill the started processes, so that none outlives its test."""
        for started in self._started:
            started.kill()
            started.communicate()
