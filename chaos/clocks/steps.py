"""Clocks that step, freeze, shake and differ; processes that were suspended."""

from __future__ import annotations

import random
import time
from typing import Literal

import ringlog
from chaos.clocks.walls import LAST_NS, NS, Walls
from chaos.order import require
from chaos.rigs.bench import Bench, process_cpu_s
from chaos.rigs.cases import Case
from chaos.rigs.cgroups import group
from ringlog.client import Record

HOUR_S = 3_600.0
TEN_YEARS_S = 10 * 365.25 * 86_400
TTL_MS = 600_000
SHORT_TTL_MS = 700
BUSY_LOOK_S = 1.0
BUSY_MAX = 0.5
"""Part of a processor that one process may use under the light load; a loop without a wait uses all of it."""
LEASE_MS = 60_000
BRIEF_LEASE_MS = 3_000
SUSPEND_S = 7.5
"""Longer than the six seconds after which a process without progress is stuck."""


def walls(bench: Bench) -> Walls:
    """The clocks of this bench's engine."""
    found: Walls = bench.more["walls"]
    return found


class Watched:
    """A topic with a TTL, what was written to it, and what its floors were: they never come down."""

    def __init__(self, bench: Bench, ttl_ms: int) -> None:
        self.bench = bench
        self.name = f"ttl-{time.monotonic_ns()}"
        self.stamps: dict[int, int] = {}
        self._floor = 0
        bench.client.topics.create(self.name, durability="fsync", ttl_ms=ttl_ms, dedupe_node=False)
        self.ttl_us = ttl_ms * 1_000

    def settle_clock(self) -> None:
        """What is written from now on is stamped with the clock as it was set before.

        A shard reads the clock when it begins a turn, and takes in what comes until it looks at its rings: a
        turn that began before the step may take a write that came after it. Its answer says that this turn
        has done so.
        """
        self.bench.client.topics.state(self.name)

    def write(self, count: int) -> None:
        """Append; each stamp is at least the one before (CK-3)."""
        for _ in range(count):
            done = self.bench.client.append(self.name, b"ttl")
            last = max(self.stamps.values(), default=0)
            require(done.commit_ts >= last, f"a stamp goes back: {last} to {done.commit_ts}")
            want = max(self.stamps, default=0) + 1
            require(done.first_seq == want, f"number {done.first_seq} and not {want}")
            self.stamps[done.first_seq] = done.commit_ts

    def look(self, *, latest_us: int, transport: Literal["ring", "ipc"] = "ring") -> list[int]:
        """Numbers that are there; nothing is gone before its time, and nothing comes back.

        `latest_us` is the latest time that any process of the engine may have seen since the last look. Who
        reads leaves out what has expired by its own clock: this process by the true one, the gateway (with
        `transport` "ipc") by that of the case.
        """
        with ringlog.connect(self.bench.host.url, transport=transport) as client:
            here = [item.seq for item in client.reader(self.name) if isinstance(item, Record)]
        state = self.bench.client.topics.state(self.name)
        floor = max(state.evict_floor, 0)
        require(floor >= self._floor, f"a floor came down from {self._floor} to {floor}")
        require(not here or here[0] >= self._floor, f"{here[:1]} came back; the floor was {self._floor}")
        require(here == list(range(here[0], here[-1] + 1)) if here else True, f"gaps in {here[:20]}")
        gone = [seq for seq in self.stamps if seq not in set(here)]
        early = [seq for seq in gone if self.stamps[seq] + self.ttl_us > latest_us + 1]
        require(not early, f"expired early: {early[:5]}, stamps {[self.stamps[seq] for seq in early[:5]]}")
        self._floor = max([floor, self._floor, *here[:1]])
        return here


def _calm(bench: Bench) -> None:
    """No process spins: CPU time of each over a while of light load."""
    pids = bench.pids
    before = {name: process_cpu_s(pid) for name, pid in pids.items() if name != "supervisor"}
    begun = time.monotonic()
    bench.wait("a while", lambda: time.monotonic() - begun > BUSY_LOOK_S)
    took = time.monotonic() - begun
    busy = {name: (process_cpu_s(pids[name]) - cpu) / took for name, cpu in before.items()}
    require(max(busy.values()) < BUSY_MAX, f"a process spins: {busy}")


def back(bench: Bench, chance: random.Random) -> None:
    """RF-83: an hour back during writes and retention: stamps, numbers and floors go on; nothing revives."""
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, TTL_MS)
    topic.write(3)
    key = f"key-{chance.getrandbits(40)}"
    first = bench.client.append_many(topic.name, [b"keyed"], idempotency_key=key)
    topic.stamps[first.first_seq] = first.commit_ts
    clocks.step(-HOUR_S)
    topic.write(3)
    again = bench.client.append_many(topic.name, [b"keyed"], idempotency_key=key)
    require(again.first_seq == first.first_seq, f"a key is forgotten inside its window: {again}")
    require(topic.look(latest_us=time.time_ns() // 1_000) == list(range(1, 8)), "records are gone")
    bench.need_work(5)
    clocks.right()
    topic.write(2)
    topic.look(latest_us=time.time_ns() // 1_000)
    bench.need_same(before)


def forward(bench: Bench, _: random.Random) -> None:
    """RF-84: ten years forward: what has a TTL expires, what has none stays; coming back revives nothing."""
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, TTL_MS)
    topic.write(5)
    clocks.step(TEN_YEARS_S)
    bench.wait("expiry", lambda: not topic.look(latest_us=clocks.now_us() + NS))
    topic.write(3)
    bench.need_work(5)
    clocks.right()
    topic.write(3)
    left = topic.look(latest_us=time.time_ns() // 1_000 + round(TEN_YEARS_S * 1e6))
    require(left == list(range(6, 12)), f"{left} after coming back")
    bench.need_work(5)
    _calm(bench)
    bench.need_same(before)


def last_instant(bench: Bench, _: random.Random) -> None:
    """RF-84: some seconds before the largest instant, with and without a TTL that would lead beyond it."""
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, TTL_MS)
    clocks.be_at(LAST_NS - 30 * NS)
    topic.settle_clock()
    topic.write(3)
    found = topic.look(latest_us=LAST_NS // 1_000)
    require(found == [1, 2, 3], f"{found} of three are there, stamps {topic.stamps}")
    bench.need_work(5)
    clocks.freeze(LAST_NS)
    topic.write(3)
    found = topic.look(latest_us=LAST_NS // 1_000)
    require(found == [1, 2, 3, 4, 5, 6], f"{found} of six are there, stamps {topic.stamps}")
    bench.need_work(5)
    clocks.freeze(0)
    clocks.right()
    topic.write(2)
    bench.need_work(5)
    bench.need_same(before)


def first_instant(bench: Bench, _: random.Random) -> None:
    """RF-83: a host whose clock battery is dead begins in 1970."""
    before, clocks = bench.pids, walls(bench)
    clocks.be_at(NS)
    topic = Watched(bench, TTL_MS)
    topic.write(3)
    found = topic.look(latest_us=clocks.now_us() + NS // 1_000, transport="ipc")
    require(found == [1, 2, 3], f"{found} of three are there")
    bench.need_work(5)
    clocks.right()
    topic.write(2)
    bench.wait("old stamps to expire", lambda: topic.look(latest_us=time.time_ns() // 1_000) == [4, 5])
    bench.need_same(before)


def over_a_restart(bench: Bench, chance: random.Random) -> None:
    """RF-85: the clock steps while an engine is down: stamps, floors and numbers go on where they were."""
    clocks = walls(bench)
    for step in chance.sample((-HOUR_S, HOUR_S), 2):
        topic = Watched(bench, SHORT_TTL_MS)
        topic.write(3)
        bench.wait("expiry", lambda: not topic.look(latest_us=time.time_ns() // 1_000 + NS))  # noqa: B023
        topic.write(2)
        for shard in range(2):
            bench.host.kill("wal_shard", shard=shard)
        clocks.step(step)
        bench.host.wait_ready()
        topic.write(2)
        topic.look(latest_us=time.time_ns() // 1_000 + round(HOUR_S * 1e6) + NS)
        clocks.right()
        topic.write(1)
        topic.look(latest_us=time.time_ns() // 1_000 + round(HOUR_S * 1e6) + NS)
    bench.need_work(5)


def of_two_minds(bench: Bench, chance: random.Random) -> None:
    """RF-85: shards and those who work behind them see different times: the shard's decides on expiry."""
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, TTL_MS)
    topic.write(3)
    for kind in ("compactor", "reclaimer", "gateway", "supervisor"):
        clocks.step(chance.choice((-1, 1)) * chance.choice((HOUR_S, TEN_YEARS_S)), kind)
    clocks.step(TEN_YEARS_S, "reclaimer", "compactor")
    topic.write(3)
    bench.need_work(20)
    begun = clocks.readings("reclaimer") + clocks.readings("compactor")
    bench.wait("them to look", lambda: clocks.readings("reclaimer") + clocks.readings("compactor") > begun)
    require(topic.look(latest_us=time.time_ns() // 1_000) == [1, 2, 3, 4, 5, 6], "expired by another's clock")
    clocks.right()
    bench.need_same(before)


def frozen(bench: Bench, _: random.Random) -> None:
    """RF-86: the clock stands still: writes go on, nobody spins, stamps are equal and numbers are not."""
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, TTL_MS)
    clocks.freeze(time.time_ns())
    topic.settle_clock()
    topic.write(10)
    require(len(set(topic.stamps.values())) == 1, f"a frozen clock moved: {topic.stamps}")
    bench.need_work(10)
    _calm(bench)
    clocks.freeze(0)
    topic.write(2)
    topic.look(latest_us=time.time_ns() // 1_000)
    bench.need_same(before)


def shaken(bench: Bench, _: random.Random) -> None:
    """RF-86: each reading is off by up to 50 ms either way."""
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, TTL_MS)
    clocks.shake(0.05)
    topic.write(40)
    bench.need_work(20)
    _calm(bench)
    topic.look(latest_us=time.time_ns() // 1_000 + 50_000)
    clocks.shake(0)
    bench.need_same(before)


def suspended(bench: Bench, _: random.Random) -> None:
    """RF-87: every process is frozen for longer than "stuck" is, and the wall clock has moved an hour."""
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, 2 * TTL_MS)
    topic.write(3)
    with group("freezer") as frozen_group:
        frozen_group.take(before.values())
        frozen_group.freeze()
        begun = time.monotonic()
        bench.wait("the suspension to pass", lambda: time.monotonic() - begun > SUSPEND_S)
        clocks.step(HOUR_S / 6)
        frozen_group.thaw()
        bench.need_work(5)
    require(topic.look(latest_us=clocks.now_us() + NS) == [1, 2, 3], "expired early")
    topic.write(2)
    clocks.right()
    topic.write(2)
    bench.need_same(before)


def leases(bench: Bench, _: random.Random) -> None:
    """RF-84: who holds a job, of a queue or of a group, keeps it however the clock is set; its lease ends."""
    before, clocks = bench.pids, walls(bench)
    name = f"leases-{time.monotonic_ns()}"
    bench.client.topics.create(name, type="queue", durability="fsync")
    bench.client.append_many(name, [b"one", b"two"])
    holder, other = bench.client.queue(name, node="holder"), bench.client.queue(name, node="other")
    (job,) = holder.claim(1, lease_ms=LEASE_MS)
    (brief,) = holder.claim(1, lease_ms=BRIEF_LEASE_MS)
    for step in (HOUR_S, -HOUR_S, TEN_YEARS_S):
        clocks.step(step)
        require(
            all(each.seq != job.seq for each in other.claim(1, lease_ms=1_000)), f"taken away by {step} s"
        )
        job.extend(LEASE_MS)
        clocks.right()
    bench.wait("the brief lease to end", lambda: [each.seq for each in other.claim(1)] == [brief.seq])
    job.ack()
    bench.need_same(before)


CASES: tuple[Case[Bench], ...] = (
    Case("back", ("RF-83",), back),
    Case("forward", ("RF-84",), forward),
    Case("leases", ("RF-84",), leases),
    Case("last-instant", ("RF-84",), last_instant),
    Case("first-instant", ("RF-83",), first_instant),
    Case("two-minds", ("RF-85",), of_two_minds),
    Case("over-a-restart", ("RF-85",), over_a_restart),
    Case("frozen", ("RF-86",), frozen),
    Case("shaken", ("RF-86",), shaken),
    Case("suspended", ("RF-87",), suspended, is_long=True),
)
