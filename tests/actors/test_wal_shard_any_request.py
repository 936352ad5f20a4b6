"""A shard answers any message that can be encoded, or refuses it with a typed error, and continues."""

from __future__ import annotations

import pytest

from chaos.fuzz.fuzz_shard import recovered
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest
from tests.support.busy_world import SEQS, TOKENS, TOPICS, WAIT, prepared
from tests.support.message_generator import MessageGenerator, SeededChoices
from tests.support.shard_world import NoReply

REQUESTS = 250
KINDS_AT_ONCE = 12
"""A few kinds reach more states than all kinds: one creates what another needs or removes."""
KNOWN = {
    "topic": TOPICS, "seqs": SEQS, "tokens": TOKENS, "group": ("", "g", "s"), "node": ("w", "v"),
    "dead_letter": ("dead",), "name": ("r",), "epoch": (0, 1), "lease_ms": (0, 1_000), "wait_ms": (0, 5),
    "delay_ms": (0, 1),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_shard_answers_any_request_and_recovers_from_its_log(seed: int) -> None:
    world, dice = prepared(), SeededChoices(seed)
    run = world.run_of("t")
    ids = {"topic_id": [world.topic(name).topic_id for name in TOPICS], "number": [1, 2]}
    writer = MessageGenerator(dice, KNOWN | ids)
    handled = run.core.requests.kinds
    kinds = [writer.pick(handled) for _ in range(KINDS_AT_ONCE)]
    answered = 0
    for _ in range(REQUESTS):
        kind = writer.pick(kinds)
        message = writer.message(kind)
        if message is None:
            continue
        try:
            world.ask(run, message, writer.attachment())
        except NoReply:
            assert kind in WAIT, message
        answered += 1
    assert answered > REQUESTS // 2
    recovered(world)


@pytest.mark.parametrize(
    "message",
    [
        m.RecordsDelete("t", match=["tag", ["tag"], "a"]),
        m.RecordsDelete("t", match=["tag", {}, "a"]),
        m.ConfirmDeadLettered("q", 2, b"\0" * 9),
        m.Route([], 0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_once_ended_a_shard_is_refused(message: m.Message) -> None:
    """`fuzz` found the first message, as a filter of tags. The test above found the others."""
    world = prepared()
    if isinstance(message, m.ConfirmDeadLettered):
        message = m.ConfirmDeadLettered("q", world.topic("q").topic_id, message.seqs)
    answer = world.ask(world.run_of("t"), message, bytearray(b"\0" * 13))
    assert isinstance(answer, m.ErrorReply)
    assert answer.status == InvalidRequest.status
