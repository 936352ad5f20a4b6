"""The class `schedules`: a small run of each part, and the bugs that it must detect."""

from __future__ import annotations

import random
import secrets
from pathlib import Path
from types import SimpleNamespace

import pytest

from chaos import schedules
from chaos.order import Account, Order
from chaos.schedules import bell, ring, seqlock, starts
from ringlog.board.layout import ProcessField
from ringlog.ring.consumer import RingConsumer
from ringlog.ring.layout import RingWord
from ringlog.storage.real_disk import RealDisk
from ringlog.supervision import engine_resources, run_dir

LATE = ring.Plan(2 * ring.FRAME_BYTES, frames=2, late=2, producer_crashes=0, consumer_crashes=0)


def test_late_stores_break_a_ring_only_if_they_are_reordered() -> None:
    """Rings are therefore refused on processors that reorder stores (RF-34)."""
    assert ring.explore(LATE).schedules > 1_000_000
    with pytest.raises(ring.GuaranteeBroken) as caught:
        ring.explore(LATE, is_ordered=False)
    choices = iter(caught.value.path)
    with pytest.raises(ring.GuaranteeBroken, match=str(caught.value)[:20]):
        ring.Explorer(ring.replace(LATE, is_ordered=False)).walk(lambda successors: next(choices))


def test_a_single_schedule_reproduces_the_finding_of_the_graph() -> None:
    """The path of a finding is executed from the start, without saved states (mutant 20)."""

    class TailBeforeSettlement(RingConsumer):
        def settle(self, entries, new_tail):  # type: ignore[no-untyped-def]
            self._tail = new_tail
            self._memory.store(RingWord.TAIL, new_tail)
            super().settle(entries, new_tail)

    plan = ring.Plan(2 * ring.FRAME_BYTES, frames=3, producer_crashes=0)
    mutant = ring.replace(plan, consumer=TailBeforeSettlement)
    with pytest.raises(ring.GuaranteeBroken, match="never settled") as caught:
        ring.explore(mutant)
    choices = iter(caught.value.path)
    with pytest.raises(ring.GuaranteeBroken, match="never settled"):
        ring.Explorer(mutant).walk(lambda successors: next(choices))
    chance = random.Random(1)
    assert ring.Explorer(plan).walk(lambda successors: chance.randrange(len(successors))) > 20


def test_several_readers_never_see_mixed_facts() -> None:
    """A reader that does not check the sequence number again is detected (RF-116, mutant 22)."""
    assert schedules.explore_seqlock(readers=2).states > 500

    def without_second_look(words: seqlock.StepWords) -> object:
        if words[0] & 1:
            return seqlock.UNSTABLE
        return words[1], words[2]

    with pytest.raises(seqlock.Torn):
        schedules.explore_seqlock(without_second_look, readers=2)


@pytest.mark.parametrize("name", schedules.BELL_SPACES)
def test_no_bell_is_needed_for_progress(name: str) -> None:
    """Every sleeping process also polls (RF-35)."""
    plan = schedules.BELL_SPACES[name]
    assert bool(bell.explore(plan).missed) == (name not in {"bell", "calls"})


def _sleeps_without_looking_again(shell: SimpleNamespace) -> None:
    shell._slot.set(ProcessField.ASLEEP, 1)
    shell._poll.poll(1)
    shell._slot.set(ProcessField.ASLEEP, 0)
    shell._bell.drain()


def _looks_before_publishing(client: SimpleNamespace) -> None:
    is_asleep = client._location.is_asleep()
    client.publish()
    if is_asleep:
        client._shard_bell.ring()


@pytest.mark.parametrize(
    "changes",
    [{"sleep": _sleeps_without_looking_again}, {"wake": _looks_before_publishing},
     {"polls": False, "lost": 1}, {"polls": False, "is_late": True},
     {"sleep": _sleeps_without_looking_again, "through_calls": True},
     {"polls": False, "lost": 1, "through_calls": True}],
    ids=["no second look", "looks too early", "no poll, bell lost", "no poll, store late",
         "no second look at calls", "no poll, bell lost, calls"],
)  # fmt: skip
def test_the_bell_explorer_detects_each_planted_bug(changes: dict) -> None:
    """The protocol of the doorbell prevents each of these bugs."""
    with pytest.raises(bell.GuaranteeBroken):
        bell.explore(bell.Plan(), **changes)


def test_one_of_two_engines_starts_after_any_kill(tmp_path: Path) -> None:
    """This is a slice; the class runs every order with one switch or kill (RF-120)."""
    tried = starts.Starts(tmp_path)
    for order in ("", "0" * 8 + "1" * 6, "01" * 6, "0" * 10 + "a", "0" * 14 + "a" + "1" * 40):
        tried.run_order(order)
    assert tried.refused >= 1
    assert tried.kills == 2


def test_engines_without_a_lock_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines run at the same time."""

    def anybody(disk: object, data_dir: str) -> int:
        return RealDisk.lock(disk._disk, f"{data_dir}/lock-{secrets.token_hex(4)}")  # type: ignore[attr-defined]

    monkeypatch.setattr(engine_resources, "_take_lock", anybody)
    with pytest.raises(starts.GuaranteeBroken):
        starts.Starts(tmp_path).run_order("01" * 40)


def test_an_unrecorded_shared_memory_directory_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first finding of this class: the name was recorded after the directory was created."""
    make = run_dir.make_shm_dir

    def make_then_record(record: object) -> str:
        path = make(lambda path: None)
        record(path)  # type: ignore[operator]
        return path

    monkeypatch.setattr(run_dir, "make_shm_dir", make_then_record)
    wrong = []
    tried = starts.Starts(tmp_path)
    for steps in range(8, 16):
        try:
            tried.run_order("0" * steps + "a")
        except starts.GuaranteeBroken as e:
            wrong.append(str(e))
    assert any("left behind" in each for each in wrong)


def test_a_case_can_be_replayed_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding contains the name of its case."""
    order = Order("schedules", 1, 1.0, tmp_path)
    schedules.replay(order, "starts:0000000000a")
    schedules.replay(order, "late:0,0,1,1")
    assert "words" in capsys.readouterr().out


def test_counts_equal_those_of_the_explorers(account: Account) -> None:
    """The counts of the account must come from the explored graph."""
    schedules._ring("late", schedules.Space(LATE, ("RF-34",)), account)
    explored = ring.explore(LATE)
    assert account.counts["schedules"] == explored.schedules
    assert account.counts["transitions_executed"] == account.faults["RF-34"] == explored.steps


def test_settings_narrow_the_class_schedules(account: Account, tmp_path: Path) -> None:
    schedules.run(Order("schedules", 1, 5.0, tmp_path, {"only": ["seqlock"]}), account)
    assert account.faults.keys() == {"RF-116"}
    assert account.counts["states"] > 100
