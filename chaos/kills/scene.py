"""One engine under load, hurt by a case and judged when it is over."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ringlog
from chaos.check import journal
from chaos.check.history import Judgement, NothingToJudge
from chaos.check.journal import Outcome, Rows, What
from chaos.check.keys import check_keys, is_waiting
from chaos.kills.rig import SETTINGS, Engine, check_topics, close_down, kill_tree, on_shard
from chaos.order import Account, Order
from chaos.rigs import targets
from chaos.rigs.load import Load, Stuck, wait_for
from chaos.rigs.nursery import Client, Nursery
from ringlog.errors import RinglogError, StartRefused

SHARDS = 2
RINGS_S = 20.0
"""Rings of clients that are gone have been given back by then."""
KEYED_SHARD = 0
"""Where the topic of keyed writers lies."""
ASKED_S = 0.25
"""A keyed writer has begun an append by then: it begins forty in a second."""
HORIZON_NS = 200_000_000
"""A pause that a kill made begins within this time after it."""
STORY_LINES = 12
BULK_TOPICS = (1, 2)
"""One of each class and shard."""
BULK_TIMES = 3
BULK_FRAME = 100
BULK_RECORD_BYTES = 40


@dataclass(frozen=True, slots=True)
class Kill:
    """One death that we made."""

    role: str
    shard: int
    at_ns: int


@dataclass(slots=True)
class Scene:
    """Everything about one engine and its clients. `cast` makes one."""

    name: str
    engine: Engine
    load: Load
    complaints: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    judgement: Judgement | None = None
    rows: Rows | None = None
    bulk_times: float = BULK_TIMES
    """Appends in large frames, as a multiple of those in frames of one record."""
    last_look: Callable[[Scene], list[str]] = lambda scene: []
    """What else is to be judged while the engine serves for the last time; returns complaints."""

    # -- load -------------------------------------------------------------------------------------------

    def make_topics(self) -> None:
        """One after the other on shard 0 and shard 1, in different classes; the last is for keys."""
        with ringlog.connect(self.engine.url, timeout_ms=60_000) as client:
            for number, name in enumerate(self.load.topics):
                client.topics.create(name, exist_ok=True, durability=("fsync", "disk")[number // 2 % 2])

    def start_load(self, per_s: float) -> list[Client]:
        """Writers of all kinds, readers from the front and from the head, watchers, deletes, checkpoints;
        returns the keyed writers. `per_s`: appends a second in frames of one record, all together; beside
        them go `bulk_times` as many in large frames."""
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

    def wait_asked(self, writer: Client) -> None:
        """Until a keyed writer waits for an answer, ASKED_S at most; its shard should have died just now."""
        until = time.monotonic() + ASKED_S
        while time.monotonic() < until and not is_waiting(writer.task.journal_path):
            time.sleep(0.002)

    def replace_keyed(self, writer: Client) -> Client:
        """Kill a keyed writer, which may wait for an answer, and let another process send that key again."""
        self.load.kill(writer)
        number = writer.task.key_from
        if os.path.exists(writer.task.journal_path):  # Else it was killed before it began to write one.
            rows = np.fromfile(writer.task.journal_path, dtype=journal.ROW)
            begun = rows[rows["what"] == What.APPEND]
            number = int(begun["value"][-1]) & 0xFFFFFFFF if len(begun) else number
        return self.load.start("produce_keyed", topic=4, per_s=40, transport="ipc", key_from=number)

    # -- hurting ----------------------------------------------------------------------------------------

    def kill(self, role: str, shard: int = 0) -> bool:
        """Kill one actor that lives now; False when none does."""
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
        """Kill what actors are forked from, so that the next one is spawned; False when there is none now."""
        pid = targets.forkserver(self.engine.pid)
        return bool(pid) and targets.kill_child(pid, self.engine.pid)

    def kill_supervisor(self) -> None:
        """SIGKILL the supervisor alone and start a new one at once: it must not serve beside the orphans."""
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
            # Refused while orphans are there: as good, if they go.
            self.engine.wait_alone()
            self.engine.start()
        beside = [pid for pid in old if targets.is_alive(pid)]
        if beside:
            self.complaints.append(f"a new engine serves while {beside} of the old one live")

    def kill_all(self) -> None:
        """SIGKILL the whole tree at once and start it again."""
        at_ns = time.monotonic_ns()
        count = kill_tree(self.engine)
        self.kills += [Kill("all", -1, at_ns)] * count
        self.engine.start()

    def pause(self, role: str, seconds: float) -> bool:
        """SIGSTOP an actor for a while."""
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
        """End the load, kill everything once more, read it all, stop, verify, and note whatever is wrong."""
        engine, load = self.engine, self.load
        try:
            engine.wait_serving()
            load.end()
            # What clients were told last has nobody who could have written it down again since.
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
        """Rings of clients that ended or were killed go (O7); the gateway keeps its own."""

        def are_gone() -> bool:
            found = self.engine.look()
            return found is not None and found.rings <= SHARDS

        wait_for(are_gone, RINGS_S, "rings of clients that are gone to be given back")

    def pauses_ms(self) -> list[float]:
        """How long clients of a killed shard got no answer, one figure a kill of a shard."""
        topics = range(len(self.load.topics))
        deaths = [(kill.at_ns, [n for n in topics if n % SHARDS == kill.shard])
                  for kill in self.kills if kill.role == "wal_shard"]  # fmt: skip
        return pauses_ms(self.rows, deaths) if self.rows is not None else []


def pauses_ms(rows: Rows, deaths: Iterable[tuple[int, list[int]]]) -> list[float]:
    """The longest pause of appends just after each death: when it was, and the topics of who died."""
    is_append = np.isin(rows["op"], rows["op"][rows["what"] == What.APPEND])
    ends = rows[is_append & (rows["what"] == What.RETURN) & (rows["outcome"] == Outcome.OK)]
    found = []
    for at_ns, topics in deaths:
        times = np.unique(ends["at_ns"][np.isin(ends["topic"], topics)])
        if len(times) > 1:
            found.append(longest_gap_ms(times, at_ns))
    return found


def longest_gap_ms(times: Any, at_ns: int) -> float:
    """The longest time without an answer that begins, or is under way, just after a kill."""
    first = max(int(np.searchsorted(times, at_ns)) - 1, 0)
    last = min(int(np.searchsorted(times, at_ns + HORIZON_NS)) + 1, len(times))
    gaps = np.diff(times[first:last])
    return float(gaps.max()) / 1e6 if len(gaps) else 0.0


class Stage:
    """What scenes share: the order, the account, the nursery. Scenes leave their counts in the account."""

    def __init__(self, order: Order, account: Account, nursery: Nursery) -> None:
        self.order, self.account, self.nursery = order, account, nursery
        self.pauses_ms: list[float] = []
        self.outages_ms: list[float] = []
        self.total = Judgement()
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
        """Run a case; whatever stops it is a finding."""
        began = time.monotonic()
        try:
            case(self)
        except (Stuck, RinglogError, OSError) as e:
            self.account.found(f"{name}: {e}", name, traceback.format_exc())
            traceback.print_exc()
        finally:
            for scene in self._open:
                scene.load.abandon()
                scene.engine.abandon()
            self._open.clear()
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)

    @classmethod
    def replay(cls, order: Order, name: str, case: Callable[[Stage], None]) -> None:
        """Run one case by itself, with what it found and did on standard output; raises Broken."""
        account = Account()
        with Nursery() as nursery:
            cls(order, account, nursery).run(name, case)
        account.tell()

    def close(self, scene: Scene) -> None:
        """Finish a scene and enter its counts and findings."""
        scene.finish()
        self._open.remove(scene)
        account, judgement = self.account, scene.judgement
        complaints = scene.complaints + scene.load.complaints
        if judgement is not None:
            self.total.add(judgement)
            account.did("client_ops", judgement.ops)
            account.did("acked", judgement.acked)
            account.did("deletes", judgement.deletes)
            account.did("records_read", judgement.read)
            account.did("frames sent again", scene.load.sent_again)
            complaints = [f"{n} {kind}" for kind, n in judgement.wrong.items()] + complaints
            complaints += judgement.stories
        self.pauses_ms += scene.pauses_ms()
        self._note(scene, complaints)

    def judged(self, scene: Scene, complaints: list[str]) -> None:
        """Enter the findings of a scene that was finished and judged elsewhere."""
        self._open.remove(scene)
        self._note(scene, complaints)

    def _note(self, scene: Scene, complaints: list[str]) -> None:
        if complaints:
            self.account.found(
                f"{scene.name}: {complaints[0]}", scene.name,
                "\n".join([*complaints[:STORY_LINES], *scene.engine.log_path.read_text().splitlines()[-30:]]),
            )  # fmt: skip
            print("\n".join(complaints[:STORY_LINES]), flush=True)
            _keep(scene)


def _keep(scene: Scene) -> None:
    """Keep the evidence of a failure where somebody asked for it."""
    place = os.environ.get("RINGLOG_CHAOS_KEEP")
    if place:
        import shutil

        shutil.copytree(scene.engine.log_path.parent, Path(place, scene.engine.log_path.parent.name))
