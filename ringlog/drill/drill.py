"""`ringlog chaos`: kill processes of an engine under load, and check its guarantees.

All records are in topics of this run, which are deleted at the end. Processes are found through the engine's
status. Only the engine's children are killed, through pidfds. The supervisor, or all processes at once, are
killed only if a command to restart the engine is given.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ringlog
from ringlog.drill import journal, targets, work
from ringlog.drill.engine import DrillEngine, close_down, kill_tree
from ringlog.drill.history import BROKEN, NothingToJudge
from ringlog.drill.load import Load, Stuck, wait_for
from ringlog.drill.nursery import Nursery
from ringlog.drill.pauses import pauses_ms
from ringlog.envelope.messages import EngineStatusReply
from ringlog.errors import NotConnected, UsageError
from ringlog.link.address import parse_url, read_engine_file
from ringlog.placement import home_shard

TOPIC_PREFIX = "ringlog-chaos-"
TOPICS_MAX = 8
KILLS_PER_MINUTE = 4
"""Maximum kills per minute of one process of a running engine. The supervisor gives up a process after more
deaths than its settings allow, 5 by default."""
READY_S = 120.0
"""Time (s) within which an engine must serve again after the last kill."""
TREE = ("supervisor", "all")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """Options of one run."""

    url: str | None
    """Engine on this host. None: a new engine in a temporary directory."""
    seconds: float
    kill: Sequence[str]
    every_s: float
    pause_s: float = 0.0
    """Stop every second process for this time (s) instead of killing it; 0: never."""
    restart_command: str = ""
    per_s: float = 2_000.0
    """Appends per second, over all producers."""
    seed: int = 0

    def check(self) -> None:
        """Raise UsageError for unknown process names, a remote engine, or a missing `restart_command`."""
        unknown = sorted(set(self.kill) - set(targets.ROLES))
        if unknown or not self.kill:
            raise UsageError(
                "kill must name known processes, at least one",
                found=",".join(unknown),
                known=",".join(targets.ROLES),
            )
        if self.url is not None and not self.restart_command and set(self.kill) & set(TREE):
            raise UsageError(
                "killing the supervisor of a running engine requires a command that restarts the engine",
                hint="--restart-command",
            )
        if self.url is not None and not parse_url(self.url).is_local:
            raise UsageError(
                "chaos runs only on the engine's host; pass the URL of a local run directory", url=self.url
            )


@dataclass(slots=True)
class Verdict:
    """Result of one run."""

    facts: dict[str, Any] = field(default_factory=dict)
    """acked, read, and a count of each kind of broken guarantee; kills by role; pauses in milliseconds."""
    wrong: list[str] = field(default_factory=list)
    """Failures, one line each; empty if every guarantee held."""


def run_drill(options: DrillOptions, say: Say) -> Verdict:
    """Run the load and the kills.

    Raises UsageError, NotConnected if no engine runs, StartRefused if the new engine does not start.
    """
    options.check()
    with Nursery(work.__name__) as nursery, _scratch() as scratch:
        if options.url is None:
            engine = DrillEngine(scratch / "engine")
            engine.start()
            try:
                verdict = _Drill(options, engine.url, nursery, scratch / "journals", say, engine).run()
                close_down(engine, verdict.wrong)
            finally:
                engine.abandon()
        else:
            verdict = _Drill(options, options.url, nursery, scratch / "journals", say, None).run()
    return verdict


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="ringlog-chaos-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


class _Drill:
    """One run against one engine. `own` is set if the run started the engine."""

    def __init__(
        self,
        options: DrillOptions,
        url: str,
        nursery: Nursery,
        folder: Path,
        say: Say,
        own: DrillEngine | None,
    ) -> None:  # fmt: skip
        self._options, self._url, self._own, self._say = options, url, own, say
        self._run_dir = parse_url(url).run_dir
        info = read_engine_file(self._run_dir)
        if info is None or self._status() is None:
            raise NotConnected("no engine is running in this run directory", run_dir=self._run_dir)
        self._shards, self._has_gateway = info.shards, bool(info.gateway_ipc)
        run = secrets.token_hex(4)
        names = (f"{TOPIC_PREFIX}{run}-{n}" for n in itertools.count())
        count = max(2, min(self._shards, TOPICS_MAX))
        topics = [
            next(name for name in names if home_shard(name, self._shards) == n % self._shards)
            for n in range(count)
        ]
        self._load = Load(nursery, folder, url, topics)
        self._random = random.Random(options.seed or run)
        self._kills: Counter[str] = Counter()
        self._deaths: list[tuple[int, int]] = []
        """(time in ns, shard) of killed shards."""
        self._recent: dict[str, list[float]] = {}

    def run(self) -> Verdict:
        """Run load, kills and checks. Deletes the topics at the end."""
        verdict = Verdict()
        with ringlog.connect(self._url, timeout_ms=60_000, wait=10.0) as client:
            for number, name in enumerate(self._load.topics):
                client.topics.create(name, durability=("fsync", "disk")[number % 2])
        try:
            self._start_load()
            self._inject_faults()
            wait_for(self._serves, READY_S, "the engine to serve after the last kill", look_s=0.1)
            self._load.end()
            self._judge(verdict)
        except (Stuck, NothingToJudge) as e:
            verdict.wrong.append(str(e))
        finally:
            with ringlog.connect(self._url, timeout_ms=60_000) as client:
                for name in self._load.topics:
                    client.topics.delete(name)
        return verdict

    def _start_load(self) -> None:
        load, topics = self._load, range(len(self._load.topics))
        for topic in topics:
            is_remote = self._has_gateway and topic == topics[-1]
            load.start(
                "produce", topic=topic, per_s=self._options.per_s / len(topics), batch=20,
                transport="ipc" if is_remote else "auto",
            )  # fmt: skip
            load.start("read", topic=topic)
        load.start("produce_one", topic=0, per_s=100)
        load.start("reread", topic=topics[-1], per_s=10_000)
        load.start("delete", topic=topics[-1], per_s=1)

    # -- hurting ----------------------------------------------------------------------------------------

    def _inject_faults(self) -> None:
        end = time.monotonic() + self._options.seconds
        turn = itertools.count()
        self._load.wait_progress(200, 60.0)
        while (left := end - time.monotonic()) > 0:
            self._say(f"{left:4.0f} s left, {self._load.rows:,} rows in journals, kills {dict(self._kills)}")
            time.sleep(min(self._options.every_s, left))
            role = self._options.kill[next(turn) % len(self._options.kill)]
            if role in TREE:
                self._kill_tree(role)
            elif self._options.pause_s and next(turn) % 2:
                self._pause(role)
            else:
                self._kill(role)
        self._load.wait_progress(200, 60.0)

    def _kill(self, role: str) -> None:
        found = self._status()
        now = time.monotonic()
        living = [each for each in targets.living(found, role) if self._may_kill(each.name, now)]
        if not living or found is None:
            return
        victim = self._random.choice(living)
        at_ns = time.monotonic_ns()
        if targets.kill_child(victim.pid, self._supervisor()):
            self._kills[role] += 1
            self._recent.setdefault(victim.name, []).append(now)
            if role == "wal_shard":
                self._deaths.append((at_ns, int(victim.name.rpartition("-")[2])))

    def _may_kill(self, name: str, now: float) -> bool:
        recent = [at for at in self._recent.get(name, ()) if now - at < 60.0]
        self._recent[name] = recent
        return self._own is not None or len(recent) < KILLS_PER_MINUTE

    def _pause(self, role: str) -> None:
        living = targets.living(self._status(), role)
        target = targets.hold_child(self._random.choice(living).pid, self._supervisor()) if living else None
        if target is None:
            return
        with target:
            target.send(signal.SIGSTOP)
            time.sleep(self._options.pause_s)
            target.send(signal.SIGCONT)
        self._kills[f"{role} paused"] += 1

    def _kill_tree(self, role: str) -> None:
        supervisor = self._supervisor()
        if self._own is not None and role == "all":
            kill_tree(self._own)
        else:
            held = targets.living(self._status()) if role == "all" else []
            with targets.Target(supervisor) as head:
                actors = [each for one in held if (each := targets.hold_child(one.pid, supervisor))]
                for each in [head, *actors]:
                    each.send(signal.SIGKILL)
                    each.wait_dead()
                for each in actors:
                    each.__exit__()
            if self._own is not None:
                self._own.end_process()
                self._own.wait_alone()
        self._kills[role] += 1
        if self._own is not None:
            self._own.start()
            return
        subprocess.Popen(
            shlex.split(self._options.restart_command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        what = "the restart command to start the engine"
        wait_for(lambda: self._supervisor() not in {0, supervisor}, READY_S, what)
        self._recent.clear()

    # -- looking ------------------------------------------------------------------------------------------

    def _status(self) -> EngineStatusReply | None:
        return targets.status(self._run_dir)

    def _supervisor(self) -> int:
        info = read_engine_file(self._run_dir)
        return info.supervisor_pid if info is not None and targets.is_alive(info.supervisor_pid) else 0

    def _serves(self) -> bool:
        found = self._status()
        return found is not None and all(each.state == "ready" for each in found.processes)

    def _judge(self, verdict: Verdict) -> None:
        found = self._load.verdict()
        facts = verdict.facts
        facts |= {"client_ops": found.ops, "acked": found.acked, "unknown": found.unknown, "read": found.read}
        facts |= {kind: getattr(found, kind) for kind in BROKEN}
        facts["errors"] = self._load.errors
        facts |= {f"kills {role}": count for role, count in sorted(self._kills.items())}
        names = list(enumerate(self._load.topics))
        deaths = [(at_ns, [n for n, name in names if home_shard(name, self._shards) == shard])
                  for at_ns, shard in self._deaths]  # fmt: skip
        pauses = pauses_ms(journal.load(self._load.folder), deaths)
        if pauses:
            for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                facts[f"pause_{name}_ms"] = round(float(np.quantile(pauses, part)), 1)
        verdict.wrong += found.stories + self._load.complaints
        if found.wrong and not found.stories:
            verdict.wrong.append(str(found.wrong))
