"""Consumer groups of a shard: leases and positions over kills, checkpoints, deletes and repeats."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.leases import claim_requests, consumer_groups, waiting_claims
from ringlog.contract import DrainRequested, Reply
from ringlog.envelope import messages as m
from ringlog.errors import (
    BatchTooLarge,
    GroupIncompatible,
    GroupNotFound,
    InvalidRequest,
    Status,
    Throttled,
    TopicNotFound,
)
from ringlog.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from tests.support.checkpoint_world import checkpoint_all
from tests.support.group_world import QUEUE, STREAM, ack, claim, make, nack, pending, stand
from tests.support.lease_words import held, numbers, words
from tests.support.removal_world import delete
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import new_world, restart, started

CLASSES = ("fsync", "disk", "memory", "ephemeral")
LEASED, DELAYED, RETURNED = 1, 2, 3


def refused(world: World, message: m.Message, error: type[Exception]) -> None:
    with pytest.raises(error):
        world.request(message)


# -- lifetime of a group ----------------------------------------------------------------------------------


def test_a_group_is_created_on_use_and_exists_afterwards(world):
    """Opening the group again does not move its cursor."""
    made = make(world, 5)
    assert (made.created, made.cursor, made.floor, made.group) == (True, 1, 0, "g")
    again = world.request(m.GroupOpen("t", "g", QUEUE, start=4))
    assert (again.created, again.cursor) == (False, 1), "opening a group must not move its cursor"
    refused(world, m.GroupOpen("t", "g", STREAM), GroupIncompatible)
    refused(world, m.GroupOpen("t", "none", QUEUE, make=False), GroupNotFound)
    refused(world, m.GroupOpen("no topic", "g", QUEUE), TopicNotFound)
    refused(world, m.Claim("t", "w", group="none"), GroupNotFound)
    for wrong in (
        m.GroupOpen("t", "a@b", QUEUE), m.GroupOpen("t", "h", 3), m.GroupOpen("t", "h", 1, "tag"),
        m.GroupOpen("t", "h", 1, pending_max=-1), m.Claim("t", "w", -1, group="g"),
        m.Claim("t", "", group="g"),
        m.Ack("t", "w", b"12345", group="g"), m.Nack("t", "w", words([1]), delay_ms=-1, group="g"),
        m.Steal("t", "w", words([1]), min_idle_ms=-1, group="g"), m.Claim("t", "w", call=-1, group="g"),
    ):  # fmt: skip
        refused(world, wrong, InvalidRequest)
    refused(world, m.Ack("t", "w", words(range(1_001)), group="g"), BatchTooLarge)
    world.request(m.GroupOpen("t", "g", QUEUE, tags="^a"))
    listed = world.request(m.GroupList("t")).groups
    assert [(each.group, each.name, each.tags) for each in listed] == [("g", "g", ""), ("g@^a", "g", "^a")], (
        "a tag filter must make a group of its own"
    )
    assert world.request(m.GroupDelete("t", "g")).deleted
    assert not world.request(m.GroupDelete("t", "g")).deleted
    refused(world, m.Claim("t", "w", group="g"), GroupNotFound)


@pytest.mark.parametrize(("start", "cursor"), [(1, 1), (3, 3), (6, 6), (99, 6)])
def test_a_group_starts_at_the_requested_seq_within_the_existing_records(world, start, cursor):
    """A start beyond the head becomes the next seq."""
    assert make(world, 5, start=start).cursor == cursor


@pytest.mark.parametrize("durability", CLASSES)
def test_a_group_claims_and_acks_records_that_stay_for_others(world, durability):
    make(world, 3, durability=durability)
    world.request(m.GroupOpen("t", "other", QUEUE))
    claimed = claim(world, 2)
    assert (list(held(claimed)), claimed.ready) == ([1, 2], 1)
    assert claimed.deadline == world.clock.now_us() // 1_000 + 30_000
    reply = ack(world, held(claimed))
    assert (reply.acked, reply.skipped, reply.ready, reply.in_flight) == (2, b"", 1, 0)
    assert [seq for seq, _ in world.records("t")] == [1, 2, 3], "a group deletes nothing"
    assert stand(world).info.floor == 2
    assert list(held(claim(world, 9, group="other"))) == [1, 2, 3]
    assert numbers(ack(world, held(claimed)).skipped) == [1, 2], "acked records must be skipped"


def test_the_floor_is_exact_whatever_the_order_of_acks(world):
    """The floor moves only when the first gap is acked, and then past all acked records."""
    make(world, 6)
    jobs = held(claim(world, 6))
    for done, floor in (((4,), 0), ((6, 2), 0), ((1,), 2), ((3,), 4), ((5,), 6)):
        ack(world, {seq: jobs[seq] for seq in done})
        assert stand(world).info.floor == floor, done


def test_each_call_is_one_frame_and_is_answered_after_its_sync():
    seen: list[Any] = []
    world = started(effect_observer=lambda shard, effect: seen.append(effect))
    make(world, 9)
    for request in (
        m.Claim("t", "w", 9, group="g"), m.Ack("t", "w", words([2, 5, 9]), group="g"),
        m.Extend("t", "w", words([1, 3]), group="g"), m.Steal("t", "v", words([1, 4]), group="g"),
        m.Nack("t", "v", words([4]), group="g"), m.GroupLeave("t", "g", "v"), m.GroupSeek("t", "g", 4),
    ):  # fmt: skip
        seen.clear()
        before = world.run_of("t").core.log.offset
        assert not isinstance(world.request(request), m.ErrorReply)
        kinds = [type(effect) for effect in seen]
        assert kinds.count(ev.WriteBatch) == 1, request
        assert kinds[-1] is Reply
        assert kinds.index(ev.WriteBatch) < kinds.index(ev.Sync) < len(kinds) - 1
        assert world.run_of("t").core.log.offset - before < 512
    seen.clear()
    assert ack(world, [77, 78], node="nobody").acked == 0
    assert ev.WriteBatch not in map(type, seen), "what changes nothing is not logged"


# -- redelivery -------------------------------------------------------------------------------------------


def test_records_with_expired_leases_are_delivered_first_and_counted(world):
    """The old tokens are not valid any more."""
    make(world, 3)
    first = held(claim(world, 2, lease_ms=1_000))
    world.clock.advance(1.0)
    assert list(held(claim(world, 1, node="v"))) == [3], "at its deadline a lease must still be valid"
    world.clock.advance(0.001)
    again = claim(world, 9, node="v")
    assert [run[:3] for run in again.runs] == [(1, 1, 2), (2, 1, 2)] or again.runs[0][:3] == (1, 2, 2)
    assert not set(held(again).values()) & set(first.values())
    assert numbers(ack(world, first).skipped) == [1, 2]
    assert ack(world, held(again), node="v").acked == 2


def test_a_nack_returns_a_record_at_once_or_after_a_delay(world):
    make(world, 2)
    jobs = held(claim(world, 2))
    nack(world, {1: jobs[1]})
    nack(world, {2: jobs[2]}, delay_ms=500)
    assert pending(world) == {1: (RETURNED, "", 1), 2: (DELAYED, "", 1)}
    assert list(held(claim(world, 9))) == [1]
    world.clock.advance(0.5)
    assert list(held(claim(world, 9))) == [2]


def test_a_claim_that_is_called_off_is_as_if_it_had_never_been_made(world):
    """A claim or a steal is undone by its call number, at any time, also after a kill."""
    make(world, 3)
    claim(world, 2, call=1)
    assert nack(world, [], node="v", undo=True, call=1).nacked == 0
    for nacked in (2, 0):
        assert nack(world, [], undo=True, call=1).nacked == nacked, "once"
    assert pending(world) == {1: (3, "", 0), 2: (3, "", 0)}
    restart(world)
    given = claim(world, 3, call=2)
    assert {first: deliveries for first, _, deliveries, _ in given.runs} == {1: 1, 3: 1}
    assert nack(world, {3: held(given)[3]}, undo=True, call=3).nacked == 1
    world.request(m.Steal("t", "thief", words([2]), call=4, group="g"))
    assert nack(world, [], node="thief", undo=True, call=4).nacked == 1
    assert pending(world) == {1: (1, "w", 1), 2: (3, "", 1), 3: (3, "", 0)}


def test_a_steal_fences_the_previous_holder(world):
    """A lease that was extended recently is not idle."""
    make(world, 4)
    jobs = held(claim(world, 4, node="a"))
    world.clock.advance(2.0)
    world.request(m.Extend("t", "a", words([2]), group="g"))
    stolen = world.request(m.Steal("t", "b", words([1, 2, 9]), min_idle_ms=1_000, group="g"))
    assert [run[:3] for run in stolen.runs] == [(1, 1, 2)]
    assert numbers(ack(world, jobs, node="a").skipped) == [1]
    assert pending(world) == {1: (LEASED, "b", 2)}
    assert ack(world, held(stolen), node="b").acked == 1
    assert stand(world).info.floor == 4


def ack_and_claim(world: World, jobs: dict[int, int], call: int) -> Any:
    return world.request(m.AckAndClaim("t", "w", words(jobs), words(jobs.values()), 2, call=call, group="g"))


def test_what_is_done_and_the_next_claim_in_one_request(world):
    """The reply follows when both are logged, so a repeat has the same reply, also from the next shard."""
    make(world, 5)
    given = ack_and_claim(world, held(claim(world, 2)), call=5)
    assert list(held(given)) == [3, 4]
    restart(world)
    assert held(ack_and_claim(world, {1: 1, 2: 2}, call=5)) == held(given)
    assert (stand(world).info.floor, stand(world).in_flight) == (2, 2)
    last = ack_and_claim(world, held(given), call=6)
    assert list(held(last)) == [5]
    assert ack_and_claim(world, held(last), call=7).runs == []
    restart(world)
    assert ack_and_claim(world, held(last), call=7).runs == [], (
        "the ack must succeed although no record is ready"
    )
    assert stand(world).info.floor == 5


def test_an_ack_and_claim_changes_nothing_unless_every_lease_is_held(world):
    make(world, 4)
    jobs = held(claim(world, 2))
    nack(world, {2: jobs[2]})
    before = (stand(world).info.floor, pending(world))
    for wrong in (jobs, {}, {3: 1}):
        assert ack_and_claim(world, wrong, call=9) == m.NotCombinable("t")
    assert (stand(world).info.floor, pending(world)) == before


def test_a_claim_may_take_over_idle_leases_of_other_members(world):
    """This happens only if no other record is ready."""
    make(world, 2)
    claim(world, 1, node="a")
    world.clock.advance(1.0)
    assert list(held(claim(world, 9, node="b", min_idle_ms=500))) == [1, 2]
    assert claim(world, 9, node="b", min_idle_ms=500).runs == []
    assert pending(world, idle_ms=1) == {}
    world.clock.advance(0.4)
    assert claim(world, 9, node="a", min_idle_ms=500).runs == []
    assert pending(world, node="b", min_deliveries=2) == {1: (LEASED, "b", 2)}


def test_leaving_returns_leases_at_once_and_members_are_listed(world):
    """A member without requests for two minutes is not listed."""
    make(world, 3, node="w")
    claim(world, 2)
    claim(world, 1, node="v")
    assert [(name, count) for name, _, count in stand(world).members] == [("v", 1), ("w", 2)]
    assert world.request(m.GroupLeave("t", "g", "w")).released == 2
    assert [(name, count) for name, _, count in stand(world).members] == [("v", 1)]
    assert list(held(claim(world, 9, node="v", lease_ms=600_000))) == [1, 2]
    world.request(m.GroupOpen("t", "g", QUEUE, node="idle"))
    world.clock.advance(121)
    assert [name for name, _, _ in stand(world).members] == ["v"], "silent for two minutes"


def test_records_in_flight_are_bounded_for_the_group_and_for_each_member(world):
    """At the bound no new record is leased. Returned records still are."""
    make(world, 10, pending_max=5, member_max=3)
    jobs = held(claim(world, 9, node="a"))
    assert list(jobs) == [1, 2, 3]
    assert claim(world, 9, node="a").runs == []
    assert list(held(claim(world, 9, node="b"))) == [4, 5]
    assert claim(world, 9, node="c").runs == []
    nack(world, {1: jobs[1]}, node="a")
    assert list(held(claim(world, 9, node="c"))) == [1]
    ack(world, {2: jobs[2]}, node="a")
    assert list(held(claim(world, 9, node="c"))) == [6]


def test_the_bounds_of_a_topic_and_of_a_shard_are_enforced(world, monkeypatch):
    monkeypatch.setattr(consumer_groups, "GROUPS_PER_TOPIC_MAX", 2)
    make(world, 5)
    world.request(m.GroupOpen("t", "h", QUEUE))
    refused(world, m.GroupOpen("t", "i", QUEUE), Throttled)
    monkeypatch.setattr(claim_requests, "GROUP_PENDING_PER_TOPIC_MAX", 2)
    jobs = held(claim(world, 2, group="h"))
    assert claim(world, 1).runs == []
    world.request(m.Nack("t", "w", words(jobs), group="h"))
    assert claim(world, 1).runs == []
    assert list(held(claim(world, 2, group="h"))) == [1, 2], "returned records must be delivered at the bound"
    monkeypatch.setattr(waiting_claims, "WAITING_CLAIMS_MAX", 0)
    refused(world, m.Claim("t", "w", wait_ms=1_000, group="g"), Throttled)


# -- seek and lag -----------------------------------------------------------------------------------------


def test_a_seek_moves_in_both_directions_and_ends_every_lease(world):
    """The old tokens are not valid any more."""
    make(world, 9)
    jobs = held(claim(world, 6))
    assert world.request(m.GroupSeek("t", "g", 3)).cursor == 3
    assert pending(world) == {}
    assert numbers(ack(world, jobs).skipped) == [1, 2, 3, 4, 5, 6]
    assert [run[:3] for run in claim(world, 2).runs] == [(3, 2, 1)]
    assert world.request(m.GroupSeek("t", "g", 99)).cursor == 10
    assert stand(world).info.floor == 9
    assert claim(world, 2).runs == []


def test_lag_counts_only_existing_records(world):
    """Undelivered and pending records are counted separately."""
    make(world, 9)
    claim(world, 3)
    delete(world, "t", seqs=[2, 5])
    found = stand(world)
    assert (found.undelivered, found.in_flight, found.head_seq) == (5, 2, 9)
    delete(world, "t", before=4)
    found = stand(world)
    assert (found.undelivered, found.in_flight, found.info.floor) == (5, 0, 3)


def test_a_record_that_left_the_topic_is_not_pending_and_its_ack_succeeds(world):
    """One record is deleted, and others are evicted by a cap."""
    make(world, 6)
    jobs = held(claim(world, 4))
    delete(world, "t", seqs=[2])
    world.put_topic("t", durability="fsync", cap_records=3)
    assert sorted(pending(world)) == [4]
    assert ack(world, jobs).skipped == b""
    assert list(held(claim(world, 9))) == [5, 6]


# -- stream mode ------------------------------------------------------------------------------------------


def test_a_stream_group_is_read_by_one_member_at_a_time(world):
    """The latest member owns the group. A commit of the previous owner has no effect."""
    make(world, 9, STREAM)
    refused(world, m.Claim("t", "w", group="g"), GroupIncompatible)
    taken = world.request(m.GroupTakeOver("t", "g", "a"))
    assert taken.committed == 0
    reply = world.request(m.GroupCommit("t", "g", taken.token, 4, 7))
    assert (reply.committed, reply.cursor, reply.is_holder) == (4, 7, True)
    refused(world, m.GroupCommit("t", "g", taken.token, 8, 8), InvalidRequest)
    refused(world, m.GroupCommit("t", "g", taken.token, 8, 11), InvalidRequest)
    assert world.request(m.GroupCommit("t", "g", taken.token, 2, 7)).committed == 4, (
        "a commit must not move back"
    )
    assert (stand(world).undelivered, stand(world).holder) == (5, "a")
    other = world.request(m.GroupTakeOver("t", "g", "b"))
    assert other.committed == 4
    late = world.request(m.GroupCommit("t", "g", taken.token, 7, 8))
    assert (late.is_holder, late.committed) == (False, 4)
    assert world.request(m.GroupSeek("t", "g", 2)).floor == 1
    assert not world.request(m.GroupCommit("t", "g", other.token, 7, 8)).is_holder, (
        "the position of the group changed"
    )


@pytest.mark.parametrize("is_absorbed", [False, True])
def test_a_group_reports_the_age_of_its_oldest_record_and_the_waiting_time(is_absorbed):
    """Queues report the same metrics."""
    world = new_world()
    make(world)
    world.request(m.GroupOpen("t", "s", STREAM))
    world.append("t", [b"1", b"2"])
    world.clock.advance(5.0)
    world.append("t", [b"3"])
    assert stand(world).oldest_ready_ms == 5_000
    claimed = claim(world, 2)
    assert stand(world).oldest_ready_ms == 0
    assert 5_000 <= stand(world).wait_p99_ms <= 5_630
    world.clock.advance(1.0)
    nack(world, held(claimed))
    assert stand(world).oldest_ready_ms == 6_000, "a returned record must keep its age"
    if is_absorbed:
        checkpoint_all(world)
    restart(world)
    assert stand(world).oldest_ready_ms == 6_000, "the age must be read from storage"
    assert (stand(world).wait_p99_ms, stand(world, "s").oldest_ready_ms) == (0, -1)
    claim(world, 9)
    assert stand(world).oldest_ready_ms == -1
    assert stand(world).wait_p99_ms == 0, "put before the start"


# -- restarts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "stop", "power"])
@pytest.mark.parametrize("is_absorbed", [False, True])
def test_the_state_of_a_group_outlives_the_shard(how, is_absorbed):
    """Leases, counts, delays and positions are restored from the log or from a snapshot (CG2)."""
    world = new_world()
    make(world, 9, pending_max=50)
    world.request(m.GroupOpen("t", "s", STREAM))
    token = world.request(m.GroupTakeOver("t", "s", "r")).token
    world.request(m.GroupCommit("t", "s", token, 3, 6))
    jobs = held(claim(world, 6, lease_ms=60_000))
    ack(world, {2: jobs[2]})
    nack(world, {4: jobs[4]}, delay_ms=3_600_000)
    if is_absorbed:
        checkpoint_all(world)
        world.append("t", [b"10"])
    before = pending(world)
    if how == "power":
        world.power_loss(seed=1)
    elif how == "kill":
        world.kill()
    else:
        world.stop()
    world.start()
    assert pending(world) == before
    assert stand(world).info.cursor == 7
    assert ack(world, {1: jobs[1], 3: jobs[3]}).acked == 2, "the lease is the same"
    assert stand(world).info.floor == 3
    assert world.request(m.GroupCommit("t", "s", token, 5, 6)).is_holder
    assert [run[:3] for run in claim(world, 2).runs] == [(7, 2, 1)]
    assert set(held(claim(world, 1)).values()).isdisjoint(jobs.values())


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_groups_move_with_their_topics_when_the_number_of_shards_changes(before, after):
    world = new_world(before)
    jobs = {}
    for n in range(6):
        name = f"t{n}"
        world.put_topic(name, durability="fsync")
        world.append(name, [b"x"] * 5)
        world.request(m.GroupOpen(name, "g", QUEUE))
        jobs[name] = held(world.request(m.Claim(name, "w", 3, group="g")))
    for round, shards in enumerate((after, before, after)):
        if round != 1:
            checkpoint_all(world)
        world.kill()
        world.start(shards)
        for name, mine in jobs.items():
            seq = min(mine)
            reply = world.request(m.Ack(name, "w", words([seq]), words([mine.pop(seq)]), group="g"))
            assert reply.acked == 1, (round, name)
            state = world.request(m.LeaseStats(name, group="g"))
            assert (state.info.floor, state.info.cursor, state.in_flight) == (seq, 4, len(mine))


def test_a_request_that_comes_again_has_the_same_answer_also_after_a_kill(world):
    make(world, 9)
    first = claim(world, 3, call=1)
    done = ack(world, {**held(first), 8: 5}, call=2)
    assert numbers(done.skipped) == [8]
    later = claim(world, 2, call=3)
    for _ in range(2):
        assert claim(world, 2, call=3).runs == later.runs
        again = ack(world, {**held(first), 8: 5}, call=2)
        assert (again.acked, again.skipped) == (3, done.skipped)
        restart(world)
    assert stand(world).in_flight == 2


def test_a_claim_that_comes_again_is_not_told_of_leases_that_are_others_by_now(world):
    """A gateway nacks records that it cannot forward. A member without a reply repeats its claim."""
    make(world, 6)
    first = held(claim(world, 4, call=1))
    nack(world, {seq: first[seq] for seq in (3, 4)}, tokens=words([first[3], first[4]]))
    other = held(claim(world, 1, "x"))
    assert list(other) == [3]
    for _ in range(2):
        assert held(claim(world, 4, call=1)) == {seq: first[seq] for seq in (1, 2)}, "record 4 is not leased"
        restart(world)
    world.request(m.Steal("t", "x", words([1, 2]), group="g"))
    assert held(claim(world, 4, call=1)) == {}
    assert pending(world)[4][0] == RETURNED


@pytest.mark.parametrize("is_theft", [False, True])
def test_a_claim_that_is_taken_back_is_made_anew_when_it_comes_again(world, is_theft):
    """Nothing remains under the call number of the claim, also for the next shard."""
    make(world, 3)
    if is_theft:
        claim(world, 3, "x")

    def ask() -> dict[int, int]:
        if is_theft:
            return held(world.request(m.Steal("t", "w", words([1, 2]), call=1, group="g")))
        return held(claim(world, 2, call=1))

    first = ask()
    for _ in range(2):
        assert nack(world, first, tokens=words(first.values()), call=1).nacked == 2
        restart(world)
    assert pending(world)[1][:2] == (RETURNED, "")
    second = ask()
    assert list(second) == [1, 2]
    assert not set(first.values()) & set(second.values())
    assert ask() == second
    assert (ack(world, first).acked, ack(world, second).acked) == (0, 2)


def test_a_deleted_group_stays_deleted_and_a_new_one_starts_empty(world):
    make(world, 5)
    claim(world, 3)
    world.request(m.GroupDelete("t", "g"))
    world.request(m.GroupOpen("t", "g", QUEUE, start=3))
    restart(world)
    assert (stand(world).info.cursor, pending(world)) == (3, {})
    world.request(m.TopicDelete("t"))
    world.put_topic("t", durability="fsync")
    assert world.request(m.GroupList("t")).groups == []


# -- waiting claims ---------------------------------------------------------------------------------------


def ask(world: World, corr: int, message: Any) -> None:
    run = world.run_of("t")
    run.step(run.request(corr, message))


def answers(world: World) -> dict[int, Any]:
    return {corr: message for corr, (message, _) in world.run_of("t").replies.items()}


def test_a_waiting_claim_ends_with_a_record_an_expired_lease_its_timeout_or_a_drain(world):
    make(world, 0)
    run = world.run_of("t")
    replies = run.replies
    ask(world, 901, m.Claim("t", "a", 1, wait_ms=20_000, group="g"))
    ask(world, 902, m.Claim("t", "b", 1, 1_000, 20_000, group="g"))
    assert stand(world).waiting == 2
    world.append("t", [b"1"])
    assert 901 in replies
    assert 902 not in replies
    world.append("t", [b"2"])
    assert 902 in replies
    ask(world, 903, m.Claim("t", "c", 1, wait_ms=20_000, group="g"))
    world.tick(1.1)
    assert 903 in replies, "the second one's lease has ended"
    ask(world, 904, m.Claim("t", "c", 1, wait_ms=2_000, group="g"))
    world.tick(2.1)
    assert 904 in replies
    ask(world, 905, m.Claim("t", "c", 1, wait_ms=2_000, group="g"))
    run.step(DrainRequested())
    assert replies[905].status == int(Status.SHUTTING_DOWN)


def test_waiting_claims_are_served_in_several_commit_batches(world, monkeypatch):
    """A commit batch does not exceed its size for waiting claims, and no claim is forgotten."""
    monkeypatch.setattr(claim_requests, "COMMIT_BATCH_BYTES_MAX", 200)
    make(world, 0)
    for n in range(6):
        ask(world, 900 + n, m.Claim("t", f"m{n}", 1, wait_ms=20_000, group="g"))
    world.append("t", [b"x"] * 6)
    world.tick()
    replies = world.run_of("t").replies
    given = [seq for n in range(6) for seq in held(replies[900 + n])]
    assert sorted(given) == [1, 2, 3, 4, 5, 6]


def test_a_waiting_claim_fails_when_its_group_is_deleted(world):
    make(world, 0)
    ask(world, 901, m.Claim("t", "a", 1, wait_ms=20_000, group="g"))
    world.request(m.GroupDelete("t", "g"))
    assert world.run_of("t").replies[901].status == int(Status.GROUP_NOT_FOUND)


def test_on_a_full_disk_claims_wait_without_spinning():
    """They receive records when space is available again."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = started(disk=disk)
    make(world, 1)
    world.put_topic("f", durability="fsync")
    run = world.run_of("t")
    ack(world, held(claim(world)))
    run.step(run.request(901, m.Claim("t", "w", 2, 60_000, 20_000, group="g")))
    disk.plan = [DiskFault("size", disk.calls["size"] + 1, "ENOSPC", always=True)]
    while not run.core.log_roll.failure:
        world.send("f", [world.frame_for("f", [b"x" * 30_000])])
    for _ in range(3):
        for number in run.core.requests.leases.registry._topic_of:
            run.core.requests.leases.waiting_claims.wake(number)  # As at the end of a lease.
        world.tick(0.3)
        assert 901 not in run.replies
        assert run.core.next_deadline_ns() > world.clock.monotonic_ns(), "the shard spins"
    disk.plan = []
    world.tick(1.1)
    world.append("t", [b"record"])
    world.tick(1.1)
    assert held(run.replies[901])
