"""Records that a consumer group gives up, in their shard: exhausted, listed, acked when moved."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.actors.wal_shard.leases import lease_queries
from ringlog.envelope import messages as m
from ringlog.errors import (
    BatchTooLarge,
    GroupIncompatible,
    GroupNotFound,
    InvalidRequest,
    NotReady,
    StaleEpoch,
)
from ringlog.limits import DELIVERIES_MAX, GROUP_DEAD_LETTERS_PER_MOVE
from tests.support.checkpoint_world import checkpoint_all
from tests.support.group_world import QUEUE, STREAM, ack, claim, give_again, nack, pending, stand
from tests.support.lease_words import held, numbers, words
from tests.support.removal_world import delete
from tests.support.shard_world import World
from tests.support.shard_worlds import new_world, restart, started

EXHAUSTED = 5


@pytest.fixture
def world() -> World:
    return with_mover(started())


def with_mover(world: World, has_mover: bool = True) -> World:
    """Set whether a mover exists, for every group, as the shell does before recovery."""
    registry = world.run_of("t").core.requests.leases.registry
    registry.has_dead_letter_mover = has_mover
    registry.finish_recovery()
    return world


def make(world: World, records: int = 4, most: int = 2, dead_letter: str = "dead") -> None:
    world.put_topic("t", durability="fsync")
    world.append("t", [b"record %d" % n for n in range(1, records + 1)])
    world.request(m.GroupOpen("t", "g", QUEUE, max_deliveries=most, dead_letter=dead_letter))


def spent(world: World, after: int = 0) -> m.ExhaustedReply:
    return world.ask(world.run_of("t"), m.ListExhausted(after))


def reject(world: World, jobs: Any, **options: Any) -> m.RejectReply:
    return world.request(m.Reject("t", "w", words(jobs), words(jobs.values()), group="g", **options))


def spent_tokens(world: World) -> dict[int, int]:
    """Return position -> token of the lease with which the record became exhausted."""
    found = spent(world)
    rows = zip(found.runs, found.tokens, strict=True)
    return {first + n: token + n for (first, count, _), token in rows for n in range(count)}


def moved(world: World, number: int, *seqs: int, tokens: dict[int, int] | None = None) -> int:
    topic_id, known = world.topic("t").topic_id, spent_tokens(world) if tokens is None else tokens
    given = words(known.get(seq, 1) for seq in seqs)
    return world.request(m.ConfirmDeadLettered("t", topic_id, words(seqs), number, given)).moved


def test_a_record_is_delivered_up_to_its_maximum_and_is_then_exhausted(world: World) -> None:
    """An exhausted record stays pending and is delivered to no member."""
    make(world)
    for _ in range(2):
        assert spent(world) == m.ExhaustedReply()
        nack(world, held(claim(world, 2)))
    found = spent(world)
    assert (found.topic, found.dead_letter, found.group, found.runs) == ("t", "dead", "g", [(1, 2, 2)])
    assert spent(world, found.number) == m.ExhaustedReply()
    assert list(held(claim(world, 9))) == [3, 4], "an exhausted record must not be delivered"
    reply = stand(world)
    assert (reply.exhausted, reply.in_flight, reply.info.floor) == (2, 2, 0), (
        "an exhausted record must stay pending"
    )
    assert pending(world)[1] == (EXHAUSTED, "", 2)
    assert held(world.request(m.Steal("t", "w", words([1]), group="g"))) == {}


def test_a_moved_record_is_done_for_the_group_and_stays_in_the_topic(world: World) -> None:
    """Only a record that is still exhausted can be moved."""
    make(world, most=1)
    nack(world, held(claim(world, 3)))
    number = spent(world).number
    assert moved(world, number, 1, 3, 4) == 2
    assert moved(world, number, 1, 3) == 0
    assert spent(world).runs == [(2, 1, 1)]
    assert stand(world).info.floor == 1
    assert world.topic("t").count == 4
    with pytest.raises(GroupNotFound):
        moved(world, number + 1, 2)


def test_a_rejected_record_is_exhausted_at_once_with_its_reason(world: World) -> None:
    make(world, most=0)
    jobs = held(claim(world, 3))
    first = reject(world, {1: jobs[1], 3: jobs[3]}, reason="no address\nline two", call=5)
    assert (first.rejected, numbers(first.skipped)) == (2, [])
    again = reject(world, {1: jobs[1], 3: jobs[3]}, call=5)
    assert again == first, "a repeated request must have the same reply"
    assert numbers(reject(world, {1: jobs[1]}).skipped) == [1]
    found = spent(world)
    assert found.runs == [(1, 1, 1), (3, 1, 1)]
    assert found.reasons == {1: "no address", 3: "no address"}
    assert moved(world, found.number, 1) == 1
    assert spent(world).reasons == {3: "no address"}
    assert world.run_of("t").core.requests.leases.exhausted_total == 2


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_exhausted_records_survive_their_shard(has_checkpoint: bool) -> None:
    world = with_mover(new_world()) if has_checkpoint else with_mover(started())
    make(world)
    jobs = held(claim(world, 2))
    reject(world, {1: jobs[1]}, reason="no address")
    nack(world, {2: jobs[2]}, reason="timeout")
    nack(world, held(claim(world, 1)), reason="refused")
    at_ms = world.clock.now_us() // 1_000
    for _ in range(2):
        if has_checkpoint:
            checkpoint_all(world)
        restart(world)
        with_mover(world)
        found = spent(world)
        assert found.runs == [(1, 1, 1), (2, 1, 2)]
        assert stand(world).exhausted == 2
        assert found.reasons == {1: "no address", 2: "refused"}
        assert found.failed == {1: (at_ms, 0), 2: (at_ms, 2)}
    assert moved(world, found.number, 1, 2) == 2
    restart(world)
    with_mover(world)
    assert spent(world) == m.ExhaustedReply()
    assert stand(world).info.floor == 2


def test_expired_leases_and_leaving_members_count_as_deliveries(world: World) -> None:
    make(world, most=1)
    claim(world, 1, lease_ms=1_000)
    claim(world, 1, "x")
    world.request(m.GroupLeave("t", "g", "x"))
    assert spent(world).runs == [(2, 1, 1)]
    world.clock.advance(2)
    assert spent(world).runs == [(1, 1, 1), (2, 1, 1)]


def test_without_a_mover_records_are_delivered_again(world: World) -> None:
    make(world, most=1)
    jobs = held(claim(world, 2))
    reject(world, {1: jobs[1]})
    nack(world, {2: jobs[2]})
    assert stand(world).exhausted == 2
    with_mover(world, has_mover=False)
    assert spent(world) == m.ExhaustedReply()
    given = [run[:3] for run in claim(world, 2).runs]
    assert given == [(1, 1, 2), (2, 1, 2)], "both must be delivered, with their count"
    assert (stand(world).in_flight, stand(world).exhausted) == (2, 0)
    with pytest.raises(InvalidRequest, match="dead-letter topic"):
        reject(world, held(claim(world, 1)))


def test_exhausted_records_that_leave_the_topic_are_not_moved(world: World) -> None:
    make(world, most=1)
    nack(world, held(claim(world, 3)))
    delete(world, "t", before=3)
    assert spent(world).runs == [(3, 1, 1)]
    assert stand(world).exhausted == 1
    ack(world, held(claim(world, 1)))
    assert stand(world).info.floor == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_deliveries": -1, "dead_letter": "dead"},
        {"max_deliveries": DELIVERIES_MAX + 1, "dead_letter": "dead"},
        {"max_deliveries": 3},
        {"dead_letter": "t"},
        {"dead_letter": "no/../name\0"},
        {"dead_letter": "dead", "mode": STREAM},
    ],
)
def test_invalid_dead_letter_settings_are_refused(world: World, wrong: dict[str, Any]) -> None:
    world.put_topic("t")
    with pytest.raises(InvalidRequest):
        world.request(m.GroupOpen("t", "g", wrong.pop("mode", QUEUE), **wrong))


def test_a_group_without_a_dead_letter_topic_refuses_rejects(world: World) -> None:
    make(world, most=0, dead_letter="")
    with pytest.raises(InvalidRequest, match="dead-letter topic"):
        reject(world, held(claim(world, 1)))
    for _ in range(5):
        nack(world, held(claim(world, 1)))
    assert (spent(world), stand(world).returned) == (m.ExhaustedReply(), 1)


# -- redriven letters -------------------------------------------------------------------------------------


def test_a_redriven_record_is_delivered_like_a_new_one(world: World) -> None:
    make(world, most=1)
    nack(world, held(claim(world, 3)))
    moved(world, spent(world).number, 1, 2, 3)
    assert stand(world).info.floor == 3
    assert give_again(world, {1: 101, 3: 103}) == (0, [])
    assert (stand(world).returned, stand(world).info.floor) == (2, 0), "the records must be ready at once"
    given = claim(world, 9)
    assert [run[:3] for run in given.runs] == [(1, 1, 1), (3, 1, 1), (4, 1, 1)]
    ack(world, held(given))
    assert stand(world).info.floor == 4


def test_a_letter_is_redriven_once_although_it_is_sent_again_later(world: World) -> None:
    """The deletion of the letter was lost. Meanwhile the record was acked and the shard died."""
    make(world, most=1)
    nack(world, held(claim(world, 2)))
    moved(world, spent(world).number, 1, 2)
    assert give_again(world, {1: 101}) == (0, [])
    ack(world, held(claim(world, 1)))
    world.power_loss(seed=1)
    world.start()
    with_mover(world)
    assert give_again(world, {1: 101, 2: 102}) == (1, [])
    assert list(held(claim(world, 9))) == [2, 3, 4]


@pytest.mark.parametrize("seed", range(4))
def test_a_redriven_record_is_durable_whatever_the_topics_class(seed: int) -> None:
    """Its letter is deleted afterwards, possibly from a topic of class `fsync`."""
    world = with_mover(started())
    world.put_topic("t", durability="disk")
    world.append("t", [b"1", b"2", b"3"])
    world.request(m.GroupOpen("t", "g", QUEUE, dead_letter="dead"))
    jobs = held(claim(world, 3))
    ack(world, jobs)
    assert give_again(world, {2: 102}) == (0, [])
    world.power_loss(seed=seed)
    world.start()
    with_mover(world)
    assert list(held(claim(world, 9))) == [2]


def test_a_redrive_leaves_pending_and_undelivered_records_unchanged_and_remembers_the_letter(
    world: World,
) -> None:
    make(world, most=1)
    jobs = held(claim(world, 2))
    assert give_again(world, {1: 101, 4: 104}) == (0, [])
    assert pending(world)[1][0] == 1, "it is leased"
    assert give_again(world, {1: 101, 4: 104}) == (2, [])
    ack(world, jobs)
    assert give_again(world, {1: 101}) == (1, [])
    assert list(held(claim(world, 9))) == [3, 4]


def test_a_letter_is_not_redriven_before_its_record_is_done_for_the_group(world: World) -> None:
    """Otherwise the late confirmation would ack the redriven record, which would be lost. Found by
    `groups`."""
    make(world)
    reject(world, held(claim(world, 1)))
    number = spent(world).number
    with pytest.raises(NotReady) as refused:
        give_again(world, {1: 101})
    assert refused.value.detail["retry_after_ms"] > 0
    with pytest.raises(NotReady):
        give_again(world, {4: 104, 1: 101})
    assert moved(world, number, 1) == 1
    assert give_again(world, {4: 104, 1: 101}) == (0, []), "a refused request must change nothing"
    assert moved(world, number, 1) == 0, "a repeated confirmation must change nothing"
    assert list(held(claim(world, 9))) == [1, 2, 3, 4]


def test_a_late_confirmation_of_a_first_letter_does_not_end_a_second_rejection(world: World) -> None:
    """The second letter is not written yet. Without the check the record would be lost."""
    make(world)
    reject(world, held(claim(world, 3)))
    number, first = spent(world).number, spent_tokens(world)
    assert moved(world, number, 1, 2, 3, tokens=first) == 3
    assert give_again(world, {1: 101, 3: 103}) == (0, [])
    reject(world, held(claim(world, 2)))
    second = spent_tokens(world)
    assert second.keys() == {1, 3}
    assert moved(world, number, 1, 2, 3, tokens=first) == 0
    assert spent_tokens(world) == second
    assert moved(world, number, 1, 3, tokens={1: first[1], 3: second[3]}) == 1
    assert moved(world, number, 3, 1, tokens=second) == 1
    assert stand(world).info.floor == 3


def test_a_confirmation_without_lease_tokens_is_refused(world: World) -> None:
    make(world)
    reject(world, held(claim(world, 2)))
    number, topic_id = spent(world).number, world.topic("t").topic_id
    for tokens in (b"", words([1])):
        with pytest.raises(InvalidRequest):
            world.request(m.ConfirmDeadLettered("t", topic_id, words([1, 2]), number, tokens))
    assert world.request(m.ConfirmDeadLettered("t", topic_id, b"", number, b"")).moved == 0
    assert spent(world).runs == [(1, 2, 1)]


def test_a_redrive_reports_records_that_left_the_topic(world: World) -> None:
    make(world)
    ack(world, held(claim(world, 4)))
    delete(world, "t", before=2)
    delete(world, "t", seqs=[3])
    assert give_again(world, {0: 100, 1: 101, 2: 102, 3: 103, 9: 109}) == (0, [0, 1, 3, 9])
    assert list(held(claim(world, 9))) == [2]


def test_a_waiting_claim_receives_a_redriven_record(world: World) -> None:
    make(world, most=1)
    nack(world, held(claim(world, 4)))
    moved(world, spent(world).number, 1, 2, 3, 4)
    run = world.run_of("t")
    run.step(run.request(901, m.Claim("t", "w", 1, wait_ms=60_000, group="g")))
    assert 901 not in run.replies
    give_again(world, {2: 102})
    assert list(held(run.replies[901])) == [2]


def test_invalid_redrive_requests_are_refused(world: World) -> None:
    make(world)
    topic_id = world.topic("t").topic_id
    many = range(1, GROUP_DEAD_LETTERS_PER_MOVE + 2)
    with pytest.raises(BatchTooLarge):
        world.request(m.Redeliver("t", topic_id, "g", words(many), words(many)))
    with pytest.raises(BatchTooLarge):
        world.request(m.Redeliver("t", topic_id, "g", words([1]), b""))
    with pytest.raises(StaleEpoch):
        world.request(m.Redeliver("t", topic_id + 1, "g", words([1]), words([5])))
    with pytest.raises(GroupNotFound):
        world.request(m.Redeliver("t", topic_id, "h", words([1]), words([5])))
    world.request(m.GroupOpen("t", "s", STREAM))
    with pytest.raises(GroupIncompatible):
        world.request(m.Redeliver("t", topic_id, "s", words([1]), words([5])))


def test_the_pending_list_contains_nack_reasons(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has at most the number of records that one request may name. Queues have the same list."""
    make(world, most=5)
    jobs = held(claim(world, 3))
    for seq, reason in ((1, "no disk"), (1, "no net"), (3, "bad")):
        nack(world, {seq: jobs[seq]}, reason=reason)
        if seq == 1:
            jobs = held(claim(world, 1)) | {n: token for n, token in jobs.items() if n > 1}
    monkeypatch.setattr(lease_queries, "JOBS_PER_REQUEST_MAX", 2)
    first = world.request(m.ListPending("t", group="g"))
    now_ms = world.clock.now_us() // 1_000
    assert [row[:2] for row in first.rows] == [(1, 1), (2, 1)]
    assert (first.more, first.failures) == (True, {1: ("no net", now_ms, 2)})
    rest = world.request(m.ListPending("t", 2, group="g"))
    assert (rest.more, rest.failures) == (False, {3: ("bad", now_ms, 1)})
