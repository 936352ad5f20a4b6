"""The logged changes of a queue compared with its model: after every crash the state is the same."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from ringlog.leases.change import LeaseChange
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.runs import DELAYED, EXHAUSTED, GONE, LEASED, RETURNED
from ringlog.leases.snapshot import decode_queue_leases, encode_queue_leases, new_durable_group
from ringlog.leases.tokens import LeaseTokens
from tests.support.queue_machine import LIVES, NODES, Job, QueueMachine

pytestmark = pytest.mark.slow

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LeaseChange).decode
STATE = {"leased": LEASED, "delayed": DELAYED, "returned": RETURNED, "spent": EXHAUSTED}
KNOWN_MAX = 10_000
CALLS = {"claim", "steal", "nack", "nack_with_backoff", "undo", "extend", "reject", "release"}


class Logged:
    """A queue that logs every change as its shard does."""

    def __init__(self, queue: ConsumerGroup, log: list[bytes]) -> None:
        self._queue, self._log = queue, log

    def __getattr__(self, name):
        found = getattr(self._queue, name)
        return self._logged(found) if name in CALLS else found

    def _logged(self, call):
        def calls(*arguments, **options):
            answer = call(*arguments, **options)
            for change in answer if isinstance(answer, list) else [answer]:
                if change is not None:
                    data = _encode(change)
                    assert _decode(data) == change
                    self._log.append(data)
            return answer

        return calls


class DurableMachine(QueueMachine):
    """Any history of a queue with durable leases (Q6).

    Replay, a snapshot of any moment, and both together give the same state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[bytes] = []
        self.snapshots: list[tuple[int, bytes]] = [(0, encode_queue_leases(new_durable_group()))]
        """States, each with how long the log was then."""
        durable = self.durable = ConsumerGroup(tokens=LeaseTokens(1))
        durable.begin_log()
        durable.enqueue_times.record_enqueue(self.head + 1, self.now)
        self.queue = Logged(durable, self.log)

    def rests(self, queue):
        super().rests(queue._queue if isinstance(queue, Logged) else queue)

    def restore(self):
        """Do nothing. This operation is not logged; the first claim after a restart repeats it."""

    @rule()
    def snapshot(self):
        self.snapshots.append((len(self.log), encode_queue_leases(self.durable)))

    def replayed(self, which: int, again: int = 0) -> ConsumerGroup:
        """Return the state of a snapshot with the log after it.

        `again` changes that the snapshot already contains are replayed too.
        """
        length, data = self.snapshots[which % len(self.snapshots)]
        durable = decode_queue_leases(data)
        self.rests(durable)
        for each in self.log[max(length - again, 0) :]:
            durable.replay(_decode(each))
        self.incarnation += 1
        durable.finish_recovery(self.live(), LeaseTokens(self.incarnation))
        durable.apply_expirations(self.now)
        return durable

    @rule(which=st.integers(0, 60), again=st.sampled_from([0, 0, 3, 50]))
    def restart(self, which, again):
        self.expire()
        self.durable = self.replayed(which, again)
        queue = self.durable
        queue.enqueue_times.record_enqueue(self.head + 1, self.now)
        queue.invalidate_priorities(self.levels)
        self.promoted = 0
        self.gone = {}
        for seq, job in self.jobs.items():
            if job.state in {"fresh", "waiting"}:
                state = "waiting" if job.not_before > self.now else "fresh"
                self.jobs[seq] = Job(job.not_before, job.priority, self.now, state=state)
        self.queue = Logged(self.durable, self.log)
        self.feed(sorted(self.jobs))

    @rule(which=st.integers(0, 60), again=st.sampled_from([0, 3, 50]))
    def a_replay_says_what_the_model_says(self, which, again):
        self.expire()
        durable = self.replayed(which, again)
        self.compare(durable)
        loaded = decode_queue_leases(encode_queue_leases(durable))
        self.rests(loaded)
        loaded.finish_recovery(self.live(), LeaseTokens(self.incarnation))
        self.compare(loaded)

    def compare(self, durable: ConsumerGroup) -> None:
        queue, runs = durable, durable.runs
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
        assert len(queue.runs.rows_leased_by(0)) == 0, "who claimed is known"
        links = {life: link for link, life in queue.processes.by_number.items()}
        for node in NODES:
            mine = [seq for seq, job in self.jobs.items() if job.state == "leased" and job.node == node]
            rows = runs.rows_leased_by(links.get(LIVES[node], 1 << 31))
            assert sum(runs.stop[row] - runs.first[row] for row in rows) == len(mine)

    @invariant()
    def the_bound_is_not_met(self):
        assert self.durable.runs.jobs < KNOWN_MAX


DurableMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestDurableModel = DurableMachine.TestCase
del QueueMachine
