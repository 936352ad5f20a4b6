"""The compactor in a real engine: acked records are read back once and in order, whichever process dies."""

from __future__ import annotations

import os
import select
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

import ringlog
from ringlog import stop_points
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError
from ringlog.link.shard_requests import Requester
from ringlog.testing import engine
from ringlog.testing.real_engine import wait_until
from ringlog.verify.directory import verify_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STOPS = [name for name in stop_points.POINTS if name.startswith("compact_")]
TOPICS = [f"topic-{n}" for n in range(5)]


def running(tmp_path, shards=2, file_bytes="1MiB", **options):
    return engine(
        wal={"shards": shards, "file_bytes": file_bytes},
        storage={"enabled": True, "own_segment_bytes": "64KiB"},
        directory=str(tmp_path / "engine"),
        **options,
    )


def write(client, start, count=400):
    for name in TOPICS:
        client.append_many(
            name, [f"{name}:{n}".encode().ljust(200, b".") for n in range(start, start + count)]
        )


def read_back(client, count):
    """Check every topic from its first record to its last."""
    for name in TOPICS:
        found = [record.data.rstrip(b".") for record in client.reader(name)]
        assert found == [f"{name}:{n}".encode() for n in range(count)], name


def checkpoint_now(host, timeout_s=30.0):
    """Request a checkpoint as an operator does. Repeat the request while the compactor restarts."""
    compactor = Requester("compactor", f"ipc://{host.info.shm_dir}/compactor.sock")
    found = []

    def is_made():
        try:
            found.append(
                compactor.ask(m.CheckpointNow(), m.CheckpointMade, timeout_s=timeout_s).message.files
            )
        except RinglogError:
            return False
        return True

    try:
        wait_until(is_made, 60.0, "a checkpoint")
    finally:
        compactor.close()
    return found[0]


def test_a_checkpoint_moves_records_to_segments_and_readers_find_them_there(tmp_path):
    """Readers find all records before and after a restart of the engine."""
    with running(tmp_path) as host:
        with ringlog.connect(host.url) as client:
            write(client, 0)
            files = checkpoint_now(host)
            assert any(name.endswith(".data") for name in files)
            assert all(os.path.exists(f"{host.data_dir}/{name}") for name in files)
            read_back(client, 400)
            write(client, 400)
            checkpoint_now(host)
            checkpoint_now(host)
            read_back(client, 800)
        host.restart()
        with ringlog.connect(host.url) as client:
            read_back(client, 800)
            write(client, 800)
            read_back(client, 1200)


@pytest.mark.parametrize("point", STOPS)
def test_a_compactor_that_dies_at_any_point_loses_and_duplicates_nothing(tmp_path, point):
    """Its successor repeats the unfinished work."""
    with running(tmp_path, environ={"RINGLOG_TEST_STOP_POINTS": f"{point}:1:kill"}) as host:
        with ringlog.connect(host.url) as client:
            write(client, 0)
            checkpoint_now(host)
            assert restarts_of(host) == 1
            read_back(client, 400)
        host.crash()
        host.start()
        with ringlog.connect(host.url) as client:
            read_back(client, 400)


def restarts_of(host):
    return next(process.restarts for process in host.status().processes if process.kind == "compactor")


def test_the_reclaimer_runs_at_idle_priority_and_the_compactor_only_in_its_passes(tmp_path):
    with running(tmp_path) as host:
        checkpoint_now(host)
        how = {
            role: (
                os.sched_getscheduler(host.pid_of(role)),
                os.getpriority(os.PRIO_PROCESS, host.pid_of(role)),
            )
            for role in ("compactor", "reclaimer")
        }
        assert how["reclaimer"] == (os.SCHED_IDLE, 19)
        assert how["compactor"] == (os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))


def test_a_killed_compactor_is_replaced_while_the_engine_stays_ready(tmp_path):
    with running(tmp_path) as host:
        host.kill("compactor")
        assert host.status().state == "ready"
        assert checkpoint_now(host)
        assert host.stop() == 0


def test_the_compactor_reconnects_to_a_restarted_shard(tmp_path):
    with running(tmp_path) as host, ringlog.connect(host.url) as client:
        write(client, 0)
        checkpoint_now(host)
        host.kill("wal_shard", shard=1)
        write(client, 400)
        checkpoint_now(host)
        read_back(client, 800)
        assert restarts_of(host) == 0


def test_a_different_number_of_shards_recovers_everything_from_the_old_snapshots(tmp_path):
    with running(tmp_path) as host, ringlog.connect(host.url) as client:
        write(client, 0)
        checkpoint_now(host)
        write(client, 400)
    for shards in (3, 1):
        with running(tmp_path, shards=shards) as host:
            with ringlog.connect(host.url) as client:
                read_back(client, 800)
            for _ in range(3):
                checkpoint_now(host)
            host.restart()
            with ringlog.connect(host.url) as client:
                read_back(client, 800)


def test_an_orderly_stop_leaves_a_snapshot_and_the_next_start_replays_no_log(tmp_path):
    # One large file, so that no pass absorbs it before the stop. A CPU-starved pass would delay the stop.
    with running(tmp_path, shards=1, file_bytes="64MiB") as host:
        with ringlog.connect(host.url, wait=10) as client:
            for name in TOPICS:
                client.topics.create(name, durability="fsync")
            for start in range(0, 2_000, 400):
                write(client, start)
        # A compactor that still starts exits at once: the next start replays the log.
        host.wait_ready("compactor")
        host.stop()
        snapshots = os.listdir(os.path.join(host.data_dir, "meta"))
        assert any(name.startswith("snapshot-00.") for name in snapshots), snapshots
        found = verify_directory(host.data_dir, jobs=1)
        assert not found.is_damaged, found.findings
        assert not any(report.served for report in found.files if report.kind == "wal"), "nothing to replay"
        host.start()
        with ringlog.connect(host.url, wait=10) as client:
            read_back(client, 2_000)


def in_the_middle_of_a_pass(host):
    """Write records until the compactor pauses at its stop point. Return its pid."""
    with ringlog.connect(host.url, wait=10) as client:
        for name in TOPICS:
            client.topics.create(name, durability="fsync")
        # Several full log files are ready for the pass.
        for start in range(0, 4_000, 400):
            write(client, start)
    pid = host.pid_of("compactor")
    wait_until(lambda: state_of(pid) == "T", 30.0, "the compactor to pause")
    return pid


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


PAUSED = {"RINGLOG_TEST_STOP_POINTS": "compact_mid_read:1:pause"}


def test_a_stop_in_the_middle_of_a_pass_is_orderly_and_prompt(tmp_path):
    """A pass can end after each of its steps. The next compactor repeats the unfinished pass."""
    with running(tmp_path, shards=1, environ=PAUSED) as host:
        compactor = in_the_middle_of_a_pass(host)
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(host.stop)
            wait_until(lambda: "engine stops" in host.log_path.read_text(), 20.0, "the stop to begin")
            os.kill(compactor, signal.SIGCONT)
            assert stopped.result() == 0
        assert "main thread" not in host.log_path.read_text()
        host.start()
        with ringlog.connect(host.url, wait=10) as client:
            read_back(client, 4_000)


def test_a_paused_compactor_is_killed_at_the_drain_limit_and_the_stop_is_orderly(tmp_path):
    """A compactor holds no state that must survive. The supervisor kills it, and the exit code stays 0."""
    with running(tmp_path, shards=1, environ=PAUSED, supervisor={"drain_s": 1.0}) as host:
        in_the_middle_of_a_pass(host)
        assert host.stop() == 0


def test_an_orphaned_compactor_does_not_keep_the_next_engine_waiting(tmp_path):
    with running(tmp_path, shards=1, environ=PAUSED) as host:
        compactor = in_the_middle_of_a_pass(host)
        pidfd = os.pidfd_open(compactor)
        host.kill("supervisor")
        try:
            # The process is still paused. Even a stopped process must not outlive its supervisor.
            assert select.select([pidfd], [], [], 20.0)[0]
        finally:
            os.close(pidfd)
        host.start()
        with ringlog.connect(host.url, wait=10) as client:
            read_back(client, 4_000)
