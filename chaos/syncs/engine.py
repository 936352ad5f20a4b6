"""The whole program over a device that fails, lags, hangs or vanishes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.order import Account, Order
from chaos.rigs.blockstore import StoredVolume, stored_volume
from chaos.rigs.extents import forget_pages, range_of
from chaos.rigs.mount import KINDS, RigError, bind, unmount, volume
from chaos.rigs.program import ASK_S, BATCH, TOPICS, WAIT_S, Traffic, checkpoint, data_of, program, until
from ringlog.drill.checks import GuaranteeBroken, verify
from ringlog.drill.load import ACKED
from ringlog.drill.nursery import Nursery
from ringlog.drill.targets import is_alive
from ringlog.errors import RinglogError
from ringlog.placement import home_shard
from ringlog.testing.real_engine import TestEngine

PATIENT_S = 60.0
"""Timeout (s) of a write over a device that lags."""
OTHERS_S_MAX = 1.5
"""Maximum time (s) of a write to the other shard in the meantime. The host also runs other work."""
LAG_S = {"lags": 0.4, "lags_long": 5.0, "hangs": 30.0}
STUCK_AFTER_S = 10.0
SYNCS_MAX = 8
"""Maximum number of delayed syncs before a killed process dies: about two of its own, and those of others
that the file system's journal makes it wait for."""
LOOK_S = 0.05
SIGBUS_STATUS = -7
MAPPED_S = 20.0


def run(order: Order, account: Account, names: list[str], until_s: float) -> None:
    """Run these cases in turn, each once and then while time remains. The file system alternates."""
    number = 0
    while names and (number < len(names) or time.monotonic() < until_s):
        name, kind = names[number % len(names)], KINDS[(number + order.seed) % len(KINDS)]
        try:
            run_case(name, order, kind, account)
            account.count_work("cases of the whole program")
        except RigError as e:
            account.skip(f"the program over a failing {kind}", str(e))
        except (GuaranteeBroken, RinglogError) as e:
            account.report_finding(
                f"the program on {kind}, {name}: {str(e)[:300]}", f"engine/{kind}/{name}", str(e)
            )
        number += 1


def run_case(name: str, order: Order, kind: str, account: Account) -> None:
    """Run one case by its name. Raises GuaranteeBroken."""
    with Nursery("chaos.rigs.work") as nursery:
        CASES[name](_Place(order, kind, account, nursery))


@dataclass(frozen=True, slots=True)
class _Place:
    """Environment of a case."""

    order: Order
    kind: str
    account: Account
    nursery: Nursery

    def traffic(self, host: TestEngine, ask_s: float = ASK_S) -> Traffic:
        """Return running traffic; see Traffic.begin."""
        return Traffic.begin(
            self.nursery, self.order.scratch / f"journals-{time.monotonic_ns()}", host.url, ask_s
        )


def fails(place: _Place) -> None:
    """Fail writes to the log of one shard under the program, then repair the device (RF-41).

    The shard is replaced.
    """
    with stored_volume(place.kind, place.order.scratch) as stored:
        root = stored.volume.root
        with program(root) as host:
            traffic = place.traffic(host)
            pid = host.pid_of("wal_shard", 0)
            where = range_of(_newest_log(Path(host.data_dir), 0))
            stored.store.mode("write_eio", low=where.low, high=where.high)
            is_replaced = until(lambda: _pid(host, 0) not in {0, pid}, WAIT_S)
            errors = stored.store.seen()["write_errors"]
            stored.store.mode("ok")
            if not (is_replaced and errors):
                raise GuaranteeBroken(
                    f"{errors} writes failed and shard 0 was {'' if is_replaced else 'not '}replaced"
                )
            traffic.need_acks("after a sync failed and the device was well again", within_s=2 * WAIT_S)
            traffic.end()
            host.power_off()
        stored.power_cycle()
        _judge(root, traffic, place.account)
    place.account.count_work("sync_failures", 1, "RF-41")


def lags(place: _Place) -> None:
    """Delay syncs by 0.4 s (RF-45)."""
    _lag(place, LAG_S["lags"])


def lags_long(place: _Place) -> None:
    """Delay syncs by 5 s (RF-45)."""
    _lag(place, LAG_S["lags_long"])


def _lag(place: _Place, seconds: float) -> None:
    """Delay syncs.

    No process is restarted, no record is lost, and the shard on another device is not affected.
    """
    with _two_devices(place) as (root, slow), program(root) as host:
        traffic = place.traffic(host, PATIENT_S)
        before = _restarts(host)
        mine = [topic for topic in TOPICS if home_shard(topic, 2) == 0]
        others = [topic for topic in TOPICS if home_shard(topic, 2) == 1]
        mark = traffic.mark()
        slow.store.mode("ok", delay_s=seconds)
        lagged = until(
            lambda: (
                all(traffic.count(ACKED, mark, topic) >= 2 * BATCH for topic in mine)
                and all(traffic.count(ACKED, mark, topic) >= 6 * BATCH for topic in others)
            ),
            WAIT_S + 12 * seconds,
        )
        took = max((s for topic in mine for s in traffic.took_s(ACKED, mark, topic)), default=0.0)
        others_took = max((s for topic in others for s in traffic.took_s(ACKED, mark, topic)), default=0.0)
        slow.store.mode("ok")
        traffic.need_acks("after the device was quick again", within_s=2 * WAIT_S)
        traffic.end()
        place.account.figures[f"slowest_ack_with_{seconds}_s_lag_s"] = round(took, 3)
        place.account.figures[f"slowest_ack_of_the_other_shard_with_{seconds}_s_lag_s"] = round(
            others_took, 3
        )
        if not lagged or took < seconds:
            raise GuaranteeBroken(
                f"with syncs of {seconds} s: acks came {lagged}, the slowest after {took:.2f} s"
            )
        if others_took > OTHERS_S_MAX:
            raise GuaranteeBroken(f"the other shard took {others_took:.2f} s for a write")
        if _restarts(host) != before:
            raise GuaranteeBroken(f"a process was restarted: {before} then {_restarts(host)}")
        traffic.judge()
    place.account.count_work("cases of a device that lags", 1, "RF-45")


def hangs(place: _Place) -> None:
    """Let a shard hang in a sync of 30 s, with a stuck timeout of 10 s (RF-12).

    Two of it must never run at once.
    """
    seconds = LAG_S["hangs"]
    limits: dict[str, Any] = {"supervisor": {"stuck_after_s": STUCK_AFTER_S}}
    with _two_devices(place) as (root, slow), program(root, **limits) as host:
        traffic = place.traffic(host)
        old, mark = host.pid_of("wal_shard", 0), traffic.mark()
        slow.store.mode("ok", delay_s=seconds)
        deadline = time.monotonic() + seconds * SYNCS_MAX
        is_over = False
        while time.monotonic() < deadline and not is_over:
            new = _pid(host, 0)
            if new not in {0, old}:
                if is_alive(old):
                    raise GuaranteeBroken(f"shard 0 runs as {new} while {old} is not dead")
                is_over = True
            time.sleep(LOOK_S)
        slow.store.mode("ok")
        if not is_over:
            raise GuaranteeBroken(f"a shard that hung for {seconds} s was not replaced")
        # If its successor has begun a sync in the meantime, that one hangs for the same time again.
        traffic.need_acks("after a shard had hung", within_s=seconds + 2 * WAIT_S)
        traffic.end()
        others = [topic for topic in TOPICS if home_shard(topic, 2) == 1]
        if not any(traffic.count(ACKED, mark, topic) > 6 * BATCH for topic in others):
            raise GuaranteeBroken("the other shard did not serve while one hung")
        traffic.judge()
    place.account.count_work("shards that hung in a sync", 1, "RF-12", "RF-45")


def vanishes(place: _Place) -> None:
    """Make the device fail everything, then bring it back (RF-50)."""
    with stored_volume(place.kind, place.order.scratch) as stored:
        root = stored.volume.root
        with program(root) as host:
            traffic = place.traffic(host)
            mark = traffic.mark()
            stored.store.mode("dead")
            until(lambda: all(traffic.failed(mark, topic) for topic in TOPICS), WAIT_S)
            traffic.end()
            if not (traffic.failed(mark) and stored.store.seen()["write_errors"]):
                raise GuaranteeBroken("the device vanished without a visible error")
            host.power_off()
        stored.power_cycle()
        _judge(root, traffic, place.account)
    place.account.count_work("sync_failures", 1, "RF-50")


def unreadable(place: _Place) -> None:
    """Make stored data unreadable for a while (RF-52).

    A reader with mapped files may die of it. No process of the engine dies, and everything works again with
    the device.
    """
    with stored_volume(place.kind, place.order.scratch) as stored:
        root = stored.volume.root
        with program(root) as host:
            traffic = place.traffic(host)
            until(lambda: checkpoint(host), WAIT_S)
            traffic.need_acks("after a checkpoint", within_s=2 * WAIT_S)
            traffic.end()
            pids = _pids(host)
            # Only sealed records: a write to a log page that is not in memory has to read the page first.
            sealed = max(Path(host.data_dir).rglob("*.data"), key=lambda path: path.stat().st_size)
            where = range_of(sealed)
            forget_pages(sealed)
            stored.store.mode("read_eio", low=where.low, high=where.high)
            status = _read_mapped(host.url)
            checkpoint(host)
            errors = stored.store.seen()["read_errors"]
            stored.store.mode("ok")
            if not errors:
                raise RigError("no read failed: everything was in memory")
            _need_no_sigbus(host, pids)
            place.account.count_work("mapped readers that met a read error")
            place.account.count_work("of them, ended by SIGBUS", int(status == SIGBUS_STATUS))
            traffic.start_all()
            traffic.need_acks("after the device could be read again", within_s=2 * WAIT_S)
            traffic.end()
            traffic.judge()
    place.account.count_work("cases of a device that cannot be read", 1, "RF-52")


CASES: dict[str, Callable[[_Place], None]] = {
    "fails": fails, "lags": lags, "lags_long": lags_long, "hangs": hangs, "vanishes": vanishes,
    "unreadable": unreadable,
}  # fmt: skip


# -- pieces -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _two_devices(place: _Place) -> Iterator[tuple[Path, StoredVolume]]:
    """Yield (root, block store). The log of shard 0 is on the block store, other data on a normal device."""
    with volume("ext4", place.order.scratch) as plain:
        slow_scratch = place.order.scratch / "slow"
        slow_scratch.mkdir(exist_ok=True)
        with stored_volume(place.kind, slow_scratch) as slow:
            log = plain.root / "engine" / "data" / "wal" / "shard-00"
            with program(plain.root) as host:
                host.stop()
            # A subdirectory, so that files of the file system itself (lost+found) are not in the shard's
            # directory.
            shutil.copytree(log, slow.volume.root / "shard")
            bind(slow.volume.root / "shard", log)
            try:
                yield plain.root, slow
            finally:
                slow.store.mode("ok")
                unmount(log)


def _judge(root: Path, traffic: Traffic, account: Account) -> None:
    verify(data_of(root))
    with program(root) as host:
        account.count_work("records read", traffic.judge().survivors)
        traffic.start_all(host.url)
        traffic.need_acks("after the device came back")
        account.count_work("acked batches held to", traffic.judge().acked // BATCH)


def _newest_log(data: Path, shard: int) -> Path:
    """Return the log file that the shard writes: the newest one of its highest incarnation."""
    logs = list((data / "wal" / f"shard-{shard:02d}").glob("wal-*.log"))
    return max(logs, key=lambda path: tuple(map(int, path.stem.split("-")[1:])))


def _pid(host: TestEngine, shard: int) -> int:
    return _pids(host).get(f"wal_shard-{shard:02d}", 0)


def _pids(host: TestEngine) -> dict[str, int]:
    try:
        return {each.name: each.pid for each in host.status().processes}
    except RinglogError:
        return {}


def _restarts(host: TestEngine) -> dict[str, int]:
    return {each.name: each.restarts for each in host.status().processes}


def _read_mapped(url: str) -> int:
    """Read every topic through mapped files in a separate process. Returns its exit status."""
    program_text = (
        "import sys, ringlog\n"
        "with ringlog.connect(sys.argv[1], timeout_ms=3000) as client:\n"
        "    for topic in sys.argv[2:]:\n"
        "        try:\n"
        "            for batch in client.tailer(topic, follow=False):\n"
        "                bytes(memoryview(batch.payloads[0]))\n"
        "        except Exception as e: print(topic, type(e).__name__, e)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program_text, url, *TOPICS], capture_output=True, timeout=MAPPED_S,
            check=False, env={**os.environ, "PYTHONFAULTHANDLER": "0"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise GuaranteeBroken(f"a reader over a device that cannot be read hangs: {e.stderr!r}") from e
    return done.returncode


def _need_no_sigbus(host: TestEngine, pids: dict[str, int]) -> None:
    now = _pids(host)
    changed = sorted(kind for kind, pid in pids.items() if now.get(kind) != pid)
    log = host.log_path.read_text(errors="replace")
    if "SIGBUS" in log or '"signal":7' in log:
        raise GuaranteeBroken(f"a process of the engine died of a read error below a mapping: {changed}")
    shards = [kind for kind in changed if kind.startswith("wal_shard")]
    if shards:
        raise GuaranteeBroken(f"{shards} ended over reads that they did not need\n{_first_errors(log)}")


def _first_errors(log: str) -> str:
    lines = [line for line in log.splitlines() if '"level":"error"' in line or '"level":"critical"' in line]
    return "\n".join(lines[:6])[:4_000]
