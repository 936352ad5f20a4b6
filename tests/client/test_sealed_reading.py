"""A real engine that compacts its log into segments.

Every transport reads the same before, during and after a compaction.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import ringlog
from ringlog.testing.real_engine import engine, wait_until
from tests.support.checkpoints import checkpoint
from tests.support.engines import engine_fixture

pytestmark = pytest.mark.slow
RECORDS = 20_000
ENGINE = {"wal": {"shards": 1}, "gateway": {"enabled": True}, "storage": {"enabled": True}}

running = engine_fixture("module", **ENGINE)


@pytest.fixture
def clients(running):
    """One client over rings, one over the gateway."""
    with (
        ringlog.connect(running.url, wait=10) as ring,
        ringlog.connect(running.url, wait=10, transport="ipc") as ipc,
    ):
        yield ring, ipc


def write(client, topic, first, last):
    with client.producer(topic, linger_ms=1) as producer:
        for n in range(first, last + 1):
            producer.send(b"%d" % n, tag=f"t{n % 10}")


def everything(clients, topic, after=0):
    """Read the topic in every way. Return the records, which must be equal."""
    ring, _ = clients
    found = [[int(record.data) for record in client.reader(topic, after + 1)] for client in clients]
    pages = [int(data) for page in ring.reader(topic, after + 1).pages(777) for data in page.bytes()]
    with ring.tailer(topic, after + 1, follow=False) as tailer:
        tailed = [int(data) for batch in tailer for data in batch.bytes()]
    assert found[0] == found[1] == pages == tailed
    return tailed


def test_records_are_equal_in_the_log_and_in_segments(running, clients, topic):
    """This includes deletes before and after a compaction, a restart of the shard, and seeking by time."""
    ring, ipc = clients
    write(ring, topic, 1, RECORDS)
    assert everything(clients, topic) == list(range(1, RECORDS + 1))
    assert any(name.endswith(".data") for name in checkpoint(running))
    assert everything(clients, topic) == list(range(1, RECORDS + 1))
    assert everything(clients, topic, 12_345) == list(range(12_346, RECORDS + 1))
    assert ipc.topics.delete_records(topic, match="t3").deleted == RECORDS // 10
    write(ring, topic, RECORDS + 1, RECORDS + 10)
    expected = [n for n in range(1, RECORDS + 11) if n % 10 != 3 or n > RECORDS]
    assert everything(clients, topic) == expected
    checkpoint(running)
    assert everything(clients, topic) == expected
    running.kill("wal_shard", shard=0)
    assert everything(clients, topic) == expected
    assert ring.topics.delete_records(topic, before_seq=5001).deleted == 4500
    checkpoint(running)
    assert everything(clients, topic) == [n for n in expected if n > 5000]
    record = ring.read(topic, 15_000, limit=1).records[0]
    for client in clients:
        sought = client.read(topic, start=record.time, limit=1).records[0]
        before = client.read(topic, sought.seq - 2, limit=1).records[0]
        assert sought.ts == record.ts
        assert before.seq >= sought.seq or before.ts < record.ts


def test_compaction_during_reads_is_invisible(running, clients, topic):
    """Checkpoints run continuously while the clients write and read."""
    ring, _ = clients
    done = threading.Event()
    problems = []

    def seal():
        while not done.is_set():
            try:
                checkpoint(running)
            except Exception as e:  # noqa: BLE001  shown by the test
                problems.append(e)
                return

    sealing = threading.Thread(target=seal)
    sealing.start()
    try:
        for round_ in range(5):
            write(ring, topic, 2000 * round_ + 1, 2000 * round_ + 2000)
            assert everything(clients, topic) == list(range(1, 2000 * round_ + 2001))
    finally:
        done.set()
        sealing.join(30)
    assert not problems


def test_cold_records_can_be_read_with_every_transport(tmp_path):
    """Local clients open the files of the cold tier. For gateway clients the relocator reads them."""
    settings = {"dir": str(tmp_path / "cold"), "hot_segments": 0, "interval_s": 0.1}
    (tmp_path / "cold").mkdir(mode=0o700)
    with (
        engine(
            wal={"shards": 1}, gateway={"enabled": True}, storage={"enabled": True}, cold=settings
        ) as running,
        ringlog.connect(running.url, wait=10) as ring,
        ringlog.connect(running.url, wait=10, transport="ipc") as ipc,
    ):
        write(ring, "t", 1, RECORDS)
        checkpoint(running)
        write(ring, "t", RECORDS + 1, RECORDS + 5)

        def is_cold():
            hot = list(Path(running.data_dir).rglob("*.data"))
            return not hot and any((tmp_path / "cold").rglob("*.data"))

        wait_until(is_cold, 20, "the segment is relocated")
        assert everything((ring, ipc), "t") == list(range(1, RECORDS + 6))
        assert ring.topics.delete_records("t", match="t1").deleted == RECORDS // 10 + 1
        assert len(everything((ring, ipc), "t")) == RECORDS + 5 - (RECORDS // 10 + 1)
