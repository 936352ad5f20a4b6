"""A consumer group compared with a model of one object for each position, and its log compared with its
state."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import structs
from pyroaring import BitMap64

from ringlog.leases.change import GroupConfig, LeaseChange, Mode
from ringlog.leases.failures import Failure
from ringlog.leases.group import ConsumerGroup, create_group, created
from ringlog.leases.live_seqs import LiveSeqs
from ringlog.leases.pending_list import PendingRange, list_pending
from ringlog.leases.ready_index import DeliveryAttributes
from ringlog.leases.runs import BLOCK, DELAYED, LEASED, RETURNED
from ringlog.leases.snapshot import decode_group, encode_group
from ringlog.leases.tokens import LeaseTokens
from ringlog.leases.types import DispatchOrder
from ringlog.limits import GROUP_REASONS_SAVED_MAX
from tests.support.lease_runs import lease_runs

pytestmark = pytest.mark.slow

NODES = ("a", "b", "c")
node = st.sampled_from(NODES)
pick = st.integers(0, 60)
BEGIN = BLOCK - 20
"""The first position. The test runs around the end of a block of the run table."""
PENDING_MAX, MEMBER_MAX = 40, 25
STATE = {"leased": LEASED, "delayed": DELAYED, "returned": RETURNED}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LeaseChange).decode


@dataclass
class Position:
    """One position in the model."""

    not_before: int = 0
    priority: int = 0
    state: str = "fresh"
    """Without a delivery: fresh, or waiting until `not_before`."""
    node: str = ""
    token: int = 0
    at: int = 0
    deliveries: int = 0
    begun: int = 0
    given: int = 0
    failure: Failure | None = None


class GroupMachine(RuleBasedStateMachine):
    """Any history of a consumer group: order and time of delivery, settlements, seeks and removals.

    Replay of the log from any snapshot gives the same state (CG1, CG2, CG4).
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000
        self.incarnation = 1
        self.tokens = LeaseTokens(1)
        made = GroupConfig("g", Mode.QUEUE, "", PENDING_MAX, MEMBER_MAX)
        self.log: list[bytes] = []
        self.saved: list[tuple[int, bytes]] = []
        """Encoded states, each with the length of the log at that time."""
        self.group = create_group(self.logged(created(1, made, BEGIN, self.now)), self.tokens)
        self.positions: dict[int, Position] = {}
        self.all: set[int] = set()
        self.dead: set[int] = set()
        self.front, self.head, self.levels = BEGIN, BEGIN - 1, 3
        self.asked: dict[int, tuple[int, int]] = {}
        """(not_before, priority) of each record."""
        self.given: list[tuple[int, int, str]] = []
        self.seen: set[int] = set()
        self.calls = 0

    def logged(self, change: LeaseChange) -> LeaseChange:
        data = _encode(change)
        assert _decode(data) == change
        self.log.append(data)
        return change

    # -- the model ------------------------------------------------------------------------------------

    def live(self) -> LiveSeqs:
        dead = {seq for seq in self.dead if seq >= self.front}
        return LiveSeqs(self.front, self.head, BitMap64(dead) if dead else None)

    def expire(self) -> None:
        for each in self.positions.values():
            over = each.at < self.now if each.state == "leased" else each.at <= self.now
            if each.state in {"leased", "delayed"} and over:
                each.state, each.at = "returned", 0
            if each.state == "waiting" and each.not_before <= self.now:
                each.state = "fresh"

    def pending(self) -> dict[int, Position]:
        return {
            seq: each for seq, each in sorted(self.positions.items())
            if each.state not in {"fresh", "waiting"}
        }  # fmt: skip

    def begun(self, seq: int) -> Position:
        """Return a position without a delivery."""
        not_before, priority = self.asked[seq]
        return Position(not_before, priority, "waiting" if not_before > self.now else "fresh")

    def level_of(self, seq: int) -> int:
        return min(self.asked[seq][1], self.levels - 1) if self.levels else 0

    @rule()
    def learn(self):
        """Load the delivery attributes that the shard loads from storage before a claim."""
        group = self.group
        if group.levels != self.levels:
            group.invalidate_priorities(self.levels)
        first = max(group.attributes_loaded_to + 1, self.front)
        if not group.ready_index.is_reloading:
            first = max(first, group.cursor)
        if group.attributes_loaded_to >= self.head or first > self.head:
            return
        found = [
            (seq, self.asked[seq][0], self.level_of(seq)) for seq in sorted(self.all - self.dead)
            if seq >= first and (self.asked[seq][0] or self.level_of(seq))
        ]  # fmt: skip
        seqs, at_ms, levels = (list(column) for column in zip(*found, strict=True)) if found else ([],) * 3
        marks = DeliveryAttributes(
            np.array(seqs, np.int64), np.array(at_ms, np.int64), np.array(levels, np.uint8)
        )
        group.add_delivery_attributes(marks, self.live(), self.head, self.now)

    def held_by(self, who: str) -> int:
        return sum(1 for each in self.positions.values() if each.state == "leased" and each.node == who)

    def leased(self, change: LeaseChange | None, wanted: list[int], who: str, lease: int) -> None:
        found = []
        for run in lease_runs(change) if change else []:
            for seq in range(run.first, run.stop):
                each = self.positions[seq]
                token = run.token + seq - run.first
                assert token not in self.seen, "QL-7"
                self.seen.add(token)
                each.begun = each.begun or self.now
                each.deliveries += 1
                assert run.deliveries == each.deliveries
                each.state, each.node, each.token, each.at = "leased", who, token, self.now + lease
                each.given = self.now
                self.given.append((seq, token, who))
                found.append(seq)
        assert found == sorted(wanted)
        if change:
            self.logged(change)
            assert change.until_ms == self.now + lease

    # -- operations ---------------------------------------------------------------------------------------

    @rule(
        count=st.integers(1, 30), delay=st.sampled_from([None, None, None, 1, 100, 250]),
        priority=st.sampled_from([0, 1, 7]),
    )  # fmt: skip
    def append(self, count, delay, priority):
        for _ in range(count):
            self.head += 1
            self.all.add(self.head)
            self.asked[self.head] = (0 if delay is None else self.now + delay, priority)
            self.positions[self.head] = self.begun(self.head)

    @rule(levels=st.sampled_from([0, 2, 3, 3]))
    def levels_change(self, levels):
        self.levels = levels

    @rule(
        who=node,
        most=st.integers(1, 25),
        lease=st.sampled_from([100, 300]),
        idle=st.sampled_from([0, 0, 120]),
        by_number=st.sampled_from([False, False, True]),
    )
    def claim(self, who, most, lease, idle, by_number):
        self.expire()
        self.learn()
        room = min(most, MEMBER_MAX - self.held_by(who))
        pending = self.pending()
        wanted = [seq for seq, each in pending.items() if each.state == "returned"][:room]
        most_new = max(min(room - len(wanted), PENDING_MAX - len(pending)), 0)
        fresh = [seq for seq, each in sorted(self.positions.items()) if each.state == "fresh"]
        if not by_number:
            fresh.sort(key=lambda seq: -self.level_of(seq))
        wanted += fresh[:most_new]
        if idle:
            others = [
                seq for seq, each in pending.items()
                if each.state == "leased" and each.node != who and each.given <= self.now - idle
            ]  # fmt: skip
            wanted += others[: room - len(wanted)]
        order = DispatchOrder(self.levels, 0, by_number)
        change = self.group.claim(self.live(), who, most, lease, self.now, min_idle_ms=idle, order=order)
        self.leased(change, wanted, who, lease)

    @rule(who=node, picks=st.lists(pick, max_size=8), idle=st.sampled_from([0, 120]))
    def steal(self, who, picks, idle):
        self.expire()
        seqs = np.array(
            sorted({self.given[at % len(self.given)][0] for at in picks if self.given}), dtype=np.int64
        )
        pending = self.pending()
        wanted = [seq for seq in seqs.tolist() if seq in pending and pending[seq].given <= self.now - idle]
        wanted = wanted[: max(MEMBER_MAX - self.held_by(who), 0)]
        change = self.group.steal(seqs, who, 200, self.now, min_idle_ms=idle)
        self.leased(change, wanted, who, 200)

    @rule(
        who=node, picks=st.lists(pick, max_size=8), with_tokens=st.booleans(),
        what=st.sampled_from(["ack", "ack", "nack", "rest", "extend", "undo"]),
        reason=st.sampled_from(["", "why"]),
    )  # fmt: skip
    def settle(self, who, picks, with_tokens, what, reason):
        entries = [self.given[at % len(self.given)][:2] for at in picks if self.given]
        entries.insert(len(entries) // 2, (self.head + 5, 77))
        seqs = np.array([seq for seq, _ in entries], dtype=np.int64)
        tokens = np.array([token for _, token in entries], dtype=np.uint64) if with_tokens else None
        self.expire()
        held, skipped = [], []
        for seq, token in entries:
            each = self.positions.get(seq)
            is_held = each is not None and each.state == "leased" and each.node == who
            if is_held and seq not in held and (not with_tokens or token == each.token):
                held.append(seq)
            else:
                skipped.append(seq)
        found = self.group.match(seqs, tokens, who, self.now)
        assert found.leased.tolist() == sorted(held)
        assert found.skipped.tolist() == skipped
        self.calls += 1
        if what == "ack":
            change = self.group.ack(found, who, self.now, call=self.calls)
        elif what == "extend":
            change = self.group.extend(found, who, 250, self.now, call=self.calls)
        elif what == "undo":
            change, reason = self.group.undo(found, who, self.now, call=self.calls), ""
        else:
            delay = 90 if what == "rest" else 0
            change = self.group.nack(found, who, delay, self.now, call=self.calls, reason=reason)
        assert (change is not None) == bool(held)
        for seq in held:
            each = self.positions[seq]
            if what == "ack":
                del self.positions[seq]
            elif what == "extend":
                each.at, each.given = self.now + 250, self.now
            else:
                each.state, each.at = ("delayed", self.now + 90) if what == "rest" else ("returned", 0)
                each.deliveries -= what == "undo"
                if reason:
                    nacks = 1 + (each.failure.nacks if each.failure else 0)
                    each.failure = Failure(reason, self.now, nacks)
        if change:
            self.logged(change)
            assert self.group.recent_calls.find(self.calls) == structs.replace(change, reason="")
            assert change.skipped == skipped

    @rule(who=node)
    def leave(self, who):
        self.expire()
        change = self.group.leave(who, self.now)
        held = [each for each in self.positions.values() if each.state == "leased" and each.node == who]
        assert (change is not None) == bool(held)
        for each in held:
            each.state, each.at = "returned", 0
        if change:
            self.logged(change)

    @rule(at=pick)
    def again(self, at):
        """Redeliver a position: an acked one becomes ready, a pending or undelivered one does not change."""
        self.expire()
        there = sorted(seq for seq in self.all - self.dead if seq >= self.front)
        if not there:
            return
        seq = there[at % len(there)]
        self.calls += 1
        change = self.group.redeliver(seq, self.now, call=self.calls)
        assert bool(change.rows) == (seq not in self.positions)
        self.positions.setdefault(seq, Position(state="returned", begun=self.now, given=self.now))
        self.logged(change)
        assert self.group.recent_calls.find(self.calls) == change

    @rule(back=st.integers(-5, 40))
    def seek(self, back):
        cursor = min(max(self.head + 1 - back, self.front), self.head + 1)
        self.logged(self.group.seek(cursor, self.now))
        self.positions = {seq: self.begun(seq) for seq in self.all if seq >= cursor and seq not in self.dead}

    @rule(picks=st.lists(pick, min_size=1, max_size=5))
    def delete(self, picks):
        there = sorted(self.all - self.dead)
        gone = {there[at % len(there)] for at in picks} if there else set()
        self.dead |= gone
        self.group.apply_removal(0, BitMap64(gone))
        self.positions = {seq: each for seq, each in self.positions.items() if seq not in gone}

    @rule(count=st.integers(1, 10))
    def evict(self, count):
        self.front = min(self.front + count, self.head + 1)
        self.dead |= {seq for seq in self.all if seq < self.front}
        self.group.apply_removal(self.front)
        self.positions = {seq: each for seq, each in self.positions.items() if seq >= self.front}

    @rule(ms=st.integers(1, 150))
    def time(self, ms):
        self.now += ms

    @rule()
    def snapshot(self):
        self.saved.append((len(self.log), encode_group(self.group)))

    @rule(at=st.integers(0, 20), again=st.integers(0, 3))
    def restart(self, at, again):
        """Recover from any snapshot, or from none, and replay some of the log twice."""
        begun, group = 1, create_group(_decode(self.log[0]))
        if self.saved:
            begun, data = self.saved[at % len(self.saved)]
            group = decode_group(data)
        for data in [*self.log[max(begun - again, 1) : begun], *self.log[begun:]]:
            group.replay(_decode(data))
        self.incarnation += 1
        self.tokens = LeaseTokens(self.incarnation)
        group.finish_recovery(self.live(), self.tokens)
        group.apply_expirations(self.now)
        self.group.apply_expirations(self.now)
        assert self.facts(group) == self.facts(self.group)
        assert list(group.recent_calls) == list(self.group.recent_calls)
        known, kept = dict(self.group.failures), dict(group.failures)
        assert kept.items() <= known.items()
        assert len(kept) >= min(len(known), GROUP_REASONS_SAVED_MAX)
        for seq, each in self.positions.items():
            each.failure = kept.get(seq)
        self.group = group

    def facts(self, group: ConsumerGroup) -> dict[int, tuple]:
        """Return all known values of each pending position."""
        entries, more = list_pending(group, self.now, limit=1_000)
        assert not more
        facts = {}
        for each in entries:
            for seq in range(each.first, each.stop):
                token = each.token + seq - each.first
                facts[seq] = (
                    each.state, each.node, each.deliveries, each.begun_ms, each.given_ms, each.until_ms, token
                )  # fmt: skip
        return facts

    # -- invariants ---------------------------------------------------------------------------------------

    @invariant()
    def the_model_says_the_same(self):
        self.group.check()
        self.expire()
        self.group.apply_expirations(self.now)
        wanted = {}
        for seq, each in self.pending().items():
            is_leased = each.state == "leased"
            wanted[seq] = (
                STATE[each.state], each.node if is_leased else "", each.deliveries, each.begun, each.given,
                each.at, each.token,
            )  # fmt: skip
        assert self.facts(self.group) == wanted
        assert self.group.pending == len(wanted)

    @invariant()
    def the_floor_has_everything_below_it_done_and_no_more_than_that(self):
        first = min(self.positions, default=self.head + 1)
        assert self.group.ack_floor < first
        between = {seq for seq in self.all - self.dead if self.group.ack_floor < seq < first}
        assert not between or min(between) >= self.group.lowest_undelivered

    @invariant()
    def why_they_failed_is_known_as_long_as_they_are_pending(self):
        """The failure of a position is kept until it is no longer pending."""
        wanted = {seq: each.failure for seq, each in self.positions.items() if each.failure}
        assert dict(self.group.failures) == wanted

    @invariant()
    def it_knows_what_was_handed_out(self):
        self.expire()
        untouched = {seq for seq, each in self.positions.items() if each.state in {"fresh", "waiting"}}
        alive = {seq for seq in self.all - self.dead if seq >= self.front}
        low = self.group.lowest_undelivered
        assert {seq for seq in alive if self.group.was_delivered(seq)} == alive - untouched
        assert sum(seq >= low for seq in alive) - self.group.delivered_ahead_count == len(untouched)
        self.group.apply_expirations(self.now)
        waiting = sum(each.state == "waiting" for each in self.positions.values())
        if self.group.attributes_loaded_to == self.head and self.group.levels == self.levels:
            delayed = sum(each.state == "delayed" for each in self.positions.values())
            assert self.group.total_delayed == waiting + delayed

    @invariant()
    def looking_by_member_and_age_finds_the_right_ones(self):
        self.expire()
        for who in NODES:
            found: list[PendingRange] = list_pending(self.group, self.now, node=who, limit=1_000)[0]
            held = [seq for each in found for seq in range(each.first, each.stop)]
            assert held == [s for s, p in self.pending().items() if p.state == "leased" and p.node == who]
        old = list_pending(self.group, self.now, idle_ms=120, min_deliveries=2, limit=1_000)[0]
        wanted = [s for s, p in self.pending().items() if p.given <= self.now - 120 and p.deliveries >= 2]
        assert [seq for each in old for seq in range(each.first, each.stop)] == wanted


GroupMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestGroup = GroupMachine.TestCase
