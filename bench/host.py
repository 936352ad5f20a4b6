"""A real engine in its own directory, for benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

import ringlog

BUILD = Path(__file__).parent.parent / "build"


def ran_s(pid: int) -> float:
    """Return the CPU time (s) of a process from schedstat.

    The usual figure samples ticks, which is too coarse for an idle process.
    """
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # The thread has exited.
            total += int(file.read_text().split()[0])
    return total / 1e9


def stop_in_order_on_signals() -> None:
    """Make SIGTERM and SIGINT raise KeyboardInterrupt, also if the benchmark started with SIGINT ignored.

    A shell can start a benchmark in that way. Servers and their files would then remain after an interrupt.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)


class Host:
    """Starts the engine as a user would, stops it and removes its files."""

    def __init__(self, shards: int, *sets: str, environ: dict[str, str] | None = None) -> None:
        BUILD.mkdir(exist_ok=True)
        self.shards = shards
        self.directory = Path(tempfile.mkdtemp(prefix="bench-", dir=BUILD))
        self.data_dir = self.directory / "data"
        self._sets = [f"wal.shards={shards}", "gateway.enabled=false", "log.level=warning", *sets]
        self._environ = {**os.environ, "RINGLOG_ALLOW_ROOT": "1", **(environ or {})}
        self.started_s = 0.0
        try:
            self.start()
        except BaseException:  # An interrupt must not leave an engine running, either.
            self._abandon()
            raise

    def start(self) -> None:
        """Start and wait until the engine is ready. `started_s` is the time that this took."""
        command = [sys.executable, "-m", "supervisor", "--data-dir", str(self.data_dir)]
        for item in self._sets:
            command += ["--set", item]
        path = self.data_dir / "run" / "engine.json"
        path.unlink(missing_ok=True)  # Left by a killed engine.
        begun = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=self._environ)
        while not path.exists():
            if self.process.poll() is not None or time.perf_counter() - begun > 60:
                raise RuntimeError(f"the engine did not start (exit {self.process.poll()})")
            time.sleep(0.002)
        self.started_s = time.perf_counter() - begun
        info: dict[str, Any] = json.loads(path.read_text())
        self.shm_dir = str(info["shm_dir"])
        self.url = f"ringlog://{self.data_dir / 'run'}"
        self.client = ringlog.connect(self.url, wait=10)

    def restart(self, *sets: str) -> None:
        """Stop in an orderly way and start again. `sets` override earlier settings and stay."""
        self.stop()
        self._sets += sets
        self.start()

    def kill(self) -> None:
        """SIGKILL the supervisor and thereby every process. Returns when all have exited."""
        processes = self.processes()
        self.client.close(0.0)
        self.process.kill()
        self.process.wait(30)
        psutil.wait_procs(processes, timeout=30)

    def shard_bytes(self) -> int:
        """Return the private memory (USS) of all shards in bytes."""
        return sum(psutil.Process(pid).memory_full_info().uss for pid in self.shard_pids())

    def processes(self) -> list[psutil.Process]:
        """Return the supervisor and its children."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children()]

    def shard_pids(self) -> list[int]:
        """Return the pids of the shards, in order."""
        found = sorted((p.name(), p.pid) for p in self.processes() if p.name().startswith("wal_shard"))
        return [pid for _, pid in found]

    def shard_cpu_s(self) -> float:
        """Return the CPU seconds that all shards have used."""
        return sum(map(ran_s, self.shard_pids()))

    def stop(self) -> None:
        """Stop in an orderly way."""
        self.client.close(1.0)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)

    def _abandon(self) -> None:
        """Stop an engine that did not become ready."""
        process = getattr(self, "process", None)
        if process is not None:
            process.terminate()
            process.wait(30)
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Stop and remove everything."""
        if self.process.poll() is None:
            self.stop()
        shutil.rmtree(self.directory)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
