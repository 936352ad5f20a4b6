"""Claims that arrive together are served together, if the topic is configured for it."""

from __future__ import annotations

import pytest

from ringlog.contract import DrainRequested
from ringlog.envelope import messages as m
from ringlog.errors import Status
from tests.support.lease_words import held
from tests.support.queue_world import ack, claim, make, stats
from tests.support.removal_world import append
from tests.support.shard_world import World
from tests.support.shard_worlds import restart

JITTER_S = 0.1


class Claims:
    """Claims with pending replies."""

    def __init__(self, world: World) -> None:
        self.world, self.run, self.corr = world, world.run_of("q"), 900

    def ask(self, *wants: int, **options) -> list[int]:
        corrs = []
        for want in wants:
            self.corr += 1
            node = options.pop("node", f"w{self.corr}")
            self.run.step(self.run.request(self.corr, m.Claim("q", node, want, **options)))
            corrs.append(self.corr)
        return corrs

    def after(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        self.run.step()

    def shares(self, corrs: list[int]) -> list[int]:
        return [len(held(self.run.replies.pop(corr))) for corr in corrs]


@pytest.mark.parametrize(
    ("asked", "jobs", "shares"),
    [([10] * 10, 50, [5] * 10), ([10] * 4, 20, [5] * 4), ([1, 10, 10], 12, [1, 6, 5])],
)
def test_shares_are_fair_and_no_claim_is_answered_before_the_window_closes(world, asked, jobs, shares):
    """The length of the window is `claim_jitter_ms`."""
    make(world, jobs, claim_jitter_ms=100)
    claims = Claims(world)
    corrs = claims.ask(*asked)
    claims.after(JITTER_S - 0.001)
    assert not any(corr in claims.run.replies for corr in corrs)
    deadline_ns = claims.run.core.next_deadline_ns()
    assert deadline_ns is not None
    assert deadline_ns <= world.clock.monotonic_ns() + 1_000_000
    claims.after(0.001)
    assert claims.shares(corrs) == shares
    assert stats(world) == (max(jobs - sum(shares), 0), sum(shares), 0)


def test_deadlines_count_from_the_end_of_the_window_and_each_claim_has_its_own(world):
    """Each worker can ack only the jobs of its own claim."""
    make(world, 9, claim_jitter_ms=100)
    claims = Claims(world)
    (first,) = claims.ask(2, lease_ms=1_000, node="a")
    claims.after(0.05)
    (second,) = claims.ask(3, lease_ms=5_000, node="b")
    claims.after(0.05)
    now_ms = world.clock.now_us() // 1_000
    one, two = claims.run.replies.pop(first), claims.run.replies.pop(second)
    assert (one.deadline, two.deadline) == (now_ms + 1_000, now_ms + 5_000)
    assert ack(world, held(one), node="a").acked == 2
    assert ack(world, held(two), node="a").acked == 0
    assert ack(world, held(two), node="b").acked == 3


def test_other_requests_do_not_wait_and_a_new_claim_opens_a_new_window(world):
    """An append does not close the window either."""
    make(world, 4, claim_jitter_ms=100)
    claims = Claims(world)
    (first,) = claims.ask(1, node="a")
    claims.after(JITTER_S)
    jobs = held(claims.run.replies.pop(first))
    (waiting,) = claims.ask(1)
    assert ack(world, jobs, node="a").acked == 1
    world.append("q", [b"x"])
    assert waiting not in claims.run.replies, "a write closed the window"
    claims.after(JITTER_S)
    assert claims.shares([waiting]) == [1]


def test_on_an_empty_queue_a_claim_ends_with_the_window_and_one_with_wait_ms_waits(world):
    make(world, 0, claim_jitter_ms=100)
    claims = Claims(world)
    (at_once,) = claims.ask(5)
    (patient,) = claims.ask(5, wait_ms=10_000)
    claims.after(JITTER_S)
    assert claims.shares([at_once]) == [0]
    assert patient not in claims.run.replies
    world.append("q", [b"x"])
    assert claims.shares([patient]) == [1]


def test_delayed_jobs_are_looked_up_when_the_window_closes(world):
    make(world, 0, claim_jitter_ms=100)
    at_us = world.clock.now_us() + 100_000
    append(world, "q", [b"a", b"b"], not_before=[at_us, at_us + 100_000_000])
    restart(world)
    claims = Claims(world)
    corrs = claims.ask(5, 5)
    append(world, "q", [b"c"], not_before=[at_us + 100_000_000])
    claims.after(JITTER_S)
    assert claims.shares(corrs) == [1, 0]


def test_an_error_is_the_reply_to_every_claim_of_the_window(world):
    """The queue is deleted, or the shard drains."""
    make(world, 3, claim_jitter_ms=100)
    claims = Claims(world)
    corrs = claims.ask(1, 1)
    world.request(m.TopicDelete("q"))
    claims.run.step()
    assert [claims.run.replies.pop(corr).status for corr in corrs] == [Status.TOPIC_NOT_FOUND] * 2
    make(world, 3, claim_jitter_ms=100)
    corrs = claims.ask(1, 1)
    claims.run.step(DrainRequested())
    assert [claims.run.replies.pop(corr).status for corr in corrs] == [Status.SHUTTING_DOWN] * 2


def test_a_repeated_claim_joins_the_window_once(world):
    make(world, 5, claim_jitter_ms=100)
    claims = Claims(world)
    (first,) = claims.ask(2, call=7, node="a")
    (again,) = claims.ask(2, call=7, node="a")
    claims.after(JITTER_S)
    assert first not in claims.run.replies
    answer = claims.run.replies.pop(again)
    (later,) = claims.ask(2, call=7, node="a")
    assert claims.run.replies.pop(later) == answer
    assert stats(world) == (3, 2, 0)


def test_without_jitter_each_claim_is_served_at_once(world):
    make(world, 3)
    assert len(held(claim(world, 3))) == 3
