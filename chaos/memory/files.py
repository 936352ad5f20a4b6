"""Files of rings and boards: full, truncated, unlinked, of another start; a writer that dies in between."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import xxhash

import ringlog
from chaos.memory.lies import rings_of
from chaos.memory.raw import Opener
from chaos.rigs import small_disks
from chaos.rigs.bench import Bench, bench, topics_of
from chaos.rigs.cases import Case
from ringlog.drill.checks import require
from ringlog.drill.load import ACKED, UNKNOWN
from ringlog.envelope.messages import ErrorReply, RingOpen
from ringlog.environment import STOP_POINTS
from ringlog.errors import RingError
from ringlog.ring import layout
from ringlog.ring.producer import RingProducer

MIB = 1 << 20
SHM_BYTES = 24 * MIB
RINGS_ASKED_MAX = 64
SEQLOCK_PASSES = (1, 2, 7, 40)


# -- RF-27 --------------------------------------------------------------------------------------------


def half_written_slot(outer: Bench, chance: random.Random) -> None:
    """Kill the shard between two stores of a board slot (RF-27).

    Readers neither hang nor return torn data.
    """
    passes = chance.choice(SEQLOCK_PASSES)
    environ = {STOP_POINTS: f"board_mid_slot:{passes}:kill"}
    with bench(outer.order, outer.account, environ=environ) as inner:
        restarts = {each.name: each.restarts for each in inner.host.status().processes}
        inner.need_work(20)
        hit = [name for name, count in restarts.items() if count]
        inner.wait("both shards to have died there", lambda: _restarts(inner) >= 2)
        inner.need_work(5)
        require(hit or _restarts(inner), "no shard died")
        inner.account.figures["shards_died_half_way"] = _restarts(inner)


def _restarts(inner: Bench) -> int:
    return sum(each.restarts > 0 for each in inner.host.status().processes if each.kind == "wal_shard")


# -- RF-28 --------------------------------------------------------------------------------------------


def full_shared_memory(outer: Bench, _: random.Random) -> None:
    """Open rings until shared memory is full (RF-28).

    The last ring is refused. Rings that exist can be filled completely, and a client without a ring uses a
    socket. When space is free, the next ring is created. No process gets a SIGBUS: all stay the same.
    """
    shm = Path("/dev/shm")
    small_disks.small_tmpfs(shm, SHM_BYTES)
    try:
        settings = {"run": {"ring_bytes": MIB, "settle_entries": 1_024}}
        with bench(outer.order, outer.account, settings=settings) as inner, Opener(inner.host.info) as opener:
            before = inner.pids
            made, refusal = [], None
            for _i in range(RINGS_ASKED_MAX):
                answer = opener.ask(RingOpen("full", os.getpid(), 0, MIB))
                if isinstance(answer, ErrorReply):
                    refusal = answer
                    break
                made.append(answer.ring)
            require(refusal is not None, f"{len(made)} rings of 1 MiB fit into {SHM_BYTES >> 20} MiB")
            require("shared memory" in str(refusal), f"refused for another reason: {refusal}")
            _fill_to_the_last_byte(f"{inner.host.info.shm_dir}/{made[-1]}")
            with ringlog.connect(inner.host.url, timeout_ms=10_000) as late:
                late.append(topics_of("late")[0], b"by socket")
            inner.need_work(5)
            for name in made:
                opener.close(name)
            with ringlog.connect(inner.host.url, timeout_ms=10_000) as late:
                late.append(topics_of("late")[0], b"x")
            inner.need_same(before)
            inner.account.count_work("rings_refused")
    finally:
        small_disks.unmount(shm)


def _fill_to_the_last_byte(path: str) -> None:
    with open(path, "r+b") as file:
        data = bytes(MIB)
        size = os.fstat(file.fileno()).st_size
        for start in range(layout.HEADER_BYTES, size, len(data)):
            file.seek(start)
            file.write(data[: size - start])


# -- RF-29 --------------------------------------------------------------------------------------------


def cut_ring(bench: Bench, chance: random.Random) -> None:
    """Truncate a ring while both ends map it (RF-29).

    Both may die. The shard restarts, and no other process is affected.
    """
    _with_victim(bench, chance, lambda path: os.truncate(path, chance.choice((0, 4_096, 8_192))))


def unlinked_ring(bench: Bench, chance: random.Random) -> None:
    """Unlink a ring (RF-29). Both ends continue. When the shard dies, the client gets a new ring."""
    _with_victim(bench, chance, os.unlink, is_harmless=True)


def _with_victim(
    bench: Bench, chance: random.Random, hurt: Callable[[Path], None], *, is_harmless: bool = False
) -> None:
    shard = chance.randrange(2)
    topic = bench.new_topic(shard, chance)
    before, rings, size = bench.pids, rings_of(bench), bench.log_size
    with bench.load_on(topic) as victim:
        victim.need_work(0, 5)
        [name] = [name for name in rings_of(bench) - rings if name.startswith(f"ring-{shard:02d}")]
        hurt(Path(bench.host.info.shm_dir) / name)
        if is_harmless:
            victim.need_work(None, 5)
            bench.need_same(before)
            bench.host.kill("wal_shard", shard=shard)
            bench.host.wait_ready()
            victim.need_work(None, 5)
        else:
            bench.wait(
                "the client or the shard to die of SIGBUS",
                lambda: not victim.is_alive or "SIGBUS" in bench.said_since(size),
            )
        victim.abandon()
        bench.host.wait_ready()
        bench.need_work(5)
        require(victim.judge().acked, "the victim wrote nothing")
    bench.need_same(before, but=f"wal_shard-{shard:02d}")
    bench.wait("the victim's rings to go", lambda: rings_of(bench) <= rings or not is_harmless)


# -- RF-30 --------------------------------------------------------------------------------------------


def ring_of_another_life(bench: Bench, chance: random.Random) -> None:
    """Turn a client's ring into one of another version, engine, shard or magic (RF-30).

    The successor of the killed shard refuses it, and the client opens another one.
    """
    shard = chance.randrange(2)
    topic = bench.new_topic(shard, chance)
    before, rings = bench.pids, rings_of(bench)
    with bench.load_on(topic) as victim:
        victim.need_work(0, 5)
        [name] = [name for name in rings_of(bench) - rings if name.startswith(f"ring-{shard:02d}")]
        path = Path(bench.host.info.shm_dir) / name
        _make_foreign(path, chance)
        try:
            RingProducer.attach(str(path), engine_id=bench.host.info.engine_id).close()
        except RingError as e:
            # The refusal must not be due to the producer lock. Only the shard refuses a ring of another
            # shard.
            bench.account.count_work(
                "foreign_refused_by_producers", int("already has a producer" not in str(e))
            )
        bench.host.kill("wal_shard", shard=shard)
        bench.host.wait_ready()
        victim.need_work(None, 5)
        require(not path.exists(), "the foreign ring is still there")
        require(victim.judge().acked, "the victim wrote nothing")
        unknown = victim.count(UNKNOWN)
        bench.account.figures["unknown_after_foreign_ring"] = unknown
    bench.need_same(before, but=f"wal_shard-{shard:02d}")
    bench.load.need(ACKED, None, 5)


def _make_foreign(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        head = bytearray(file.read(layout.IDENTITY_BYTES))
        kind = chance.randrange(4)
        if kind == 0:
            head[8] ^= 2  # version
        elif kind == 1:
            head[12] ^= 1  # shard
        elif kind == 2:
            head[32] ^= 0xFF  # engine
        else:
            head[0] ^= 0x20  # magic
        head[64:72] = xxhash.xxh3_64_intdigest(bytes(head[:64])).to_bytes(8, "little")
        file.seek(0)
        file.write(head)


def ring_of_the_last_start(outer: Bench, _: random.Random) -> None:
    """Plant a ring of the previous start in the new run directory after a crash (RF-30). It is ignored."""
    with bench(outer.order, outer.account) as inner:
        old = Path(inner.host.info.shm_dir)
        name = sorted(rings_of(inner))[0]
        copy = (old / name).read_bytes()
        inner.host.crash()
        inner.host.start()
        new = Path(inner.host.info.shm_dir)
        require(new != old, "two starts share a directory")
        require(not old.exists(), "the old directory is still there")
        planted = new / name
        if not planted.exists():
            planted.write_bytes(copy)
            planted.chmod(0o600)
        inner.need_work(5)
        inner.host.kill("wal_shard")
        inner.need_work(5)


CASES: tuple[Case[Bench], ...] = (
    Case("foreign-ring", ("RF-30",), ring_of_another_life),
    Case("unlinked-ring", ("RF-29",), unlinked_ring),
    Case("cut-ring", ("RF-29",), cut_ring),
    Case("half-slot", ("RF-27",), half_written_slot),
    Case("full-shm", ("RF-28",), full_shared_memory),
    Case("last-start", ("RF-30",), ring_of_the_last_start),
)
