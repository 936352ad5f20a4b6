"""The engine of the demo: started as users start it, and killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from ringlog.envelope.messages import ProcessStatus
from ringlog.errors import RinglogError
from ringlog.link.address import read_engine_file
from ringlog.supervision import control_client

READY_S = 30.0
STOP_S = 30.0
LOOK_S = 0.005


class Engine:
    """`python -m supervisor` on a data directory of the demo."""

    def __init__(self, directory: Path, shards: int) -> None:
        self.data_dir = directory / "data"
        self.run_dir = self.data_dir / "run"
        self.url = f"ringlog://{self.run_dir}"
        self.log = directory / "engine.log"
        self._shards = shards
        self._process: subprocess.Popen[bytes] | None = None
        self._sets: tuple[str, ...] = ()
        self.shm_dir = ""

    def start(self, *sets: str) -> float:
        """Start the engine and return the seconds until it is ready.

        `sets`: settings for this and later starts.
        """
        self._sets += sets
        began = time.monotonic()
        before = read_engine_file(str(self.run_dir))
        command = [sys.executable, "-m", "supervisor", "--data-dir", str(self.data_dir)]
        command += ["--set", f"wal.shards={self._shards}"]
        command += [text for setting in self._sets for text in ("--set", setting)]
        command += ["--set", "run.allow_root=true"] if os.geteuid() == 0 else []
        with self.log.open("ab") as log:
            # A separate session: Ctrl-C goes only to the demo, which then stops the engine in an orderly way.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        while time.monotonic() - began < READY_S:
            info = read_engine_file(str(self.run_dir))
            if info is not None and (before is None or info.start_id != before.start_id):
                self.shm_dir = info.shm_dir
                return time.monotonic() - began
            if self._process.poll() is not None:
                break
            time.sleep(LOOK_S)
        raise SystemExit(f"the engine did not start; the end of its log:\n{self._log_end()}")

    def stop(self) -> float:
        """Stop the engine with SIGTERM and return the duration in seconds. Kill it after a timeout."""
        process, self._process = self._process, None
        if process is None:
            return 0.0
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self.shm_dir:
            # An orderly stop has already deleted it.
            shutil.rmtree(self.shm_dir, ignore_errors=True)
        return time.monotonic() - began

    def kill(self, name: str) -> int:
        """Kill one of the engine's processes with SIGKILL when it is ready; return its pid."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            found = self._process_of(name)
            if found is not None and found.state == "ready" and found.pid:
                os.kill(found.pid, signal.SIGKILL)
                return found.pid
            time.sleep(LOOK_S)
        raise SystemExit(f"{name} did not come back; the end of its log:\n{self._log_end()}")

    def restarts(self) -> int:
        """Return the number of process restarts."""
        return sum(process.restarts for process in control_client.fetch_status(str(self.run_dir)).processes)

    def _process_of(self, name: str) -> ProcessStatus | None:
        try:
            processes = control_client.fetch_status(str(self.run_dir)).processes
        except RinglogError:
            return None
        return next((process for process in processes if process.name == name), None)

    def _log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
