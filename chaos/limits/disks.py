"""Disk limits: full, out of inodes, read-only; and mapped files that are truncated under their readers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.order import CannotRun
from chaos.processes import raise_priority
from chaos.rigs import small_disks
from chaos.rigs.bench import Bench, bench, is_refused
from chaos.rigs.cases import Case
from ringlog.client import Record
from ringlog.drill.checks import require
from ringlog.drill.load import ACKED, READ, REFUSED
from ringlog.errors import Internal, RequestTimeout, RinglogError, StorageReadOnly

MIB = 1 << 20
FULL_BYTES = 48 * MIB
EXT4_BYTES = 64 * MIB
INODES = 400
RECORD_BYTES = 100_000
SMALL_FILES = {"data": {"min_free_bytes": 0}, "wal": {"file_bytes": MIB}}


def _fill(where: Path) -> list[Path]:
    """Use up all free space, to the last block."""
    filler = where / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (MIB, 4096, 512):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return [filler]


def _fill_names(where: Path) -> list[Path]:
    """Use up all inodes."""
    made: list[Path] = []
    folder = where / "names"
    folder.mkdir()
    try:
        while True:
            path = folder / str(len(made))
            path.touch()
            made.append(path)
    except OSError:
        return made


def _runs_out(outer: Bench, root: Path, fill: Callable[[Path], list[Path]]) -> None:
    """Work before the fault, on a full disk, with a delete on it, and after space is freed.

    The processes stay the same, and no acked record is lost.
    """
    with bench(
        outer.order, outer.account, directory=root / "engine", size=2_000, settings=SMALL_FILES
    ) as inner:
        inner.need_work()
        topic = "to-be-deleted"
        inner.client.topics.create(topic, durability="fsync")
        for _ in range(5):
            inner.client.append(topic, b"x")
        before = inner.pids
        taken = fill(root)
        mark = inner.load.mark()

        def push() -> RinglogError | None:
            return is_refused(lambda: inner.client.append(topic, bytes(RECORD_BYTES)))

        refusal = None
        deadline = time.monotonic() + 20
        while refusal is None or isinstance(refusal, RequestTimeout):
            refusal = push()
            require(time.monotonic() < deadline, f"a full disk did not refuse an append: {refusal}")
        inner.load.need(REFUSED, mark, 1)
        require(isinstance(refusal, Internal), f"the refusal has no reason: {refusal!r}")
        inner.load.need(READ, None, 5)
        deletion = inner.client.topics.delete_records(topic, before_seq=4)
        require(deletion.earliest_seq >= 4, f"the delete did nothing: {deletion}")
        inner.need_same(before)
        for path in taken:
            path.unlink()
        inner.need_work()
        inner.wait("records to be taken again", lambda: push() is None)
        inner.need_same(before)
        inner.account.figures["refused_when_full"] = inner.load.count(REFUSED, mark)


def full(outer: Bench, _: random.Random) -> None:
    """Fill a tmpfs (RF-47)."""
    root = small_disks.small_tmpfs(outer.scratch / f"full-{time.monotonic_ns()}", FULL_BYTES)
    try:
        _runs_out(outer, root, _fill)
    finally:
        small_disks.unmount(root)


def full_ext4(outer: Bench, _: random.Random) -> None:
    """Fill an ext4, where fallocate reserves space and metadata needs space too (RF-47)."""
    # A new directory for each pass: an earlier one contains another engine's data.
    root = outer.scratch / f"full-{time.monotonic_ns()}"
    image = root.with_suffix(".img")
    small_disks.make_ext4(image, EXT4_BYTES)
    small_disks.mount_ext4(image, root)
    try:
        _runs_out(outer, root, _fill)
    finally:
        small_disks.unmount(root)


def no_inodes(outer: Bench, _: random.Random) -> None:
    """Use up the inodes of a tmpfs (RF-48)."""
    root = small_disks.small_tmpfs(outer.scratch / f"names-{time.monotonic_ns()}", 4 * FULL_BYTES, INODES)
    try:
        _runs_out(outer, root, _fill_names)
    finally:
        small_disks.unmount(root)


def read_only(outer: Bench, _: random.Random) -> None:
    """Make ext4 turn read-only after an error of its own (RF-49).

    Shards restart and serve reads. Writes are refused with a typed error that names the directory, and the
    log contains the reason. After a file-system check and a new mount, everything acknowledged is there and
    writes resume.
    """
    # Only the data directory is on this file system. The engine's log must stay writable.
    home = outer.scratch / f"ro-{time.monotonic_ns()}"
    home.mkdir()
    root, image = home / "data", home / "ext4.img"
    small_disks.make_ext4(image, EXT4_BYTES)
    small_disks.mount_ext4(image, root)
    try:
        trigger = Path(f"/sys/fs/ext4/{small_disks.device_of(root)}/trigger_fs_error")
        if not trigger.exists():
            raise CannotRun("this kernel's ext4 has no trigger_fs_error")
        # Each shard may die once. A life that only serves reads is not counted as a death.
        settings = {**SMALL_FILES, "supervisor": {"restart_max": 3}}
        with bench(outer.order, outer.account, directory=home, settings=settings) as inner:
            inner.need_work()
            size = inner.log_size
            trigger.write_text("1")
            _serves_reads_alone(inner, shards=(0, 1))
            require("Read-only file system" in inner.said_since(size), "the log does not name the reason")
            inner.host.crash()
            small_disks.unmount(root)
            small_disks.command("sh", "-c", f"e2fsck -fy {image} >&2 || test $? -lt 4")
            small_disks.mount_ext4(image, root)
            inner.host.start()
            inner.need_work()
    finally:
        small_disks.unmount(root)


def read_only_for_a_time(outer: Bench, chance: random.Random) -> None:
    """Make the directory of one shard read-only and then writable again (RF-49).

    While it is read-only, that shard serves reads, and the others serve everything. No manual restart is
    needed, and no start in read-only mode counts as a crash.
    """
    home = outer.scratch / f"latch-{time.monotonic_ns()}"
    home.mkdir()
    shard = chance.randrange(2)
    settings = {"supervisor": {"restart_max": 2, "restart_window_s": 600.0}}
    with contextlib.ExitStack() as undo:
        inner = undo.enter_context(bench(outer.order, outer.account, directory=home, settings=settings))
        inner.need_work()
        folder = Path(inner.host.data_dir) / "wal" / f"shard-{shard:02d}"
        # A process that has a file open there keeps the old mount, so the shard is killed first.
        with _stopped(inner.host.pid):
            inner.host.kill("wal_shard", shard=shard)
            small_disks.bind_read_only(folder)
        undo.callback(small_disks.unmount, folder)
        mark = inner.load.mark()
        _serves_reads_alone(inner, shards=(shard,))
        inner.load.need(ACKED, mark, 10, topic=inner.shard_topic(1 - shard))
        small_disks.remount_writable(folder)
        inner.need_work(10, 60.0)
        _wait_state(inner, shard, "ready")


def _serves_reads_alone(inner: Bench, shards: tuple[int, ...]) -> None:
    """Check that these shards report `read_only`, serve all reads, and refuse all changes."""
    for shard in shards:
        _wait_state(inner, shard, "read_only")
    for shard in shards:
        topic, mark = inner.shard_topic(shard), inner.load.mark()
        inner.load.need(REFUSED, mark, 3, topic=topic)
        require(not inner.load.count(ACKED, mark, topic), "acknowledged on a read-only disk")
        seen = sum(1 for _ in inner.client.reader(topic))
        require(seen > 0, "nothing can be read")
        inner.account.figures[f"records_read_while_read_only_{shard}"] = seen
        refusal = is_refused(lambda: inner.client.append(topic, b"x"))  # noqa: B023
        require(isinstance(refusal, StorageReadOnly), f"an append ends in {refusal!r}")
        require("directory" in getattr(refusal, "detail", {}), f"the refusal names no directory: {refusal}")
        for change in (
            lambda: inner.client.topics.delete(topic),  # noqa: B023
            lambda: inner.client.topics.delete_records(topic, before_seq=2),  # noqa: B023
        ):
            require(
                isinstance(is_refused(change), StorageReadOnly), f"a change ends in {is_refused(change)!r}"
            )


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Stop the process with SIGSTOP within the block."""
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, signal.SIGSTOP)
        yield
    finally:
        signal.pidfd_send_signal(fd, signal.SIGCONT)
        os.close(fd)


def _wait_state(inner: Bench, shard: int, state: str) -> None:
    name = f"wal_shard-{shard:02d}"
    inner.wait(
        f"{name} to be {state}",
        lambda: any(x.name == name and x.state == state for x in inner.host.status().processes),
    )


# -- mapped files -------------------------------------------------------------------------------------

_READER = """
import sys, ringlog
from ringlog.errors import RinglogError
with ringlog.connect(sys.argv[1], transport=sys.argv[2], timeout_ms=5000) as client:
    count = 0
    try:
        for item in client.reader(sys.argv[3]):
            count += 1
    except RinglogError as e:
        print(type(e).__name__, e)
    else:
        print("all", count)
"""


def _read_again(bench: Bench, topic: str) -> subprocess.CompletedProcess[str]:
    """Read the topic until the reader is directed to its segments. Returns the reader's output.

    Until the segments are registered with the shard, the log serves all records.
    """
    done: list[subprocess.CompletedProcess[str]] = []

    def is_led_there() -> bool:
        raise_priority(bench.host.status().processes)
        done.append(
            subprocess.run(
                [sys.executable, "-c", _READER, bench.host.url, "ipc", topic],
                capture_output=True, text=True, check=False, timeout=60,
            )
        )  # fmt: skip
        return not done[-1].stdout.startswith("all ")

    bench.wait("a reader to be directed to the segments", is_led_there)
    return done[-1]


def cut_under_readers(bench: Bench, chance: random.Random) -> None:
    """Truncate sealed files while processes read them (RF-53). Readers get a typed error, no server dies.

    Readers use the gateway, which reads for its clients, and this host's files, which a client may map.
    """
    topic = f"sealed-{time.monotonic_ns()}"
    folder = Path(bench.host.data_dir)
    others = set(folder.glob("topics/*"))
    bench.client.topics.create(topic, durability="fsync")
    for _ in range(20):
        bench.client.append_many(topic, [chance.randbytes(2_000) for _ in range(100)])

    def sealed() -> list[Path]:
        raise_priority(bench.host.status().processes)
        # Select by size: a new topic may belong to the load, which is smaller. Topics of earlier passes are
        # excluded.
        by_topic = [list(each.glob("seg-*.data")) for each in set(folder.glob("topics/*")) - others]
        return max(by_topic, key=lambda paths: sum(path.stat().st_size for path in paths), default=[])

    bench.wait("sealed segments", lambda: sum(path.stat().st_size for path in sealed()) > 4_000_000)
    before = bench.pids
    paths = sealed()
    whole = {path: path.read_bytes() for path in paths}
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", _READER, bench.host.url, transport, topic],
            stdout=subprocess.PIPE,
            text=True,
        )
        for transport in ("ipc", "ring", "ipc")
    ]
    for path, data in whole.items():
        os.truncate(path, chance.randrange(4096, len(data) // 2))
    outcomes = [reader.communicate(timeout=60)[0] for reader in readers]
    again = _read_again(bench, topic)
    for path, data in whole.items():
        with path.open("r+b") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    print("cut readers:", outcomes, again.stdout, flush=True)
    require(
        "CorruptData" in again.stdout,
        f"a truncated file did not cause CorruptData: {again.stdout} {again.stderr}",
    )
    bench.need_same(before)
    bench.need_work(5)
    got = [item for item in bench.client.reader(topic) if isinstance(item, Record)]
    require(len(got) == 2_000, f"{len(got)} of 2000 records once the file is whole again")


CASES: tuple[Case[Bench], ...] = (
    Case("cut-segment", ("RF-53",), cut_under_readers),
    Case("disk-full", ("RF-47",), full),
    Case("read-only", ("RF-49",), read_only),
    Case("read-only-shard", ("RF-49",), read_only_for_a_time),
    Case("no-inodes", ("RF-48",), no_inodes, is_long=True),
    Case("ext4-full", ("RF-47",), full_ext4, is_long=True),
)
