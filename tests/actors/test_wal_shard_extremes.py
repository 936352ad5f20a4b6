"""A shard accepts every field of every request at its extremes, and its successor decodes the log."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chaos.fuzz.fuzz_shard import recovered
from ringlog.envelope import messages as m
from ringlog.envelope.wire import PROTOCOL, MessageInvalid, decode
from ringlog.limits import PID_MAX, SEQ_MAX
from tests.support.busy_world import WAIT, prepared
from tests.support.extremes import extreme_bodies
from tests.support.shard_world import NoReply, ShardRun, World

KINDS = sorted(prepared().run_of("t").core.requests.kinds, key=lambda kind: kind.__name__)
SEQS = b"\1" + bytes(7)
_encode = msgspec.msgpack.encode


def known(world: World, topic: str) -> dict[str, Any]:
    """Return field values that make a request about this topic valid."""
    topic_id = world.topic(topic).topic_id
    return {
        "topic": topic, "topic_id": topic_id, "dest_id": topic_id, "dest": topic, "source": "t", "name": "r",
        "group": "g", "node": "w", "seqs": SEQS, "tokens": b"", "config": {}, "mode": 1,
        "dead_letter": "dead", "filter": "", "tags": "", "flags": 3, "durability": 0, "frames": 0,
        "frame": -1, "epoch": 0, "match": "a", "call": 0, "pid": 0, "pid_started": 0, "wait_ms": 0, "after":
        0, "cursor": 0, "start": 0, "lost": 0,
    }  # fmt: skip


def fed(topic: str) -> World:
    """Return a world in which router 1 leads to this topic."""
    world = prepared()
    facts = m.RouterFacts(1, "r", "dead", 1, 1, topic, world.topic(topic).topic_id, 3, "", 0)
    assert isinstance(world.ask(world.run_of("t"), m.RouterPut(facts)), m.RouterFacts)
    return world


def asked(world: World, run: ShardRun, kind: type[m.Message], body: list[Any]) -> m.Message | None:
    """Send a body and return the reply. None if the request waits, or if decoding refuses the body."""
    try:
        message = decode(_encode([PROTOCOL, kind.__name__, 7, body])).message
    except MessageInvalid:
        return None
    try:
        return world.ask(run, message, bytearray())
    except NoReply:
        assert kind in WAIT, message
        return None


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["t", "q"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_shard_survives_every_field_at_its_extremes(kind: type[m.Message], topic: str) -> None:
    world = fed(topic)
    run = world.run_of("t")
    answered = 0
    for what, body in extreme_bodies(kind, known(world, topic)):
        if run.core.directory.find(topic) is None:
            # The topic was removed, so later requests would have no subject.
            world = fed(topic)
            run = world.run_of("t")
        try:
            answered += asked(world, run, kind, body) is not None
        except Exception as e:
            raise AssertionError(f"{kind.__name__} with {what} ended the shard") from e
    assert answered or not kind.__struct_fields__
    recovered(world)


@pytest.mark.parametrize(
    "message",
    [
        m.Claim("q", "w", 1, pid=PID_MAX, pid_started=1 << 63),
        m.Claim("q", "w", 1, pid=1, pid_started=(1 << 64) - 1, call=(1 << 64) - 1),
        m.Claim("t", "w", 1, call=(1 << 64) - 1, pid=PID_MAX, pid_started=(1 << 64) - 1, group="g"),
        m.Extend("q", "w", SEQS, lease_ms=1 << 43),
        m.GroupSeek("t", "g", SEQ_MAX),
        m.GroupOpen("t", "h", 1, start=SEQ_MAX),
    ],
    ids=lambda message: type(message).__name__,
)
def test_the_greatest_numbers_of_a_message_are_kept_and_recovered(message: m.Message) -> None:
    world = prepared()
    asked(world, world.run_of("t"), type(message), msgspec.to_builtins(message))
    recovered(world)


def test_invalid_router_facts_are_refused() -> None:
    """Such a row was once logged, and no successor could decode it."""
    world = prepared()
    run = world.run_of("t")
    good = m.RouterFacts(1, "r", "t", 1, 1, "u", world.topic("u").topic_id, 3, "", 0)
    for change in (
        {"source_id": -1}, {"source_epoch": -1}, {"cursor": -1}, {"flags": -1}, {"flags": 1 << 20},
        {"router": -1}, {"name": "\0"}, {"name": ""}, {"source": "/"}, {"filter": "no kept filter"},
        {"filter": "~a+/b"}, {"cursor": SEQ_MAX + 1}, {"router": (1 << 64) - 1, "filter": "^" + "x" * 5_000},
    ):  # fmt: skip
        body = msgspec.to_builtins(msgspec.structs.replace(good, **change))
        answer = asked(world, run, m.RouterPut, [body])
        assert not isinstance(answer, m.RouterFacts), change
        assert not world.topic("u").routers
    assert isinstance(asked(world, run, m.RouterPut, [msgspec.to_builtins(good)]), m.RouterFacts)
    recovered(world)
