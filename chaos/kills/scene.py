"""A scene: one engine under load, the faults that a case injects, and the final checks."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ringlog
from chaos.check.keys import check_keys, is_waiting
from chaos.kills.rig import Engine, check_topics, on_shard
from chaos.order import Account, Order
from ringlog.drill import journal, targets
from ringlog.drill.engine import SETTINGS, close_down, kill_tree
from ringlog.drill.history import HistoryVerdict, NothingToJudge
from ringlog.drill.journal import Rows, What
from ringlog.drill.load import Load, Stuck, wait_for
from ringlog.drill.nursery import ClientProcess, Nursery
from ringlog.drill.pauses import pauses_ms
from ringlog.errors import RinglogError, StartRefused

SHARDS = 2
RINGS_S = 20.0
"""Time (s) within which rings of exited clients are removed."""
KEYED_SHARD = 0
"""Shard of the topic of keyed writers."""
ASKED_S = 0.25
"""Time (s) within which a keyed writer has begun an append. It begins forty per second."""
STORY_LINES = 12
BULK_TOPICS = (1, 2)
"""Indexes of topics for large frames: one of each durability class and shard."""
BULK_TIMES = 3
BULK_FRAME = 100
BULK_RECORD_BYTES = 40


@dataclass(frozen=True, slots=True)
class Kill:
    """One death caused by the harness."""

    role: str
    shard: int
    at_ns: int


@dataclass(slots=True)
class Scene:
    """One engine and its clients. `Stage.cast` creates it."""

    name: str
    engine: Engine
    load: Load
    complaints: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    judgement: HistoryVerdict | None = None
    rows: Rows | None = None
    bulk_times: float = BULK_TIMES
    """Appends in large frames, as a multiple of those in frames of one record."""
    last_look: Callable[[Scene], list[str]] = lambda scene: []
    """Additional checks while the engine serves for the last time. Returns complaints."""

    # -- load -------------------------------------------------------------------------------------------

    def make_topics(self) -> None:
        """Create the topics, alternately on shard 0 and shard 1, in two classes.

        The last one is for keyed writers.
        """
        with ringlog.connect(self.engine.url, timeout_ms=60_000) as client:
            for number, name in enumerate(self.load.topics):
                client.topics.create(name, exist_ok=True, durability=("fsync", "disk")[number // 2 % 2])

    def start_load(self, per_s: float) -> list[ClientProcess]:
        """Start writers of all kinds, readers from start and head, watches, deletes and checkpoints.

        Args:
            per_s: appends per second in frames of one record, over all writers. `bulk_times` as many are
                added in large frames.

        Returns:
            The keyed writers.
        """
        start = self.load.start
        bulk_per_s = per_s * self.bulk_times / len(BULK_TOPICS)
        for topic in BULK_TOPICS:
            start(
                "produce", topic=topic, per_s=bulk_per_s, batch=4 * BULK_FRAME, frame=BULK_FRAME,
                record_bytes=BULK_RECORD_BYTES,
            )  # fmt: skip
        for topic in range(4):
            start("produce", topic=topic, per_s=per_s / 4, transport="ipc" if topic == 3 else "auto")
        start("produce_one", topic=0, per_s=60)
        start("produce_one", topic=3, per_s=30, transport="ipc")
        start("read", topic=0)
        start("read", topic=3, transport="ipc")
        start("reread", topic=1, per_s=20_000)
        start("reread", topic=2, per_s=10_000)
        start("watch")
        start("watch", transport="ipc")
        start("delete", topic=2, per_s=3)
        start("delete", topic=3, per_s=3)
        start("operate", per_s=8)
        return [start("produce_keyed", topic=4, per_s=40, transport="ipc") for _ in range(2)]

    def wait_asked(self, writer: ClientProcess) -> None:
        """Wait until a keyed writer has a pending append, at most ASKED_S.

        Call it just after its shard died.
        """
        until = time.monotonic() + ASKED_S
        while time.monotonic() < until and not is_waiting(writer.task.journal_path):
            time.sleep(0.002)

    def replace_keyed(self, writer: ClientProcess) -> ClientProcess:
        """Kill a keyed writer, perhaps with a pending append. Another process resends its last key."""
        self.load.kill(writer)
        number = writer.task.key_from
        if os.path.exists(writer.task.journal_path):  # Otherwise it was killed before it created its journal.
            rows = np.fromfile(writer.task.journal_path, dtype=journal.ROW)
            begun = rows[rows["what"] == What.APPEND]
            number = int(begun["value"][-1]) & 0xFFFFFFFF if len(begun) else number
        return self.load.start("produce_keyed", topic=4, per_s=40, transport="ipc", key_from=number)

    # -- hurting ----------------------------------------------------------------------------------------

    def kill(self, role: str, shard: int = 0) -> bool:
        """Kill one live actor. Returns False if there is none."""
        found = self.engine.look()
        living = targets.living(found, role)
        if role == "wal_shard":
            living = [each for each in living if each.name.endswith(f"-{shard:02d}")]
        if not living:
            return False
        at_ns = time.monotonic_ns()
        if not targets.kill_child(living[0].pid, self.engine.pid):
            return False
        self.kills.append(Kill(role, shard, at_ns))
        return True

    def kill_forkserver(self) -> bool:
        """Kill the forkserver, so that the next actor is spawned. Returns False if there is none."""
        pid = targets.forkserver(self.engine.pid)
        return bool(pid) and targets.kill_child(pid, self.engine.pid)

    def kill_supervisor(self) -> None:
        """SIGKILL only the supervisor and start a new one at once.

        It must not serve while orphans are alive.
        """
        old = self.engine.pids()
        at_ns = time.monotonic_ns()
        with targets.Target(self.engine.pid) as target:
            target.send(signal.SIGKILL)
            target.wait_dead()
        self.engine.end_process()
        self.kills.append(Kill("supervisor", -1, at_ns))
        try:
            self.engine.start()
        except StartRefused:
            # The new engine refused to start because orphans were alive. This is correct if the orphans exit.
            self.engine.wait_alone()
            self.engine.start()
        beside = {pid: targets.facts_of(pid) for pid in old if targets.is_alive(pid)}
        if beside:
            self.complaints.append(f"a new engine serves while processes of the old one run: {beside}")

    def kill_all(self) -> None:
        """SIGKILL the whole tree at once and start it again."""
        at_ns = time.monotonic_ns()
        count = kill_tree(self.engine)
        self.kills += [Kill("all", -1, at_ns)] * count
        self.engine.start()

    def pause(self, role: str, seconds: float) -> bool:
        """Stop an actor with SIGSTOP for `seconds`. Returns False if there is none."""
        living = targets.living(self.engine.look(), role)
        target = targets.hold_child(living[0].pid, self.engine.pid) if living else None
        if target is None:
            return False
        with target:
            target.send(signal.SIGSTOP)
            time.sleep(seconds)
            target.send(signal.SIGCONT)
        return True

    # -- the end ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the load, kill everything once more, read all records, stop, verify, and collect complaints."""
        engine, load = self.engine, self.load
        try:
            engine.wait_serving()
            load.end()
            # After the load has ended, no client resends. This kill shows whether the last acks were durable.
            self.kill_all()
            engine.wait_serving()
            self.complaints += self.last_look(self)
            self.judgement = load.verdict()
            self._wait_rings()
        except (Stuck, NothingToJudge, RinglogError) as e:
            self.complaints.append(f"{type(e).__name__}: {e}")
        close_down(engine, self.complaints)
        check_topics(engine, load, self.complaints)
        self.rows = journal.load(load.folder)
        self.complaints += check_keys(self.rows, len(load.topics) - 1)

    def _wait_rings(self) -> None:
        """Wait until the rings of exited and killed clients are removed. The gateway keeps its own rings."""

        def are_gone() -> bool:
            found = self.engine.look()
            return found is not None and found.rings <= SHARDS

        wait_for(are_gone, RINGS_S, "rings of exited clients to be removed")

    def pauses_ms(self) -> list[float]:
        """Return how long clients of a killed shard got no ack (ms), one value per kill of a shard."""
        topics = range(len(self.load.topics))
        deaths = [(kill.at_ns, [n for n in topics if n % SHARDS == kill.shard])
                  for kill in self.kills if kill.role == "wal_shard"]  # fmt: skip
        return pauses_ms(self.rows, deaths) if self.rows is not None else []


class Stage:
    """State shared by scenes: order, account, nursery. Scenes add their counts to the account."""

    def __init__(self, order: Order, account: Account, nursery: Nursery) -> None:
        self.order, self.account, self.nursery = order, account, nursery
        self.pauses_ms: list[float] = []
        self.outages_ms: list[float] = []
        self.total = HistoryVerdict()
        self._open: list[Scene] = []

    def cast(
        self, name: str, *, plan: str = "", topics: int = 5, settings: Mapping[str, Any] | None = None
    ) -> Scene:
        """Start an engine for a case."""
        root = self.order.scratch / f"{name}-{time.monotonic_ns()}"
        engine = Engine(root, {**SETTINGS, **(settings or {})}, plan)
        names = [on_shard(f"topic-{n}", n % SHARDS, SHARDS) for n in range(topics)]
        scene = Scene(name, engine, Load(self.nursery, Path(root, "journals"), engine.url, names))
        scene.bulk_times = self.order.settings.get("bulk_times", BULK_TIMES)
        self._open.append(scene)
        engine.start()
        return scene

    def run(self, name: str, case: Callable[[Stage], None]) -> None:
        """Run a case. Any error that ends it is a finding."""
        began = time.monotonic()
        try:
            case(self)
        except (Stuck, RinglogError, OSError) as e:
            self.account.report_finding(f"{name}: {e}", name, traceback.format_exc())
            traceback.print_exc()
        finally:
            for scene in self._open:
                scene.load.abandon()
                scene.engine.abandon()
            self._open.clear()
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)

    @classmethod
    def replay(cls, order: Order, name: str, case: Callable[[Stage], None]) -> None:
        """Run one case and print its findings and counts. Raises GuaranteeBroken if there is a finding."""
        account = Account()
        with Nursery("chaos.rigs.work") as nursery:
            cls(order, account, nursery).run(name, case)
        account.print_report()

    def close(self, scene: Scene) -> None:
        """Finish a scene and add its counts and findings to the account."""
        scene.finish()
        self._open.remove(scene)
        account, judgement = self.account, scene.judgement
        complaints = scene.complaints + scene.load.complaints
        if judgement is not None:
            self.total.add(judgement)
            account.count_work("client_ops", judgement.ops)
            account.count_work("acked", judgement.acked)
            account.count_work("deletes", judgement.deletes)
            account.count_work("records_read", judgement.read)
            account.count_work("frames sent again", scene.load.sent_again)
            complaints = [f"{n} {kind}" for kind, n in judgement.wrong.items()] + complaints
            complaints += judgement.stories
        self.pauses_ms += scene.pauses_ms()
        self._note(scene, complaints)

    def judged(self, scene: Scene, complaints: list[str]) -> None:
        """Add the findings of a scene that was finished and judged elsewhere."""
        self._open.remove(scene)
        self._note(scene, complaints)

    def _note(self, scene: Scene, complaints: list[str]) -> None:
        if complaints:
            self.account.report_finding(
                f"{scene.name}: {complaints[0]}", scene.name,
                "\n".join([*complaints[:STORY_LINES], *scene.engine.log_path.read_text().splitlines()[-30:]]),
            )  # fmt: skip
            print("\n".join(complaints[:STORY_LINES]), flush=True)
            _keep(scene)


def _keep(scene: Scene) -> None:
    """Copy the engine's directory to RINGLOG_CHAOS_KEEP, if that variable is set."""
    place = os.environ.get("RINGLOG_CHAOS_KEEP")
    if place:
        import shutil

        shutil.copytree(scene.engine.log_path.parent, Path(place, scene.engine.log_path.parent.name))
