"""Crash states of histories with checkpoints.

After every disk call of shard and compactor, every legal image is recovered twice and compared with the acked
writes.
"""

from __future__ import annotations

import pytest

from chaos.states.explore import Share, explore
from ringlog.actors.wal_shard.recovery.baseline import Baseline
from ringlog.actors.wal_shard.retention.checkpoint import ShardCheckpoint as ShardSide
from ringlog.drill.checks import GuaranteeBroken

SHARE = Share(recoveries_every=400, recovery_cuts=4, sends_again_every=5, goes_on_every=100)


@pytest.mark.slow
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
def test_every_crash_state_of_a_checkpoint_recovers_the_acked_writes(steps):
    """Snapshot, segments and the later log reproduce the state after any last call (C1)."""
    tally = explore([steps], share=SHARE, seconds=50)
    assert tally.judged > 100
    assert tally.acked > 50


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.night
def test_every_crash_state_of_long_histories_with_checkpoints():
    """Three checkpoints remove log files and retire snapshots, with restarts between them."""
    chosen = [
        ("append", "seal", "append_disk", "seal", "append", "seal", "append"),
        ("append_many", "seal", "restart", "append_disk_many", "seal", "config", "seal"),
        ("rotate", "seal", "delete_topic", "seal", "restart", "append_disk", "seal"),
    ]
    tally = explore(chosen, share=SHARE, seconds=15)
    assert tally.judged > 100


# -- mutants: each is a plausible mistake that the judge must detect -------------------------------------


def caught(*steps: str) -> str:
    with pytest.raises(GuaranteeBroken) as broken:
        explore([steps], share=SHARE)
    return str(broken.value)


@pytest.mark.interpreted
@pytest.mark.night
def test_a_snapshot_ahead_of_its_log_is_caught(monkeypatch):
    """The mutant answers the last page before the log that its rows describe is synced."""
    monkeypatch.setattr(ShardSide, "_await_durable", lambda self, group: None)
    assert caught("append", "seal", "append_disk", "seal_amid")


def test_skipping_the_log_after_the_snapshot_is_caught(monkeypatch):
    """The mutant treats every log file as absorbed."""
    monkeypatch.setattr(Baseline, "absorbs", lambda self, file_id: bool(self.layers))
    assert caught("append", "seal", "append")
