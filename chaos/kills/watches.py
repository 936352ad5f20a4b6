"""Case `watches`: after each kill, every watch must reach the head of every topic.

In the other cases a watch that lost its subscription recovers with the next kill. Here the writers pause
after each round of kills until all watches have caught up.
"""

from __future__ import annotations

import signal
import threading
import time
from random import Random
from typing import Literal

import ringlog
from chaos.kills.rig import Engine, on_shard
from chaos.kills.scene import SHARDS, Stage
from ringlog.board.processes import GATEWAY, SCHEDULER, WAL_SHARD
from ringlog.client.read.pages import Page
from ringlog.client.watches.events import CaughtUp, Lagged
from ringlog.drill import targets
from ringlog.drill.engine import SETTLE_S, close_down, kill_tree
from ringlog.drill.load import Stuck, wait_for
from ringlog.errors import RinglogError

TOPICS = 4
WATCHES: tuple[Literal["auto", "ipc"], ...] = ("auto", "ipc", "ipc", "auto", "ipc")
"""Transports of the watches, which all follow all topics."""
TOLD_S = 30.0
"""Time (s) within which the watches must catch up once the engine serves."""
KILLS_MAX = 3
"""Most kills in one round."""
KILLS_APART_S = 0.3
FRAMES = (1, 20, 200)
WAIT_S = 0.05
TIMEOUT_MS = 60_000


class _Watcher(threading.Thread):
    """One watch in its own client. `reached` has the last position of each topic."""

    def __init__(self, url: str, topics: list[str], transport: Literal["auto", "ipc"]) -> None:
        super().__init__(daemon=True)
        self.reached = dict.fromkeys(topics, 0)
        self.transport = transport
        self.complaints: list[str] = []
        self._url = url
        self._must_end = threading.Event()

    def run(self) -> None:
        with (
            ringlog.connect(self._url, transport=self.transport, timeout_ms=TIMEOUT_MS) as client,
            client.watch(list(self.reached)) as watch,
        ):
            while not self._must_end.is_set():
                try:
                    event = watch.next(WAIT_S)
                except RinglogError as e:
                    self.complaints.append(f"a watch over {self.transport} raised {type(e).__name__}: {e}")
                    return
                if isinstance(event, Page):
                    self._take(event)
                elif event is not None and not isinstance(event, CaughtUp | Lagged):
                    self.complaints.append(f"a watch over {self.transport} returned {event}")

    def _take(self, page: Page) -> None:
        expected = self.reached[page.topic] + 1
        if len(page) and page.records[0].seq != expected:
            self.complaints.append(f"{page.topic}: got {page.records[0].seq}, expected {expected}")
        self.reached[page.topic] = page.cursor.seq

    def end(self) -> None:
        self._must_end.set()
        self.join(TIMEOUT_MS / 1_000)


class _Writer(threading.Thread):
    """Appends frames of different sizes to one topic, except while it is paused."""

    def __init__(self, url: str, topic: str, random: Random) -> None:
        super().__init__(daemon=True)
        self.complaints: list[str] = []
        self.acked = 0
        self._url, self._topic, self._random = url, topic, random
        self._may_write, self._must_end = threading.Event(), threading.Event()
        self._is_writing = threading.Lock()

    def run(self) -> None:
        with ringlog.connect(self._url, timeout_ms=TIMEOUT_MS) as client:
            while not self._must_end.is_set():
                if not self._may_write.wait(WAIT_S):
                    continue
                frame = [b"x" * 100] * self._random.choice(FRAMES)
                try:
                    with self._is_writing:
                        client.append_many(self._topic, frame)
                except RinglogError as e:
                    self.complaints.append(f"an append raised {type(e).__name__}: {e}")
                    return
                self.acked += len(frame)
                time.sleep(WAIT_S / 2)

    def resume(self) -> None:
        self._may_write.set()

    def pause(self) -> None:
        """Return once no append is pending."""
        self._may_write.clear()
        with self._is_writing:
            pass

    def end(self) -> None:
        self._must_end.set()
        self.join(TIMEOUT_MS / 1_000)


def watches(stage: Stage, rounds: int) -> None:
    """Kill processes and whole engines. All watches must catch up after each round, over both transports."""
    scene, random = stage.cast("watches", topics=0), stage.order.random("watches")
    engine, complaints = scene.engine, scene.complaints
    topics = [on_shard(f"watched-{n}", n % SHARDS, SHARDS) for n in range(TOPICS)]
    with ringlog.connect(engine.url, timeout_ms=TIMEOUT_MS) as client:
        for n, topic in enumerate(topics):
            client.topics.create(topic, durability=("fsync", "disk")[n // SHARDS % 2])
    readers = [_Watcher(engine.url, topics, transport) for transport in WATCHES]
    writers = [_Writer(engine.url, topic, Random(random.random())) for topic in topics]
    clients: list[_Watcher | _Writer] = [*writers, *readers]
    for each in clients:
        each.start()
    for number in range(rounds):
        for writer in writers:
            writer.resume()
        faults = [_inflict(stage, engine, random) for _ in range(random.randint(1, KILLS_MAX))]
        engine.wait_serving()
        for writer in writers:
            writer.pause()
        complaints += _late(engine.url, topics, readers, f"round {number}, after {', '.join(faults)}")
        for each in clients:
            complaints += each.complaints
        if complaints:
            break
        stage.account.count_work("watch_rounds", 1, "RF-127")
    for each in clients:
        each.end()
    stage.account.count_work("acked", sum(writer.acked for writer in writers))
    close_down(engine, complaints)
    stage.judged(scene, complaints)


def _inflict(stage: Stage, engine: Engine, random: Random) -> str:
    """Kill a process, or end the engine and start it again. Returns what it did."""
    time.sleep(random.uniform(0.0, KILLS_APART_S))
    fault = random.choice(("shard", "shard", "gateway", "scheduler", "all", "stop", "stop while starting"))
    if fault == "all":
        kill_tree(engine)
        engine.start()
    elif fault.startswith("stop"):
        _stop(engine)
        if fault != "stop":
            engine.begin_start()
            time.sleep(random.uniform(0.0, 3 * KILLS_APART_S))
            _stop(engine)
        engine.start()
    else:
        kind = {"shard": WAL_SHARD, "gateway": GATEWAY, "scheduler": SCHEDULER}[fault]
        wait_for(lambda: bool(engine.pids(kind)), SETTLE_S, f"a {fault} to kill")
        targets.kill_child(random.choice(engine.pids(kind)), engine.pid)
    stage.account.count_work("kills", 1, "RF-1" if fault in {"shard", "gateway", "scheduler"} else "RF-23")
    return fault


def _stop(engine: Engine) -> None:
    engine.signal(signal.SIGTERM)
    if engine.wait_status(SETTLE_S) is None:
        raise Stuck("the engine did not exit after SIGTERM")
    engine.wait_alone()


def _late(url: str, topics: list[str], readers: list[_Watcher], when: str) -> list[str]:
    """Wait until every watch is at the head of every topic. Returns those that are not within TOLD_S."""
    with ringlog.connect(url, timeout_ms=TIMEOUT_MS) as client:
        heads = {topic: client.topics.state(topic, touch=False).head_seq for topic in topics}
    deadline = time.monotonic() + TOLD_S
    behind = readers
    while behind and time.monotonic() < deadline:
        time.sleep(WAIT_S / 2)
        behind = [r for r in behind if not r.complaints and any(r.reached[t] < heads[t] for t in topics)]
    return [
        f"{when}: a watch over {each.transport} reached {each.reached} within {TOLD_S:.0f} s, heads {heads}"
        for each in behind
    ]
