"""A cancelled claim leaves no lease, in whatever order and however often it and its undo arrive.

The two may take different channels, and a client sends both again after a reconnect.
"""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest

from ringlog.actors.wal_shard.leases import reply_cache
from ringlog.envelope import messages as m
from tests.support.lease_words import held, words
from tests.support.shard_world import World
from tests.support.shard_worlds import new_world, restart

CALL = 77
KINDS: dict[str, dict[str, Any]] = {
    "queue": {"type": "queue"},
    "queue with priorities": {"type": "queue", "record_priority": True},
    "queue with durable leases": {"type": "queue", "leases_durable": True},
    "queue with jitter": {"type": "queue", "claim_jitter_ms": 50},
    "group": {},
}
UNDO = "undo"
CLAIMS = ("claim", "claim that waits", "steal", "ack and claim")
ORDERS = sorted(
    {order for more in ((), (UNDO,), ("claim",)) for order in permutations(("claim", UNDO, *more))}
)
"""Orders of arrival of a claim and its undo, each at least once."""


class Place:
    """A queue or group with eight jobs. Worker w holds the first two, worker v the next two."""

    def __init__(self, kind: str) -> None:
        self.world: World = new_world()
        self.group = "g" if kind == "group" else ""
        self.world.put_topic("t", durability="disk", **KINDS[kind])
        if self.group:
            self.world.request(m.GroupOpen("t", "g", 1))
        self.world.append("t", [b"%d" % n for n in range(8)])
        self._corr = 1_000
        self.held: dict[int, int] = held(self.claim(2, "w"))
        self.claim(2, "v")

    def message(self, what: str, claim: str) -> Any:
        if what == UNDO:
            return m.Nack("t", "w", b"", call=CALL, undo=True, group=self.group)
        if claim == "steal":
            return m.Steal("t", "w", words([3, 4]), 60_000, 0, CALL, group=self.group)
        if claim == "ack and claim":
            seqs, tokens = words(self.held), words(self.held.values())
            return m.AckAndClaim("t", "w", seqs, tokens, 2, 60_000, CALL, group=self.group)
        wait_ms = 5_000 if claim == "claim that waits" else 0
        return m.Claim("t", "w", 2, 60_000, wait_ms, CALL, group=self.group)

    def send(self, *messages: Any) -> list[int]:
        """Let the messages arrive together. Return the numbers of the requests."""
        run = self.world.run_of("t")
        sent = [(self._corr + n, message) for n, message in enumerate(messages, 1)]
        self._corr += len(sent)
        run.step(*[run.request(corr, message) for corr, message in sent])
        return [corr for corr, _ in sent]

    def claim(self, most: int, node: str) -> m.ClaimReply:
        (corr,) = self.send(m.Claim("t", node, most, 60_000, call=self._corr, group=self.group))
        self.end_jitter()
        return self.world.run_of("t").replies[corr]

    def end_jitter(self) -> None:
        self.world.tick(0.2)

    def leased(self) -> set[int]:
        """Return the seqs of the jobs that worker w holds. Check the shard's invariants."""
        self.end_jitter()
        self.world.run_of("t").core.check()
        reply = self.world.request(m.ListPending("t", limit=100, group=self.group))
        return {
            first + n
            for first, count, state, _, _, _, _, place, _ in reply.rows
            if state == 1 and reply.nodes[place] == "w"
            for n in range(count)
        }

    def deliver(self, order: tuple[str, ...], claim: str, *, is_batched: bool, has_restart: bool) -> None:
        """Let these requests arrive in this order, with or without a restart after each undo."""
        messages = [self.message(what, claim) for what in order]
        if is_batched:
            self.send(*messages)
            return
        for what, message in zip(order, messages, strict=True):
            self.send(message)
            if what == UNDO and has_restart:
                restart(self.world)


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_claim_leaves_no_lease(kind, claim, is_batched):
    """A combined request may have acked its jobs."""
    for order in ORDERS:
        place = Place(kind)
        place.deliver(order, claim, is_batched=is_batched, has_restart=False)
        left = place.leased()
        assert left == {1, 2} or (claim == "ack and claim" and not left), (order, left)
        deliveries = {row[0]: row[2] for row in place.claim(9, "x").runs}
        assert claim == "steal" or set(deliveries.values()) == {1}, (order, deliveries)


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("kind", ["queue with durable leases", "group"])
def test_a_logged_undo_is_remembered_over_a_restart(kind, claim):
    """The claim was performed, so its undo is in the log."""
    place = Place(kind)
    place.deliver(("claim", UNDO, "claim"), claim, is_batched=False, has_restart=True)
    left = place.leased()
    assert left == {1, 2} or (claim == "ack and claim" and not left)


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_is_cancelled_only_by_its_own_worker(kind):
    place = Place(kind)
    place.send(m.Nack("t", "somebody else", b"", call=CALL, undo=True, group=place.group))
    place.send(place.message("claim", "claim"))
    assert place.leased() == {1, 2, 5, 6}


def test_a_cancelled_request_acks_its_jobs_or_says_that_it_did_not():
    """It may leave the acks to a request of their own, but a reply without an error means that they are
    done."""
    for kind, order in product(KINDS, ORDERS):
        place = Place(kind)
        run = place.world.run_of("t")
        for what in order:
            (corr,) = place.send(place.message(what, "ack and claim"))
            if isinstance(run.replies.get(corr), m.ClaimReply):
                assert place.leased().isdisjoint(place.held), (kind, order)


def test_a_bounded_number_of_cancelled_claims_is_kept(monkeypatch):
    monkeypatch.setattr(reply_cache, "CANCELLED_CLAIMS_MAX", 2)
    place = Place("queue")
    for call in (1, 2, 3, 2):
        place.send(m.Nack("t", "w", b"", call=call + 100, undo=True))
    kept = place.world.run_of("t").core.requests.leases.cancelled_claims
    assert [call for call in range(100, 105) if kept.has(call, "w")] == [102, 103]
