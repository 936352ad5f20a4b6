"""Durable leases of queues over kills, power losses, checkpoints, shard counts and switches."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.leases import lease_registry
from ringlog.contract import Reply
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, Throttled
from ringlog.leases import group, group_state
from ringlog.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from tests.support.checkpoint_world import checkpoint_all
from tests.support.lease_words import held, numbers, words
from tests.support.queue_world import claim, make_durable, settle, stats
from tests.support.removal_world import append, delete
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import new_world, restart, started

LOGGED = ("fsync", "disk", "memory")


# -- after the end of a shard -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "stop", "power"])
@pytest.mark.parametrize("is_absorbed", [False, True])
def test_leases_counts_and_delays_outlive_the_shard(how, is_absorbed):
    """Replay from the log or from a snapshot gives the same state (Q6)."""
    world = new_world()
    make_durable(world, 12)
    jobs = held(claim(world, 6, lease_ms=60_000))
    settle(world, m.Ack, {2: jobs[2]})
    settle(world, m.Nack, {4: jobs[4]}, delay_ms=120_000)
    settle(world, m.Nack, {5: jobs[5]})
    settle(world, m.Extend, {6: jobs[6]}, lease_ms=300_000)
    other = held(claim(world, 2, node="v", lease_ms=90_000))
    assert list(other) == [5, 7]
    if is_absorbed:
        checkpoint_all(world)
        world.append("q", [b"13"])
    before = stats(world)
    restart(world, how)
    assert stats(world) == before == (5 + is_absorbed, 5, 1)
    assert numbers(settle(world, m.Ack, {1: jobs[1]}, node="v").skipped) == [1], (
        "another node must not ack the job"
    )
    assert numbers(settle(world, m.Ack, {1: jobs[1] + 1}).skipped) == [1], (
        "another token must not ack the job"
    )
    assert settle(world, m.Ack, {1: jobs[1]}).acked == 1
    again = claim(world, 2, node="v", lease_ms=600_000)
    assert [run[:3] for run in again.runs] == [(8, 2, 1)]
    assert set(held(again).values()).isdisjoint([*jobs.values(), *other.values()]), (
        "a lease token was issued twice (Q3)"
    )
    world.clock.advance(60.0)
    assert stats(world)[1] == 6, "at its deadline a lease must still be valid"
    world.clock.advance(0.001)
    assert [run[:3] for run in claim(world, 1, lease_ms=600_000).runs] == [(3, 1, 2)], (
        "wrong order or number of deliveries"
    )
    world.clock.advance(30.0)
    back = claim(world, 9, lease_ms=600_000)
    assert [run[:3] for run in back.runs][:2] == [(5, 1, 3), (7, 1, 2)]
    world.clock.advance(30.0)
    assert [run[:3] for run in claim(world, 9, lease_ms=600_000).runs] == [(4, 1, 2)], "its delay is over"
    assert settle(world, m.Ack, {6: jobs[6]}).acked == 1, "extended"


@pytest.mark.parametrize("durability", LOGGED)
def test_every_durability_class_with_a_log_keeps_leases_over_a_kill(world, durability):
    """Acked jobs stay deleted."""
    make_durable(world, 4, durability=durability)
    jobs = held(claim(world, 3, lease_ms=60_000))
    settle(world, m.Ack, {1: jobs[1]})
    for _ in range(3):
        restart(world)
        assert stats(world) == (1, 2, 0)
    assert settle(world, m.Ack, {2: jobs[2], 3: jobs[3]}).acked == 2
    assert list(held(claim(world, 9))) == [4]


def test_an_ephemeral_queue_ignores_the_setting(world):
    """Its leases are not logged."""
    seen: list[Any] = []
    world = started(effect_observer=lambda shard, effect: seen.append(effect))
    make_durable(world, 3, durability="ephemeral")
    seen.clear()
    claim(world, 1)
    assert ev.WriteBatch not in map(type, seen)
    assert world.topic("q").leases is None


def test_leases_that_expired_before_or_during_the_restart_are_ready(world):
    """Their jobs are delivered first and keep their delivery count."""
    make_durable(world, 3)
    claim(world, 2, lease_ms=1_000)
    world.kill()
    world.clock.advance(1.001)
    world.start()
    assert stats(world) == (3, 0, 0)
    assert [run[:3] for run in claim(world, 9).runs] == [(1, 2, 2), (3, 1, 1)]


def test_a_clock_that_steps_back_revives_no_lease(world):
    """A lease stays expired if a change was logged after its deadline."""
    make_durable(world, 3)
    jobs = held(claim(world, 1, lease_ms=1_000))
    others = held(claim(world, 1, lease_ms=60_000))
    world.clock.advance(2.0)
    settle(world, m.Extend, others, lease_ms=60_000)
    world.kill()
    world.reboot()  # Otherwise the monotonic time of leases would continue.
    world.clock.step(-1.9)
    world.start()
    assert numbers(settle(world, m.Ack, {**jobs, **others}).skipped) == [1]


def test_a_claim_is_one_record_in_the_log_and_is_answered_after_its_sync():
    """The same holds for every other change (Q6)."""
    seen: list[Any] = []
    world = started(effect_observer=lambda shard, effect: seen.append(effect))
    make_durable(world, 2_100)
    claim(world, 1)
    for request in (
        m.Claim("q", "w", 1_000), m.Extend("q", "w", words([1, 3]), lease_ms=9_000),
        m.Nack("q", "w", words([3, 5]), delay_ms=9), m.Nack("q", "w", words([7])),
    ):  # fmt: skip
        seen.clear()
        before = world.run_of("q").core.log.offset
        assert not isinstance(world.request(request), m.ErrorReply)
        kinds = [type(effect) for effect in seen]
        assert kinds.count(ev.WriteBatch) == 1, request
        assert len(seen[kinds.index(ev.WriteBatch)].buffers) == 2, "expected a chain mark and one frame"
        assert kinds[-1] is Reply
        assert kinds.index(ev.WriteBatch) < kinds.index(ev.Sync) < len(kinds) - 1
        assert world.run_of("q").core.log.offset - before < 512
    seen.clear()
    assert settle(world, m.Nack, {2_000: 5}).nacked == 0
    assert claim(world, 1, node="x").runs
    seen.clear()
    world.request(m.Claim("q", "y", 1_000))
    world.request(m.Claim("q", "y", 1_000))
    seen.clear()
    assert claim(world, 1, node="x").runs == []
    assert ev.WriteBatch not in map(type, seen), "what changes nothing is not logged"


def test_a_claim_that_waited_is_logged_before_it_is_answered():
    """The reply follows when the change is durable (Q6)."""
    seen: list[Any] = []
    world = started(effect_observer=lambda shard, effect: seen.append(effect))
    make_durable(world, 0)
    run = world.run_of("q")
    run.step(run.request(901, m.Claim("q", "w", 2, 60_000, wait_ms=20_000)))
    seen.clear()
    world.append("q", [b"1", b"2", b"3"])
    kinds = [type(effect) for effect in seen]
    assert kinds.count(ev.WriteBatch) == 2
    told = next(n for n, each in enumerate(seen) if type(each) is Reply and each.corr == 901)
    assert told > len(kinds) - 1 - kinds[::-1].index(ev.Sync)
    jobs = held(run.replies[901])
    restart(world)
    assert settle(world, m.Ack, jobs).acked == 2


def test_claims_that_are_served_together_are_logged_separately(world):
    """After a restart each worker can ack its own jobs."""
    make_durable(world, 6, claim_jitter_ms=100)
    run = world.run_of("q")
    for n in range(3):
        run.step(run.request(901 + n, m.Claim("q", f"n{n}", 2, 60_000, call=11 + n)))
    world.tick(0.2)
    given = [run.replies[901 + n] for n in range(3)]
    assert [len(held(each)) for each in given] == [2, 2, 2]
    restart(world)
    assert stats(world) == (0, 6, 0)
    for n, each in enumerate(given):
        assert settle(world, m.Ack, held(each), node=f"n{n}").acked == 2


def test_no_lease_is_granted_if_nothing_can_be_logged(world):
    """The error has the reason `no_log_space`."""
    make_durable(world, 3)
    run = world.run_of("q")
    handled = run.core.requests.handle(
        run.request(7, m.Claim("q", "w", 2)), run.core.state.batch, 1, can_log=False
    )
    assert isinstance(handled.message, m.ErrorReply)
    assert handled.message.detail["reason"] == "no_log_space"
    assert stats(world) == (3, 0, 0)


def test_on_a_full_disk_a_claim_waits_without_spinning():
    """The claim receives jobs when space is available again."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = started(disk=disk)
    make_durable(world, 0)
    world.put_topic("f", durability="fsync")
    run = world.run_of("q")
    run.step(run.request(901, m.Claim("q", "w", 2, 60_000, wait_ms=20_000)))
    disk.plan = [DiskFault("size", disk.calls["size"] + 1, "ENOSPC", always=True)]
    while not run.core.log_roll.failure:
        world.send("f", [world.frame_for("f", [b"x" * 30_000])])
    run.core.requests.leases.waiting_claims.wake(world.topic("q").topic_id)
    world.send("q", [world.frame_for("q", [b"job"])])
    for _ in range(3):
        world.tick(0.3)
        if 901 not in run.replies:
            assert run.core.next_deadline_ns() > world.clock.monotonic_ns(), "the shard spins"
    disk.plan = []
    world.tick(1.1)
    world.append("q", [b"job"])
    world.tick(1.1)
    assert held(run.replies[901])


def test_an_undone_claim_stays_undone_after_a_kill():
    """This also holds if only the claim was logged before the kill, and if the request is repeated."""
    world = new_world()
    make_durable(world, 4)
    claim(world, 2, call=1, lease_ms=60_000)
    claim(world, 2, call=2, lease_ms=60_000)
    assert settle(world, m.Nack, {}, undo=True, call=1).nacked == 2
    restart(world)
    assert settle(world, m.Nack, {}, undo=True, call=1).nacked == 0
    assert settle(world, m.Nack, {}, undo=True, call=2).nacked == 2
    for _ in range(2):
        assert stats(world) == (4, 0, 0)
        checkpoint_all(world)
        restart(world)
    assert [run[:3] for run in claim(world, 4).runs] == [(1, 4, 1)]


def test_a_request_that_comes_again_has_the_same_answer_also_after_a_kill():
    """The leases of a claim with a lost reply are granted once."""
    world = new_world()
    make_durable(world, 9)
    first = claim(world, 3, call=1, lease_ms=60_000)
    back = settle(world, m.Nack, {1: held(first)[1], 8: 5}, call=2)
    longer = settle(world, m.Extend, {2: held(first)[2], 9: 5}, lease_ms=90_000, call=3)
    assert (back.nacked, numbers(back.skipped), numbers(longer.skipped)) == (1, [8], [9])
    before = stats(world)
    for n in range(3):
        assert claim(world, 3, call=1).runs == [(2, 2, 1, held(first)[2])], "the first job was nacked"
        again = settle(world, m.Nack, {1: held(first)[1], 8: 5}, call=2)
        assert (again.nacked, again.skipped) == (1, back.skipped)
        again = settle(world, m.Extend, {2: held(first)[2], 9: 5}, call=3)
        assert (again.extended, again.deadline, again.skipped) == (1, longer.deadline, longer.skipped)
        assert stats(world) == before
        if n == 1:
            checkpoint_all(world)
        restart(world)
    done = settle(world, m.Ack, {2: held(first)[2]}, call=4, in_time=True)
    restart(world)
    assert settle(world, m.Ack, {2: held(first)[2]}, call=4, in_time=True).acked == done.acked == 1


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_leases_move_with_their_topics_when_the_number_of_shards_changes(before, after):
    world = new_world(before)
    jobs = {}
    for n in range(6):
        make_durable(world, 5, f"q{n}")
        jobs[f"q{n}"] = held(claim(world, 3, name=f"q{n}", lease_ms=600_000))
    for turn, shards in enumerate((after, before, after)):
        if turn != 1:
            checkpoint_all(world)
        world.kill()
        world.start(shards)
        for name, mine in jobs.items():
            seq = min(mine)
            assert settle(world, m.Ack, {seq: mine.pop(seq)}, name=name).acked == 1, (turn, name)
            assert world.request(m.LeaseStats(name)).in_flight == len(mine)


# -- dead workers and removed jobs ------------------------------------------------------------------------


def test_jobs_of_a_dead_worker_are_ready_and_stay_ready(world):
    """This also holds if the shard dies between the claim and the death of the worker."""
    make_durable(world, 6)
    claim(world, 2, pid=7, pid_started=70, lease_ms=60_000)
    claim(world, 2, node="v", pid=8, pid_started=80, lease_ms=60_000)
    run = world.run_of("q")
    run.step(ev.WorkerDied(7, 70))
    assert stats(world) == (4, 2, 0)
    restart(world)
    assert stats(world) == (4, 2, 0)
    run = world.run_of("q")
    assert run.core.requests.process_ids() == {(8, 80)}, "the process must be monitored again"
    run.step(run.request(901, m.Claim("q", "x", 9, 60_000, wait_ms=20_000)))
    run.step(run.request(902, m.Claim("q", "y", 9, 60_000, wait_ms=20_000)))
    assert list(held(run.replies[901])) == [1, 2, 5, 6]
    run.step(ev.WorkerDied(8, 80))
    assert [each[:3] for each in run.replies[902].runs] == [(3, 2, 2)]
    restart(world)
    assert stats(world) == (0, 6, 0)


def test_a_lease_ends_when_its_job_leaves_the_topic(world):
    """A lease ends with its job, whatever removes the job (Q5)."""
    make_durable(world, 6)
    jobs = held(claim(world, 4, lease_ms=60_000))
    delete(world, "q", seqs=[4])
    world.put_topic("q", type="queue", leases_durable=True, durability="fsync", cap_records=3)
    restart(world)
    assert stats(world) == (2, 1, 0)
    assert numbers(settle(world, m.Ack, jobs, in_time=True).skipped) == [1, 2], "evicted; 4 was deleted"
    assert list(held(claim(world, 9))) == [5, 6]


def test_rejected_jobs_and_their_count_outlive_the_shard(world):
    """The reason of the reject survives as well."""
    make_durable(world, 4, max_deliveries=3, dead_letter="dead")
    world.run_of("q").core.requests.leases.registry.has_dead_letter_mover = True
    jobs = held(claim(world, 3, lease_ms=60_000))
    settle(world, m.Reject, {1: jobs[1], 2: jobs[2]}, reason="no such street")
    found = world.ask(world.run_of("q"), m.ListExhausted())
    assert world.request(m.ConfirmDeadLettered("q", found.topic_id, words([1]))).moved == 1
    restart(world)
    world.run_of("q").core.requests.leases.registry.has_dead_letter_mover = True
    assert stats(world) == (2, 1, 0)
    found = world.ask(world.run_of("q"), m.ListExhausted())
    assert (found.runs, found.reasons) == ([(2, 1, 1)], {2: "no such street"})
    assert world.request(m.LeaseStats("q")).dead_lettered == 1
    assert list(held(claim(world, 9))) == [4]


@pytest.mark.parametrize("is_absorbed", [False, True])
def test_the_reason_of_a_nack_outlives_the_shard(is_absorbed):
    """It is restored from the log or from a snapshot."""
    world = new_world()
    make_durable(world, 2, max_deliveries=2, dead_letter="dead")
    at_ms = {}
    for reason in ("timeout", "refused"):
        world.clock.advance(0.25)
        jobs = held(claim(world, 1, lease_ms=60_000))
        settle(world, m.Nack, jobs, reason=reason)
        at_ms[reason] = world.clock.now_us() // 1_000
        if is_absorbed:
            checkpoint_all(world)
        restart(world)
    world.run_of("q").core.requests.leases.registry.has_dead_letter_mover = True
    assert list(held(claim(world, 1))) == [2]
    found = world.ask(world.run_of("q"), m.ListExhausted())
    assert (found.runs, found.reasons) == ([(1, 1, 2)], {1: "refused"})
    assert found.failed == {1: (at_ms["refused"], 2)}


def test_priorities_and_delays_of_records_survive_a_restart(world):
    """The shard reads them again and delivers no job twice."""
    make_durable(world, 0, record_priority=True)
    for priority in (0, 2, 1, 2):
        append(world, "q", [b"x"], priorities=[priority])
    append(world, "q", [b"x"], not_before=[world.clock.now_us() + 10_000_000])
    given: list[int] = []
    for n in range(4):
        given += held(claim(world, 1, lease_ms=60_000))
        if n == 1:
            restart(world)
            assert stats(world) == (2, 2, 1)
    assert given == [2, 4, 3, 1]
    assert claim(world, 1).runs == []


# -- switching the setting --------------------------------------------------------------------------------


def switch(world: World, *, is_on: bool, **config: Any) -> None:
    world.put_topic("q", **{"type": "queue", "durability": "fsync", "leases_durable": is_on, **config})


@pytest.mark.parametrize("is_absorbed", [False, True])
def test_switching_on_logs_the_known_state(is_absorbed, monkeypatch):
    """Leases, counts, delays and rejects that were only in memory become durable."""
    monkeypatch.setattr(group, "_SNAPSHOT_ROWS", 2)
    world = new_world()
    make_durable(world, 12, leases_durable=False, max_deliveries=9, dead_letter="dead")
    world.run_of("q").core.requests.leases.registry.has_dead_letter_mover = True
    jobs: dict[int, int] = {}
    for n in range(8):
        jobs |= held(claim(world, 1, f"n{n % 3}", lease_ms=60_000))
    settle(world, m.Nack, {1: jobs[1]}, node="n0")
    settle(world, m.Nack, {2: jobs[2]}, node="n1", delay_ms=90_000)
    settle(world, m.Reject, {3: jobs[3]}, node="n2", reason="why")
    claim(world, 1, "p", lease_ms=60_000, pid=7, pid_started=70)
    delete(world, "q", seqs=[4])
    before = stats(world)
    if is_absorbed:
        checkpoint_all(world)
    switch(world, is_on=True, max_deliveries=9, dead_letter="dead")
    if is_absorbed:
        checkpoint_all(world)
    restart(world)
    assert stats(world) == before == (5, 5, 1)
    world.run_of("q").core.requests.leases.registry.has_dead_letter_mover = True
    assert world.ask(world.run_of("q"), m.ListExhausted()).reasons == {3: "why"}
    world.run_of("q").step(ev.WorkerDied(7, 70))
    assert stats(world) == (6, 4, 1)
    assert settle(world, m.Ack, {5: jobs[5], 8: jobs[8]}, node="n1").acked == 2
    switch(world, is_on=False, max_deliveries=9, dead_letter="dead")
    assert stats(world) == (6, 2, 1), "leases must stay in memory"
    assert settle(world, m.Ack, {6: jobs[6]}, node="n2").acked == 1
    restart(world)
    assert stats(world) == (8, 0, 0), "leases in memory must end with the shard"
    switch(world, is_on=True)
    jobs = held(claim(world, 1, lease_ms=60_000))
    restart(world)
    assert settle(world, m.Ack, jobs).acked == 1


def test_a_change_to_a_class_with_a_log_makes_leases_durable(world):
    """Ephemeral jobs and their leases end with the shard."""
    make_durable(world, 3, durability="ephemeral")
    jobs = held(claim(world, 2, lease_ms=60_000))
    world.put_topic("q", type="queue", leases_durable=True, durability="fsync")
    assert world.topic("q").leases is not None
    world.append("q", [b"x"])
    assert list(held(claim(world, 2, lease_ms=60_000))) == [3, 4]
    restart(world)
    assert stats(world)[1] == 1, "ephemeral jobs must be lost"
    assert numbers(settle(world, m.Ack, jobs).skipped) == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        m.Claim("q", "w", call=-1), m.Claim("q", "w", pid=-7, pid_started=1),
        m.Claim("q", "w", pid=7, pid_started=-1), m.Nack("q", "w", words([1]), call=-1),
        m.Extend("q", "w", words([1]), call=-1), m.Reject("q", "w", words([1]), call=-1),
    ],
)  # fmt: skip
def test_a_request_that_replay_could_not_decode_is_refused(world, wrong):
    make_durable(world, 2)
    claim(world, 1)
    with pytest.raises(InvalidRequest):
        world.request(wrong)
    restart(world)
    assert stats(world) == (1, 1, 0)


# -- bounds -----------------------------------------------------------------------------------------------


def test_the_number_of_durable_leases_is_bounded(world, monkeypatch):
    monkeypatch.setattr(group_state, "DURABLE_LEASES_MAX", 4)
    monkeypatch.setattr(lease_registry, "DURABLE_LEASES_MAX", 4)
    make_durable(world, 9)
    jobs = held(claim(world, 9))
    assert list(jobs) == [1, 2, 3, 4]
    assert claim(world, 9).runs == []
    settle(world, m.Nack, {2: jobs[2]})
    assert list(held(claim(world, 9))) == [2]
    settle(world, m.Ack, {1: jobs[1]})
    assert list(held(claim(world, 9))) == [5]
    switch(world, is_on=False)
    claim(world, 9)
    with pytest.raises(Throttled):
        switch(world, is_on=True)


def test_the_number_of_lease_holders_is_bounded(world, monkeypatch):
    monkeypatch.setattr(group, "DURABLE_HOLDERS_MAX", 2)
    make_durable(world, 9)
    jobs = held(claim(world, 1, "a"))
    claim(world, 1, "b")
    assert claim(world, 1, "c").runs == []
    assert list(held(claim(world, 1, "b"))) == [3]
    run = world.run_of("q")
    run.step(run.request(901, m.Claim("q", "c", 1, wait_ms=20_000)))
    assert 901 not in run.replies
    settle(world, m.Ack, jobs, node="a")
    assert list(held(run.replies[901])) == [4]
