"""The fast path for claims and acks has the results of the general path (Q4)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ringlog.actors.wal_shard.leases.queue_fast_path import QueueFastPath
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest
from ringlog.testing.disk import SimulatedDisk
from tests.support.shard_world import ShardRun, World
from tests.support.shard_worlds import restart

FILE_BYTES = 4 << 20
NODES = ("ann", "bob")


def make(*, is_quick: bool = True, **config: Any) -> tuple[World, ShardRun]:
    world = World(SimulatedDisk("/data"))
    world.file_bytes = FILE_BYTES
    world.start()
    world.put_topic("q", type="queue", **({"durability": "disk"} | config))
    run = world.run_of("q")
    if not is_quick:
        refuse(run)
    return world, run


def refuse(run: ShardRun) -> None:
    """Disable the fast path, so that every request takes the general path."""
    quick: Any = run.core.requests.leases.fast_path
    quick.claim = lambda message, now_us: None
    quick.ack = quick.ack_and_claim = lambda message, event, now_us: False


class Counting:
    """Counts the requests that take the fast path."""

    def __init__(self, run: ShardRun) -> None:
        self.claims = self.acks = 0
        self._quick = quick = run.core.requests.leases.fast_path
        claim, ack = QueueFastPath.claim, QueueFastPath.ack

        def counted_claim(message: m.Claim, now_us: int) -> m.ClaimReply | None:
            found = claim(quick, message, now_us)
            self.claims += found is not None
            return found

        def counted_ack(message: m.Ack, event: ControlReceived, now_us: int) -> bool:
            found = ack(quick, message, event, now_us)
            self.acks += found
            return found

        mine: Any = quick
        mine.claim, mine.ack = counted_claim, counted_ack


def words(numbers: list[int]) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def jobs_of(claimed: m.ClaimReply) -> list[tuple[int, int]]:
    return [(first + n, token + n) for first, count, _, token in claimed.runs for n in range(count)]


def ack_of(jobs: list[tuple[int, int]], node: str, call: int) -> m.Ack:
    return m.Ack("q", node, words([a for a, _ in jobs]), words([b for _, b in jobs]), True, call)


def next_of(
    jobs: list[tuple[int, int]], node: str, call: int, most: int = 1, lease_ms: int = 5_000
) -> m.AckAndClaim:
    seqs, tokens = words([a for a, _ in jobs]), words([b for _, b in jobs])
    return m.AckAndClaim("q", node, seqs, tokens, most, lease_ms, call)


Step = tuple[str, int, int, bool]
"""(operation, node number, count, whether it is sent together with the next one)"""
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "claim", "claim", "ack", "ack", "nack", "again", "part", "wait", "delete"]),
        st.integers(0, 1),
        st.integers(1, 6),
        st.booleans(),
    ),
    max_size=40,
)


class History:
    """Performs steps and records the replies."""

    def __init__(self, is_quick: bool, **config: Any) -> None:
        self.world, self.run = make(is_quick=is_quick, **config)
        self.held: list[tuple[str, list[tuple[int, int]]]] = []
        self.asked: dict[int, tuple[str, Any]] = {}
        self.said: list[Any] = []
        self.waiting: list[ControlReceived] = []
        self.last: Any = None
        self.call = 0
        self.corr = 1_000

    def ask(self, message: Any) -> None:
        self.corr += 1
        self.asked[self.corr] = (getattr(message, "node", ""), message)
        self.waiting.append(self.run.request(self.corr, message))

    def flush(self) -> None:
        if self.waiting:
            events, self.waiting = self.waiting, []
            self.run.step(*events)
        for corr in sorted(self.run.replies):
            if corr in self.asked:
                node, _ = self.asked.pop(corr)
                answer = self.run.replies.pop(corr)
                self.said.append((corr, answer))
                if isinstance(answer, m.ClaimReply) and answer.runs:
                    self.held.append((node, jobs_of(answer)))

    def do(self, step: Step) -> None:
        what, which, count, is_together = step
        node = NODES[which]
        self.call += 1
        if what == "put":
            self.flush()
            self.world.append("q", [b"x" * count] * count)
        elif what == "claim":
            self.ask(m.Claim("q", node, count, 5_000, call=self.call))
        elif what == "wait":
            self.flush()
            self.world.tick(count * 1.1)
        elif what == "delete":
            self.flush()
            self.ask(m.RecordsDelete("q", before_seq=count))
        elif what == "again" and self.last is not None:
            self.ask(self.last)
        elif what in {"ack", "nack", "part"} and self.held:
            self.flush()
            owner, jobs = self.held.pop(which % len(self.held))
            if what == "part":
                jobs = jobs[count // 2 :: 2] or jobs
            if what == "nack":
                seqs, reason = words([a for a, _ in jobs]), "failed" if count % 2 else ""
                self.ask(m.Nack("q", owner, seqs, b"", 0, self.call, reason))
            else:
                self.last = ack_of(jobs, owner if count > 1 else NODES[0], self.call)
                self.ask(self.last)
        if not is_together:
            self.flush()

    def facts(self) -> Any:
        self.flush()
        topic = self.world.topic("q")
        queue = self.run.core.requests.leases.registry.find_default_group(topic.topic_id)
        self.run.core.check()
        state = None
        if queue is not None:
            state = (queue.cursor, queue.leased, queue.delayed, dict(queue.failures))
        return (
            self.said, state, topic.count, topic.bytes, topic.earliest_seq, self.world.records("q"),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("durability", ["disk", "fsync", "ephemeral"])
@pytest.mark.parametrize("backoff_ms", [0, 1_500])
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_both_paths_reply_and_leave_the_same(durability: str, backoff_ms: int, steps: list[Step]) -> None:
    config = {"durability": durability, "backoff_ms": backoff_ms}
    quick, slow = History(True, **config), History(False, **config)
    for step in steps:
        quick.do(step)
        slow.do(step)
    assert quick.facts() == slow.facts()


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_acks_by_the_fast_path_survive_a_power_loss(steps: list[Step]) -> None:
    history = History(True, durability="fsync")
    for step in steps:
        history.do(step)
    before = history.facts()
    history.world.power_loss(seed=1)
    history.world.start()
    topic = history.world.topic("q")
    assert (topic.count, topic.bytes, topic.earliest_seq) == before[2:5]
    assert history.world.records("q") == before[5]


@pytest.mark.interpreted
def test_one_job_after_another_takes_the_fast_path() -> None:
    world, run = make()
    world.append("q", [b"x"] * 50)
    world.request(m.Claim("q", "ann"))
    counting = Counting(run)
    for call in range(1, 40, 2):
        (job,) = jobs_of(world.request(m.Claim("q", "ann", call=call)))
        assert world.request(ack_of([job], "ann", call + 1)).acked == 1
    assert counting.claims == 20
    assert counting.acks >= 19  # Before the first ack, the sizes of the jobs are looked up.


@pytest.mark.interpreted
def test_the_failure_of_a_job_is_forgotten_with_its_ack() -> None:
    world, run = make()
    world.append("q", [b"x"] * 3)
    jobs = jobs_of(world.request(m.Claim("q", "ann", 3)))
    world.request(ack_of([jobs[0]], "ann", 1))
    seqs = words([seq for seq, _ in jobs[1:]])
    world.request(m.Nack("q", "ann", seqs, words([token for _, token in jobs[1:]]), 0, 2, "it failed"))
    queue = run.core.requests.leases.registry.find_default_group(world.topic("q").topic_id)
    assert len(queue.failures) == 2
    counting = Counting(run)
    (again,) = jobs_of(world.request(m.Claim("q", "ann", 1, call=3)))
    assert world.request(ack_of([again], "ann", 4)).acked == 1
    assert counting.acks == 1
    assert [seq for seq, _ in queue.failures] == [3]


def test_acks_of_a_pass_are_one_record_of_the_log() -> None:
    world, run = make(durability="fsync")
    world.append("q", [b"x"] * 40)
    claims = [world.request(m.Claim("q", "ann", 2, call=n)) for n in range(1, 20)]
    world.request(ack_of(jobs_of(claims[0]), "ann", 100))
    topic = world.topic("q")
    version, offset = topic.version, run.core.log.offset
    acks = [
        run.request(900 + n, ack_of(jobs_of(claimed), "ann", 200 + n)) for n, claimed in enumerate(claims[1:])
    ]
    run.step(*acks)
    assert [run.replies[900 + n].acked for n in range(len(acks))] == [2] * len(acks)
    assert topic.version == version + 1
    assert run.core.log.offset - offset < 512


@pytest.mark.parametrize(("acked", "left"), [((0, 1), [3, 4, 5]), ((0, 2), [2, 4, 5]), ((3, 1), [1, 3, 5])])
def test_acks_of_a_pass_end_the_jobs_they_name_and_no_other(acked: tuple[int, ...], left: list[int]) -> None:
    world, run = make(durability="fsync")
    world.append("q", [b"x"] * 5)
    claims = [world.request(m.Claim("q", "ann", 1, call=n)) for n in range(1, 6)]
    run.step(*(run.request(900 + n, ack_of(jobs_of(claims[n]), "ann", 200 + n)) for n in acked))
    assert [seq for seq, *_ in world.records("q")] == left
    restart(world)
    assert [seq for seq, *_ in world.records("q")] == left


@pytest.mark.interpreted
def test_a_crash_while_acks_are_staged_is_blamed_on_a_request_of_that_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, run = make(durability="fsync")
    world.put_topic("other", type="queue", durability="fsync")
    acks = []
    for n, name in enumerate(("q", "other")):
        world.append(name, [b"x"] * 2)
        held = [jobs_of(world.request(m.Claim(name, "ann", 1, call=10 * n + call))) for call in (1, 2)]
        settled = [
            structs.replace(ack_of(jobs, "ann", 10 * n + call), topic=name)
            for call, jobs in enumerate(held, 5)
        ]
        world.request(settled[0])  # The first ack of a queue takes the general path.
        acks.append(run.request(900 + n, settled[1]))
    stage = run.core.removals.stage_removal

    def crash_at_q(topic: Any, *rest: Any, **options: Any) -> None:
        if topic.name == "q":
            raise ZeroDivisionError
        stage(topic, *rest, **options)

    monkeypatch.setattr(run.core.removals, "stage_removal", crash_at_q)
    with pytest.raises(ZeroDivisionError):
        run.step(*acks)
    blamed = run.core.intake.current_request
    assert blamed is not None
    assert blamed.message.topic == "q"


def test_a_claim_is_answered_before_changes_staged_in_its_pass() -> None:
    world, run = make(durability="fsync")
    world.append("q", [b"x"] * 9)
    first = world.request(m.Claim("q", "ann", 1, call=1))
    world.request(ack_of(jobs_of(first), "ann", 2))
    held = world.request(m.Claim("q", "ann", 1, call=3))
    events = [
        run.request(901, ack_of(jobs_of(held), "ann", 4)),
        run.request(902, m.Claim("q", "ann", 1, call=5)),
    ]
    effects = run.core.handle([run._tick(), *events])
    assert [type(effect).__name__ for effect in effects[:1]] == ["Reply"]
    assert effects[0].corr == 902
    assert not any(getattr(effect, "corr", 0) == 901 for effect in effects)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "config",
    [
        {"record_priority": True}, {"leases_durable": True}, {"claim_jitter_ms": 50},
        {"durability": "ephemeral"},
    ],
)  # fmt: skip
def test_queues_with_other_settings_take_the_general_path(config: dict[str, Any]) -> None:
    world, run = make(**config)
    world.append("q", [b"x"] * 9)
    counting = Counting(run)
    claimed = world.request(m.Claim("q", "ann", 1, call=1)) if "claim_jitter_ms" not in config else None
    if claimed is not None:
        world.request(ack_of(jobs_of(claimed), "ann", 2))
        assert counting.acks == 0
    assert counting.claims == 0 or config == {"durability": "ephemeral"}


def test_a_repeated_request_has_the_same_reply() -> None:
    world, _ = make()
    world.append("q", [b"x"] * 9)
    claimed = world.request(m.Claim("q", "ann", 2, call=7))
    assert world.request(m.Claim("q", "ann", 2, call=7)).runs == claimed.runs
    ack = ack_of(jobs_of(claimed), "ann", 8)
    answer = world.request(ack)
    assert world.request(ack) == answer
    assert world.topic("q").count == 7


@pytest.mark.parametrize("token", [1 << 63, (1 << 64) - 2, (1 << 64) - 1])
def test_a_token_that_cannot_have_a_successor_acks_nothing(token: int) -> None:
    world, _ = make()
    world.append("q", [b"x"] * 9)
    claimed = world.request(m.Claim("q", "ann", 2, call=7))
    first, second = (seq for seq, _ in jobs_of(claimed))
    jobs = [(first, token), (second, min(token + 1, (1 << 64) - 1))]
    assert world.request(ack_of(jobs, "ann", 8)).acked == 0
    assert world.request(ack_of(jobs_of(claimed), "ann", 9)).acked == 2


def test_a_wrong_token_or_node_acks_nothing() -> None:
    world, _ = make()
    world.append("q", [b"x"] * 9)
    claimed = world.request(m.Claim("q", "ann", 2, call=7))
    jobs = [(seq, token + 1) for seq, token in jobs_of(claimed)]
    assert world.request(ack_of(jobs, "ann", 8)).acked == 0
    assert world.request(ack_of(jobs_of(claimed), "bob", 9)).acked == 0
    assert world.request(ack_of(jobs_of(claimed), "ann", 10)).acked == 2


class InOne(History):
    """Acks and claims in one request where this is possible, or, with `apart`, one after the other."""

    def __init__(self, *, apart: bool, **config: Any) -> None:
        super().__init__(True, **config)
        self.apart = apart
        self.taken = 0
        self.moves: list[Any] = []

    def do(self, step: Step) -> None:
        what, which, count, _ = step
        if what != "part" or not self.held:
            super().do((*step[:3], False))
            return
        owner, jobs = self.held.pop(which % len(self.held))
        jobs = jobs[: 1 + count // 2]
        node = owner if count != 3 else NODES[0]
        self.call += 1
        answer: Any = m.NotCombinable("q")
        if not self.apart:
            answer = self.world.request(next_of(jobs, node, self.call, count))
        if isinstance(answer, m.NotCombinable):
            acked = self.world.request(ack_of(jobs, node, self.call + 1_000))
            answer = self.world.request(m.Claim("q", node, count, 5_000, call=self.call + 2_000))
            self.moves.append((acked.acked, answer.runs, answer.deadline, answer.ready, answer.lease_ms))
        else:
            self.taken += 1
            self.moves.append((len(jobs), answer.runs, answer.deadline, answer.ready, answer.lease_ms))
        if answer.runs:
            self.held.append((node, jobs_of(answer)))


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["disk", "fsync"])
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_ack_and_claim_in_one_request_equal_two_requests(durability: str, steps: list[Step]) -> None:
    config = {"durability": durability, "backoff_ms": 1_500}
    one, two = InOne(apart=False, **config), InOne(apart=True, **config)
    for step in steps:
        one.do(step)
        two.do(step)
        assert one.moves == two.moves
        assert one.held == two.held
    # Compare the other replies and the final state.
    assert one.facts()[1:] == two.facts()[1:]


def test_ack_and_claim_in_one_request_are_answered_when_the_ack_is_durable() -> None:
    world, run = make(durability="fsync")
    world.append("q", [b"x"] * 30)
    claimed = world.request(m.Claim("q", "ann", call=1))
    world.request(ack_of(jobs_of(claimed), "ann", 2))
    claimed = world.request(m.Claim("q", "ann", call=3))
    queues = run.core.requests.leases
    done = dict(queues.registry.queue_metrics.outcomes)
    for call in range(4, 20):
        event = run.request(1_000 + call, next_of(jobs_of(claimed), "ann", call))
        effects = run.core.handle([run._tick(), event])
        assert not any(getattr(effect, "corr", 0) == 1_000 + call for effect in effects)
        run._pump(effects)
        claimed = run.replies[1_000 + call]
        assert len(jobs_of(claimed)) == 1
    assert world.topic("q").count == 30 - 17
    assert queues.registry.queue_metrics.outcomes["acked"] - done["acked"] == 16


def test_an_ack_and_claim_acks_even_if_no_job_is_ready() -> None:
    world, _ = make()
    world.append("q", [b"x"] * 2)
    world.request(ack_of(jobs_of(world.request(m.Claim("q", "ann", call=1))), "ann", 2))
    (job,) = jobs_of(world.request(m.Claim("q", "ann", call=3)))
    answer = world.request(next_of([job], "ann", 4))
    assert (answer.runs, answer.ready) == ([], 0)
    assert world.topic("q").count == 0
    assert world.request(next_of([job], "ann", 4)) == answer


def test_a_repeated_ack_and_claim_returns_the_leases_that_are_still_valid() -> None:
    world, _ = make()
    world.append("q", [b"x"] * 9)
    world.request(ack_of(jobs_of(world.request(m.Claim("q", "ann", call=1))), "ann", 2))
    jobs = jobs_of(world.request(m.Claim("q", "ann", 1, call=3)))
    asked = next_of(jobs, "ann", 4, most=3)
    answer = world.request(asked)
    assert len(jobs_of(answer)) == 3
    assert world.request(asked) == answer
    back = jobs_of(answer)[:1]
    world.request(m.Nack("q", "ann", words([back[0][0]]), words([back[0][1]]), 60_000, 5))
    assert jobs_of(world.request(asked)) == jobs_of(answer)[1:]
    world.tick(61)  # The leases of the others have ended.
    assert world.request(asked).runs == []
    assert world.topic("q").count == 7


def test_an_ack_and_claim_that_cannot_be_combined_changes_nothing() -> None:
    world, run = make()
    world.append("q", [b"x"] * 9)
    held = jobs_of(world.request(m.Claim("q", "ann", 2, call=1)))
    world.request(ack_of(held[:1], "ann", 2))
    wrong = [(seq, token + 1) for seq, token in held[1:]]
    state = run.core.requests.leases.registry.find_default_group(world.topic("q").topic_id)
    before = state.cursor, state.leased, world.topic("q").count
    for jobs, node in ((wrong, "ann"), (held[1:], "bob"), ([(99, 5)], "ann"), (held[:1], "ann")):
        assert isinstance(world.request(next_of(jobs, node, 70 + len(node) + jobs[0][0])), m.NotCombinable)
        assert (state.cursor, state.leased, world.topic("q").count) == before
    refused = [
        m.AckAndClaim("q", "ann", b"123", b"123", call=81),
        m.AckAndClaim("q", "", words([2]), words([2]), call=82),
        m.AckAndClaim("q", "ann", words([2]), words([2]), -1, call=83),
    ]  # fmt: skip
    for message in refused:
        with pytest.raises(InvalidRequest):
            world.request(message)
    assert isinstance(world.request(next_of(held[1:], "ann", 90)), m.ClaimReply)


def test_job_sizes_are_looked_up_once_for_acks_that_come_with_claims() -> None:
    """This includes many requests in one pass. Their acks are still one record of the log."""
    world, run = make(durability="fsync")
    world.append("q", [b"x"] * 60)
    claims = [world.request(m.Claim("q", "ann", 1, call=n)) for n in range(1, 21)]
    topic = world.topic("q")
    offset = run.core.log.offset
    asked = [
        run.request(900 + n, next_of(jobs_of(claimed), "ann", 200 + n)) for n, claimed in enumerate(claims)
    ]
    run.step(*asked)
    answers = [run.replies[900 + n] for n in range(len(asked))]
    assert [jobs_of(answer)[0][0] for answer in answers] == list(range(21, 41))
    assert topic.count == 40
    assert run.core.log.offset - offset < 512


def test_sizes_of_missing_jobs_are_not_looked_up() -> None:
    world, run = make()
    world.append("q", [b"x"] * 3)
    world.request(m.Claim("q", "ann", 1, call=1))
    for n, seq in enumerate((0, 4, 1 << 62)):
        assert isinstance(world.request(next_of([(seq, 5)], "ann", 10 + n)), m.NotCombinable)
    assert len(run.core.requests.leases.sizes) == 0
