"""The class of jobs: its judge finds planted faults, and a small slice of a real run passes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from chaos import jobs
from chaos.kills.scene import Stage
from chaos.leases.history import Death, LeaseVerdict, Place, Rules
from chaos.leases.journal import ROW, Did, Journal, Outcome, load
from chaos.leases.putting import payload_of, value_of
from chaos.leases.verdict import judge
from chaos.order import Account, Order
from chaos.plan import load_plan
from ringlog.drill.nursery import Nursery
from tests.support.lease_story import MS, LeaseStory
from tests.support.lease_story import ONE as JOB

LEASE = 1_000


class Story(LeaseStory):
    """A lease history in which claims contain no delivery counts."""

    def claim(self, at: int, client: int, times: int = 0, **more: Any) -> Story:
        return super().claim(at, client, times, **more)

    def judged(self, *deaths: Death, letters: dict[int, int] | None = None, left: int = 0) -> LeaseVerdict:
        rows = np.array(sorted(self.rows), dtype=ROW)
        rules = Rules(LEASE, is_logged=False, deaths=deaths, what="job", who="worker")
        return judge(rows, [Place(0, left=left)], rules, letters)


def shard_died(at: int) -> Death:
    return Death("wal_shard", at * MS, (at + 1) * MS)


def test_a_job_without_faults_is_counted() -> None:
    found = Story().put().claim(10, 2).ack(20, 2).judged()
    assert (found.records, found.done, found.doubles, dict(found.wrong)) == (1, 1, 0, {})


@pytest.mark.parametrize(
    ("story", "deaths", "why"),
    [
        (Story().put().claim(10, 2).claim(10 + LEASE, 3).ack(1_050, 3), (), "lease ended"),
        (Story().put().claim(10, 2).add(20, Did.NACK, 2).claim(30, 3).ack(40, 3), (), "given back"),
        (Story().put().claim(10, 2).claim(60, 3).ack(70, 3), (shard_died(30),), "shard died"),
        (Story().put().claim(10, 2).claim(60, 3).ack(70, 3), (Death("worker", 30 * MS, 31 * MS, 2),),
         "worker died"),
        (Story().put().claim(10, 2).claim(60, 3).ack(70, 3), (Death("all", 30 * MS, 31 * MS),), "shard died"),
        # The claim that was noted last had the job first: its reply took a long time.
        (Story().put().claim(1_240, 3, begun=1_150).ack(1_245, 3).claim(1_260, 2, begun=10), (),
         "lease ended"),
        # The same after the death of its shard: both acks belong to one deletion, the older one by its token.
        (Story().put().claim(150, 3, begun=110).ack(155, 3).claim(160, 2, begun=10).ack(165, 2),
         (shard_died(50),), "shard died"),
    ],
)  # fmt: skip
def test_a_repeated_delivery_of_a_job_is_explained(story: Story, deaths: tuple[Death, ...], why: str) -> None:
    found = story.judged(*deaths)
    assert (found.doubles, dict(found.explained), dict(found.wrong)) == (1, {why: 1}, {})


@pytest.mark.parametrize(
    ("story", "deaths", "letters", "left", "fault"),
    [
        # Never delivered, or delivered and missing without an ack.
        (Story().put(), (), {}, 0, "a job is lost"),
        (Story().put().claim(10, 2), (), {}, 0, "a job is lost"),
        (Story().put().claim(10, 2).add(20, Did.NACK, 2), (shard_died(15),), {}, 0, "a job is lost"),
        # Delivered again within its lease, while no process that kept the lease died.
        (Story().put().claim(10, 2).claim(500, 3).ack(510, 3), (), {}, 0, "two workers have one job"),
        (Story().put().claim(740, 3, begun=650).ack(745, 3).claim(760, 2, begun=10), (), {}, 0,
         "two workers have one job"),
        (Story().put().claim(10, 2).claim(500, 3).ack(510, 3), (Death("gateway", 20 * MS, 21 * MS),), {}, 0,
         "two workers have one job"),
        (Story().put().claim(10, 2).claim(500, 3).ack(510, 3), (Death("worker", 20 * MS, 21 * MS, 3),), {}, 0,
         "two workers have one job"),
        (Story().put().claim(10, 2).claim(500, 3).ack(510, 3), (shard_died(600),), {}, 0,
         "two workers have one job"),
        # Delivered after its ack, even if a shard died.
        (Story().put().claim(10, 2).ack(20, 2).claim(5_000, 3).ack(5_010, 3, Outcome.REFUSED),
         (shard_died(30),), {}, 0, "a job came back"),
        # Two workers get a successful ack.
        (Story().put().claim(10, 2).claim(10 + LEASE, 3, begun=15).ack(1_020, 3).ack(1_022, 2), (), {}, 0,
         "a job is finished twice"),
        (Story().put().claim(10, 2).claim(30, 3, seq=2).ack(40, 3), (shard_died(20),), {}, 0,
         "a job is there twice"),
        (Story().claim(10, 2).ack(20, 2), (), {}, 0, "a job that nobody put"),
        (Story().put().claim(10, 2).add(20, Did.REJECT, 2), (), {JOB: 2}, 0, "a dead letter is there twice"),
        (Story().put().claim(10, 2).ack(20, 2), (), {9: 1}, 0, "a job that nobody put"),
        (Story().put().claim(10, 2).ack(20, 2), (), {}, 3, "jobs that nobody gets"),
    ],
)  # fmt: skip
def test_planted_faults_of_jobs_are_found(
    story: Story, deaths: tuple[Death, ...], letters: dict[int, int], left: int, fault: str
) -> None:
    found = story.judged(*deaths, letters=letters, left=left)
    assert fault in found.wrong
    assert any(told.startswith(fault) for told in found.stories)


@pytest.mark.parametrize(
    ("story", "letters"),
    [
        # An ack or a put with unknown outcome allows both results.
        (Story().put().claim(10, 2).ack(20, 2, None), {}),
        (Story().add(0, Did.PUT, 1), {}),
        (Story().add(0, Did.PUT, 1).claim(10, 2).ack(20, 2), {}),
        (Story().put().claim(10, 2).add(20, Did.REJECT, 2), {JOB: 1}),
        # A claim that started before the ack returned: its reply may have been late.
        (Story().put().claim(10, 2).claim(1_100, 3, begun=15).ack(20, 2), {}),
    ],
)
def test_allowed_histories_of_jobs_are_not_faults(story: Story, letters: dict[int, int]) -> None:
    assert not story.judged(letters=letters).wrong


def test_journals_read_back_as_written(tmp_path: Path) -> None:
    for client in (1, 2):
        journal = Journal(tmp_path / f"{client}.journal", client)
        journal.note(Did.PUT, 3, [client, 10 + client])
        journal.note(Did.PUT_END, 3, [client, 10 + client], seqs=[5, 6], outcome=Outcome.OK)
        journal.note(Did.END, 3, [])
        journal.close()
        with pytest.raises(FileExistsError):
            Journal(tmp_path / f"{client}.journal", client)
    rows = load(tmp_path)
    assert rows["value"].tolist() == [1, 11, 1, 11, 2, 12, 2, 12]
    assert rows["seq"].tolist() == [0, 0, 5, 6] * 2
    assert (np.diff(rows["at_ns"]) >= 0).all()
    assert set(rows["queue"]) == {3}


def test_a_payload_encodes_the_value_of_its_job() -> None:
    for value in (0, 1, 255, 1 << 40):
        assert value_of(payload_of(value)) == value
    with pytest.raises(AssertionError):
        value_of(payload_of(3)[:-1])


def test_both_plans_have_the_class() -> None:
    assert load_plan("ci").by_name["jobs"].seconds <= 20
    assert "jobs" in load_plan("night").by_name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.night
def test_a_small_storm_of_jobs_passes(account: Account, tmp_path: Path) -> None:
    with Nursery("chaos.rigs.work") as nursery:
        stage = Stage(Order("jobs", 1, 5.0, tmp_path, {}), account, nursery)
        stage.run("storm", partial(jobs.storm, seconds=4.0, random=Random(5)))
    assert account.findings == []
    assert account.counts["jobs"] > 100
    assert account.counts["kills"] > 0
