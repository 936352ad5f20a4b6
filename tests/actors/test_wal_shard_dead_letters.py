"""Jobs that used all their deliveries, in their shard: exhausted, listed, deleted when moved."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from ringlog.actors.wal_shard.leases.lease_requests import reason_of
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, TopicNotFound
from tests.support.lease_words import held, words
from tests.support.queue_world import claim, make, nack, stats
from tests.support.removal_world import read
from tests.support.shard_world import World
from tests.support.shard_worlds import restart, started


@pytest.fixture
def world() -> World:
    world = started()
    make(world, 4, max_deliveries=2, dead_letter="dead", durability="fsync")
    with_mover(world)
    return world


def with_mover(world: World) -> None:
    world.run_of("q").core.requests.leases.registry.has_dead_letter_mover = True


def deliver(world: World, times: int, most: int = 4) -> None:
    for _ in range(times):
        nack(world, list(held(claim(world, most))))


def spent(world: World, after: int = 0) -> m.ExhaustedReply:
    return world.ask(world.run_of("q"), m.ListExhausted(after))


def moved(world: World, *seqs: int, topic_id: int = 0) -> int:
    topic_id = topic_id or world.topic("q").topic_id
    return world.request(m.ConfirmDeadLettered("q", topic_id, words(list(seqs)))).moved


def test_a_job_is_delivered_up_to_its_maximum_and_is_then_exhausted(world):
    """The maximum is checked at the next claim."""
    deliver(world, 2, most=2)
    assert spent(world) == m.ExhaustedReply(), "the maximum is checked at the next claim"
    assert list(held(claim(world, 3))) == [3, 4]
    found = spent(world)
    assert (found.topic, found.dead_letter, found.runs) == ("q", "dead", [(1, 2, 2)])
    assert found.epoch == world.topic("q").epoch
    assert spent(world, found.topic_id) == m.ExhaustedReply()
    assert world.run_of("q").core.requests.leases.exhausted_total == 2
    assert world.request(m.LeaseStats("q")).exhausted == 2
    assert stats(world) == (2, 2, 0), "exhausted jobs count as ready until they are moved"


def test_moved_jobs_are_deleted_and_counted(world):
    """Only exhausted jobs can be moved. After a restart, counts of deliveries start at 0."""
    deliver(world, 2)
    assert claim(world, 9).runs == []
    assert moved(world, 3, 1) == 2
    assert read(world, "q") == (None, [2, 4])
    assert moved(world, 3, 2, 77) == 1, "only exhausted jobs can be moved"
    assert world.request(m.LeaseStats("q")).dead_lettered == 3
    assert stats(world) == (1, 0, 0)
    restart(world)
    assert read(world, "q") == (None, [4])
    with_mover(world)
    assert claim(world, 9).runs[0][:3] == (4, 1, 1), "a successor counts from 0"


def test_a_move_for_another_topic_id_changes_nothing(world):
    deliver(world, 2)
    claim(world, 9)
    with pytest.raises(TopicNotFound):
        moved(world, 1, topic_id=world.topic("q").topic_id + 1)
    assert stats(world) == (4, 0, 0)


def test_without_a_dead_letter_topic_or_a_mover_jobs_return_forever(world):
    """The same holds if `max_deliveries` is 0."""
    deliver(world, 2)
    assert claim(world, 9).runs == []
    world.put_topic("q", mode="merge", dead_letter=None)
    assert spent(world) == m.ExhaustedReply()
    assert list(held(claim(world, 9))) == [1, 2, 3, 4]
    world.put_topic("q", mode="merge", dead_letter="dead", max_deliveries=0)
    nack(world, [1, 2, 3, 4])
    deliver(world, 3)
    assert spent(world) == m.ExhaustedReply()
    world.put_topic("q", mode="merge", max_deliveries=1)
    world.run_of("q").core.requests.leases.registry.has_dead_letter_mover = False
    deliver(world, 3)
    assert spent(world) == m.ExhaustedReply()


def test_an_exhausted_job_that_is_deleted_meanwhile_is_not_moved(world):
    deliver(world, 2)
    claim(world, 9)
    world.request(m.RecordsDelete("q", 3))
    assert spent(world).runs == [(3, 2, 2)]
    assert moved(world, 1, 2, 3) == 1
    assert stats(world) == (1, 0, 0)


def test_one_claim_exhausts_a_bounded_number_of_jobs(world, monkeypatch):
    """The bound is `DEAD_LETTERS_PER_CLAIM_MAX`."""
    monkeypatch.setattr("ringlog.leases.table.DEAD_LETTERS_PER_CLAIM_MAX", 2)
    deliver(world, 2)
    assert claim(world, 9).runs == []
    assert spent(world).runs == [(1, 2, 2)]
    assert claim(world, 9).runs == []
    assert spent(world).runs == [(1, 2, 2), (3, 2, 2)]


def test_a_rejected_job_is_exhausted_at_once_with_its_reason(world):
    """A retry of the reject has the same reply. Only the first line of the reason is kept."""
    jobs = held(claim(world, 3))
    reject = m.Reject("q", "w", words([2, 9]), words([jobs[2], 1]), "no such address\nand more", 5)
    reply = world.request(reject)
    assert (reply.rejected, reply.skipped) == (1, words([9]))
    assert world.request(reject) == reply, "a repeated request must have the same reply"
    found = spent(world)
    assert (found.runs, found.reasons) == ([(2, 1, 1)], {2: "no such address"})
    assert stats(world) == (2, 2, 0)
    assert moved(world, 2) == 1
    assert not world.run_of("q").core.requests.leases.registry._own[world.topic("q").topic_id].failures
    assert reason_of("x" * 300) == "x" * 253 + "..."
    assert len(reason_of("\u00e4" * 300).encode()) <= 256


def test_a_nacked_job_keeps_its_last_reason_until_it_is_settled(world):
    """The shard keeps the last reason, its time, and the number of nacks with a reason."""
    for n, reason in enumerate(("timeout", "refused\nline two")):
        jobs = held(claim(world, 3))
        if n == 0:
            world.request(m.Nack("q", "w", words([1, 2]), words([jobs[1], jobs[2]]), reason=reason))
            world.request(m.Nack("q", "w", words([3]), words([jobs[3]])))
            world.clock.advance(0.5)
        else:
            again = m.Nack("q", "w", words([1, 9]), words([jobs[1], 1]), call=7, reason=reason)
            assert world.request(again).nacked == 1
            assert world.request(again).nacked == 1, "a repeated nack must not count as another failure"
            at_ms = world.clock.now_us() // 1_000
            world.request(m.Ack("q", "w", words([2]), words([jobs[2]]), in_time=True))
            world.request(m.Reject("q", "w", words([3]), words([jobs[3]]), "no such address"))
    assert claim(world, 1).runs == [(4, 1, 1, ANY)]
    found = spent(world)
    assert found.runs == [(1, 1, 2), (3, 1, 2)]
    assert found.reasons == {1: "refused", 3: "no such address"}
    assert found.failed == {1: (at_ms, 2), 3: (at_ms, 0)}
    assert moved(world, 1, 3) == 2
    assert not world.run_of("q").core.requests.leases.registry._own[world.topic("q").topic_id].failures


def test_a_reject_without_a_dead_letter_topic_is_refused(world):
    world.put_topic("q", mode="merge", dead_letter=None)
    claim(world, 1)
    with pytest.raises(InvalidRequest):
        world.request(m.Reject("q", "w", words([1])))
    assert stats(world) == (3, 1, 0)
