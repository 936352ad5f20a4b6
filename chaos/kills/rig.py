"""An engine of the class: started with a plan of stop points, and looked over closely when it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos import leaks
from chaos.order import Broken
from chaos.rigs import targets
from chaos.rigs.judge import verify
from chaos.rigs.load import Load, Stuck, wait_for
from ringlog.envelope.messages import EngineStatusReply
from ringlog.placement import home_shard
from ringlog.supervision.engine import STOP_POINTS_VARIABLE
from ringlog.testing.real_engine import TestEngine
from ringlog.verify.directory import verify_directory

SETTLE_S = 60.0
"""Within this time after the last fault everything serves again (O8)."""
ORPHANS_S = 30.0
"""Children of a dead supervisor have ended by then: they drain first."""
SETTINGS: dict[str, Any] = {
    "wal.shards": 2, "wal.file_bytes": "1MiB", "gateway.enabled": True, "storage.enabled": True,
    "storage.own_segment_bytes": "64KiB", "storage.segment_bytes": "1MiB", "storage.reclaim_interval_s": 0.2,
    "cold.interval_s": 0.2, "cold.hot_segments": 0, "supervisor.restart_max": 1_000, "supervisor.drain_s": 40,
    "data.min_free_bytes": 0,
}  # fmt: skip
"""Small files, and background work without rest, so that every step is passed often."""


class Engine(TestEngine):
    """As of a test, with a way to arm stop points for one start; dies with us."""

    __test__ = False
    ready_s = 90.0
    code_first: tuple[str, ...] = ()
    """Directories on the path of every process, before ringlog: for bugs that a test plants."""
    program = (
        "import os, sys; from ringlog.hardening import die_with_parent; die_with_parent(os.getppid());"
        " from supervisor import main; sys.argv[0] = 'supervisor'; sys.exit(main())"
    )

    def __init__(self, root: Path, settings: Mapping[str, Any] = SETTINGS, plan: str = "") -> None:
        root.mkdir(mode=0o700, parents=True)
        self.cold_dir = root / "cold"
        self.cold_dir.mkdir()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOG_")}
        environ["PYTHONPATH"] = os.pathsep.join([*self.code_first, str(Path(__file__).parent.parent.parent)])
        if leaks.MARK in os.environ:
            environ[leaks.MARK] = os.environ[leaks.MARK]
        if plan:
            environ[STOP_POINTS_VARIABLE] = plan
        super().__init__(root, {**settings, "cold.dir": str(self.cold_dir)}, environ)

    def arm(self, plan: str) -> None:
        """Stop points from the next start on; "" for none."""
        self._environ = {**self._environ, STOP_POINTS_VARIABLE: plan}

    def look(self) -> EngineStatusReply | None:
        """Its status; None while nobody answers."""
        return targets.status(self.run_dir)

    def restarts(self, kind: str) -> list[int]:
        """Restarts of each process of a kind; empty while nobody answers."""
        found = self.look()
        return [each.restarts for each in found.processes if each.kind == kind] if found else []

    def pids(self, kind: str = "") -> list[int]:
        """Living actors."""
        return [each.pid for each in targets.living(self.look(), kind)]

    def wait_serving(self) -> None:
        """Wait until every process serves; raises Stuck (O8)."""

        def serves() -> bool:
            found = self.look()
            return found is not None and all(each.state == "ready" for each in found.processes)

        wait_for(serves, SETTLE_S, "every process to serve after the last fault")

    def end_process(self) -> None:
        """Forget the supervisor that died, so that `start` may make another."""
        if self._process is not None:
            self._process.wait(targets.DEATH_S)

    def signal(self, number: signal.Signals) -> None:
        """To the supervisor."""
        with targets.Target(self.pid) as target:
            target.send(number)

    def wait_status(self, timeout_s: float) -> int | None:
        """Exit status of the supervisor; None when it lives after that time."""
        assert self._process is not None
        with targets.Target(self.pid) as target:
            return self._process.wait() if target.wait_dead(timeout_s) else None

    def abandon(self) -> None:
        """End it in whatever way, if it has not ended."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        self.stop()

    def left(self) -> list[int]:
        """Living processes of this engine's directory."""
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
        """Wait until no actor is left of a supervisor that died; raises Stuck."""
        wait_for(lambda: not self.left(), ORPHANS_S, "the orphans to settle and exit")


def on_shard(prefix: str, shard: int, shards: int) -> str:
    """A topic name whose home is this shard."""
    return next(name for n in range(10_000) if home_shard(name := f"{prefix}-{n}", shards) == shard)


def close_down(engine: Engine, complaints: list[str]) -> None:
    """Stop in good order, and look for what is wrong with what remains: files, processes, shared memory."""
    shm_dir = engine.info.shm_dir
    began = time.monotonic()
    engine.signal(signal.SIGTERM)
    status = engine.wait_status(SETTLE_S)
    if status != 0:
        complaints.append(f"the orderly stop ended with {status} after {time.monotonic() - began:.1f} s")
    left = engine.left()
    if left:
        complaints.append(f"processes {left} outlive the supervisor's orderly end")
    if Path(shm_dir).exists():
        complaints.append(f"{shm_dir} outlives the orderly end")
    engine.stop()
    try:
        if not verify(engine.data_dir, engine.cold_dir).files:
            complaints.append("verify found no file at all")
    except Broken as e:
        complaints.append(str(e))


def check_topics(engine: Engine, load: Load, complaints: list[str]) -> None:
    """The verifier counts what the final read counted (O6); call after `verdict` and the orderly stop."""
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
    """SIGKILL every process of the engine at once; returns how many."""
    supervisor = engine.pid
    held = [targets.hold_child(pid, supervisor) for pid in engine.pids()]
    with targets.Target(supervisor) as head:
        # Frozen first, so that nobody sees another die and does something about it.
        head.send(signal.SIGSTOP)
        actors = [each for each in held if each is not None]
        count = sum(each.send(signal.SIGKILL) for each in actors) + head.send(signal.SIGKILL)
        dead = all(each.wait_dead() for each in [*actors, head])
        for each in actors:
            each.__exit__()
    engine.end_process()
    if not dead:
        raise Stuck("a killed process does not die")
    engine.wait_alone()
    return count
