"""Clocks that step, freeze, jitter and differ between processes, and suspended processes."""

from __future__ import annotations

import random
import time
from typing import Literal

import ringlog
from chaos.clocks.walls import LAST_NS, NS, Walls
from chaos.rigs.bench import Bench, process_cpu_s
from chaos.rigs.cases import Case
from chaos.rigs.cgroups import group
from ringlog.client import Record
from ringlog.drill.checks import require

HOUR_S = 3_600.0
TEN_YEARS_S = 10 * 365.25 * 86_400
TTL_MS = 600_000
SHORT_TTL_MS = 700
BUSY_LOOK_S = 1.0
BUSY_MAX = 0.5
"""CPU share that one process may use under light load. A loop without a wait uses a whole CPU."""
LEASE_MS = 60_000
BRIEF_LEASE_MS = 3_000
SUSPEND_S = 7.5
"""Longer than the 6 s after which the supervisor treats a process without progress as stuck."""


def walls(bench: Bench) -> Walls:
    """Return the clocks of this bench's engine."""
    found: Walls = bench.more["walls"]
    return found


class Watched:
    """A topic with a TTL, its writes, and its floor so far, which must never fall."""

    def __init__(self, bench: Bench, ttl_ms: int) -> None:
        self.bench = bench
        self.name = f"ttl-{time.monotonic_ns()}"
        self.stamps: dict[int, int] = {}
        self._floor = 0
        bench.client.topics.create(self.name, durability="fsync", ttl_ms=ttl_ms, dedupe_node=False)
        self.ttl_us = ttl_ms * 1_000

    def settle_clock(self) -> None:
        """Ensure that later writes are stamped with the clock that was set before this call.

        A shard reads the clock at the start of a pass of its loop and accepts frames until it polls its
        rings. A pass that began before the clock step may therefore accept a later write. The reply to a
        request proves that this pass has polled its rings.
        """
        self.bench.client.topics.state(self.name)

    def write(self, count: int) -> None:
        """Append `count` records.

        Each timestamp must be at least the previous one, and seqs must be dense.
        """
        for _ in range(count):
            done = self.bench.client.append(self.name, b"ttl")
            last = max(self.stamps.values(), default=0)
            require(done.commit_ts >= last, f"a stamp goes back: {last} to {done.commit_ts}")
            want = max(self.stamps, default=0) + 1
            require(done.first_seq == want, f"expected seq {want}, got {done.first_seq}")
            self.stamps[done.first_seq] = done.commit_ts

    def look(self, *, latest_us: int, transport: Literal["ring", "ipc"] = "ring") -> list[int]:
        """Return the seqs that can be read, and check that no record expired early or came back.

        `latest_us` is the latest time that any engine process may have observed since the last look. Readers
        omit records that have expired by their own clock. This process uses the true clock; the gateway (with
        `transport` "ipc") uses the clock of the case.
        """
        with ringlog.connect(self.bench.host.url, transport=transport) as client:
            here = [item.seq for item in client.reader(self.name) if isinstance(item, Record)]
        state = self.bench.client.topics.state(self.name)
        floor = max(state.evict_floor, 0)
        require(floor >= self._floor, f"the floor fell from {self._floor} to {floor}")
        require(not here or here[0] >= self._floor, f"seq {here[:1]} is below the old floor {self._floor}")
        # Records that expire while pages are read may be missing between others.
        reader_us = time.time_ns() // 1_000 if transport == "ring" else latest_us
        gaps = set(range(here[0], here[-1])) - set(here) if here else set()
        gaps -= {seq for seq in gaps if self.stamps[seq] + self.ttl_us <= reader_us}
        require(not gaps, lambda: f"{sorted(gaps)[:20]} are missing in {here[:20]} and have not expired")
        gone = [seq for seq in self.stamps if seq not in set(here)]
        early = [seq for seq in gone if self.stamps[seq] + self.ttl_us > latest_us + 1]
        require(not early, f"expired early: {early[:5]}, stamps {[self.stamps[seq] for seq in early[:5]]}")
        self._floor = max([floor, self._floor, *here[:1]])
        return here


def _calm(bench: Bench) -> None:
    """Check that no process spins: CPU time of each process during light load."""
    pids = bench.pids
    before = {name: process_cpu_s(pid) for name, pid in pids.items() if name != "supervisor"}
    begun = time.monotonic()
    bench.wait("a while", lambda: time.monotonic() - begun > BUSY_LOOK_S)
    took = time.monotonic() - begun
    busy = {name: (process_cpu_s(pids[name]) - cpu) / took for name, cpu in before.items()}
    require(max(busy.values()) < BUSY_MAX, f"a process spins: {busy}")


def back(bench: Bench, chance: random.Random) -> None:
    """Step the clock one hour back during writes and retention (RF-83).

    Timestamps, seqs and floors continue, and no deleted record returns.
    """
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, TTL_MS)
    topic.write(3)
    key = f"key-{chance.getrandbits(40)}"
    first = bench.client.append_many(topic.name, [b"keyed"], idempotency_key=key)
    topic.stamps[first.first_seq] = first.commit_ts
    clocks.step(-HOUR_S)
    topic.write(3)
    again = bench.client.append_many(topic.name, [b"keyed"], idempotency_key=key)
    require(again.first_seq == first.first_seq, f"the key was forgotten within its window: {again}")
    require(topic.look(latest_us=time.time_ns() // 1_000) == list(range(1, 8)), "records are missing")
    bench.need_work(5)
    clocks.right()
    topic.write(2)
    topic.look(latest_us=time.time_ns() // 1_000)
    bench.need_same(before)


def forward(bench: Bench, _: random.Random) -> None:
    """Step the clock ten years forward (RF-84).

    Records with a TTL expire, those without one stay. After the step back nothing returns.
    """
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
    require(left == list(range(6, 12)), f"seqs {left} after the clock stepped back")
    bench.need_work(5)
    _calm(bench)
    bench.need_same(before)


def last_instant(bench: Bench, _: random.Random) -> None:
    """Set the clock to seconds before the largest instant, with a TTL that would exceed it (RF-84)."""
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, TTL_MS)
    clocks.set_time(LAST_NS - 30 * NS)
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
    """Start in 1970, like a host with a dead clock battery (RF-83)."""
    before, clocks = bench.pids, walls(bench)
    clocks.set_time(NS)
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
    """Step the clock while an engine is down (RF-85).

    Timestamps, floors and seqs continue where they were.
    """
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
    """Give shards and background processes different times (RF-85). The shard's clock decides on expiry."""
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
    require(topic.look(latest_us=time.time_ns() // 1_000) == [1, 2, 3, 4, 5, 6], "expired by a foreign clock")
    clocks.right()
    bench.need_same(before)


def frozen(bench: Bench, _: random.Random) -> None:
    """Freeze the clock (RF-86). Writes continue, no process spins, timestamps are equal and seqs are not."""
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
    """Jitter each clock reading by up to 50 ms in either direction (RF-86)."""
    before, clocks = bench.pids, walls(bench)
    topic = Watched(bench, TTL_MS)
    clocks.jitter(0.05)
    topic.write(40)
    bench.need_work(20)
    _calm(bench)
    topic.look(latest_us=time.time_ns() // 1_000 + 50_000)
    clocks.jitter(0)
    bench.need_same(before)


def suspended(bench: Bench, _: random.Random) -> None:
    """Suspend all processes for longer than the stuck timeout; the wall clock moves by 10 min (RF-87)."""
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
    """Set the clock while jobs are leased (RF-84).

    The holder keeps its lease, and a short lease ends on time.
    """
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
            all(each.seq != job.seq for each in other.claim(1, lease_ms=1_000)),
            f"a clock step of {step} s ended the lease",
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
