"""Batch reads of damaged engines: restarts, damage at rest, a cold tier, records lost in a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringlog
from ringlog.errors import CorruptData, NotReady
from ringlog.spark.bounds import gaps_of
from ringlog.spark.catalog import Catalog
from ringlog.spark.clients import close_clients
from ringlog.spark.errors import DataLoss
from ringlog.spark.plan import COLD
from ringlog.spark.slice_reader import read_slices
from ringlog.testing.real_engine import engine, wait_until
from tests.support.checkpoints import checkpoint
from tests.support.spark_records import copied, damage, reader_of, seqs, write

pytestmark = pytest.mark.slow
N = 10_000


@pytest.fixture
def hurt():
    with engine(wal={"shards": 1}, storage={"enabled": True}) as running:
        yield running
    close_clients()


def fill(running, first=1, last=N):
    with ringlog.connect(running.url, wait=10) as client:
        write(client, "t", first, last, size=50)


def test_a_plan_is_still_valid_after_a_restart_of_the_engine(hurt):
    """The kept client reconnects after a restart and after a kill of the shard."""
    fill(hurt)
    reader, _ = reader_of(hurt, "t", columns="seq", minPartitions="3")
    parts = reader.partitions()
    first = [seq for batch in reader.read(copied(parts[0])) for seq in batch["seq"].to_pylist()]
    hurt.restart()
    rest = [seq for part in parts[1:] for b in reader.read(copied(part)) for seq in b["seq"].to_pylist()]
    assert first + rest == list(range(1, N + 1))
    hurt.kill("wal_shard")
    assert seqs(hurt, "t") == list(range(1, N + 1))


@pytest.mark.parametrize("fails", [True, False])
def test_ephemeral_records_of_a_dead_engine_are_a_reported_loss(fails):
    """Their seqs are never used for other records."""
    with engine(wal={"shards": 1}) as running:
        with ringlog.connect(running.url, wait=10) as client:
            client.topics.create("t", durability="ephemeral")
            write(client, "t", 1, 100, frame=10)
            reader, struct = reader_of(running, "t", columns="seq", failOnDataLoss=str(fails))
            (part,) = reader.partitions()
            running.crash()
            running.start()
            client.append("t", b"new", durability="ephemeral")
        gaps = []
        reading = read_slices(part.slices, reader._options, struct, gaps.append)
        if fails:
            with pytest.raises(DataLoss, match="restart_loss"):
                list(reading)
        else:
            assert list(reading) == []
            assert [(each.gap_from, each.gap_to, each.reason) for each in gaps] == [(1, 100, "restart_loss")]
        with Catalog.open(running.data_dir) as catalog:
            (gap,) = gaps_of(catalog, part.bounds[0])
        assert (gap.gap_from, gap.gap_to, gap.reason) == (1, 100, "restart_loss")
    close_clients()


def data_files(running):
    return sorted(Path(running.data_dir).rglob("*.data"))


def test_damage_fails_the_task_and_quarantine_omits_only_the_damaged_frame(hurt):
    """With onCorrupt=quarantine the omitted records are reported."""
    fill(hurt)
    checkpoint(hurt)
    first, last = damage(hurt, 5_000, N)
    assert (first, last) == (4_097, 5_120)
    with pytest.raises(CorruptData, match="body does not match its checksum") as caught:
        seqs(hurt, "t")
    assert (caught.value.detail["first_seq"], caught.value.detail["last_seq"]) == (first, last)
    with pytest.raises(CorruptData):
        seqs(hurt, "t", failOnDataLoss="false")
    reader, struct = reader_of(hurt, "t", columns="seq", onCorrupt="quarantine")
    gaps = []
    found = [
        seq
        for part in reader.partitions()
        for batch in read_slices(part.slices, reader._options, struct, gaps.append)
        for seq in batch["seq"].to_pylist()
    ]
    assert found == [*range(1, first), *range(last + 1, N + 1)]
    assert [(each.gap_from, each.gap_to, each.reason) for each in gaps] == [(first, last, "corrupt")]


def test_cold_records_are_read_in_separate_partitions(tmp_path):
    """A missing cold store is an error and never a gap."""
    cold = tmp_path / "cold"
    cold.mkdir(mode=0o700)
    settings = {"dir": str(cold), "hot_segments": 0, "interval_s": 0.1}
    with engine(wal={"shards": 1}, storage={"enabled": True}, cold=settings) as running:
        fill(running)
        checkpoint(running)
        wait_until(
            lambda: not data_files(running) and any(cold.rglob("*.data")), 20, "the segment is relocated"
        )
        fill(running, N + 1, 2 * N)
        reader, _ = reader_of(running, "t", maxPartitionBytes="100k")
        parts = reader.partitions()
        tiers = [{each.tier == COLD for each in part.slices} for part in parts]
        assert {True} in tiers
        assert {False} in tiers
        assert all(len(each) == 1 for each in tiers)
        assert seqs(running, "t") == list(range(1, 2 * N + 1))
        cold.rename(tmp_path / "gone")
        with pytest.raises(NotReady, match="cold"):
            seqs(running, "t", failOnDataLoss="false")
        (tmp_path / "gone").rename(cold)
        assert len(seqs(running, "t")) == 2 * N
    close_clients()
