"""What the log says of a queue against the recounting model of it: after every crash all is as it was."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_queue_model import NODES, Job, QueueMachine

from ringlog.leases.durable import Durable, load, save
from ringlog.leases.queue import Queue
from ringlog.leases.queue_change import JobsChange
from ringlog.leases.runs import DELAYED, EXHAUSTED, GONE, LEASED, RETURNED
from ringlog.leases.tokens import Tokens

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JobsChange).decode
STATE = {"leased": LEASED, "delayed": DELAYED, "returned": RETURNED, "spent": EXHAUSTED}
KNOWN_MAX = 10_000


def life_of(link: int) -> tuple[int, int]:
    return (100 + link, 7)


def link_of(life: tuple[int, int]) -> int:
    return life[0] - 100


class Logged:
    """A queue that logs what is done to it, as its shard would."""

    def __init__(self, durable: Durable, log: list[bytes], now_ms: Callable[[], int]) -> None:
        self._durable, self._log, self.now_ms = durable, log, now_ms
        self._queue = durable.queue
        self._reason = ""

    def __getattr__(self, name):
        return getattr(self._queue, name)

    def logged(self, change: JobsChange) -> None:
        data = _encode(change)
        assert _decode(data) == change
        self._log.append(data)

    def claim(self, live, node, most, lease_ms, now_ms, *, link=0, **options):
        given = self._queue.claim(live, node, most, lease_ms, now_ms, link=link, **options)
        if given.runs or given.aside:
            self.logged(self._durable.claimed(given, node, now_ms, link=link, life=life_of(link)))
        return given

    def failed(self, matched, reason, at_ms):
        self._queue.failed(matched, reason, at_ms)
        self._reason = reason

    def nack(self, matched, delay_ms, now_ms):
        self._queue.nack(matched, delay_ms, now_ms)
        if len(matched.leased):
            self.logged(self._durable.released(matched.leased, delay_ms, now_ms, reason=self._reason))

    def undo(self, matched):
        self._queue.undo(matched)
        if len(matched.leased):
            self.logged(self._durable.undone(matched.leased, self.now_ms()))

    def match(self, *asked):
        self._reason = ""
        return self._queue.match(*asked)

    def extend(self, matched, lease_ms, now_ms):
        until_ms = self._queue.extend(matched, lease_ms, now_ms)
        if len(matched.leased):
            self.logged(self._durable.extended(matched.leased, until_ms, now_ms))
        return until_ms

    def reject(self, matched, reason, now_ms):
        self._queue.reject(matched, reason, now_ms)
        if len(matched.leased):
            self.logged(self._durable.rejected(matched.leased, reason, now_ms))

    def release(self, link, now_ms):
        self._queue.settle(now_ms)
        runs, seqs = self._queue.runs, []
        for row in runs.leased_through(link):
            seqs += range(runs.first[row], runs.stop[row])
        count = self._queue.release(link, now_ms)
        if seqs:
            self.logged(self._durable.released(np.sort(np.array(seqs, np.int64)), 0, now_ms))
        return count


class DurableMachine(QueueMachine):
    """QL-10, QL-15, QL-17, QL-22, QN-6: replay, a snapshot of any moment, and both together say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[bytes] = []
        self.snapshots: list[tuple[int, bytes]] = [(0, save(Durable()))]
        """States, each with how long the log was then."""
        durable = Durable(Queue(Tokens(1)))
        durable.queue.ages.note(self.head + 1, self.now)
        self.durable = durable
        self.queue = Logged(durable, self.log, lambda: self.now)

    def rests(self, queue):
        super().rests(queue._queue if isinstance(queue, Logged) else queue)

    def restore(self):
        """Not logged: it is done again by the first claim after a restart."""

    @rule()
    def snapshot(self):
        self.snapshots.append((len(self.log), save(self.durable)))

    def replayed(self, which: int, again: int = 0) -> Durable:
        """The log behind a snapshot, perhaps with some of what the snapshot has already (QL-17)."""
        length, data = self.snapshots[which % len(self.snapshots)]
        durable = load(data)
        self.rests(durable.queue)
        for each in self.log[max(length - again, 0) :]:
            durable.apply(_decode(each))
        self.incarnation += 1
        durable.recovered(self.live(), Tokens(self.incarnation), link_of)
        durable.queue.settle(self.now)
        return durable

    @rule(which=st.integers(0, 60), again=st.sampled_from([0, 0, 3, 50]))
    def restart(self, which, again):
        self.expire()
        self.durable = self.replayed(which, again)
        queue = self.durable.queue
        queue.ages.note(self.head + 1, self.now)
        queue.unmark(self.levels)
        self.promoted = 0
        self.gone = {}
        for seq, job in self.jobs.items():
            if job.state in {"fresh", "waiting"}:
                state = "waiting" if job.not_before > self.now else "fresh"
                self.jobs[seq] = Job(job.not_before, job.priority, self.now, state=state)
        self.queue = Logged(self.durable, self.log, lambda: self.now)
        self.feed(sorted(self.jobs))

    @rule(which=st.integers(0, 60), again=st.sampled_from([0, 3, 50]))
    def a_replay_says_what_the_model_says(self, which, again):
        self.expire()
        durable = self.replayed(which, again)
        self.compare(durable)
        loaded = load(save(durable))
        self.rests(loaded.queue)
        loaded.recovered(self.live(), Tokens(self.incarnation), link_of)
        self.compare(loaded)

    def compare(self, durable: Durable) -> None:
        queue, runs = durable.queue, durable.queue.runs
        queue.check()
        found = {}
        for row in runs.rows():
            state = runs.state[row]
            assert state != GONE
            for seq in range(runs.first[row], runs.stop[row]):
                is_leased = state == LEASED
                found[seq] = (
                    state, runs.deliveries[row],
                    queue.holders.name_of(runs.holder[row]) if is_leased else "",
                    runs.token[row] + seq - runs.first[row] if is_leased else 0,
                    runs.at[row] if state in {LEASED, DELAYED} else 0,
                )  # fmt: skip
        wanted = {
            seq: (
                STATE[job.state], job.deliveries, job.node if job.state == "leased" else "",
                job.token if job.state == "leased" else 0,
                job.at if job.state in {"leased", "delayed"} else 0,
            )
            for seq, job in self.jobs.items()
            if job.state in STATE
        }  # fmt: skip
        assert found == wanted
        assert dict(queue.failures) == {seq: job.failure for seq, job in self.jobs.items() if job.failure}
        assert len(queue.runs.leased_through(0)) == 0, "who claimed is known"
        for n, node in enumerate(NODES):
            mine = [seq for seq, job in self.jobs.items() if job.state == "leased" and job.node == node]
            rows = runs.leased_through(1 + n)
            assert sum(runs.stop[row] - runs.first[row] for row in rows) == len(mine)

    @invariant()
    def the_bound_is_not_met(self):
        assert self.durable.queue.runs.jobs < KNOWN_MAX


DurableMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestDurableModel = DurableMachine.TestCase
del QueueMachine
