"""Queues of a shard: claims, acks and their effects over commit batches, kills, retention and repeats."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.leases import reply_cache, waiting_claims
from ringlog.contract import DrainRequested, Reply
from ringlog.envelope import messages as m
from ringlog.errors import BatchTooLarge, InvalidRequest, NotAQueue, Status, TopicNotFound
from ringlog.limits import LEASE_MS_MIN
from tests.support.lease_words import held, numbers, words
from tests.support.queue_world import ack, claim, make, nack, stats
from tests.support.removal_world import append, delete, read
from tests.support.shard_world import World
from tests.support.shard_worlds import restart, started

CLASSES = ("fsync", "disk", "memory", "ephemeral")
LEASE_S = 30.0


# -- lifetime of a job ------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_job_is_claimed_acked_and_deleted(world, durability):
    """The deletion leaves no tombstone."""
    make(world, 3, durability=durability)
    claimed = claim(world, 2)
    assert (list(held(claimed)), claimed.ready) == ([1, 2], 1)
    assert claimed.deadline == world.clock.now_us() // 1_000 + 30_000
    reply = ack(world, held(claimed))
    assert (reply.acked, reply.skipped, reply.ready, reply.in_flight) == (2, b"", 1, 0)
    assert read(world, "q") == (None, [3]), "a delete must leave no tombstone"
    assert stats(world) == (1, 0, 0)
    assert ack(world, held(claimed)).skipped == words([1, 2])


@pytest.mark.parametrize("durability", CLASSES[:3])
def test_acks_survive_a_kill_and_leases_do_not(world, durability):
    """After the kill, counts of deliveries start at 0."""
    make(world, 4, durability=durability)
    jobs = held(claim(world, 3))
    ack(world, {2: jobs[2]})
    restart(world)
    assert stats(world) == (3, 0, 0)
    again = claim(world, 9)
    assert [run[:3] for run in again.runs] == [(1, 1, 1), (3, 2, 1)]
    assert not set(held(again).values()) & set(jobs.values()), "a lease token was issued twice (Q3)"


def test_an_ack_is_one_record_of_the_log_and_answered_after_its_sync():
    """The reply follows when the record is as durable as its class requires (Q4)."""
    seen: list[Any] = []
    world = started(effect_observer=lambda shard, effect: seen.append(effect))
    make(world, 9, durability="fsync")
    jobs = held(claim(world, 9))
    seen.clear()
    assert ack(world, jobs).acked == 9
    kinds = [type(effect) for effect in seen]
    assert kinds.count(ev.WriteBatch) == 1
    assert kinds[-1] is Reply
    assert kinds.index(ev.WriteBatch) < kinds.index(ev.Sync) < len(kinds) - 1
    assert len(seen[kinds.index(ev.WriteBatch)].buffers) == 2, "expected a chain mark and one frame"


def test_jobs_of_a_dead_worker_are_ready_at_once(world):
    """Leases of other processes under the same node name are not affected (Q10)."""
    make(world, 6)
    mine = claim(world, 2, pid=7, pid_started=70)
    other = claim(world, 2, pid=7, pid_started=71)
    claim(world, 1)
    run = world.run_of("q")
    run.step(run.request(901, m.Claim("q", "x", 9, wait_ms=20_000)))
    assert list(held(run.replies.pop(901))) == [6]
    run.step(run.request(902, m.Claim("q", "w", 9, wait_ms=20_000, pid=7, pid_started=70)))
    run.step(run.request(903, m.Claim("q", "x", 9, wait_ms=20_000)))
    run.step(ev.WorkerDied(7, 70))
    again = run.replies.pop(903)
    assert [run[:3] for run in again.runs] == [(1, 2, 2)], "deliveries stay counted"
    assert 902 not in run.replies, "the claim of the dead process must receive nothing"
    assert stats(world) == (0, 6, 0)
    assert ack(world, held(mine)).acked == 0
    assert ack(world, held(other)).acked == 2
    run.step(ev.WorkerDied(7, 70))
    assert stats(world) == (0, 4, 0)


def test_a_waiting_claim_of_a_connection_that_ended_gets_no_job(world):
    """A gateway claims for others, so its claims do not name its process."""
    make(world, 1)
    run = world.run_of("q")
    assert list(held(claim(world, 1))) == [1]
    gone = run.request(901, m.Claim("q", "w", 1, wait_ms=20_000))
    run.step(gone)
    run.step(ev.ConnectionsEnded([gone.client]))
    make(world, 1)
    assert 901 not in run.replies
    assert list(held(claim(world, 1))) == [2]


def test_acks_that_arrive_together_share_one_sync():
    seen: list[Any] = []
    world = started(effect_observer=lambda shard, effect: seen.append(effect))
    make(world, 8, durability="fsync")
    jobs = held(claim(world, 8))
    seen.clear()
    run = world.run_of("q")
    seen.clear()
    asked = [
        run.request(1_000 + seq, m.Ack("q", "w", words([seq]), words([token]))) for seq, token in jobs.items()
    ]
    run.step(*asked)
    assert [run.replies.pop(1_000 + seq).acked for seq in jobs] == [1] * 8
    assert sum(isinstance(effect, ev.Sync) for effect in seen) == 1
    assert stats(world) == (0, 0, 0)


def test_claims_lease_only_published_jobs(world):
    """An append in the same pass is only staged."""
    make(world, 0, durability="fsync")
    run = world.run_of("q")
    frame = world.frame_for("q", [b"one"])
    run.step(run.frames(1, frame), run.request(901, m.Claim("q", "w", 5)))
    assert run.replies.pop(901).runs == []
    assert list(held(claim(world, 5))) == [1]


def test_an_expired_lease_gives_the_job_to_the_next_claim(world):
    """The old token is not valid any more, and the delivery count grows."""
    make(world, 2)
    first = held(claim(world))
    world.clock.advance(LEASE_S)
    assert ack(world, {}, node="other").acked == 0
    assert claim(world, 1, "v").runs[0][:3] == (2, 1, 1)
    world.clock.advance(0.001)
    assert claim(world, 1, "v").runs[0][:3] == (1, 1, 2)
    assert ack(world, first).skipped == words([1])


def test_nack_and_extend(world):
    """Jobs without a lease of the node are skipped."""
    make(world, 3)
    jobs = held(claim(world, 3))
    reply = nack(world, [1, 7])
    assert (reply.nacked, numbers(reply.skipped), reply.ready, reply.in_flight) == (1, [7], 1, 2)
    assert nack(world, {2: jobs[2]}, delay_ms=500).nacked == 1
    assert stats(world) == (1, 1, 1)
    extended = world.request(m.Extend("q", "w", words([3, 1]), lease_ms=90_000))
    assert (extended.extended, numbers(extended.skipped)) == (1, [1])
    assert extended.deadline == world.clock.now_us() // 1_000 + 90_000
    world.clock.advance(0.5)
    assert list(held(claim(world, 9))) == [1, 2]
    world.clock.advance(60)
    assert stats(world) == (2, 1, 0)


def test_lengths_and_names_are_validated(world):
    """A request with too many seqs is refused with the maximum."""
    make(world, 2)
    assert claim(world, 0, lease_ms=LEASE_MS_MIN).deadline == world.clock.now_us() // 1_000 + LEASE_MS_MIN
    with pytest.raises(BatchTooLarge) as large:
        ack(world, list(range(1, 1_002)))
    assert large.value.detail == {"seqs": 1_001, "max": 1_000}
    assert ack(world, []).acked == 0
    for wrong in (
        m.Ack("q", "w", b"1234567"),
        m.Ack("q", "w", words([1, 2]), words([1])),
        m.Ack("q", "", words([1])),
        m.Claim("q", "n" * 129),
        m.Claim("q", "w", -1),
        m.Nack("q", "w", words([1]), delay_ms=-1),
        m.Extend("q", "w", words([1]), lease_ms=-1),
        m.Claim("q", "w", lease_ms=LEASE_MS_MIN - 1),
    ):
        with pytest.raises(InvalidRequest):
            world.request(wrong)


@pytest.mark.parametrize("kind", [m.Claim, m.Ack, m.Nack, m.Extend, m.LeaseStats])
def test_a_log_topic_is_no_queue_and_no_topic_is_created(world, kind):
    """Every request about jobs is refused."""
    world.put_topic("log")
    fields = {m.Claim: ("w",), m.LeaseStats: ()}.get(kind, ("w", b""))
    with pytest.raises(NotAQueue) as refused:
        world.request(kind("log", *fields))
    assert refused.value.detail == {"topic": "log"}
    with pytest.raises(TopicNotFound):
        world.request(kind("absent", *fields))


# -- removal of jobs --------------------------------------------------------------------------------------


def test_the_ack_of_a_deleted_job_succeeds_and_of_an_evicted_job_does_not(world):
    """A lease ends with its job, whatever removes the job (Q5)."""
    make(world, 6, cap_records=6)
    jobs = held(claim(world, 5))
    delete(world, "q", seqs=[3])
    world.append("q", [b"more", b"more"])  # seven exist: the cap evicts one
    assert read(world, "q")[0].gap_to == 1
    assert stats(world) == (3, 3, 0)
    reply = ack(world, jobs)
    assert (reply.acked, numbers(reply.skipped)) == (4, [1])
    assert stats(world) == (3, 0, 0)


def test_a_job_with_an_expired_ttl_is_not_leased_any_more(world):
    """Its ack is skipped."""
    make(world, 2, ttl_ms=1_000)
    jobs = held(claim(world))
    world.clock.advance(1.002)
    reply = ack(world, jobs)
    assert (reply.acked, numbers(reply.skipped), reply.ready, reply.in_flight) == (0, [1], 0, 0)
    assert claim(world, 9).runs == []


def test_an_expired_record_between_others_is_skipped(world):
    world.put_topic("q", type="queue")
    soon = world.clock.now_us() + 1_000_000
    append(world, "q", [b"a", b"b", b"c"], expires_at=[0, soon, 0])
    world.clock.advance(2)
    assert list(held(claim(world, 9))) == [1, 3]


def test_a_delete_up_to_a_seq_removes_ready_leased_and_delayed_jobs(world):
    """The counts follow (Q2)."""
    make(world, 6)
    claim(world, 3)
    nack(world, [2], delay_ms=60_000)
    assert stats(world) == (3, 2, 1)
    delete(world, "q", before=5)
    assert stats(world) == (2, 0, 0)


def test_a_recreated_queue_has_no_old_leases(world):
    make(world, 2)
    old = held(claim(world, 2))
    world.request(m.TopicDelete("q"))
    make(world, 2)
    assert ack(world, old).acked == 0
    assert stats(world) == (2, 0, 0)


# -- repeated requests ------------------------------------------------------------------------------------


def test_a_repeated_request_has_the_same_reply(world):
    make(world, 4)
    first = claim(world, 2, call=1)
    assert claim(world, 2, call=1) == first
    acked = ack(world, held(first), call=2)
    assert ack(world, held(first), call=2) == acked
    claim(world, 2)
    given = nack(world, [3], call=3)
    assert nack(world, [3], call=3) == given
    extend = m.Extend("q", "w", words([4]), call=4)
    assert world.request(extend).extended == world.request(extend).extended == 1
    assert stats(world) == (1, 1, 0)


def test_a_claim_that_comes_again_is_not_told_of_leases_that_are_others_by_now(world):
    """A gateway nacks jobs that it cannot forward, and a worker without a reply repeats its claim."""
    make(world, 4)
    first = held(claim(world, 3, call=1))
    nack(world, {3: first[3]})
    assert list(held(claim(world, 1, "x"))) == [3]
    assert held(claim(world, 3, call=1)) == {seq: first[seq] for seq in (1, 2)}


def test_a_claim_that_is_taken_back_is_made_anew_when_it_comes_again(world):
    """Nothing remains under the call number of the claim."""
    make(world, 2)
    first = held(claim(world, 2, call=1))
    for _ in range(2):
        assert nack(world, first, call=1).nacked == 2
    assert stats(world) == (2, 0, 0)
    second = held(claim(world, 2, call=1))
    assert list(second) == [1, 2]
    assert not set(first.values()) & set(second.values())
    assert held(claim(world, 2, call=1)) == second


def test_a_claim_repeated_after_its_lease_is_a_new_claim(world):
    make(world, 1)
    old = claim(world, call=1)
    world.clock.advance(LEASE_S + 1)
    assert held(claim(world, call=1)).keys() == held(old).keys()
    assert stats(world) == (0, 1, 0)


def test_a_repeated_ack_after_a_restart_succeeds_if_its_deletion_was_logged(world):
    """A job without a logged deletion is skipped."""
    make(world, 4, durability="fsync", cap_records=4)
    claimed = claim(world, 4)
    jobs = held(claimed)
    ack(world, {2: jobs[2], 4: jobs[4]}, in_time=True)
    world.append("q", [b"new"] * 3)  # evicts the first
    restart(world)
    world.clock.advance(LEASE_S + 1)  # The shard was down for long.
    reply = ack(world, jobs, in_time=True)
    assert (reply.acked, numbers(reply.skipped)) == (2, [1, 3])
    assert ack(world, [2, 4], in_time=True).acked == 0, "an ack without a token must be skipped"
    assert ack(world, {2: jobs[2]}).acked == 0, "an ack after the lease must be skipped"
    own = held(claim(world, 1))
    (seq, token), *_ = own.items()
    ack(world, own)
    assert ack(world, {seq: token}, in_time=True).acked == 0, (
        "a settled job of this incarnation must be skipped"
    )


def test_a_bounded_number_of_replies_is_kept(world, monkeypatch):
    monkeypatch.setattr(reply_cache, "REPLY_CACHE_REPLIES_MAX", 2)
    monkeypatch.setattr(reply_cache, "REPLY_CACHE_ROWS_MAX", 8)
    make(world, 9)
    for call in range(1, 6):
        claim(world, 1, call=call)
    kept = world.run_of("q").core.requests.leases.replies
    assert [call for call in range(1, 8) if call in kept] == [4, 5]
    ack(world, list(range(100, 120)), call=6)
    assert ([call for call in range(1, 8) if call in kept], kept._rows) == ([], 0)


# -- waiting claims ---------------------------------------------------------------------------------------


def park(world: World, corr: int, most: int = 1, wait_ms: int = 5_000, node: str = "w", call: int = 0) -> Any:
    run = world.run_of("q")
    run.step(run.request(corr, m.Claim("q", node, most, wait_ms=wait_ms, call=call)))
    return run


def test_a_claim_that_is_called_off_is_as_if_it_had_never_been_made(world):
    """A claim is undone by its call number, before and after it leased jobs, or by the seqs of its jobs."""
    make(world, 0)
    run = park(world, 900, wait_ms=20_000, call=7)
    assert nack(world, [], undo=True, call=7).nacked == 0
    assert run.replies[900].runs == [], "the waiting claim must end"
    world.append("q", [b"a", b"b", b"c"])
    world.tick(0.01)
    assert stats(world) == (3, 0, 0)
    first = claim(world, 2, call=8)
    assert nack(world, [], node="somebody else", undo=True, call=8).nacked == 0
    assert nack(world, [], undo=True, call=99).nacked == 0, "there is no such claim"
    assert stats(world) == (1, 2, 0)
    for nacked in (2, 0, 0):
        assert nack(world, [], undo=True, call=8).nacked == nacked, "once"
    again = claim(world, 3, call=9)
    assert [(number, deliveries) for number, _, deliveries, _ in again.runs] == [(1, 1)]
    assert not set(held(first).values()) & set(held(again).values()), "a lease token was issued twice (Q3)"
    for _ in range(2):
        assert nack(world, {2: held(again)[2]}, undo=True, call=10).nacked == 1, "the same answer"
    assert claim(world).runs[0][:3] == (2, 1, 1)
    assert nack(world, [1]).nacked == 1
    assert claim(world).runs[0][:3] == (1, 1, 2), "a normal nack must count the delivery"
    ack(world, [1, 2])
    assert nack(world, [], undo=True, call=9).nacked == 1, "settled jobs must stay settled"
    assert stats(world) == (1, 0, 0)


def test_a_waiting_claim_receives_appended_jobs(world):
    make(world, 0, durability="fsync")
    run = park(world, 900, most=2)
    assert not run.replies
    world.append("q", [b"a", b"b", b"c"])
    assert list(held(run.replies.pop(900))) == [1, 2]


def test_the_claim_that_waits_longest_is_served_first(world):
    make(world, 0)
    run = park(world, 900)
    park(world, 901, most=5)
    park(world, 902)
    world.append("q", [b"a", b"b", b"c"])
    assert [list(held(run.replies.pop(900 + n))) for n in range(2)] == [[1], [2, 3]]
    assert not run.replies
    assert world.request(m.LeaseStats("q")).waiting == 1


def test_a_wait_ends_with_a_returned_job(world):
    """The job returns by a nack, after a delay, or from an expired lease. The shard sets a timer."""
    make(world, 1)
    jobs = held(claim(world))
    run = park(world, 900, wait_ms=30_000, node="v")
    nack(world, jobs)
    assert list(held(run.replies.pop(900))) == [1]
    park(world, 901, wait_ms=30_000)
    nack(world, [1], node="v", delay_ms=700)
    assert not run.replies
    assert wakes_in_s(world) == pytest.approx(0.7)
    world.tick(0.7)
    assert list(held(run.replies.pop(901))) == [1]
    extended = world.request(m.Extend("q", "w", words([1]), lease_ms=900))
    assert extended.extended == 1
    park(world, 902, wait_ms=30_000, node="v")
    world.tick(wakes_in_s(world))
    world.tick(0.001)
    assert run.replies.pop(902).runs[0][:3] == (1, 1, 4)


def wakes_in_s(world: World) -> float:
    """Return the seconds until the shard must check its waiting claims."""
    core = world.run_of("q").core
    deadline = core.requests.leases.waiting_claims.next_deadline_ns(world.clock.now_us())
    assert deadline is not None
    assert core.next_deadline_ns() <= deadline
    return (deadline - world.clock.monotonic_ns()) / 1e9


def test_a_claim_with_an_expired_wait_returns_no_job(world):
    make(world, 0)
    run = park(world, 900, wait_ms=1_000)
    world.tick(0.9)
    assert not run.replies
    world.tick(0.1)
    assert run.replies.pop(900).runs == []
    assert run.core.requests.leases.waiting_claims.next_deadline_ns(0) is None
    assert not run.core.requests.leases.waiting_claims


def test_a_repeated_waiting_claim_waits_once(world):
    make(world, 0)
    run = park(world, 900, call=77)
    park(world, 901, call=77)
    world.append("q", [b"a", b"b"])
    assert list(held(run.replies.pop(901))) == [1]
    assert not run.replies


def test_waiting_claims_end_with_their_topic_and_with_their_shard(world):
    make(world, 0)
    run = park(world, 900)
    world.request(m.TopicDelete("q"))
    run.step()
    assert run.replies.pop(900).status == Status.TOPIC_NOT_FOUND
    make(world, 0)
    park(world, 901)
    run.step(DrainRequested())
    assert run.replies.pop(901).status == Status.SHUTTING_DOWN


def test_too_many_waiting_claims_are_refused(world, monkeypatch):
    monkeypatch.setattr(waiting_claims, "WAITING_CLAIMS_MAX", 1)
    make(world, 0)
    run = park(world, 900)
    park(world, 901)
    assert run.replies.pop(901).detail["limit"] == "waiting_claims"


@pytest.mark.slow
def test_the_bookkeeping_of_waiting_claims_stays_small(world):
    make(world, 1)
    claim(world)
    run = world.run_of("q")
    for turn in range(3_000):
        park(world, 10_000 + turn, wait_ms=30_000, call=0)
        world.append("q", [b"x"])
        assert run.replies.pop(10_000 + turn).runs
    claims = run.core.requests.leases.waiting_claims
    assert (len(claims._of), len(claims._dues), len(claims._due_of)) == (0, 1, 1)
    assert len(claims._ends) <= 1_024 + 2


def test_a_waiting_claim_receives_no_expired_job(world):
    make(world, 1, ttl_ms=40_000)
    claim(world)
    run = park(world, 900, wait_ms=30_000, node="v")
    world.clock.advance(12)
    run.step()
    world.clock.advance(29)
    run.step()
    run.step()
    answer = run.replies.pop(900)
    assert answer.runs == [], "its lease and its time ended together"


# -- leases of other workers ------------------------------------------------------------------------------


@pytest.mark.parametrize("leases_durable", [False, True])
def test_an_idle_lease_may_be_taken_over_by_another_worker(world, leases_durable):
    """As in consumer groups: by a steal of its seq, or by a claim when no other job is ready."""
    make(world, 3, durability="fsync", leases_durable=leases_durable)
    theirs = held(claim(world, 3, node="a"))
    steal = m.Steal("q", "b", words([1, 9]), min_idle_ms=1_000, call=7)
    assert world.request(steal).runs == []
    world.clock.advance(2.0)
    stolen = world.request(m.Steal("q", "b", words([1, 9]), min_idle_ms=1_000, call=8))
    assert [run[:3] for run in stolen.runs] == [(1, 1, 2)]
    assert held(world.request(m.Steal("q", "b", words([1, 9]), call=8))) == held(stolen)
    assert list(held(claim(world, 1, node="c", min_idle_ms=1_000))) == [2]
    assert claim(world, 9, node="c", min_idle_ms=5_000).runs == []
    if leases_durable:
        restart(world)
    assert numbers(ack(world, theirs, node="a").skipped) == [1, 2]
    assert ack(world, held(stolen), node="b").acked == 1


@pytest.mark.parametrize("leases_durable", [False, True])
def test_a_deleted_job_cannot_be_taken_over(world, leases_durable):
    """Its holder may still ack it, but it is not pending."""
    make(world, 3, leases_durable=leases_durable)
    theirs = held(claim(world, 2, node="a"))
    assert delete(world, "q", before=3).deleted == 2
    assert world.request(m.Steal("q", "b", words([1, 2]), call=7)).runs == []
    assert stats(world) == (1, 0, 0)
    assert list(held(claim(world, 9, node="c"))) == [3]
    assert ack(world, theirs, node="a").acked == 2
    assert stats(world) == (0, 1, 0)
