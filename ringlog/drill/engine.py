"""The engine that a drill starts for itself, and how it is killed and closed down."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringlog.drill import targets
from ringlog.drill.checks import GuaranteeBroken, verify
from ringlog.drill.load import Stuck, wait_for
from ringlog.envelope.messages import EngineStatusReply
from ringlog.testing.real_engine import TestEngine, engine_environ

SETTLE_S = 60.0
"""Time (s) after the last fault within which everything must serve again."""
ORPHANS_S = 30.0
"""Time (s) within which the children of a dead supervisor exit. They drain first."""
SETTINGS: dict[str, Any] = {
    "wal.shards": 2, "wal.file_bytes": "1MiB", "gateway.enabled": True, "storage.enabled": True,
    "storage.own_segment_bytes": "64KiB", "storage.segment_bytes": "1MiB", "storage.reclaim_interval_s": 0.2,
    "cold.interval_s": 0.2, "cold.hot_segments": 0, "supervisor.restart_max": 1_000, "supervisor.drain_s": 40,
    "data.min_free_bytes": 0,
}  # fmt: skip
"""Small files and continuous background work, so that every step runs often."""


class DrillEngine(TestEngine):
    """An engine of the test kind with a cold tier. Its processes are watched closely when it stops."""

    __test__ = False
    ready_s: float = 90.0

    def __init__(
        self, root: Path, settings: Mapping[str, Any] = SETTINGS, environ: Mapping[str, str] | None = None
    ) -> None:
        """`environ` is the environment of the engine. None: as of `ringlog.testing.engine`."""
        root.mkdir(mode=0o700, parents=True)
        self.cold_dir: Path = root / "cold"
        self.cold_dir.mkdir()
        wanted = engine_environ({}) if environ is None else environ
        super().__init__(root, {**settings, "cold.dir": str(self.cold_dir)}, wanted)

    def look(self) -> EngineStatusReply | None:
        """Return the engine's status, or None if it does not answer."""
        return targets.status(self.run_dir)

    def restarts(self, kind: str) -> list[int]:
        """Return the restarts of each process of a kind; empty if the engine does not answer."""
        found = self.look()
        return [each.restarts for each in found.processes if each.kind == kind] if found else []

    def pids(self, kind: str = "") -> list[int]:
        """Return the pids of live actors."""
        return [each.pid for each in targets.living(self.look(), kind)]

    def wait_serving(self) -> None:
        """Wait until every process serves. Raises Stuck after SETTLE_S."""

        def serves() -> bool:
            found = self.look()
            return found is not None and all(each.state == "ready" for each in found.processes)

        wait_for(serves, SETTLE_S, "every process to serve after the last fault")

    def end_process(self) -> None:
        """Forget the dead supervisor, so that `start` can start another one."""
        if self._process is not None:
            self._process.wait(targets.DEATH_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        with targets.Target(self.pid) as target:
            target.send(number)

    def wait_status(self, timeout_s: float) -> int | None:
        """Return the supervisor's exit status, or None if it is still alive after `timeout_s`."""
        assert self._process is not None
        with targets.Target(self.pid) as target:
            return self._process.wait() if target.wait_dead(timeout_s) else None

    def abandon(self) -> None:
        """Kill the engine if it has not stopped."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        self.stop()

    def left(self) -> list[int]:
        """Return live processes that use this engine's directory."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                try:
                    command = Path(f"/proc/{entry}/cmdline").read_bytes()
                except OSError:
                    continue
                if self.data_dir.encode() in command and targets.is_alive(int(entry)):
                    found.append(int(entry))
        return found

    def wait_alone(self) -> None:
        """Wait until no actor of a dead supervisor is left. Raises Stuck."""
        wait_for(lambda: not self.left(), ORPHANS_S, "the orphans to settle and exit")


def close_down(engine: DrillEngine, complaints: list[str]) -> None:
    """Stop the engine in an orderly way.

    Adds complaints about leftover files, processes and shared memory.
    """
    shm_dir = engine.info.shm_dir
    began = time.monotonic()
    engine.signal(signal.SIGTERM)
    status = engine.wait_status(SETTLE_S)
    if status != 0:
        complaints.append(f"the orderly stop ended with {status} after {time.monotonic() - began:.1f} s")
    left = engine.left()
    if left:
        complaints.append(f"processes {left} are alive after the orderly stop")
    if Path(shm_dir).exists():
        complaints.append(f"{shm_dir} exists after the orderly stop")
    engine.stop()
    try:
        if not verify(engine.data_dir, engine.cold_dir).files:
            complaints.append("verify found no file at all")
    except GuaranteeBroken as e:
        complaints.append(str(e))


def kill_tree(engine: DrillEngine) -> int:
    """SIGKILL every process of the engine at once. Returns how many were killed."""
    supervisor = engine.pid
    held = [targets.hold_child(pid, supervisor) for pid in engine.pids()]
    with targets.Target(supervisor) as head:
        # Stop the supervisor first, so that it cannot react to the death of a child.
        head.send(signal.SIGSTOP)
        actors = [each for each in held if each is not None]
        count = sum(each.send(signal.SIGKILL) for each in actors) + head.send(signal.SIGKILL)
        dead = all(each.wait_dead() for each in [*actors, head])
        for each in actors:
            each.__exit__()
    engine.end_process()
    if not dead:
        raise Stuck("a killed process is still alive")
    engine.wait_alone()
    return count
