"""The class of consumer groups: its judge finds planted faults, and a small slice passes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from chaos import groups
from chaos.kills.rig import Engine
from chaos.kills.scene import Stage
from chaos.leases.history import Death, LeaseVerdict, Place, Rules
from chaos.leases.journal import ROW, Did, Outcome
from chaos.leases.verdict import judge
from chaos.order import Account, Order
from chaos.plan import load_faults, load_plan
from ringlog.drill.nursery import Nursery
from tests.support.lease_story import MS, ONE, LeaseStory

RULES = Rules(lease_ms=1_000, idle_ms=600)
ROUNDS = 3
"""Number of storms that a slow host may need until all expected events occurred."""


class Story(LeaseStory):
    def judged(self, *, is_queue: bool = True, is_sought: bool = False, left: int = 0) -> LeaseVerdict:
        rows = np.array(sorted(self.rows), dtype=ROW)
        return judge(rows, [Place(0, 0, is_queue, is_sought, left)], RULES)


def test_a_record_without_faults_is_counted() -> None:
    found = Story().put().claim(10, 2).ack(20, 2).floor(30, 1).judged()
    assert (found.records, found.done, found.doubles, found.looks) == (1, 1, 0, 1)
    assert not found.wrong


@pytest.mark.parametrize(
    ("story", "why"),
    [
        (Story().put().claim(10, 2).claim(1_010, 3, 2).ack(1_050, 3), "lease ended"),
        (Story().put().claim(10, 2).add(20, Did.NACK, 2).claim(30, 3, 2).ack(40, 3), "given back"),
        (Story().put().claim(10, 2).claim(620, 3, 2, did=Did.STOLEN).ack(630, 3), "stolen"),
        (Story().put().claim(10, 2).claim(620, 3, 2, did=Did.TAKEN_OVER).ack(630, 3), "taken over"),
        # A member took it over and died before it wrote its journal; then the record was stolen.
        (Story().put().claim(10, 2).claim(700, 3, 3).ack(710, 3), "somebody between them who died"),
        # The first member wrote its journal late. The delivery counts show which member was first.
        (Story().put().claim(1_020, 2, begun=9).claim(1_015, 3, 2).ack(1_030, 3), "lease ended"),
    ],
)
def test_a_repeated_delivery_of_a_record_is_explained(story: Story, why: str) -> None:
    found = story.judged()
    assert (found.doubles, dict(found.explained), dict(found.wrong)) == (1, {why: 1}, {})


def _with(died: dict[int, int]) -> Rules:
    return replace(RULES, deaths=[Death("leaser", at_ns, at_ns, client) for client, at_ns in died.items()])


def test_a_death_explains_only_the_leases_of_its_own_member() -> None:
    story = Story().put().claim(10, 2).claim(300, 3, 2).ack(350, 3)
    rows = np.array(sorted(story.rows), dtype=ROW)
    place = Place(0, 0, True)
    found = judge(rows, [place], _with({2: 200 * MS}))
    assert (dict(found.explained), dict(found.wrong)) == ({"member died": 1}, {})
    for died in ({}, {3: 200 * MS}, {2: 301 * MS}):
        found = judge(rows, [place], _with(died))
        assert found.wrong["two members have one record"] == 1


QUEUE_FAULTS: list[tuple[Story, str]] = [
    # Never delivered, or delivered and never acked.
    (Story().put(), "a record is lost"),
    (Story().put().claim(10, 2), "a record is lost"),
    # Delivered again within its lease: no death excuses that.
    (Story().put().claim(10, 2).claim(500, 3, 2).ack(510, 3), "two members have one record"),
    (Story().put().claim(10, 2).claim(700, 3, 2).ack(710, 3), "two members have one record"),
    (Story().put().claim(10, 2).claim(500, 3, 2, did=Did.STOLEN).ack(510, 3), "two members have one record"),
    (Story().put().claim(10, 2).add(500, Did.EXTENDED, 2, begun=499).claim(1_100, 3, 2).ack(1_110, 3),
     "two members have one record"),
    # Another member nacked the record, not its holder.
    (Story().put().claim(10, 2).add(20, Did.NACK, 4).claim(30, 3, 2).ack(40, 3),
     "two members have one record"),
    # The delivery count starts again.
    (Story().put().claim(10, 2).claim(1_100, 3, 1).ack(1_110, 3), "two members have one record"),
    # Delivered after its ack, or two members get a successful ack.
    (Story().put().claim(10, 2).ack(20, 2).claim(5_000, 3, 2).ack(5_010, 3, Outcome.REFUSED),
     "a record came back"),
    (Story().put().claim(10, 2).claim(1_015, 3, 2, begun=15).ack(1_020, 3).ack(1_022, 2),
     "a record is finished twice"),
    (Story().put().claim(10, 2).claim(1_020, 3, 2, seq=2).ack(1_040, 3), "a record is there twice"),
    (Story().claim(10, 2).ack(20, 2), "a record that nobody put"),
    (Story().put().claim(10, 2).floor(15, 1).ack(20, 2), "a floor is ahead"),
    (Story().put().claim(10, 2).ack(20, 2).floor(30, 1).floor(40, 0), "a floor goes back"),
]  # fmt: skip


@pytest.mark.parametrize(("story", "fault"), QUEUE_FAULTS)
def test_planted_faults_in_queue_mode_are_found(story: Story, fault: str) -> None:
    found = story.judged()
    assert set(found.wrong) == {fault}
    assert any(told.startswith(fault) for told in found.stories)


STREAM_FAULTS: list[tuple[Story, str]] = [
    (Story().put(records=2).take(10, 2).read(11, 2, 1, 10).commit(12, 2, 1, 10), "a record is lost"),
    (Story().put(records=3).take(10, 2).read(11, 2, 1, 10).read(12, 2, 3, 10).take(20, 3).read(21, 3, 1, 20)
     .read(22, 3, 2, 20), "a record is passed over"),
    (Story().put(records=2).take(10, 2).read(11, 2, 1, 10).take(20, 3).read(21, 3, 2, 20),
     "a record is passed over"),
    (Story().put(records=2).take(10, 2).read(11, 2, 1, 10).read(12, 2, 2, 10).commit(13, 2, 2, 10).take(20, 3)
     .read(21, 3, 2, 20), "a record came back"),
    (Story().put(records=2).take(10, 2).read(11, 2, 1, 10).read(12, 2, 2, 10).read(13, 2, 1, 10),
     "a reader goes back"),
    # Another member has the group since 20 ms.
    (Story().put().take(10, 2).read(11, 2, 1, 10).take(20, 3).read(21, 3, 1, 20).commit(22, 2, 1, 10),
     "two read one group"),
    (Story().put().take(10, 2).read(11, 2, 1, 10).floor(12, 1), "a floor is ahead"),
]  # fmt: skip


@pytest.mark.parametrize(("story", "fault"), STREAM_FAULTS)
def test_planted_faults_in_stream_mode_are_found(story: Story, fault: str) -> None:
    assert set(story.judged(is_queue=False).wrong) == {fault}


@pytest.mark.parametrize(
    "story",
    [
        # An ack or a write with unknown outcome allows both results.
        Story().put().claim(10, 2).ack(20, 2, None),
        Story().add(0, Did.PUT, 1),
        Story().add(0, Did.PUT, 1).claim(10, 2).ack(20, 2),
        # A claim that started before the ack returned: its reply may have been late.
        Story().put().claim(10, 2).claim(1_100, 3, 2, begun=15).ack(20, 2),
    ],
)
def test_allowed_histories_are_not_faults(story: Story) -> None:
    assert not story.judged().wrong


def test_a_late_commit_and_a_repeated_read_are_allowed() -> None:
    again = (
        Story().put(records=2).take(10, 2).read(11, 2, 1, 10).read(12, 2, 2, 10).commit(13, 2, 1, 10, None)
    )
    assert not again.take(20, 3).read(21, 3, 1, 20).read(22, 3, 2, 20).judged(is_queue=False).wrong
    refused = Story().put().take(10, 2).read(11, 2, 1, 10).take(20, 3).read(21, 3, 1, 20)
    refused.commit(22, 2, 1, 10, Outcome.REFUSED)
    assert not refused.judged(is_queue=False).wrong


def test_a_seek_back_delivers_all_records_from_there_again() -> None:
    def sought() -> Story:
        story = Story().put(records=2).claim(10, 2).claim(10, 2, seq=2, value=ONE + 1)
        story.ack(20, 2).ack(20, 2, value=ONE + 1).floor(25, 2)
        return story.add(30, Did.SEEK, 9, begun=30).add(31, Did.SEEK_END, 9, begun=30, seq=2).floor(40, 1)

    done = sought().claim(50, 2, seq=2, value=ONE + 1).ack(60, 2, value=ONE + 1).judged(is_sought=True)
    assert (done.seeks, dict(done.wrong)) == (1, {})
    assert set(sought().judged(is_sought=True).wrong) == {"a record is lost"}
    # An earlier seek does not explain a later drop of the floor.
    story = sought().claim(50, 2, seq=2, value=ONE + 1).ack(60, 2, value=ONE + 1).floor(70, 2).floor(80, 1)
    assert set(story.judged(is_sought=True).wrong) == {"a floor goes back"}


def test_exactly_the_rejected_records_are_dead_letters() -> None:
    def rejected(outcome: Outcome | None = Outcome.OK) -> Story:
        story = Story().put().claim(10, 2).add(20, Did.REJECT, 2)
        return story if outcome is None else story.add(21, Did.END, 2, outcome=outcome)

    def wrong(story: Story, letters: dict[int, int]) -> set[str]:
        rows = np.array(sorted(story.rows), dtype=ROW)
        return set(judge(rows, [Place(0, 0, True)], RULES, letters).wrong)

    assert wrong(rejected(), {ONE: 1}) == set()
    assert wrong(rejected(None), {ONE: 1}) == wrong(rejected(None), {}) == set(), "nobody knows"
    assert wrong(rejected(), {}) == {"a record is lost"}
    assert wrong(rejected(), {ONE: 2}) == {"a dead letter is there twice"}
    assert wrong(Story().put().claim(10, 2).ack(20, 2), {ONE: 1}) == {"a letter that nobody rejected"}
    again = rejected().claim(1_500, 3, 2).ack(1_510, 3, Outcome.REFUSED)
    assert wrong(again, {ONE: 1}) == {"a record came back"}


def test_a_redriven_letter_explains_one_delivery_and_one_lower_floor() -> None:
    def returned(letters: int = 1, times: int = 1, *, has_end: bool = True) -> Story:
        story = Story().put().claim(10, 2).add(20, Did.REJECT, 2).add(21, Did.END, 2, outcome=Outcome.OK)
        story.floor(30, 1)
        for n in range(letters):
            story.add(40 + n, Did.REDRIVE, 8, seq=5 + n, begun=40 + n)
            if has_end:
                story.add(45 + n, Did.REDRIVE_END, 8, seq=5 + n, begun=40 + n)
        story.floor(44, 0)
        for n in range(times):
            at = 50 + 20 * n
            story.claim(at, 3).add(at + 5, Did.REJECT, 3).add(at + 6, Did.END, 3, outcome=Outcome.OK)
        return story

    def wrong(story: Story, lie: int = 1) -> set[str]:
        rows = np.array(sorted(story.rows), dtype=ROW)
        return set(judge(rows, [Place(0, 0, True)], RULES, {ONE: lie}).wrong)

    done = judge(np.array(sorted(returned().rows), dtype=ROW), [Place(0, 0, True)], RULES, {ONE: 1})
    assert (dict(done.wrong), done.redriven) == ({}, 1)
    assert done.explained == {"came back from the dead": 1}
    assert wrong(returned(letters=2, times=2)) == set()
    assert wrong(returned(times=2)) == {"a record came back", "a record is finished twice"}
    assert wrong(returned(letters=0)) >= {"a record came back", "a floor goes back"}
    assert wrong(returned().floor(100, 1).floor(110, 0)) == {"a floor goes back"}
    assert wrong(returned(), lie=2) == {"a dead letter is there twice"}
    assert wrong(returned(has_end=False), lie=2) == set(), "nobody knows whether it was deleted"


def test_records_left_in_a_group_are_one_fault() -> None:
    assert dict(Story().put().claim(10, 2).judged(left=1).wrong) == {"records that nobody gets": 1}


def test_both_plans_and_the_matrix_have_the_class() -> None:
    assert load_plan("ci").by_name["groups"].seconds <= 15
    assert load_plan("night").by_name["groups"].seconds >= 100
    assert "groups" in next(each for each in load_faults() if each.id == "RF-117").classes


# -- real engines ----------------------------------------------------------------------------------------


@pytest.fixture
def storm(tmp_path: Path) -> Callable[[float, float], Account]:
    """Run a storm of `seconds` seconds, with `empty_s` seconds to finish all records."""

    def run(seconds: float, empty_s: float) -> Account:
        account = Account()
        with Nursery("chaos.rigs.work") as nursery:
            stage = Stage(Order("groups", 1, 5.0, tmp_path / "scratch", {}), account, nursery)
            stage.run("storm", partial(groups.storm, seconds=seconds, random=Random(5), empty_s=empty_s))
        return account

    return run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.night
def test_a_small_storm_of_groups_passes(storm: Callable[[float, float], Account]) -> None:
    """Every record is finished, no repeated delivery is unexplained, and floors never go back (CG1, CG4)."""
    wanted = Counter({"records": 100, "kills": 1, "takeovers": 2, "commits": 1, "looks": 20})
    counts: Counter[str] = Counter()
    for _ in range(ROUNDS):
        account = storm(4.0, 60.0)
        assert account.findings == []
        counts += account.counts
        if wanted <= counts:
            return
    assert wanted <= counts


PLANTED = """
from ringlog.actors.wal_shard.leases.lease_registry import LeaseRegistry
from ringlog.leases.change import Op

log = LeaseRegistry.log

def forgetful(self, topic, group, change, into):
    if change is None or change.op != Op.{op}:
        log(self, topic, group, change, into)

LeaseRegistry.log = forgetful
"""


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    # a lost commit shows as a lower floor or as a repeated record, whichever the judge checks first
    ("op", "fault"),
    [("ACKED", "a record came back"), ("COMMITTED", r"a floor goes back|\d was committed")],
)
def test_a_reply_without_a_log_record_is_detected(
    storm: Callable[[float, float], Account], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str,
    fault: str,
) -> None:  # fmt: skip
    """The shard replies to an ack or a commit that does not survive its restart."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(PLANTED.format(op=op))
    monkeypatch.setattr(Engine, "code_first", (str(code),))
    for _ in range(ROUNDS):
        account = storm(5.0, 10.0)
        if any(re.search(fault, finding.story) for finding in account.findings):
            return
    raise AssertionError(account.findings)
