"""Topics that are deleted after an idle time, and the effect of restarts (X8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.retention.idle_topic_expiry import USING_REQUESTS
from ringlog.actors.wal_shard.retention.retention_schedule import CONTENT_REQUESTS
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, TopicNotFound
from ringlog.limits import IDLE_CHECKS_MAX, IDLE_CHECKS_PER_PERIOD
from ringlog.topic.routers import RouterFlag
from tests.support.group_world import QUEUE, STREAM
from tests.support.lease_words import words
from tests.support.removal_world import append
from tests.support.shard_world import World
from tests.support.shard_worlds import restart
from tests.support.world_checkpoints import checkpoint_all

PERIOD_MS = 10_000
PERIOD_S = PERIOD_MS / 1_000
LATE_S = 2 * PERIOD_S / IDLE_CHECKS_PER_PERIOD + 0.2
"""Maximum delay of the deletion after the idle time, in seconds."""


class Crash(RuntimeError):
    """The process ends here."""


def make(world: World, name: str = "t", **config: Any) -> None:
    world.put_topic(name, expire_unused_ms=PERIOD_MS, **config)


def is_there(world: World, name: str = "t") -> bool:
    """Return whether the topic exists, without a request that would count as a use."""
    return any(run.core.directory.find(name) is not None for run in world.runs.values())


def wait(world: World, seconds: float, step_s: float = 0.1) -> None:
    for _ in range(round(seconds / step_s)):
        world.tick(step_s)


def goes_in(world: World, name: str = "t", most_s: float = 4 * PERIOD_S) -> float:
    """Return the seconds from now until the topic is deleted."""
    for n in range(round(most_s * 10)):
        if not is_there(world, name):
            return n / 10
        world.tick(0.1)
    return float("inf")


def require_period(world: World, name: str = "t") -> None:
    """Check that the unused topic is deleted after its period, not earlier and not much later."""
    seconds = goes_in(world, name)
    assert PERIOD_S <= seconds <= PERIOD_S + LATE_S, f"deleted after {seconds} s"


def of_group(kind: type[m.Message], *fields: Any, **options: Any) -> Callable[[World], Any]:
    return lambda world: world.request(kind("t", "g", *fields, **options))


# -- idle topics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["fsync", "disk", "memory", "ephemeral"])
@pytest.mark.parametrize("kind", ["log", "queue"])
def test_an_unused_topic_is_deleted_after_its_period(world, kind, durability):
    """A topic is deleted only after its idle time (X8)."""
    make(world, type=kind, durability=durability)
    world.append("t", [b"left behind"])
    require_period(world)
    with pytest.raises(TopicNotFound):
        world.request(m.Locate("t", 0))


def test_a_topic_without_the_setting_stays(world):
    """The shard does not check it."""
    world.put_topic("t")
    wait(world, 3 * PERIOD_S, 1.0)
    assert is_there(world)
    assert world.runs[0].core.requests.idle_topic_expiry.next_deadline_ns() is None


def test_the_shard_wakes_up_for_the_deletion(world):
    """The next deadline of an idle shard leads to the deletion, without a request."""
    make(world)
    core, turns = world.runs[0].core, 0
    while is_there(world):
        deadline = core.next_deadline_ns()
        assert deadline is not None
        world.tick(max(deadline - world.clock.monotonic_ns(), 0) / 1e9)
        turns += 1
        assert turns < 40
    assert core.next_deadline_ns() is None or core.requests.idle_topic_expiry.next_deadline_ns() is None


def test_the_deletion_is_like_a_requested_one_and_contains_its_reason(world):
    """The slot is released, so that the name can be used again."""
    seen: list[ev.RetireTopic] = []
    world.effect_observer = lambda _, effect: (
        seen.append(effect) if isinstance(effect, ev.RetireTopic) else None
    )
    make(world)
    world.append("t", [b"1", b"2"])
    wait(world, PERIOD_S + LATE_S)
    ((topic, unused_ms),) = [(effect.topic, effect.unused_ms) for effect in seen]
    assert (topic.name, topic.count, unused_ms) == ("t", 2, PERIOD_MS)
    world.put_topic("t")
    assert world.topic("t").epoch > topic.epoch
    world.request(m.TopicDelete("t"))
    assert seen[-1].unused_ms == 0


def test_many_topics_are_deleted_in_several_checks(world):
    """The work of one check is bounded."""
    count = IDLE_CHECKS_MAX + 40
    for n in range(count):
        make(world, f"t{n}")
    wait(world, PERIOD_S - 0.5)
    assert len(world.runs[0].core.directory) == count
    most, left = 0, count
    for _ in range(round((LATE_S + 1) * 10)):
        world.tick(0.1)
        now = len(world.runs[0].core.directory)
        most, left = max(most, left - now), now
    assert left == 0
    assert 0 < most <= IDLE_CHECKS_MAX
    world.runs[0].core.check()


# -- uses ---------------------------------------------------------------------------------------------------


def claim(world: World, **options: Any) -> m.ClaimReply:
    return world.request(m.Claim("t", "w", 1, **options))


USED: dict[str, tuple[str, Callable[[World], Any]]] = {
    "append": ("log", lambda world: world.append("t", [b"r"])),
    "put": ("queue", lambda world: world.append("t", [b"r"])),
    "resolve": ("log", lambda world: world.request(m.TopicResolve("t"))),
    "locate": ("log", lambda world: world.request(m.Locate("t", 0))),
    "declare": ("log", lambda world: world.put_topic("t", mode="create", expire_unused_ms=PERIOD_MS)),
    "state": ("log", lambda world: world.request(m.TopicState("t"))),
    "claim": ("queue", claim),
    "open": ("log", of_group(m.GroupOpen, STREAM)),
}


@pytest.mark.parametrize("use", USED)
def test_each_use_restarts_the_period(world, use):
    """The idle time starts at the first check after the last use (X8)."""
    kind, use_it = USED[use]
    make(world, type=kind)
    for _ in range(3):
        wait(world, 0.8 * PERIOD_S)
        use_it(world)
    wait(world, 0.9 * PERIOD_S)
    assert is_there(world)
    use_it(world)
    require_period(world)


def test_monitoring_is_no_use(world):
    """Otherwise a monitor of all topics would keep them."""
    make(world, type="queue")
    run = world.runs[0]
    looks = 0
    while is_there(world):
        for look in (m.TopicState("t", touch=False), m.TopicList("", "", 10), m.LeaseStats("t")):
            if is_there(world):
                world.ask(run, look)
        world.tick(0.1)
        looks += 1
    assert PERIOD_S <= looks / 10 <= PERIOD_S + LATE_S
    assert not USING_REQUESTS & {m.TopicState, m.TopicList, m.TopicDelete, m.LeaseStats, m.ListPending}
    assert m.Locate in USING_REQUESTS & set(CONTENT_REQUESTS)


def test_a_waiting_claim_keeps_its_topic(world):
    """The period starts when the claim ends."""
    make(world, type="queue")
    run = world.runs[0]
    run.step(run.request(9_000, m.Claim("t", "w", 1, wait_ms=25_000)))
    wait(world, 24.8)
    assert is_there(world)
    assert 9_000 not in run.replies
    wait(world, 0.2)
    assert not run.replies.pop(9_000).runs
    require_period(world)


def test_a_waiting_claim_of_a_group_keeps_its_topic(world):
    """The period starts when the claim ends."""
    make(world)
    world.request(m.GroupOpen("t", "g", QUEUE))
    run = world.runs[0]
    run.step(run.request(9_000, m.Claim("t", "w", 1, wait_ms=25_000, group="g")))
    wait(world, 24.8)
    assert is_there(world)
    wait(world, 0.2)
    require_period(world)


def test_a_leased_job_keeps_its_topic_until_its_ack(world):
    """The period starts with the ack, however recent the last check was."""
    make(world, type="queue")
    world.append("t", [b"job"])
    ((first, _, _, token),) = claim(world, lease_ms=60_000, call=77).runs
    wait(world, 3 * PERIOD_S + 0.7)
    assert is_there(world)
    # The ack goes directly to the shard, without a request that resolves the topic.
    ack = m.Ack("t", "w", words([first]), words([token]), call=78)
    assert world.ask(world.runs[0], ack).acked == 1
    require_period(world)


def test_the_fast_path_of_claims_and_acks_is_a_use(world):
    """It leaves a trace for the next check, also if no check falls between claim and ack."""
    make(world, type="queue")
    world.append("t", [b"job %d" % n for n in range(60)])
    run, call = world.runs[0], 1
    # The first claim takes the general path and looks up the sizes of jobs.
    for pause_s in (0.1, 0.3, 1.3, 2.6, 3.1, 7.7, 0.4):
        ((first, _, _, token),) = world.ask(run, m.Claim("t", "w", 1, lease_ms=60_000, call=call)).runs
        wait(world, pause_s)
        world.ask(run, m.Ack("t", "w", words([first]), words([token]), call=call + 1))
        call += 2
    require_period(world)


def test_an_expired_lease_does_not_keep_its_topic(world):
    """The job was not acked."""
    make(world, type="queue")
    world.append("t", [b"job"])
    claim(world, lease_ms=15_000)
    wait(world, 15.0)
    assert is_there(world)
    assert goes_in(world) <= PERIOD_S + LATE_S


def test_a_delayed_job_keeps_its_topic_until_its_time(world):
    """This holds without any claim, and after a restart before the shard has read the records."""
    make(world, type="queue")
    append(world, "t", [b"later"], not_before=[world.clock.now_us() + 60_000_000])
    wait(world, 30.0)
    assert is_there(world)
    restart(world)
    wait(world, 29.0)
    assert is_there(world)
    assert PERIOD_S <= goes_in(world) <= 1.0 + PERIOD_S + LATE_S


def test_a_record_leased_by_a_group_keeps_its_topic(world):
    """The period starts with the ack."""
    make(world)
    world.append("t", [b"record"])
    world.request(m.GroupOpen("t", "g", QUEUE))
    ((first, _, _, token),) = world.request(m.Claim("t", "w", 1, 60_000, group="g")).runs
    wait(world, 3 * PERIOD_S)
    assert is_there(world)
    world.ask(world.runs[0], m.Ack("t", "w", words([first]), words([token]), group="g"))
    require_period(world)


def test_a_router_into_a_topic_keeps_it(world):
    """The period starts when the router is deleted."""
    make(world)
    topic = world.topic("t")
    facts = m.RouterFacts(5, "r", "source", 1, 1, "t", topic.topic_id, int(RouterFlag.PRESERVE_NODE), "", 0)
    world.ask(world.runs[0], m.RouterPut(facts))
    wait(world, 4 * PERIOD_S)
    assert is_there(world)
    world.ask(world.runs[0], m.RouterDrop(topic.topic_id, 5))
    assert PERIOD_S <= goes_in(world) <= PERIOD_S + LATE_S


def test_a_claim_after_the_deletion_fails(world):
    """A waiting claim keeps its topic, so only a request can delete the topic under it."""
    make(world, type="queue")
    wait(world, PERIOD_S + LATE_S)
    answer = world.ask(world.runs[0], m.Claim("t", "w", 1, wait_ms=1_000))
    assert isinstance(answer, m.ErrorReply)


# -- time ---------------------------------------------------------------------------------------------------


def test_a_step_of_the_wall_clock_deletes_no_topic(world):
    """Idle times are measured on the monotonic clock (X8)."""
    make(world)
    wait(world, 1.0)
    world.clock.step(3_600)
    wait(world, PERIOD_S - 1.5)
    assert is_there(world)
    assert goes_in(world) <= 0.5 + LATE_S


def test_a_paused_shard_deletes_no_topic(world):
    """Requests that use a topic may be pending (X8)."""
    make(world)
    wait(world, 1.0)
    world.tick(10 * PERIOD_S)
    assert is_there(world)
    world.request(m.TopicResolve("t"))
    require_period(world)


# -- restarts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_after_a_restart_a_topic_has_a_full_period(world, has_snapshot):
    """Uses are not logged, and clients could not send requests meanwhile (X8)."""
    make(world)
    world.append("t", [b"r"])
    if has_snapshot:
        checkpoint_all(world)
    wait(world, 0.9 * PERIOD_S)
    world.stop()
    world.clock.advance(10 * PERIOD_S)
    world.start()
    assert is_there(world)
    require_period(world)


def test_a_deleted_idle_topic_stays_deleted_after_any_restart(world):
    """The control frame is in the log."""
    make(world)
    world.append("t", [b"r"])
    wait(world, PERIOD_S + LATE_S)
    assert not is_there(world)
    world.power_loss(7)
    world.start()
    assert not is_there(world)
    world.put_topic("t")
    assert world.records("t") == []


@pytest.mark.parametrize("crash", ["before", "after"])
def test_a_crash_around_the_control_frame_keeps_or_deletes_the_whole_topic(world, crash):
    """The deletion is logged before any process learns of it (X8)."""
    make(world)
    world.append("t", [b"r"])
    wait(world, PERIOD_S - 0.3)
    run = world.runs[0]
    written = run._perform[ev.WriteBatch]

    def write(effect: ev.WriteBatch) -> Any:
        if crash == "before":
            raise Crash
        return written(effect)

    def watch(_: int, effect: Any) -> None:
        assert crash == "after" or not isinstance(effect, ev.RetireTopic), "announced before it is logged"
        if isinstance(effect, ev.WriteBatch):
            raise Crash

    run._perform[ev.WriteBatch], world.effect_observer = write, watch
    with pytest.raises(Crash):
        wait(world, LATE_S + 0.5)
    world.effect_observer = lambda shard, effect: None
    restart(world)
    assert is_there(world) is (crash == "before")
    if crash == "before":
        assert world.records("t") == [(1, b"r")]
        require_period(world)


def test_a_read_only_shard_deletes_no_topic(world):
    """It cannot log the deletion."""
    make(world)
    world.kill()
    world.start_shard(0, is_read_only=True)
    wait(world, 3 * PERIOD_S, 1.0)
    assert is_there(world)


# -- the setting --------------------------------------------------------------------------------------------


def test_the_setting_must_be_given_at_creation_and_can_only_grow(world):
    """Existing readers would not know that they must renew. A longer period, or none, harms no reader."""
    world.put_topic("t")
    make(world, "u")
    for name, unused_ms in (("t", PERIOD_MS), ("u", PERIOD_MS - 1)):
        with pytest.raises(InvalidRequest) as caught:
            world.put_topic(name, "merge", expire_unused_ms=unused_ms)
        assert caught.value.detail["field"] == "expire_unused_ms"
    world.put_topic("u", "merge", expire_unused_ms=3 * PERIOD_MS)
    wait(world, 2.5 * PERIOD_S)
    assert is_there(world, "u")
    world.put_topic("u", "merge", expire_unused_ms=0)
    wait(world, 5 * PERIOD_S, 0.2)
    assert is_there(world, "u")
