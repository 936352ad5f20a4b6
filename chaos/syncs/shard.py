"""A shard over a failing block store: its core, log writer and recovery on a real file system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos.order import Account
from chaos.rigs.blockstore import StoredVolume
from chaos.rigs.extents import Range, forget_pages, range_of
from chaos.rigs.judge import KILL_SHARD
from chaos.rigs.life import Life
from chaos.rigs.storage import seal
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import CorruptData, DiskError, InvariantViolation, Refused, RinglogError
from tests.support.shard_world import DATA

WARM_STEPS = 3
UNSYNCED_TRIES = 8
"""Maximum number of records of class `disk` that are sent until one stays unsynced in the page cache."""
_libc = ctypes.CDLL(None)
SYNC_CALLS = frozenset({"sync_data", "sync_file", "sync_dir"})


@dataclass(slots=True)
class Bench:
    """One case: a shard that has acked a record, on a device that works so far."""

    stored: StoredVolume
    life: Life
    rng: random.Random
    account: Account

    @property
    def root(self) -> Path:
        """Data directory on the host."""
        return self.stored.volume.root / "life"

    @property
    def log(self) -> Path:
        """Log file that is being written."""
        return self.host_path(self.life.world.runs[0].writer.path)

    def host_path(self, path: str) -> Path:
        """Return the host path of a path of the World."""
        return self.root / path.removeprefix(DATA).lstrip("/")

    def fail_writes(self, where: Range) -> None:
        """Make the device fail writes in this range."""
        self.stored.store.mode("write_eio", low=where.low, high=where.high)

    def fail_reads(self, where: Range) -> None:
        """Make the device fail reads in this range."""
        self.stored.store.mode("read_eio", low=where.low, high=where.high)

    def well(self) -> None:
        """Make the device work again."""
        self.stored.store.mode("ok")

    def sync_must_fail(self, work: Callable[[], None], calls: frozenset[str] = SYNC_CALLS) -> None:
        """Run work whose sync must fail with a typed error, without an ack of class `fsync`.

        Raises GuaranteeBroken.
        """
        acked, before = self.life.model.owed, self.stored.store.seen()["write_errors"]
        try:
            work()
        except DiskError as e:
            if e.detail.get("call") not in calls:
                raise GuaranteeBroken(f"a call other than the sync failed: {e}") from e
            is_sync = e.detail.get("call") in SYNC_CALLS
        else:
            raise GuaranteeBroken("the device failed a write below a sync without a visible error")
        finally:
            now = self.life.model.owed
            if now != acked:
                raise GuaranteeBroken(f"{now - acked} frames were acked over a failed sync")
        if not is_sync:
            return  # The file system noticed the error first and shut down.
        if self.stored.store.seen()["write_errors"] == before:
            raise GuaranteeBroken("the rig failed no write")
        self.account.count_work("sync_failures")

    def may_not_go_on(self) -> None:
        """Sync again in the same incarnation, with a working device. The log must refuse (RF-41).

        The kernel would report success, because it reports a write-back error only once.
        """
        try:
            self.life.world.runs[0].writer.sync()
        except (InvariantViolation, DiskError):
            return
        raise GuaranteeBroken("a log whose sync failed accepted a second sync")

    def replace(self) -> bool:
        """Start a successor with the same board. Returns False if the file system refuses all work."""
        self.life.end()
        try:
            self.life.start(keeps_board=True)
        except DiskError:
            self.life.end()
            return False
        self.life.judge(KILL_SHARD)
        return True

    def power_cycle_and_judge(self) -> None:
        """Check that everything acked or shown is there when only the device's contents remain."""
        self.life.end()
        self.stored.power_cycle()
        self.life.recover()
        self.life.send("f", [self.life.payload()])
        self.life.end()


def sync_fails_once(bench: Bench) -> None:
    """Fail one sync; the next one would succeed (RF-41)."""
    bench.fail_writes(range_of(bench.log))
    bench.sync_must_fail(lambda: bench.life.send("f", [bench.life.payload(700)]))
    bench.well()
    bench.may_not_go_on()
    if bench.replace():
        bench.life.send("f", [bench.life.payload()])
    bench.power_cycle_and_judge()
    bench.account.count_work("cases", 1, "RF-41")


def cache_lies(bench: Bench) -> None:
    """Let the successor read bytes from the page cache that the device never got (RF-42).

    The case counts only if the lost bytes were in the file before the power cycle and are not after it.
    """
    life, log = bench.life, bench.log
    payload = life.payload(900)
    bench.fail_writes(range_of(log))
    bench.sync_must_fail(lambda: life.send("f", [payload]))
    bench.well()
    is_set = payload in log.read_bytes()
    is_replaced = bench.replace()
    is_shown = is_replaced and any(each.is_shown for each in life.model.frames if payload in each.payloads)
    if is_replaced:
        life.send_again("f")
        life.send("f", [life.payload()])
    fd = os.open(log, os.O_RDWR | os.O_CLOEXEC) if log.exists() else -1
    if fd >= 0:
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
    life.end()
    bench.stored.power_cycle()
    is_lost = not log.exists() or payload not in log.read_bytes()
    life.recover()
    life.end()
    if is_set and is_lost:
        bench.account.count_work("cases", 1, "RF-42")
        bench.account.count_work("traps")
        if is_shown:
            bench.account.count_work("traps shown by the successor from its own copy")


def write_back_fails(bench: Bench) -> None:
    """Fail write-back between two syncs; the kernel reports it on another descriptor (RF-43)."""
    life, log = bench.life, bench.log
    where = range_of(log)
    before = bench.stored.store.seen()["write_errors"]
    other = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    try:
        life.world.runs[0].has_slow_flushes = True
        for _ in range(UNSYNCED_TRIES):
            flushes = bench.stored.store.seen()["flushes"]
            life.send("d", [life.payload(600)])
            if bench.stored.store.seen()["flushes"] == flushes:
                break
        bench.fail_writes(where)
        with contextlib.suppress(OSError):
            os.fdatasync(other)
        bench.well()
    finally:
        os.close(other)
    if bench.stored.store.seen()["write_errors"] == before:
        raise GuaranteeBroken("the rig failed no write")
    acked = life.model.owed
    try:
        life.send("f", [life.payload()])
    except DiskError:
        bench.account.count_work("sync_failures")
    else:
        raise GuaranteeBroken("write-back failed between two syncs, but the next sync succeeded")
    if life.model.owed != acked:
        raise GuaranteeBroken("acked over a write-back that failed")
    bench.may_not_go_on()
    bench.replace()
    bench.power_cycle_and_judge()
    bench.account.count_work("cases", 1, "RF-43")


def device_vanishes(bench: Bench) -> None:
    """Make the device fail everything (RF-50). A start must fail too, and not assume an empty directory."""
    life = bench.life
    bench.stored.store.mode("dead")
    acked = life.model.owed
    try:
        bench.sync_must_fail(lambda: life.send("f", [life.payload(700)]), SYNC_CALLS | {"write_at"})
        bench.may_not_go_on()
    except Refused:
        # The shard could not create the log file that it needed, and refused the write.
        bench.account.count_work("writes refused over a dead device")
    if life.model.owed != acked:
        raise GuaranteeBroken("acked over a vanished device")
    life.end()
    bench.stored.power_cycle()
    bench.stored.store.mode("dead")
    _start_must_fail(bench, "a device that is gone")
    # The device accepts writes, so a start that took the directory for empty could create new files.
    bench.stored.store.mode("ok")
    bench.stored.power_cycle()
    bench.stored.store.mode("read_eio")
    _start_must_fail(bench, "a device that cannot be read")
    bench.stored.store.mode("ok")
    bench.stored.power_cycle()
    bench.account.count_work("starts refused over a dead device")
    life.recover()
    life.send("f", [life.payload()])
    life.end()
    bench.account.count_work("cases", 1, "RF-50")


def log_unreadable(bench: Bench) -> None:
    """Fail reads during recovery (RF-51). Recovery must not take this for the end of the log."""
    life = bench.life
    for _ in range(3):
        life.send("f", [life.payload(5_000)])
    log = bench.log
    life.end()
    bench.stored.power_cycle()
    where = range_of(log)
    bench.fail_reads(where)
    _start_must_fail(bench, "a log that cannot be read")
    bench.well()
    bench.stored.power_cycle()
    life.recover()
    life.end()
    bench.account.count_work("cases", 1, "RF-51")
    bench.account.count_work("read errors in a recovery")


def records_unreadable(bench: Bench) -> None:
    """Fail reads under a reader, in the log and in segments (RF-51).

    The error names the file and is temporary.
    """
    life = bench.life
    for _ in range(3):
        life.send("f", [life.payload(5_000)])
    if bench.rng.random() < 0.5:
        seal(life.world)
    life.end()
    bench.stored.power_cycle()
    life.start(is_reboot=True)
    life.judge()
    files = [
        path for path in bench.root.rglob("*") if path.suffix in {".log", ".data"} and path.stat().st_size
    ]
    for path in files:
        forget_pages(path)
    where = [range_of(path) for path in files]
    bench.fail_reads(Range(min(each.low for each in where), max(each.high for each in where)))
    before = bench.stored.store.seen()["read_errors"]
    try:
        found = life.world.records("f")
    except (DiskError, CorruptData) as e:
        if not e.detail.get("path"):
            raise GuaranteeBroken(f"a read error without a path: {e}") from e
    else:
        if bench.stored.store.seen()["read_errors"] > before:
            raise GuaranteeBroken(
                f"a reader was given {len(found)} records over a device that cannot be read"
            )
    finally:
        bench.well()
    life.judge()
    life.send("f", [life.payload()])
    bench.power_cycle_and_judge()
    bench.account.count_work("cases", 1, "RF-51")
    bench.account.count_work("read errors under a reader")


def device_lies(bench: Bench) -> None:
    """Let the device confirm syncs without effect (RF-44, below a real file system).

    Records acked in that time may be lost. The remaining records are those from before, dense and unaltered.
    """
    life = bench.life
    honest = len(life.model.frames)
    # Data that the file system has in memory belongs to the time before the lies.
    fd = os.open(bench.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _libc.syncfs(fd)
    finally:
        os.close(fd)
    bench.stored.store.mode("drop")
    for _ in range(3):
        life.send("f", [life.payload(700)])
    life.end()
    bench.stored.power_cycle()
    for frame in life.model.frames[honest:]:
        frame.first_seq = frame.acked_at = 0
    life.model.highest.clear()
    life.recover()
    if all(frame.is_shown for frame in life.model.frames[honest:]):
        raise GuaranteeBroken("the rig dropped nothing")
    life.send("f", [life.payload()])
    bench.power_cycle_and_judge()
    bench.account.count_work("cases", 1, "RF-44")


def _start_must_fail(bench: Bench, what: str) -> None:
    life, errors = bench.life, bench.stored.store.seen()
    try:
        life.start(is_reboot=True)
    except (DiskError, CorruptData) as e:
        if not e.detail.get("path"):
            raise GuaranteeBroken(f"over {what}: an error without a path: {e}") from e
    else:
        raise GuaranteeBroken(f"a shard starts over {what}")
    finally:
        life.end()
    now = bench.stored.store.seen()
    if now["read_errors"] == errors["read_errors"] and now["write_errors"] == errors["write_errors"]:
        raise GuaranteeBroken("the rig failed no call")


CASES: dict[str, Callable[[Bench], None]] = {
    "once": sync_fails_once,
    "trap": cache_lies,
    "between": write_back_fails,
    "dead": device_vanishes,
    "recovery": log_unreadable,
    "reader": records_unreadable,
    "lies": device_lies,
}


def run_case(stored: StoredVolume, name: str, rng: random.Random, account: Account) -> None:
    """Run one case in its own directory. Raises GuaranteeBroken."""
    root = stored.volume.root / "life"
    life = Life(root)
    bench = Bench(stored, life, rng, account)
    try:
        life.start()
        life.send("f", [life.payload()])
        for _ in range(WARM_STEPS):
            life.step(rng)
        if not life.model.owed:
            raise GuaranteeBroken("nothing was acked before the fault")
        CASES[name](bench)
        account.count_work("acked frames held to", life.model.owed)
    except (RinglogError, AssertionError) as e:
        raise e if isinstance(e, GuaranteeBroken) else GuaranteeBroken(f"{type(e).__name__}: {e}") from e
    finally:
        life.end()
        stored.store.mode("ok")
        stored.power_cycle()
        shutil.rmtree(root, ignore_errors=True)
