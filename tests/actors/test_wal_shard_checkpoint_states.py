"""Crash states of histories with checkpoints: after every disk call of shard and compactor every legal
image is recovered, twice, and judged by what was acknowledged."""

from __future__ import annotations

import pytest

from actors.wal_shard.recovery import recovery
from actors.wal_shard.retention.checkpoint import ShardCheckpoint as ShardSide
from chaos.order import Broken
from chaos.states.explore import Share, explore

SHARE = Share(recoveries_every=400, recovery_cuts=4, sends_again_every=5, goes_on_every=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "steps",
    [
        ("append", "seal", "append"),
        ("append_disk_many", "seal", "append_disk"),
        ("append", "seal", "delete_topic", "append_disk", "seal"),
        ("append", "seal", "seal_amid"),
    ],
)
def test_every_crash_state_of_a_checkpoint_recovers_to_what_was_acknowledged(steps):
    """CKP-1, CKP-9, SN-5, FH-5: INV-1 to 5, 15, 18 hold whatever call was the last."""
    tally = explore([steps], share=SHARE, seconds=50)
    assert tally.judged > 100
    assert tally.acked > 50


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.night
def test_every_crash_state_of_long_histories_with_checkpoints():
    """Three checkpoints: files are unlinked, snapshots retired; starts between them."""
    chosen = [
        ("append", "seal", "append_disk", "seal", "append", "seal", "append"),
        ("append_many", "seal", "restart", "append_disk_many", "seal", "config", "seal"),
        ("rotate", "seal", "delete_topic", "seal", "restart", "append_disk", "seal"),
    ]
    tally = explore(chosen, share=SHARE, seconds=15)
    assert tally.judged > 100


# -- mutants: each is a plausible mistake, and the judge has to see it -----------------------------------


def caught(*steps: str) -> str:
    with pytest.raises(Broken) as broken:
        explore([steps], share=SHARE)
    return str(broken.value)


@pytest.mark.interpreted
@pytest.mark.night
def test_a_snapshot_ahead_of_its_log_is_caught(monkeypatch):
    """The last page answered before what the rows speak of is synced."""
    monkeypatch.setattr(ShardSide, "_await_durable", lambda self, group: None)
    assert caught("append", "seal", "append_disk", "seal_amid")


def test_forgetting_what_lies_behind_the_snapshot_is_caught(monkeypatch):
    """Every file taken for absorbed."""
    monkeypatch.setattr(recovery.Baseline, "absorbs", lambda self, file_id: bool(self.layers))
    assert caught("append", "seal", "append")
