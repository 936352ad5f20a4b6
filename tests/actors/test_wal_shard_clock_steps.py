"""Steps of the wall clock: leases and delays keep their length, `not_before` follows the clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringlog.envelope import messages as m
from ringlog.frame import encode_records, frame
from tests.support.shard_world import World
from tests.support.shard_worlds import restart

HOUR_S = 3_600.0
LEASE_MS = 30_000
DELAY_S = 20.0
STEPS = pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, 10 * 365 * 86_400.0])
KINDS = pytest.mark.parametrize("kind", ["queue", "durable", "group"])


class Work:
    """The same operations for a queue, a queue with durable leases, and a group."""

    def __init__(self, world: World, kind: str, jobs: int) -> None:
        self.world, self.group = world, "g" if kind == "group" else ""
        if kind == "group":
            world.put_topic("t", durability="fsync")
            world.request(m.GroupOpen("t", "g", 1))
        else:
            world.put_topic("t", type="queue", durability="fsync", leases_durable=kind == "durable")
        if jobs:
            world.append("t", [b"job %d" % n for n in range(jobs)])

    def claim(self, node: str, most: int = 9, **options: Any) -> dict[int, int]:
        """Return number -> token of the claimed jobs."""
        options = {"lease_ms": LEASE_MS, **options}
        answer = self.world.request(m.Claim("t", node, most, group=self.group, **options))
        if answer.runs:
            assert answer.lease_ms == LEASE_MS
        return {first + n: token + n for first, count, _, token in answer.runs for n in range(count)}

    def _named(self, node: str, jobs: dict[int, int]) -> tuple[str, bytes, bytes]:
        pack = [np.array(list(each), dtype="<u8").tobytes() for each in (jobs, jobs.values())]
        return (node, pack[0], pack[1])

    def extend(self, node: str, jobs: dict[int, int]) -> int:
        """Return how many leases are extended."""
        named = self._named(node, jobs)
        return self.world.request(m.Extend("t", *named, LEASE_MS, group=self.group)).extended

    def nack(self, node: str, jobs: dict[int, int], delay_ms: int) -> None:
        self.world.request(m.Nack("t", *self._named(node, jobs), delay_ms, group=self.group))

    def ack(self, node: str, jobs: dict[int, int]) -> int:
        return self.world.request(m.Ack("t", *self._named(node, jobs), group=self.group)).acked


@KINDS
@STEPS
def test_a_leased_job_stays_with_its_worker_when_the_clock_is_stepped(world, kind, step_s):
    """A step of one hour forward once took the jobs of every worker and gave them to others."""
    work = Work(world, kind, 3)
    held = work.claim("w", 2)
    world.clock.step(step_s)
    assert list(work.claim("other")) == [3]
    world.runs[0].core.requests.leases.registry.group_metrics.sample(
        world.runs[0].core.requests.lease_clock_us // 1_000, 1
    )
    assert work.extend("w", held) == 2
    world.clock.advance(LEASE_MS / 1_000 - 0.1)
    world.clock.step(-step_s / 2)
    assert work.claim("other") == {}
    assert work.ack("w", {1: held[1]}) == 1
    world.clock.advance(0.2)
    assert list(work.claim("other")) == [2, 3], "leases must end by the monotonic clock"


@pytest.mark.parametrize("kind", ["durable", "group"])
@STEPS
def test_durable_leases_keep_their_length_over_kills_of_shards_and_engine(world, kind, step_s):
    """This holds while the host runs. After another boot the wall clock counts."""
    work = Work(world, kind, 2)
    held = work.claim("w", 1)
    world.clock.step(step_s)
    restart(world)
    assert list(work.claim("other")) == [2]
    assert work.extend("w", held) == 1
    world.clock.step(-step_s)
    world.power_loss(1)
    world.start()
    assert work.claim("third") == {}
    world.clock.advance(LEASE_MS / 1_000 + 0.1)
    assert list(work.claim("third")) == [1, 2]


@KINDS
@STEPS
def test_a_nacked_job_waits_for_its_delay_when_the_clock_is_stepped(world, kind, step_s):
    work = Work(world, kind, 1)
    work.nack("w", work.claim("w"), 60_000)
    world.clock.step(step_s)
    assert work.claim("other") == {}
    world.clock.advance(60.1)
    assert list(work.claim("other")) == [1]


@pytest.mark.parametrize("step_s", [10.0, -5.0, HOUR_S])
def test_a_job_delayed_to_a_time_is_ready_at_that_wall_clock_time(world, step_s):
    """A waiting worker receives it at once."""
    Work(world, "queue", 0)
    topic = world.topic("t")
    due_us = world.clock.now_us() + int(DELAY_S * 1e6)
    columns = encode_records([b"later"], not_before=[due_us])
    world.send("t", [frame(columns, topic_id=topic.topic_id, producer_id=1, producer_seq=1)])
    run = world.runs[0]
    run.step(run.request(900, m.Claim("t", "w", 1, wait_ms=30_000, call=7)))
    assert 900 not in run.replies
    world.clock.step(step_s)
    run.step()
    assert (900 in run.replies) == (step_s > DELAY_S)
    left_s = DELAY_S - step_s
    if left_s > 0:
        world.clock.advance(left_s - 1)
        run.step()
        assert 900 not in run.replies
        world.clock.advance(1.1)
        due_ns = run.core.next_deadline_ns()
        assert due_ns is not None
        assert due_ns <= world.clock.monotonic_ns(), "the shard must wake up on its own timer"
        run.step()
    assert run.replies[900].runs  # type: ignore[attr-defined]


@KINDS
@STEPS
def test_leased_jobs_are_listed_with_wall_clock_times(world, kind, step_s):
    work = Work(world, kind, 1)
    work.claim("w")
    world.clock.step(step_s)
    world.clock.advance(1)
    now_ms = world.clock.now_us() // 1_000
    reply = world.request(m.ListPending("t", group=work.group))
    assert (reply.now_ms, reply.rows[0][6]) == (now_ms, now_ms + LEASE_MS - 1_000)


@KINDS
@STEPS
def test_deadlines_are_reported_in_wall_clock_time(world, kind, step_s):
    """They once stayed on the clock of the shard's start."""
    work = Work(world, kind, 1)
    world.clock.step(step_s)
    claim = m.Claim("t", "w", 1, group=work.group, lease_ms=LEASE_MS, call=7)
    claimed = world.request(claim)
    assert claimed.deadline == world.clock.now_us() // 1_000 + LEASE_MS
    world.clock.advance(1)
    named = work._named("w", {claimed.runs[0][0]: claimed.runs[0][3]})
    extended = world.request(m.Extend("t", *named, LEASE_MS, group=work.group))
    assert extended.deadline == world.clock.now_us() // 1_000 + LEASE_MS
    world.clock.step(-step_s)
    assert world.request(claim).runs == claimed.runs, "a retry gets the jobs that the worker still holds"
