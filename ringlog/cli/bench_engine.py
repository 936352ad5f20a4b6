"""Engine for a benchmark: the given one, or a temporary one that is deleted afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ringlog import environment
from ringlog.cli.options import Options
from ringlog.clock import Clock
from ringlog.errors import StartRefused
from ringlog.link.address import read_engine_file

READY_S = 30.0
STOP_S = 30.0
POLL_INTERVAL_S = 0.01
SHOWN_LINES = 5
_MAIN = "import sys; from ringlog.cli import main; sys.exit(main())"


@contextlib.contextmanager
def engine_for(options: Options, directory: str) -> Iterator[str]:
    """Yield the URL of --url or RINGLOG_URL, or else of a new engine below `directory`."""
    given = options.url or os.environ.get(environment.URL)
    if given:
        yield given
        return
    place = Path(directory).absolute() / f"ringlog-bench-{secrets.token_hex(4)}"
    place.mkdir(mode=0o700)
    try:
        with _running(place, options.clock) as url:
            yield url
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _running(place: Path, clock: Clock) -> Iterator[str]:
    data, log_path = place / "data", place / "engine.log"
    command = [sys.executable, "-P", "-c", _MAIN, "serve", "--data-dir", str(data)]
    command += ["--set", "gateway.enabled=false"]
    # Benchmarks often run as root in containers, so root is allowed.
    command += ["--set", "run.allow_root=true"] if os.geteuid() == 0 else []
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_ready(process, data / "run", log_path, clock)
        yield f"ringlog://{data / 'run'}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], run_dir: Path, log_path: Path, clock: Clock) -> None:
    deadline = clock.monotonic_ns() + round(READY_S * 1e9)
    while read_engine_file(str(run_dir)) is None:
        if process.poll() is not None or clock.monotonic_ns() > deadline:
            lines = log_path.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            raise StartRefused("the engine to measure did not start", log=" | ".join(lines))
        clock.sleep(POLL_INTERVAL_S)
