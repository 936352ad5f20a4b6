"""Random lives of an engine with four classes, several producers and every kind of end, against a model.

The module scenarios/story.py states what the model requires of the shard.
"""

from __future__ import annotations

import pytest
from scenarios.story import Story

from ringlog.errors import RinglogError
from tests.support.shard_world import ShardRunEnded


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.timeout(120)
def test_random_lives_of_one_shard_satisfy_the_model(seed):
    """They include the loss of the end of a disk-class topic after readers saw it (RF-66)."""
    story = Story(seed)
    story.run(100)
    assert story.ends > 8
    assert story.made > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1_000, 1_006))
@pytest.mark.timeout(120)
def test_random_lives_with_changing_shard_counts_satisfy_the_model(seed):
    """The number of shards changes at restarts (RF-67). Names, epochs and deletions are checked as well."""
    story = Story(seed, shards=3, changes_layout=True)
    story.run(100)
    assert story.ends > 8


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.night
def test_more_random_lives():
    """The same tests with other seeds, including those of earlier failures."""
    for seed in (27, 1005, 1041, 2007, 2035, 2090, 2132, 8167):
        Story(
            seed, shards={27: 1, 8167: 4}.get(seed, 2 if seed >= 2_000 else 3), changes_layout=seed > 1_000
        ).run(120)
    for seed in range(4_000, 4_006):
        Story(seed, shards=1 + seed % 4, changes_layout=seed % 3 == 0).run(80)


def is_noticed() -> bool:
    """Return whether one of eight stories fails."""
    for seed in range(8):
        try:
            Story(seed).run(100)
        except (AssertionError, ShardRunEnded, RinglogError):
            return True
    return False


@pytest.mark.interpreted
def test_the_model_detects_an_ack_before_the_sync(monkeypatch):
    """A model that accepts everything proves nothing."""
    from ringlog.actors.wal_shard.commit.batch_committer import BatchCommitter

    monkeypatch.setattr(BatchCommitter, "on_written", BatchCommitter.finish)
    assert is_noticed()


def test_the_model_detects_a_forgotten_deletion(monkeypatch):
    """The mutant ignores the deletion of topics in replay."""
    from ringlog.actors.wal_shard.recovery.replay import Replay

    apply_control = Replay._apply_control

    def without_removals(self: Replay, topic_id: int, body: object) -> None:
        if type(body).__name__ != "TopicRemoved":
            apply_control(self, topic_id, body)  # type: ignore[arg-type]

    monkeypatch.setattr(Replay, "_apply_control", without_removals)
    assert is_noticed()
