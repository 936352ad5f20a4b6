"""The simulated world: its seeds pass, replay exactly, and detect planted bugs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("greenlet")

from chaos import world
from chaos.order import Account, Order
from chaos.world.model import Model
from chaos.world.plan import Case, Failed, parse_case, shrink
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import Outcome
from ringlog.types import Durability

SEEDS = range(11, 14)
pytestmark = pytest.mark.timeout(120)


def story_of(seed: int) -> list[Any]:
    done = world.live(Case(seed))
    return [*done.engine.story, done.loop.events, done.loop.now_ns, sorted(done.facts().items())]


def is_noticed(*seeds: int) -> str:
    """Return the failure of the first failing seed. Each seed passes without the planted bug."""
    return next(filter(None, (world.how_it_fails(Case(seed)) for seed in seeds)), "")


def test_seeds_pass_and_include_work_deaths_and_disk_faults(account: Account) -> None:
    """Each seed contains appends, reads, process deaths and disk faults, and all are judged."""
    for seed in SEEDS:
        world.note(world.live(Case(seed)), account)
    assert account.counts["seeds"] == len(SEEDS)
    assert account.counts["simulated_s"] >= 12 * len(SEEDS)
    assert account.counts["deaths"] >= 10 * len(SEEDS)
    assert account.counts["disk_faults"] >= 3 * len(SEEDS)
    assert account.counts["appends"] >= 20 * len(SEEDS)
    assert account.counts["reads"] >= 20 * len(SEEDS)
    assert account.faults["RF-24"] == len(SEEDS)


FOUND = {
    200_964: "numbers were given out a second time after power was lost, behind a change of shards",
    202_234: "a segment of several shards' topics, made anew, was forgotten by all shards but one",
    202_101: "the same, while an acknowledged record below it was there",
    202_403: "the only copy of a segment left the cold tier while a snapshot listed it",
    202_226: "two shards pointed to one another for a name",
    202_148: "records were nowhere, behind two changes of the number of shards",
    205_143: "an earlier life of a topic, found in an old log, ended the later one that a snapshot told of",
    204_980: "a segment that was removed while it was copied to the cold tier was called damaged",
    205_787: "the verifier passed over the snapshot of the layout before while a shard of the next had one",
    7399420000200912: "a name's home forgot that a shard beside it had the topic, which was then made anew",
    7399420000201555: "a topic that was removed behind a snapshot nobody was told of was back",
    7399420792100801: "records that expired while a delete waited for a file were taken away twice",
    7399420792101334: "a gateway showed deleted records that a later frame holds once more",
    7399420792104989: "(the verifier: what was left of a segment that only an earlier layout listed)",
    7399420000202462: "segments superseded by an unfinished checkpoint of another layout were lost with it",
    7399430000205109: "a pack left the host while a shard that did not answer led readers to it there",
    7399430000200373: "(the judge: a log file to which nothing was written may go at any time)",
    200_097: "(the judge: an answer that came when power was lost already)",
    201_397: "(the judge: a deletion that a loss of power undid)",
    7399500000204429: "(the judge: a refusal of unknown outcome: a shard that died had the frame)",
}
"""Seeds that found a fault, each with the fault."""


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_found_a_fault_pass(seed: int) -> None:
    world.live(Case(seed))


def test_a_seed_gives_the_same_history_each_time() -> None:
    assert story_of(21) == story_of(21)


def test_run_reports_a_finding_with_its_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(case: Case) -> Any:
        raise Failed(f"broken in {case.seed}", "the story")

    monkeypatch.setattr(world, "live", fails)
    account = Account()
    world.run(Order("world", 3, 0.01, tmp_path), account)
    assert account.findings[0].case == "seed=300000 steps=0..100"
    assert account.findings[0].story == "the story"


def test_run_ends_when_its_floors_are_reached(account, tmp_path):
    world.run(Order("world", 3, 300.0, tmp_path, floors={"seeds": 2}), account)
    assert account.counts["seeds"] == 2


def test_an_ack_before_the_sync_is_detected_by_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard acks a frame before the sync that covers it (mutant 1)."""
    from ringlog.actors.wal_shard.commit.batch_committer import BatchCommitter

    monkeypatch.setattr(BatchCommitter, "on_written", BatchCommitter.finish)
    assert "is synced up to" in is_noticed(100, 101)


def test_a_lost_producer_history_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated frames are appended again (mutant 19)."""
    from ringlog.topic.dedup import ProducerHistory

    monkeypatch.setattr(ProducerHistory, "extend", lambda *_: None)
    assert is_noticed(2, 11)


def test_an_ignored_deletion_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted topic exists again after a restart."""
    from ringlog.actors.wal_shard.recovery.replay import Replay

    apply_control = Replay._apply_control

    def without_removals(self: Replay, topic_id: int, body: object) -> None:
        if type(body).__name__ != "TopicRemoved":
            apply_control(self, topic_id, body)  # type: ignore[arg-type]

    monkeypatch.setattr(Replay, "_apply_control", without_removals)
    assert is_noticed(100, 101, 102)


def test_a_case_is_one_line_and_shrinks_to_the_needed_steps() -> None:
    assert str(Case.of(5, [3, 4, 7])) == "seed=5 steps=3..8 without=5,6"
    assert parse_case("seed=5 steps=3..8 without=5,6").kept == [3, 4, 7]
    assert parse_case("seed=9").kept == list(range(100))
    with pytest.raises(ValueError, match="not a case"):
        parse_case("whatever")

    def fails(case: Case) -> str:
        return f"record {len(case.kept)} is gone" if {17, 60} <= set(case.kept) else ""

    assert shrink(Case(5), fails).kept == [17, 60]


@pytest.mark.parametrize(("outcome", "state"), [("not_applied", "refused"), ("unknown", "unknown")])
def test_only_a_refusal_that_says_so_promises_that_nothing_was_appended(outcome: Outcome, state: str) -> None:
    model = Model(lambda: 1)
    life = model.met("a", 7, 3, Durability.FSYNC, 0, 0, 1)
    sent = model.submit(life, 1, 1, [b"payload"], "", b"frame")
    model.sending(sent)
    model.refused(sent, outcome)
    assert sent.state == state
    if state == "refused":
        with pytest.raises(GuaranteeBroken, match="which was refused"):
            model.read(life, 1, 0, 1, 1, 1, [(1, b"payload")], 0)
    else:
        model.read(life, 1, 0, 1, 1, 1, [(1, b"payload")], 0)


def test_a_topic_is_not_recreated_unless_it_was_deleted() -> None:
    """A name gets a new topic although its topic was never deleted (mutants 31 and 46)."""
    model = Model(lambda: 1)
    model.met("a", 7, 3, Durability.FSYNC, 0, 0, 1)
    with pytest.raises(GuaranteeBroken, match="nobody asked to end epoch 3"):
        model.met("a", 9, 4, Durability.FSYNC, 0, 0, 2)
    model.doomed.add((7, 3))
    assert model.met("a", 9, 4, Durability.FSYNC, 0, 0, 3).epoch == 4
