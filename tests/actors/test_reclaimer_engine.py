"""Reclaimer and relocator in a real engine: space is freed, cold records are read, no record is lost."""

from __future__ import annotations

import os
import shutil
import socket
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

import ringlog
from ringlog import stop_points
from ringlog.actors.reclaimer.shell import ReclaimerShell
from ringlog.board.board import Board
from ringlog.board.layout import ProcessField
from ringlog.clock import SystemClock
from ringlog.envelope import messages as m
from ringlog.errors import Internal, RinglogError
from ringlog.link.shard_requests import Requester
from ringlog.storage.layout import META_DIR
from ringlog.storage.snapshot import snapshot_name
from ringlog.testing import engine
from ringlog.testing.real_engine import wait_until
from tests.support.buckets import bucket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TOPICS = [f"topic-{n}" for n in range(4)]


def running(tmp_path, *, cold=None, **options):
    storage = {
        "enabled": True, "own_segment_bytes": "64KiB", "segment_bytes": "1MiB", "reclaim_interval_s": 0.2,
        "scrub_bytes_per_s": 0, **options.pop("storage", {}),
    }  # fmt: skip
    return engine(
        wal={"shards": 2, "file_bytes": "1MiB"}, storage=storage, directory=str(tmp_path / "engine"),
        cold={"interval_s": 0.2, "hot_segments": 0, **cold} if cold else {}, **options,
    )  # fmt: skip


def write(client, start, count=400, topics=TOPICS):
    for name in topics:
        client.append_many(
            name, [f"{name}:{n}".encode().ljust(300, b".") for n in range(start, start + count)]
        )


def read_back(client, count, start=0, topics=TOPICS):
    for name in topics:
        found = [record.data.rstrip(b".") for record in client.reader(name)]
        assert found == [f"{name}:{n}".encode() for n in range(start, count)], name


def ask(host, who, message, wanted, timeout_s=30.0):
    """Send a request as an operator does. Repeat it while the actor restarts."""
    requester = Requester(who, f"ipc://{host.info.shm_dir}/{who}.sock")
    found = []

    def is_answered():
        try:
            found.append(requester.ask(message, wanted, timeout_s=timeout_s).message)
        except RinglogError:
            return False
        return True

    try:
        wait_until(is_answered, 60.0, f"an answer of the {who}")
    finally:
        requester.close()
    return found[0]


def checkpoint(host):
    return ask(host, "compactor", m.CheckpointNow(), m.CheckpointMade)


def parts(root, suffix=".data"):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob(f"*{suffix}"))


def word(host, kind, number):
    board = Board.open(host.info.shm_dir, writable=False)
    try:
        return board.process(2 + {"reclaimer": 3, "relocator": 4}[kind]).get(number)
    finally:
        board.close()


def size_of(path):
    """Return the size of a file, or 0 if it was deleted in the meantime."""
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


def test_deletes_free_space_and_the_remaining_records_are_read(tmp_path):
    """One topic is deleted as a whole, and three quarters of the records of the other topics."""
    with running(tmp_path) as host, ringlog.connect(host.url) as client:
        write(client, 0)
        checkpoint(host)
        assert parts(host.data_dir)
        client.topics.delete(TOPICS[0])
        for name in TOPICS[1:]:
            client.topics.delete_records(name, before_seq=301)

        def is_gone():
            checkpoint(host)
            return sum(size_of(f"{host.data_dir}/{name}") for name in parts(host.data_dir)) < 3 * 150 * 350

        wait_until(is_gone, 60.0, "the space of deleted records to be freed")
        read_back(client, 400, 300, TOPICS[1:])
        host.restart()
        read_back(client, 400, 300, TOPICS[1:])
        assert ask(host, "reclaimer", m.ScrubNow(), m.ScrubReport).findings == []


def test_a_scrub_that_fails_is_answered(tmp_path):
    """The requester must not wait for a pass that ended with an error. The next request starts a new pass."""
    with running(tmp_path) as host, ringlog.connect(host.url) as client:
        write(client, 0)
        checkpoint(host)
        loop = Path(host.data_dir) / META_DIR / snapshot_name(0, 1 << 40)
        loop.symlink_to(loop.name)
        host.wait_ready("reclaimer", timeout=50)
        requester = Requester("reclaimer", f"ipc://{host.info.shm_dir}/reclaimer.sock")
        try:
            with pytest.raises(Internal, match="cannot be read"):
                requester.ask(m.ScrubNow(), m.ScrubReport, timeout_s=60.0)
            loop.unlink()
            assert requester.ask(m.ScrubNow(), m.ScrubReport, timeout_s=60.0).message.files
        finally:
            requester.close()


def test_one_scrub_pass_answers_all_earlier_requests(monkeypatch):
    """Many requests must not cause as many passes over all data."""
    shell = object.__new__(ReclaimerShell)
    shell._scrub_requests, shell._scrubs_done = deque((b"c", corr) for corr in range(5)), deque()
    shell._bell = SimpleNamespace(ring=lambda: None)
    made = []

    def whole_pass():
        shell._scrub_requests.append((b"late", 9))
        made.append(m.ScrubReport(len(made) + 1, 0, []))
        return made[-1]

    monkeypatch.setattr(shell, "_whole_pass", whole_pass)
    shell._scrub_step()
    assert list(shell._scrubs_done) == [(b"c", corr, made[0]) for corr in range(5)]
    shell._scrub_step()
    assert shell._scrubs_done[-1] == (b"late", 9, made[1])


def test_relocated_records_are_read_through_restarts_and_kills(tmp_path):
    """Segments are moved and read, processes are killed, and segments are read again (RF-6)."""
    (tmp_path / "cold").mkdir()
    with running(tmp_path, cold={"dir": str(tmp_path / "cold")}) as host, ringlog.connect(host.url) as client:
        write(client, 0)
        checkpoint(host)
        wait_until(lambda: not parts(host.data_dir), 30.0, "the data parts to move")
        assert parts(host.data_dir, ".idx") == parts(tmp_path / "cold", ".idx")
        read_back(client, 400)
        host.kill("wal_shard", shard=0)
        host.kill("wal_shard", shard=1)
        read_back(client, 400)
        host.crash()
        host.start()
        read_back(client, 400)
        write(client, 400)
        for who in ("relocator", "reclaimer"):
            host.kill(who)
        checkpoint(host)
        wait_until(lambda: not parts(host.data_dir), 30.0, "the data parts to move")
        read_back(client, 800)
        report = ask(host, "reclaimer", m.ScrubNow(), m.ScrubReport)
        assert report.findings == []
        assert report.files > 0


def test_records_in_an_object_store_are_read_through_the_relocator(tmp_path):
    """The credentials come from the environment."""
    with (
        bucket() as environ,
        running(tmp_path, cold={"url": "s3://cold/prefix"}, environ=environ) as host,
        ringlog.connect(host.url) as client,
    ):
        write(client, 0)
        checkpoint(host)
        wait_until(lambda: not parts(host.data_dir), 60.0, "the data parts to move")
        read_back(client, 400)
        assert word(host, "relocator", ProcessField.COLD_READS) > 0


def test_low_disk_space_refuses_appends_and_accepts_deletes(tmp_path):
    """Appends stop while space for deletes and for a stop remains. They resume without a restart."""
    free, spare = shutil.disk_usage(tmp_path).free, 1 << 31
    if free < 4 * spare:
        pytest.skip("others on this device would decide the test")
    with running(tmp_path) as host, ringlog.connect(host.url) as client:
        write(client, 0)
    with running(tmp_path, environ={}, data={"min_free_bytes": free - spare}) as host:
        filler = tmp_path / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * spare)
        with ringlog.connect(host.url) as client:
            wait_until(
                lambda: word(host, "reclaimer", ProcessField.DISK_LOW) == 1,
                30.0,
                "low disk space to be detected",
            )
            wait_until(lambda: not can_write(client), 30.0, "records to be refused")
            client.topics.delete_records(TOPICS[0], before_seq=11)
            filler.unlink()
            wait_until(lambda: can_write(client), 30.0, "records to be accepted again")


def can_write(client):
    try:
        client.append("more", b"x")
    except RinglogError:
        return False
    return True


@pytest.mark.parametrize("point", [name for name in stop_points.POINTS if name.startswith("relocate_")])
def test_a_relocator_that_dies_at_any_point_loses_nothing(tmp_path, point):
    """The shards are killed as well, so that they derive the tier from the files on disk (RF-6)."""
    (tmp_path / "cold").mkdir()
    environ = {"RINGLOG_TEST_STOP_POINTS": f"{point}:1:kill"}
    with (
        running(tmp_path, cold={"dir": str(tmp_path / "cold")}, environ=environ) as host,
        ringlog.connect(host.url) as client,
    ):
        write(client, 0)
        checkpoint(host)
        wait_until(lambda: restarts_of(host, "relocator") > 0, 30.0, "the relocator to die")
        host.kill("wal_shard", shard=0)
        host.kill("wal_shard", shard=1)
        read_back(client, 400)
        wait_until(lambda: not parts(host.data_dir), 30.0, "the data parts to move")
        read_back(client, 400)
        assert ask(host, "reclaimer", m.ScrubNow(), m.ScrubReport).findings == []


@pytest.mark.parametrize("point", [name for name in stop_points.POINTS if name.startswith("reclaim_")])
def test_a_reclaimer_that_dies_at_any_point_loses_and_duplicates_nothing(tmp_path, point):
    """The whole engine crashes after it (RF-6)."""
    environ = {"RINGLOG_TEST_STOP_POINTS": f"{point}:1:kill"}
    with running(tmp_path, environ=environ) as host, ringlog.connect(host.url) as client:
        write(client, 0)
        checkpoint(host)
        for name in TOPICS:
            client.topics.delete_records(name, before_seq=301)

        def has_died():
            checkpoint(host)
            return restarts_of(host, "reclaimer") > 0

        wait_until(has_died, 60.0, "the reclaimer to die")
        host.crash()
        host.start()
        read_back(client, 400, 300)

        def is_tidy():
            checkpoint(host)
            return len(parts(host.data_dir)) == len(TOPICS)

        wait_until(is_tidy, 60.0, "leftover files to be removed")
        read_back(client, 400, 300)
        assert ask(host, "reclaimer", m.ScrubNow(), m.ScrubReport).findings == []


def restarts_of(host, kind):
    return next(process.restarts for process in host.status().processes if process.kind == kind)


def test_a_store_that_hangs_delays_neither_appends_nor_hot_reads_nor_the_stop(tmp_path):
    """Only requests for cold data wait for the store."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environ = {"AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
                   "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}  # fmt: skip
        with (
            running(tmp_path, cold={"url": "s3://cold/x", "timeout_s": 60}, environ=environ) as host,
            ringlog.connect(host.url) as client,
        ):
            write(client, 0)
            checkpoint(host)
            caller, _ = silent.accept()  # the relocator, which gets no reply
            clock, slowest_ns = SystemClock(), 0
            for n in range(200):
                start = clock.monotonic_ns()
                client.append(TOPICS[0], f"{TOPICS[0]}:{400 + n}".encode())
                slowest_ns = max(slowest_ns, clock.monotonic_ns() - start)
            assert slowest_ns < 2_000_000_000
            read_back(client, 600, topics=TOPICS[:1])
            read_back(client, 400, topics=TOPICS[1:])
            checkpoint(host)
            assert host.status().state == "ready"
            assert host.stop() == 0
            caller.close()
