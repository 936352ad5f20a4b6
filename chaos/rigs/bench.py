"""A bench: one engine with load on each shard, shared by many cases and judged at the end."""

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
from chaos.order import Account, Order
from ringlog.drill.checks import GuaranteeBroken, require, verify
from ringlog.drill.load import SLOW_S, Load, wait_for
from ringlog.drill.nursery import Nursery
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
    """Return topic names with a home on every shard: `each` per shard, those of shard 0 first."""
    found: list[list[str]] = [[] for _ in range(SHARDS)]
    number = 0
    while any(len(names) < each for names in found):
        name = f"{prefix}{number}"
        shard = home_shard(name, SHARDS)
        if len(found[shard]) < each:
            found[shard].append(name)
        number += 1
    return [name for names in found for name in names]


def log_tail(path: Path) -> str:
    """Return the last 4,000 characters of an engine's log, after its last 40 warnings and errors.

    A process may have died long before its death is noticed.
    """
    text = path.read_text(errors="replace")
    serious = [line for line in text.splitlines() if '"level":"info"' not in line]
    return "\n".join([*serious[-40:], text[-4_000:]])


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
    """Additional state of one class."""

    @property
    def pids(self) -> dict[str, int]:
        """Pid of each process by name, including the supervisor."""
        found = {each.name: each.pid for each in self.host.status().processes if each.pid}
        return {**found, "supervisor": self.host.pid}

    def shard_topic(self, shard: int) -> str:
        """Return the topic of the load whose home is this shard."""
        return next(topic for topic in self.load.topics if home_shard(topic, SHARDS) == shard)

    def need_work(self, least: int = 10, within_s: float = 0.0) -> None:
        """Wait until `least` new writes and reads succeed on every shard. Raises GuaranteeBroken."""
        self.load.need_work(None, least, within_s)

    def new_topic(self, shard: int, chance: random.Random) -> str:
        """Create another topic of class `fsync` on that shard. Returns its name."""
        topic = topics_of(f"case{chance.getrandbits(32)}x")[shard]
        self.client.topics.create(topic, durability="fsync", dedupe_node=False)
        return topic

    def load_on(self, topic: str) -> Load:
        """Start another load on one topic."""
        return _load_on(self.nursery, self.scratch, self.host.url, [topic])

    def need_same(self, before: Mapping[str, int], *, but: str = "") -> None:
        """Check that no process was replaced since, except `but`. Raises GuaranteeBroken."""
        now = self.pids
        changed = {name: (pid, now.get(name)) for name, pid in before.items() if now.get(name) != pid}
        changed.pop(but, None)
        require(not changed, f"processes were replaced: {changed}\n{self.log_tail()}")

    def wait(self, what: str, condition: Callable[[], object], within_s: float = SLOW_S) -> None:
        """Poll until the condition holds. Raises GuaranteeBroken after `within_s`."""
        try:
            wait_for(lambda: bool(condition()), within_s, what)
        except GuaranteeBroken as e:
            raise GuaranteeBroken(f"{e}\n{self.log_tail()}") from None

    def log_tail(self) -> str:
        """Return the end of the engine's log."""
        return log_tail(self.host.log_path)

    def said_since(self, size: int) -> str:
        """Return the engine's log after the first `size` bytes."""
        with self.host.log_path.open("rb") as log:
            log.seek(size)
            return log.read().decode(errors="replace")

    @property
    def log_size(self) -> int:
        """Current size of the engine's log in bytes."""
        return self.host.log_path.stat().st_size


def is_refused(call: Any) -> RinglogError | None:
    """Return the RinglogError that a call raises; None if it succeeds. Other exceptions propagate."""
    try:
        call()
    except RinglogError as e:
        return e
    return None


def _load_on(nursery: Nursery, scratch: Path, url: str, topics: Sequence[str], size: int = 64) -> Load:
    """Start, for each topic, a client that appends single records and one that reads repeatedly."""
    load = Load(nursery, scratch / f"journals-{time.monotonic_ns()}", url, list(topics))
    load.tolerates_errors = True  # A case may delay them beyond their timeout.
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
    """Run an engine below `directory` (default: the scratch directory) under load, and judge it at the end.

    The judge reads every record with a client. Then it stops the engine in an orderly way, and the offline
    verifier reads every byte. Both must agree with the outcomes that clients got.
    """
    root = directory or order.scratch / f"engine-{time.monotonic_ns()}"
    base: dict[str, dict[str, Any]] = {
        "wal": {"shards": SHARDS},
        # Shared memory belongs to the host, and other classes run engines at the same time.
        "run": {"ring_bytes": RING_BYTES, "settle_entries": 4_096},
        "supervisor": {"restart_max": 200, "restart_window_s": 60.0},
    }
    for section, values in (settings or {}).items():
        base[section] = {**base.get(section, {}), **values}
    with (
        Nursery("chaos.rigs.work") as nursery,
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
        # Background processes start last, and cases assume that they are ready.
        made.wait(
            "every process to be ready", lambda: all(x.state == "ready" for x in host.status().processes)
        )
        yield made
        try:
            finish(made)
            stack.close()
            host.stop()
            found = verify(made.host.data_dir, is_deep=True)
            account.count_work("records_verified", sum(report.records for report in found.files))
        except (GuaranteeBroken, RinglogError) as e:
            account.report_finding(str(e).splitlines()[0], f"all:{order.seed}", f"{e}\n{made.log_tail()}")


def finish(made: Bench) -> None:
    """End the load and judge it. Raises GuaranteeBroken."""
    judged = made.load.judge()
    require(judged.acked, "nothing was acknowledged")
    made.account.count_work("acks", judged.acked)
    made.account.count_work("reads", judged.read)


def process_cpu_s(pid: int) -> float:
    """Return the CPU time (s) that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
