"""Crash states of the shard: all of them for short histories, and mutants that the judge must detect.

The exhaustive run is `python -m chaos run states`.
"""

from __future__ import annotations

import random

import pytest

from chaos.states.explore import Share, explore, histories
from ringlog.actors.wal_shard.commit.batch_committer import BatchCommitter
from ringlog.actors.wal_shard.recovery import replay
from ringlog.actors.wal_shard.recovery.copy_forward import CopyForward
from ringlog.actors.wal_shard.recovery.file_ends import FileEnds
from ringlog.drill.checks import GuaranteeBroken
from ringlog.storage.disk import Disk
from ringlog.storage.wal import WalWriter
from ringlog.topic.dedup import ProducerTable
from ringlog.topic.reservation import Reservation


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_crash_state_of_every_single_step_recovers_twice_to_the_same_state():
    """Every legal image after each disk call, and crash states of recovery itself (RF-57, RF-59)."""
    steps = ("append", "append_many", "append_disk", "append_disk_many", "delete_topic", "idle", "restart")
    share = Share(recoveries_every=40, recovery_cuts=4, sends_again_every=2, goes_on_every=1 << 30)
    tally = explore(histories(1, steps), share=share)
    assert tally.histories == len(steps)
    assert tally.judged > 150
    assert tally.acked > 80, "too few images with acked records"
    assert tally.recoveries > 20


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.night
def test_crash_states_of_two_steps_recover_twice_to_the_same_state():
    """Sequences of two operations (RF-58) in a seeded order, for 10 s. `make chaos` runs all of them."""
    pairs = [each for each in histories(2) if len(each) == 2]
    random.Random(20).shuffle(pairs)
    share = Share(recoveries_every=1 << 30, sends_again_every=4, goes_on_every=100)
    tally = explore(pairs, share=share, seconds=10)
    assert tally.histories >= 2, "too few histories were explored"
    assert tally.judged >= 100


# -- mutants: each is a plausible mistake that the judge must detect -------------------------------------


def caught(*steps: str) -> str:
    """Return the judge's message about these histories under a mutant. Fail if there is none."""
    with pytest.raises(GuaranteeBroken) as broken:
        explore([steps], share=Share(recoveries_every=1 << 30))
    return str(broken.value)


@pytest.mark.interpreted
def test_an_ack_before_the_sync_is_caught(monkeypatch):
    """The mutant settles frames when they are written."""
    monkeypatch.setattr(BatchCommitter, "on_written", BatchCommitter.finish)
    assert caught("append")


def test_a_sync_that_is_not_done_is_caught(monkeypatch):
    """The mutant does not sync WAL files."""
    monkeypatch.setattr(WalWriter, "sync", lambda self: None)
    assert "power loss" in caught("append")


@pytest.mark.interpreted
def test_a_reservation_acked_before_it_is_durable_is_caught(monkeypatch):
    """Seqs of a `disk` topic are issued twice, or their loss is not reported."""
    monkeypatch.setattr(BatchCommitter, "_reserve_heads", lambda self, group: None)
    assert "power loss" in caught("append_disk")


def test_settling_the_recovered_tail_without_copying_it_is_caught(monkeypatch):
    """The mutant settles frames that exist only in the page cache (RF-42)."""
    monkeypatch.setattr(CopyForward, "copy", lambda self, *given, **named: None)
    monkeypatch.setattr(FileEnds, "_doubt", lambda self, file, stop: None)
    assert caught("append")


def test_dropping_the_unsynced_tail_is_caught(monkeypatch):
    """Acked frames without a chain mark must be copied, not cut."""
    monkeypatch.setattr(CopyForward, "copy", lambda self, *given, **named: None)
    assert "is gone" in caught("append") or "changes the state" in caught("append")


def test_a_directory_that_is_not_synced_is_caught(monkeypatch):
    """The mutant creates the log directories without syncing them."""

    def make_stream(disk: Disk, data_dir: str, shard: int) -> str:
        disk.make_dir(f"{data_dir}/wal")
        disk.make_dir(f"{data_dir}/wal/shard-{shard:02d}")
        return f"{data_dir}/wal/shard-{shard:02d}"

    monkeypatch.setattr("tests.support.shard_world.make_stream", make_stream)
    assert caught("append")


def test_a_forgotten_dedup_table_is_caught(monkeypatch):
    """The mutant does not restore producers in replay."""
    monkeypatch.setattr(replay.Replay, "_remember", staticmethod(lambda topic, words: None))
    assert "sent again" in caught("append")


def test_a_reservation_that_is_not_restored_is_caught(monkeypatch):
    """After a power loss the head must move to the reserved seq."""
    monkeypatch.setattr(Reservation, "restore", lambda self, value: None)
    assert "power loss" in caught("append_disk", "append_disk_many")


@pytest.mark.interpreted
def test_a_dedup_that_admits_repeats_is_caught(monkeypatch):
    """A pair of producer and number is appended at most once (W4)."""
    monkeypatch.setattr(ProducerTable, "get", lambda self, producer_id: None)
    assert "sent again" in caught("append")
