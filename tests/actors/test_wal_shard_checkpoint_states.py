"""Crash states of histories with checkpoints: after every disk call of shard and compactor every legal
image is recovered, twice, and judged by what was acknowledged."""

from __future__ import annotations

import pytest
from checkpoint_world import Asking, checkpoint

from actors.wal_shard import recover
from actors.wal_shard.checkpoint import Checkpoint as ShardSide
from chaos.states import workload
from chaos.states.explore import Tally, explore
from chaos.states.judge import Broken
from ringlog.envelope.messages import CheckpointDone, CheckpointRows
from ringlog.testing.shard_world import DATA


def _checkpoint(work):
    if not work.disk.exists(f"{DATA}/meta"):
        work.disk.make_dir(f"{DATA}/meta")
        work.disk.sync_dir(DATA)
    checkpoint(work.world)


def _checkpoint_amid(work):
    """Records come between the plan and the rows, and between the rows and the end."""
    asking = Asking(work.world)

    def before(message):
        if isinstance(message, CheckpointRows | CheckpointDone):
            work.send("d", [work.payload()])
            work.send("f", [work.payload()])
            work.send("d", [work.payload()])

    asking.before = before
    checkpoint(work.world, asking=asking)


@pytest.fixture(autouse=True)
def _with_checkpoints(monkeypatch):
    monkeypatch.setitem(workload.STEPS, "checkpoint", _checkpoint)
    monkeypatch.setitem(workload.STEPS, "checkpoint_amid", _checkpoint_amid)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "steps",
    [
        ("append", "checkpoint", "append"),
        ("append_disk_many", "checkpoint", "append_disk"),
        ("append", "checkpoint", "delete", "append_disk", "checkpoint"),
        ("append", "checkpoint", "checkpoint_amid"),
    ],
)
def test_every_crash_state_of_a_checkpoint_recovers_to_what_was_acknowledged(steps):
    """CKP-1, CKP-9, SN-5, FH-5: INV-1 to 5, 15, 18 hold whatever call was the last."""
    tally = explore([steps], Tally(recoveries_every=60), seconds=50)
    assert tally.judged > 100
    assert tally.acked > 50


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_crash_state_of_long_histories_with_checkpoints():
    """Three checkpoints: files are unlinked, snapshots retired; starts between them."""
    chosen = [
        ("append", "checkpoint", "append_disk", "checkpoint", "append", "checkpoint", "append"),
        ("append_many", "checkpoint", "restart", "append_disk_many", "checkpoint", "config", "checkpoint"),
        ("roll", "checkpoint", "delete", "checkpoint", "restart", "append_disk", "checkpoint"),
    ]
    tally = explore(chosen, seconds=50)
    assert tally.judged > 200


# -- mutants: each is a plausible mistake, and the judge has to see it -----------------------------------


def caught(*steps: str) -> str:
    with pytest.raises(Broken) as broken:
        explore([steps], Tally(recoveries_every=1 << 30))
    return str(broken.value)


def test_a_snapshot_ahead_of_its_log_is_caught(monkeypatch):
    """The last page answered before what the rows speak of is synced."""
    monkeypatch.setattr(ShardSide, "_await_durable", lambda self, group: None)
    assert caught("append", "checkpoint", "append_disk", "checkpoint_amid")


def test_forgetting_what_lies_behind_the_snapshot_is_caught(monkeypatch):
    """Every file taken for absorbed."""
    monkeypatch.setattr(recover.Baseline, "absorbs", lambda self, file_id: bool(self.layers))
    assert caught("append", "checkpoint", "append")
