"""One engine with load on each shard, shared by many cases: hurt it, see it go on, judge it at the end."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ringlog
from chaos.order import Account, Broken, Order, require
from chaos.rigs.judge import verify
from chaos.rigs.load import SLOW_S, Load, wait_for
from chaos.rigs.nursery import Nursery
from ringlog.errors import RinglogError
from ringlog.placement import home_shard
from ringlog.testing.real_engine import TestEngine, engine

SHARDS = 2
CLIENT_TIMEOUT_MS = 5_000
LOAD_TIMEOUT_S = 4.0
APPENDS_PER_S = 200
READS_PER_S, PAGE = 50, 5
RING_BYTES = 4 << 20


def topics_of(prefix: str, each: int = 1) -> list[str]:
    """Names with their home on every shard, so many on each, shard 0 first."""
    found: list[list[str]] = [[] for _ in range(SHARDS)]
    number = 0
    while any(len(names) < each for names in found):
        name = f"{prefix}{number}"
        shard = home_shard(name, SHARDS)
        if len(found[shard]) < each:
            found[shard].append(name)
        number += 1
    return [name for names in found for name in names]


@dataclass(slots=True)
class Bench:
    """The engine, its load, and a client of this process."""

    order: Order
    account: Account
    host: TestEngine
    load: Load
    client: ringlog.Client
    scratch: Path
    nursery: Nursery
    more: dict[str, Any] = field(default_factory=dict)
    """What one class adds."""

    @property
    def pids(self) -> dict[str, int]:
        """Process by name, the supervisor among them."""
        found = {each.name: each.pid for each in self.host.status().processes if each.pid}
        return {**found, "supervisor": self.host.pid}

    def shard_topic(self, shard: int) -> str:
        """The topic of the load whose home is this shard."""
        return next(topic for topic in self.load.topics if home_shard(topic, SHARDS) == shard)

    def need_work(self, least: int = 10, within_s: float = 0.0) -> None:
        """Writes are acknowledged and read back on every shard, all begun after this call."""
        self.load.need_work(None, least, within_s)

    def new_topic(self, shard: int, chance: random.Random) -> str:
        """Another topic of class `fsync` on that shard."""
        topic = topics_of(f"case{chance.getrandbits(32)}x")[shard]
        self.client.topics.create(topic, durability="fsync", dedupe_node=False)
        return topic

    def load_on(self, topic: str) -> Load:
        """Another load, on one topic."""
        return _load_on(self.nursery, self.scratch, self.host.url, [topic])

    def need_same(self, before: Mapping[str, int], *, but: str = "") -> None:
        """No process was replaced since, one apart; raises Broken."""
        now = self.pids
        changed = {name: (pid, now.get(name)) for name, pid in before.items() if now.get(name) != pid}
        changed.pop(but, None)
        require(not changed, f"processes were replaced: {changed}\n{self.log_tail()}")

    def wait(self, what: str, condition: Callable[[], object], within_s: float = SLOW_S) -> None:
        """Look until it holds; raises Broken."""
        try:
            wait_for(lambda: bool(condition()), within_s, what)
        except Broken as e:
            raise Broken(f"{e}\n{self.log_tail()}") from None

    def log_tail(self, chars: int = 4_000) -> str:
        """The end of the engine's log."""
        return self.host.log_path.read_text(errors="replace")[-chars:]

    def said_since(self, size: int) -> str:
        """What the engine's log has beyond `size` bytes."""
        with self.host.log_path.open("rb") as log:
            log.seek(size)
            return log.read().decode(errors="replace")

    @property
    def log_size(self) -> int:
        """Bytes of the engine's log now."""
        return self.host.log_path.stat().st_size


def is_refused(call: Any) -> RinglogError | None:
    """The typed error a call ends in; None when it went well. Whatever else it raises comes out."""
    try:
        call()
    except RinglogError as e:
        return e
    return None


def _load_on(nursery: Nursery, scratch: Path, url: str, topics: Sequence[str], size: int = 64) -> Load:
    """Of each topic one client appends records one by one, and one reads it over and over."""
    load = Load(nursery, scratch / f"journals-{time.monotonic_ns()}", url, list(topics))
    load.is_patient = True  # A case may keep them waiting for longer than they wait.
    for topic in range(len(topics)):
        load.start(
            "produce_one", topic=topic, per_s=APPENDS_PER_S, record_bytes=size, timeout_s=LOAD_TIMEOUT_S
        )
        load.start(
            "reread", topic=topic, per_s=READS_PER_S * PAGE, page=PAGE, wait_ms=0, timeout_s=LOAD_TIMEOUT_S
        )
    return load


@contextlib.contextmanager
def bench(
    order: Order, account: Account, *, directory: Path | None = None,
    environ: Mapping[str, str] | None = None, size: int = 64,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Bench]:  # fmt: skip
    """An engine below `directory` (else the scratch area) under load; at the end everything is judged.

    The judge reads every record with a client, then stops the engine in good order and has the offline
    verifier read every byte; both must agree with what clients were told.
    """
    root = directory or order.scratch / f"engine-{time.monotonic_ns()}"
    base: dict[str, dict[str, Any]] = {
        "wal": {"shards": SHARDS},
        # Shared memory is the host's, and other classes have engines in it at the same time.
        "run": {"ring_bytes": RING_BYTES, "settle_entries": 4_096},
        "supervisor": {"restart_max": 200, "restart_window_s": 60.0},
    }
    for section, values in (settings or {}).items():
        base[section] = {**base.get(section, {}), **values}
    with (
        Nursery() as nursery,
        engine(directory=root, environ=environ, **base) as host,
        contextlib.ExitStack() as stack,
    ):
        client = stack.enter_context(ringlog.connect(host.url, timeout_ms=CLIENT_TIMEOUT_MS, wait=10))
        topics = topics_of("load")
        for topic in topics:
            client.topics.create(topic, durability="fsync", dedupe_node=False)
        load = stack.enter_context(_load_on(nursery, order.scratch, host.url, topics, size))
        made = Bench(order, account, host, load, client, order.scratch, nursery)
        load.need_work(0, 5)
        # Who works in the background starts last, and no case wants to meet it half awake.
        made.wait(
            "every process to be ready", lambda: all(x.state == "ready" for x in host.status().processes)
        )
        yield made
        try:
            finish(made)
            stack.close()
            host.stop()
            found = verify(made.host.data_dir, is_deep=True)
            account.did("records_verified", sum(report.records for report in found.files))
        except (Broken, RinglogError) as e:
            account.found(str(e).splitlines()[0], f"all:{order.seed}", f"{e}\n{made.log_tail()}")


def finish(made: Bench) -> None:
    """End the load and judge it; raises Broken."""
    judged = made.load.judge()
    require(judged.acked, "nothing was acknowledged")
    made.account.did("acks", judged.acked)
    made.account.did("reads", judged.read)


def process_cpu_s(pid: int) -> float:
    """Seconds of CPU time a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
