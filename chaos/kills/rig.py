"""The engine of class `kills`: it starts with a plan of stop points and is checked closely when it stops."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos import leaks
from chaos.order import GuaranteeBroken
from chaos.rigs import targets
from chaos.rigs.judge import verify
from chaos.rigs.load import Load, Stuck, wait_for
from ringlog.envelope.messages import EngineStatusReply
from ringlog.environment import STOP_POINTS
from ringlog.placement import home_shard
from ringlog.testing.real_engine import TestEngine
from ringlog.verify.directory import verify_directory

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


class Engine(TestEngine):
    """A test engine that can arm stop points for its next start. It stops if this process dies."""

    __test__ = False
    ready_s = 90.0
    code_first: tuple[str, ...] = ()
    """Directories that come before ringlog on the path of every process. Tests plant bugs with them."""

    def __init__(self, root: Path, settings: Mapping[str, Any] = SETTINGS, plan: str = "") -> None:
        root.mkdir(mode=0o700, parents=True)
        self.cold_dir = root / "cold"
        self.cold_dir.mkdir()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOG_")}
        environ["PYTHONPATH"] = os.pathsep.join([*self.code_first, str(Path(__file__).parent.parent.parent)])
        if leaks.MARK in os.environ:
            environ[leaks.MARK] = os.environ[leaks.MARK]
        if plan:
            environ[STOP_POINTS] = plan
        super().__init__(root, {**settings, "cold.dir": str(self.cold_dir)}, environ)

    def arm(self, plan: str) -> None:
        """Set the stop points of later starts; "" for none."""
        self._environ = {**self._environ, STOP_POINTS: plan}

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


def on_shard(prefix: str, shard: int, shards: int) -> str:
    """Return a topic name whose home is this shard."""
    return next(name for n in range(10_000) if home_shard(name := f"{prefix}-{n}", shards) == shard)


def close_down(engine: Engine, complaints: list[str]) -> None:
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


def check_topics(engine: Engine, load: Load, complaints: list[str]) -> None:
    """Check that the offline verifier and the final read count the same records.

    Call it after `verdict` and the orderly stop.
    """
    found = {
        topic.topic: topic
        for topic in verify_directory(engine.data_dir, jobs=1, cold_dir=str(engine.cold_dir)).topics
    }
    for fact in load.facts:
        topic = found.get(fact.topic)
        if topic is None or (topic.records, topic.head) != (fact.counted, fact.head):
            said = topic and (topic.records, topic.head)
            complaints.append(f"verify counts {said} in {fact.topic}, readers {(fact.counted, fact.head)}")


def kill_tree(engine: Engine) -> int:
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
