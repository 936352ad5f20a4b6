"""A queue beside a model of one object for each job, which recounts everything after each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyroaring import BitMap64

from ringlog.leases.failures import Failure
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.live_seqs import LiveSeqs
from ringlog.leases.ready_index import DeliveryAttributes
from ringlog.leases.runs import BLOCK
from ringlog.leases.tokens import LeaseTokens
from ringlog.leases.types import NO_BACKOFF, DispatchOrder, QueueCounts, RedeliveryBackoff
from tests.support.lease_runs import lease_runs

NODES = ("a", "b", "c")

LIVES = {"a": (101, 7), "b": (102, 7), "c": (103, 7)}

node = st.sampled_from(NODES)

pick = st.integers(0, 60)

BEGIN = BLOCK - 20
"""The first seq. The test runs around the end of a block of the run table."""


@dataclass
class Job:
    """One job in the model."""

    not_before: int = 0
    priority: int = 0
    put: int = 0
    ripe: int = 0
    """Time at which the job became ready, if it was delayed and the queue counts from then."""
    state: str = "fresh"
    node: str = ""
    token: int = 0
    at: int = 0
    deliveries: int = 0
    failure: Failure | None = None


class QueueMachine(RuleBasedStateMachine):
    """Any history of a queue against the model: claims, settlements, leases, delays, removals and counts (Q1,
    Q2, Q3, Q5, Q8, Q10)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000
        self.incarnation = 1
        self.levels = 0
        self.queue = ConsumerGroup(tokens=LeaseTokens(1))
        self.queue.enqueue_times.record_enqueue(BEGIN, self.now)
        self.promoted = 0
        self.jobs: dict[int, Job] = {}
        self.gone: dict[int, Job] = {}
        self.dead: set[int] = set()
        self.front = BEGIN
        self.head = BEGIN - 1
        self.given: list[tuple[int, int, str]] = []
        self.tokens: set[int] = set()
        self.backoff = NO_BACKOFF

    @initialize(backoff=st.sampled_from([NO_BACKOFF, NO_BACKOFF, RedeliveryBackoff(40, 100)]))
    def choose_backoff(self, backoff):
        self.backoff = backoff
        self.rests(self.queue)

    def rests(self, queue):
        queue.backoff = self.backoff

    # -- the model ------------------------------------------------------------------------------------

    def live(self) -> LiveSeqs:
        dead = {seq for seq in self.dead if seq >= self.front}
        return LiveSeqs(self.front, self.head, BitMap64(dead) if dead else None)

    def rest_of(self, job: Job) -> int:
        base, most = self.backoff
        return min(base * 2 ** (job.deliveries - 1), most)  # the backoff doubles with each delivery

    def expire(self) -> None:
        for job in self.jobs.values():
            over = job.at < self.now if job.state == "leased" else job.at <= self.now
            if job.state == "leased" and over and (rest := self.rest_of(job)):
                job.state, job.at = "delayed", job.at + rest
                over = job.at <= self.now
            if job.state in {"leased", "delayed"} and over:
                job.state = "returned"
        for seq, job in self.jobs.items():
            if job.state == "waiting" and job.not_before <= self.now:
                job.state = "fresh"
                job.ripe = self.now if self.level_of(job) or seq < self.queue.cursor else 0
        self.gone = {seq: job for seq, job in self.gone.items() if job.at >= self.now}

    def level_of(self, job: Job) -> int:
        return min(job.priority, self.levels - 1) if self.levels else 0

    def feed(self, seqs: list[int]) -> None:
        """Add the delivery attributes of these jobs, as the shard does."""
        found = [(seq, self.jobs[seq].not_before, self.level_of(self.jobs[seq])) for seq in seqs]
        found = [row for row in found if row[1] or row[2]]
        columns = zip(*found, strict=True) if found else ((), (), ())
        seqs_of, at_ms, levels = (list(column) for column in columns)
        marks = DeliveryAttributes(
            np.array(seqs_of, np.int64), np.array(at_ms, np.int64), np.array(levels, np.uint8)
        )
        self.queue.add_delivery_attributes(marks, self.live(), self.head, self.now)

    def fresh_in_order(self, starvation: int) -> tuple[list[int], set[int]]:
        """Return the undelivered jobs in the order of delivery, and the set of promoted jobs."""
        fresh = [seq for seq, job in sorted(self.jobs.items()) if job.state == "fresh"]
        until, top = self.now - starvation, self.levels - 1
        overdue = [
            seq for seq in fresh
            if self.levels and starvation and self.level_of(self.jobs[seq]) < top
            and max(self.jobs[seq].put, self.jobs[seq].ripe) < until
        ]  # fmt: skip
        rest = [seq for seq in fresh if seq not in overdue]
        rest.sort(key=lambda seq: -self.level_of(self.jobs[seq]))
        return overdue + rest, set(overdue)

    def holds(self, seq: int, token: int, who: str, jobs: dict[int, Job]) -> bool:
        job = jobs.get(seq)
        return job is not None and job.state == "leased" and job.node == who and token in {0, job.token}

    def chosen(self, picks: list[int], with_tokens: bool, strangers: bool):
        """Return the entries of a request: jobs that were delivered at some time, and an unknown seq if
        `strangers`."""
        found = [self.given[at % len(self.given)] for at in picks if self.given]
        entries = [(seq, token) for seq, token, _ in found]
        if strangers:
            entries.insert(len(entries) // 2, (self.head + 5, 77))
        seqs = np.array([seq for seq, _ in entries], dtype=np.int64)
        tokens = np.array([token for _, token in entries], dtype=np.uint64) if with_tokens else None
        return [(seq, token if with_tokens else 0) for seq, token in entries], seqs, tokens

    # -- operations ---------------------------------------------------------------------------------------

    @rule(
        count=st.integers(1, 30), delay=st.sampled_from([None, None, -5, 0, 1, 100, 250]),
        priority=st.sampled_from([0, 0, 1, 2, 7]),
    )  # fmt: skip
    def append(self, count, delay, priority):
        self.queue.enqueue_times.record_enqueue(self.head + 1, self.now)
        first = self.head + 1
        for _ in range(count):
            self.head += 1
            not_before = 0 if delay is None else self.now + delay
            state = "waiting" if not_before > self.now else "fresh"
            self.jobs[self.head] = Job(not_before, priority, self.now, state=state)
        self.feed(list(range(first, self.head + 1)))

    @rule(levels=st.sampled_from([0, 2, 3]))
    def levels_change(self, levels):
        if levels == self.levels:
            return
        self.expire()
        self.queue.apply_expirations(self.now)
        self.levels = levels
        self.queue.invalidate_priorities(levels)
        for job in self.jobs.values():
            job.ripe = 0
        self.feed(sorted(self.jobs))

    @rule(
        who=node, most=st.integers(1, 25), lease=st.sampled_from([100, 300]),
        limit=st.sampled_from([0, 0, 2]), starvation=st.sampled_from([0, 200]),
        by_number=st.sampled_from([False, False, True]),
    )  # fmt: skip
    def claim(self, who, most, lease, limit, starvation, by_number=False):
        self.expire()
        order = DispatchOrder(self.levels, starvation, by_number)
        if not starvation:
            # With promotion off, the queue does not use the time at which a job became ready. It still keeps
            # the times of the current millisecond.
            for job in self.jobs.values():
                job.ripe = job.ripe if job.ripe == self.now else 0
        has_marked = bool(self.queue.ready_index)
        claimed = self.queue.claim(
            self.live(),
            who,
            most,
            lease,
            self.now,
            deliveries_max=limit,
            order=order,
            process_id=LIVES[who],
        )
        ready = [seq for seq, job in sorted(self.jobs.items()) if job.state == "returned"]
        wanted, taken = [], most
        for seq in ready:
            if not taken:
                break
            if limit and self.jobs[seq].deliveries >= limit:
                self.jobs[seq].state = "spent"
                continue
            wanted.append(seq)
            taken -= 1
        fresh, overdue = self.fresh_in_order(starvation)
        if by_number:
            fresh, overdue = sorted(fresh), set()
        wanted += fresh[:taken]
        self.promoted += len(overdue & set(fresh[:taken])) if has_marked else 0
        assert self.queue.promoted == self.promoted, "L12"
        assert self.leased(claimed, who) == sorted(wanted), "QC-3, QC-5, L11, L14"
        assert not wanted or claimed.until_ms == self.now + lease, "QC-7"

    def leased(self, change, who: str) -> list[int]:
        """Note the leases that a worker got, and return their seqs."""
        found = []
        for run in lease_runs(change):
            for seq in range(run.first, run.stop):
                job = self.jobs[seq]
                token = run.token + seq - run.first
                assert token not in self.tokens, "QL-7"
                self.tokens.add(token)
                job.deliveries += 1
                assert run.deliveries == job.deliveries, "QL-10"
                job.state, job.node, job.token, job.at = "leased", who, token, change.until_ms
                self.given.append((seq, token, who))
                found.append(seq)
        return found

    @rule(who=node, picks=st.lists(pick, max_size=8), with_tokens=st.booleans(), strangers=st.booleans())
    def ack(self, who, picks, with_tokens, strangers):
        self.expire()
        self.ack_these(who, *self.chosen(picks, with_tokens, strangers))

    @rule(
        start=st.integers(0, 400), count=st.integers(2, 25), with_tokens=st.booleans(),
        spoilt=st.sampled_from(["", "", "token", "order", "twice"]),
    )  # fmt: skip
    def ack_in_a_row(self, start, count, with_tokens, spoilt):
        """Ack jobs in the order in which they were delivered, as most workers do, or with one small
        deviation."""
        if not self.given:
            return
        found = self.given[start % len(self.given) :][:count]
        entries = [(seq, token) for seq, token, _ in found]
        middle = len(entries) // 2
        if spoilt == "token":
            entries[middle] = entries[middle][0], entries[middle][1] + 1
        elif spoilt == "order":
            entries[middle], entries[middle - 1] = entries[middle - 1], entries[middle]
        elif spoilt == "twice" and len(entries) > 2:
            entries[middle] = entries[0]
        self.expire()
        seqs = np.array([seq for seq, _ in entries], dtype=np.int64)
        tokens = np.array([token for _, token in entries], dtype=np.uint64) if with_tokens else None
        self.ack_these(found[0][2], [(seq, t if with_tokens else 0) for seq, t in entries], seqs, tokens)

    def ack_these(self, who, entries, seqs, tokens):
        matched = self.queue.match(seqs, tokens, who, self.now)
        leased, gone = self.outcome(entries, matched, who)
        self.queue.finish_jobs(matched)
        for seq in leased:
            del self.jobs[seq]
            self.dead.add(seq)
        for seq in gone:
            del self.gone[seq]
        self.queue.apply_removal(0, BitMap64(leased), on_request=True)

    def outcome(self, entries, matched, who):
        """Check the match entry by entry, and return the leased and the deleted jobs. A repeated seq counts
        once."""
        leased, gone, skipped = set(), set(), []
        for seq, token in entries:
            if seq not in leased and self.holds(seq, token, who, self.jobs):
                leased.add(seq)
            elif seq not in gone and self.holds(seq, token, who, self.gone):
                gone.add(seq)
            else:
                skipped.append(seq)
        assert set(matched.leased.tolist()) == leased
        assert set(matched.gone.tolist()) == gone
        assert matched.skipped.tolist() == skipped
        return leased, gone

    @rule(
        who=node, picks=st.lists(pick, max_size=8), with_tokens=st.booleans(),
        delay=st.sampled_from([0, 0, 50, 500, None]), reason=st.sampled_from(["", "timeout", "refused"]),
    )  # fmt: skip
    def nack(self, who, picks, with_tokens, delay, reason):
        """Nack jobs. Without a delay, each job waits for the backoff of its delivery count."""
        self.expire()
        entries, seqs, tokens = self.chosen(picks, with_tokens, False)
        matched = self.queue.match(seqs, tokens, who, self.now)
        leased, _ = self.outcome(entries, matched, who)
        if delay is None:
            self.queue.nack_with_backoff(matched, who, self.now, reason=reason)
        else:
            self.queue.nack(matched, who, delay, self.now, reason=reason)
        for seq in leased:
            job = self.jobs[seq]
            rest = self.rest_of(job) if delay is None else delay
            job.state, job.at = "delayed" if rest else "returned", self.now + rest
            if reason:
                job.failure = Failure(reason, self.now, 1 + (job.failure.nacks if job.failure else 0))

    @rule(who=node, picks=st.lists(pick, max_size=8), with_tokens=st.booleans())
    def undo(self, who, picks, with_tokens):
        """Undo deliveries that no worker started: they do not count, and the jobs are delivered next."""
        self.expire()
        entries, seqs, tokens = self.chosen(picks, with_tokens, False)
        matched = self.queue.match(seqs, tokens, who, self.now)
        leased, _ = self.outcome(entries, matched, who)
        self.queue.undo(matched, who, self.now)
        for seq in leased:
            job = self.jobs[seq]
            job.state, job.at = "returned", self.now
            job.deliveries -= 1

    @rule(
        who=node, picks=st.lists(pick, max_size=8), with_tokens=st.booleans(),
        lease=st.sampled_from([10, 400]),
    )  # fmt: skip
    def extend(self, who, picks, with_tokens, lease):
        self.expire()
        entries, seqs, tokens = self.chosen(picks, with_tokens, False)
        matched = self.queue.match(seqs, tokens, who, self.now)
        leased, _ = self.outcome(entries, matched, who)
        change = self.queue.extend(matched, who, lease, self.now)
        assert change.until_ms == self.now + lease if leased else change is None
        for seq in leased:
            self.jobs[seq].at = self.now + lease

    @rule(who=node, picks=st.lists(pick, max_size=8), with_tokens=st.booleans())
    def reject(self, who, picks, with_tokens):
        self.expire()
        entries, seqs, tokens = self.chosen(picks, with_tokens, False)
        matched = self.queue.match(seqs, tokens, who, self.now)
        leased, _ = self.outcome(entries, matched, who)
        self.queue.reject(matched, who, "why", self.now)
        for seq in leased:
            job = self.jobs[seq]
            job.state = "spent"
            job.failure = Failure("why", self.now, job.failure.nacks if job.failure else 0)

    @rule(who=node, picks=st.lists(pick, max_size=8))
    def steal(self, who, picks):
        """Take over jobs that another worker holds, that are delayed or that were returned. Jobs that were
        deleted while they were leased are not among them."""
        self.expire()
        seqs = sorted({self.given[at % len(self.given)][0] for at in picks if self.given})
        wanted = [
            seq for seq in seqs
            if seq in self.jobs and self.jobs[seq].state in {"leased", "delayed", "returned"}
        ]  # fmt: skip
        stolen = self.queue.steal(np.array(seqs, dtype=np.int64), who, 200, self.now, process_id=LIVES[who])
        assert sorted(self.leased(stolen, who)) == wanted

    @rule(who=node)
    def worker_dies(self, who):
        self.expire()
        held = [job for job in self.jobs.values() if job.state == "leased" and job.node == who]
        assert sum(change.count for change in self.queue.release(LIVES[who], self.now)) == len(held)
        for job in held:
            job.state = "returned"

    @rule(ms=st.sampled_from([1, 50, 99, 100, 101, 299, 300, 301]))
    def time_passes(self, ms):
        self.now += ms

    @rule(picks=st.lists(pick, min_size=1, max_size=6), on_request=st.booleans())
    def remove(self, picks, on_request):
        seqs = {BEGIN + at for at in picks} & set(self.jobs)
        self.expire()
        self.queue.apply_expirations(self.now)
        self.forget(seqs, on_request)
        self.queue.apply_removal(0, BitMap64(seqs), on_request=on_request)

    @rule(by=st.integers(1, 15), on_request=st.booleans())
    def raise_floor(self, by, on_request):
        self.front = min(self.front + by, self.head + 1)
        self.expire()
        self.queue.apply_expirations(self.now)
        self.forget({seq for seq in self.jobs if seq < self.front}, on_request)
        self.queue.apply_removal(self.front, None, on_request=on_request)

    def forget(self, seqs, on_request):
        for seq in seqs:
            job = self.jobs.pop(seq)
            self.dead.add(seq)
            if on_request and job.state == "leased":
                self.gone[seq] = job

    @rule()
    def restart(self):
        """Restart with a new incarnation.

        Every live job is ready with delivery count 0, and no token is issued again (Q3).
        """
        self.incarnation += 1
        self.queue = ConsumerGroup(tokens=LeaseTokens(self.incarnation))
        self.rests(self.queue)
        self.queue.enqueue_times.record_enqueue(self.head + 1, self.now)
        self.queue.invalidate_priorities(self.levels)
        self.promoted = 0
        for seq, job in self.jobs.items():
            state = "waiting" if job.not_before > self.now else "fresh"
            self.jobs[seq] = Job(job.not_before, job.priority, self.now, state=state)
        self.gone = {}
        self.feed(sorted(self.jobs))

    @rule()
    def restore(self):
        self.queue.restore_exhausted()
        for job in self.jobs.values():
            if job.state == "spent":
                job.state = "returned"

    # -- invariants ---------------------------------------------------------------------------------------

    @invariant()
    def counts_are_what_a_recount_finds(self):
        """The counts of the queue equal a recount (Q2)."""
        self.expire()
        self.queue.apply_expirations(self.now)
        states = [job.state for job in self.jobs.values()]
        counts = self.queue.counts(len(self.jobs))
        leased, delayed = states.count("leased"), states.count("delayed") + states.count("waiting")
        assert counts == QueueCounts(len(states) - leased - delayed, leased, delayed)
        self.queue.check()

    @invariant()
    def the_next_instant_is_the_earliest_one(self):
        """`next_due_ms` returns the earliest time at which a job changes its state."""
        due = [job.at + 1 for job in (*self.jobs.values(), *self.gone.values()) if job.state == "leased"]
        due += [job.at for job in self.jobs.values() if job.state == "delayed"]
        due += [job.not_before for job in self.jobs.values() if job.state == "waiting"]
        found = self.queue.next_due_ms()
        # The time of a delayed job that was deleted may be kept.
        assert found == min(due, default=None) or (due and self.now < found < min(due))

    @invariant()
    def the_oldest_ready_job_is_the_lowest_one(self):
        ready = [seq for seq, job in self.jobs.items() if job.state in {"fresh", "returned"}]
        assert self.queue.oldest_ready(self.live()) == min(ready, default=None)

    @invariant()
    def spent_jobs_are_known(self):
        spent = {seq for first, stop, _ in self.queue.exhausted_runs(1_000) for seq in range(first, stop)}
        assert len(spent) == self.queue.exhausted
        assert spent == {seq for seq, job in self.jobs.items() if job.state == "spent"}

    @invariant()
    def why_jobs_failed_is_known_as_long_as_they_are_there(self):
        """The failure of a job is kept until the job leaves the queue."""
        assert dict(self.queue.failures) == {
            seq: job.failure for seq, job in self.jobs.items() if job.failure
        }
