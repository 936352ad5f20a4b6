"""Authentication and authorization: no credentials, wrong credentials, and each scope with each operation."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import zmq

from chaos.attack.arena import QUIET_S, Arena, a_frame, ask, hello
from ringlog.drill.checks import require
from ringlog.envelope import messages as m
from ringlog.envelope.wire import PROTOCOL, encode
from ringlog.errors import Status
from ringlog.link.curve import new_key

HELLO = [encode(m.Hello(PROTOCOL, "x"), 1)]
INSIDE, OUTSIDE, NOWHERE = "mine.log", "canary.log", "canary.absent"


def strangers(arena: Arena, dice: random.Random) -> int:
    """Connect without credentials and with wrong ones; no message may get an answer (RF-105)."""
    del dice
    eve = new_key()
    ways: list[tuple[str, dict[str, Any]]] = [
        ("no security", {}),
        ("an unknown key", {"key": eve}),
        ("a password", {"PLAIN_USERNAME": b"owner-key", "PLAIN_PASSWORD": b"x"}),
        ("the right key, expecting another server", {"key": arena.owner, "server": eve.public}),
        ("the server's own public key as its own", {"key": arena.server, "server": eve.public}),
    ]
    for what, how in ways:
        with arena.peer(**how) as peer:
            require(ask(peer, HELLO, QUIET_S) is None, f"a client with {what} got an answer, expected none")
    require(not _confides(arena), "a client sent its Hello to a server with a wrong key")
    with arena.peer(key=arena.owner) as peer:
        require(hello(peer), "a client with a listed key got no answer")
    return len(ways) + 1


def _confides(arena: Arena) -> bool:
    """Return whether a client sends its Hello to a server with the wrong key."""
    wrong = new_key()
    server = arena.context.socket(zmq.ROUTER)
    try:
        server.setsockopt(zmq.LINGER, 0)
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, wrong.secret)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with arena.peer(f"tcp://127.0.0.1:{port}", arena.owner) as client:
            client.send_multipart(HELLO)
            return bool(server.poll(round(QUIET_S * 1000)))
    finally:
        server.close(0)


# -- scopes and prefixes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the table in docs/explanation/security.md.

    It is repeated here as an independent check.
    """

    name: str
    scopes: frozenset[str]
    """Scopes that permit the operation; any one is enough. If empty, no key may perform it."""
    has_topic: bool = True


def _operation(name: str, *scopes: str, has_topic: bool = True) -> Operation:
    return Operation(name, frozenset(scopes), has_topic)


OPERATIONS = (
    _operation("TopicResolve", "read", "write"), _operation("TopicState", "read"), _operation("Read", "read"),
    _operation("SeekTime", "read"), _operation("TopicList", "read", has_topic=False),
    _operation("Append", "write"), _operation("Append creating", "write"),
    _operation("ProducerState", "write"), _operation("TopicPut", "admin"),
    _operation("TopicPut plain", "write", "admin"), _operation("RecordsDelete", "delete"),
    _operation("TopicDelete", "delete"), _operation("RoutesSettle", "read"), _operation("LeaseStats", "read"),
    _operation("ListPending", "read"), _operation("Claim"), _operation("Ack", "write"),
    _operation("Nack", "write"), _operation("Reject", "write"), _operation("Extend", "write"),
    _operation("RedriveDeadLetters", "write"), _operation("RedriveDeadLetters of a group"),
    _operation("GroupOpen", "read"), _operation("GroupOpen with dead letters"),
    _operation("GroupSeek", "read"), _operation("Claim of a group", "read"),
    _operation("Ack of a group", "read"), _operation("Nack of a group", "read"),
    _operation("Reject of a group"), _operation("Extend of a group", "read"),
    _operation("GroupLeave", "read"),
    _operation("ListPending of a group", "read"), _operation("LeaseStats of a group", "read"),
    _operation("GroupList", "read"), _operation("GroupTakeOver", "read"),
    _operation("GroupCommit", "read"), _operation("GroupDelete", "delete"),
    _operation("RouterCreate"), _operation("RouterGet", "read"), _operation("RouterDelete", "delete"),
    _operation("ListExhausted", has_topic=False), _operation("ScrubNow", has_topic=False),
    _operation("Locate"), _operation("RingOpen", has_topic=False),
    _operation("EngineStop", has_topic=False),
    _operation("RingAttach", has_topic=False), _operation("CheckpointOpen", has_topic=False),
    _operation("CheckpointNow", has_topic=False), _operation("ColdRead", has_topic=False),
    _operation("EngineStatus", has_topic=False), _operation("SegmentsChange", has_topic=False),
)  # fmt: skip


def _said(name: str, topic: str) -> list[Any]:
    attached: list[Any] = []
    message: m.Message
    match name:
        case "Append" | "Append creating":
            message = m.Append(topic, 1, create=name != "Append")
            attached = [a_frame(b"by right", producer_id=31)]
        case "TopicPut":
            message = m.TopicPut(topic, {"durability": "disk"})
        case "TopicPut plain":
            message = m.TopicPut(topic, {}, "create")
        case "RecordsDelete":
            message = m.RecordsDelete(topic, match="no-such-tag")
        case "TopicDelete":
            # With the right scope this is refused because the topic has records.
            message = m.TopicDelete(topic, if_empty=True)
        case "Read" | "SeekTime" | "Locate":
            message = m.KINDS[name](topic, 0)
        case "ProducerState":
            message = m.ProducerState(topic, 7)
        case "TopicResolve" | "TopicState":
            message = m.KINDS[name](topic)
        case "RoutesSettle":
            message = m.RoutesSettle(topic, 1, 0)
        case "RedriveDeadLetters of a group":
            message = m.RedriveDeadLetters(topic, b"", "g")
        case "RedriveDeadLetters":
            message = m.RedriveDeadLetters(topic, b"")
        case "GroupOpen":
            message = m.GroupOpen(topic, "g", 1)
        case "GroupOpen with dead letters":
            message = m.GroupOpen(topic, "h", 1, dead_letter="mine.dead")
        case "GroupSeek":
            message = m.GroupSeek(topic, "g", 1)
        case "GroupCommit":
            message = m.GroupCommit(topic, "g", 1, 0, 1)
        case "GroupList" | "LeaseStats" | "ListPending" | "RouterGet" | "RouterDelete":
            message = m.KINDS[name](topic)
        case "GroupDelete":
            message = m.KINDS[name](topic, "g")
        case "ListPending of a group" | "LeaseStats of a group":
            message = m.KINDS[name.partition(" ")[0]](topic, group="g")
        case "GroupLeave" | "GroupTakeOver":
            message = m.KINDS[name](topic, "g", "w")
        case "Claim" | "Claim of a group":
            message = m.Claim(topic, "w", group="" if name == "Claim" else "g")
        case "Ack" | "Nack" | "Reject" | "Extend":
            message = m.KINDS[name](topic, "w", b"")
        case "Ack of a group" | "Nack of a group" | "Reject of a group" | "Extend of a group":
            message = m.KINDS[name.partition(" ")[0]](topic, "w", b"", group="g")
        case "RouterCreate":
            message = m.RouterCreate(topic, INSIDE, "mine.dest")
        case "RingOpen":
            message = m.RingOpen("c", 1, 0)
        case "RingAttach":
            message = m.RingAttach("r", "b", "c")
        case "ColdRead":
            message = m.ColdRead("wal/shard-00/wal-1-0.log", 0, 8)
        case "SegmentsChange":
            message = m.SegmentsChange([], [1])
        case _:
            message = m.KINDS[name]()
    return [encode(message, 1), *attached]


def table(arena: Arena, dice: random.Random) -> int:
    """Try each operation with each single scope (RF-106).

    Topics are inside the prefix, outside it, and missing. A refusal must not show whether a topic exists.
    """
    del dice
    cases = 0
    with arena.connect() as client:
        client.append(INSIDE, b"so that it is not empty")
    for scope, key in sorted(arena.by_scope.items()):
        with arena.peer(key=key) as peer:
            for operation in OPERATIONS:
                cases += _try(peer, operation, scope)
            listed = ask(peer, [encode(m.TopicList(), 1)])
            if scope == "read":
                assert isinstance(listed, m.TopicListReply)
                names = [topic.topic for topic in listed.topics]
                require(names and all(name.startswith("mine.") for name in names), f"a list shows {names}")
    return cases


def _try(peer: zmq.Socket[Any], operation: Operation, scope: str) -> int:
    may = scope in operation.scopes
    what = f"{operation.name} with scope {scope}"
    inside = ask(peer, _said(operation.name, INSIDE))
    require(inside is not None, f"{what} got no answer")
    is_refused = isinstance(inside, m.ErrorReply) and inside.status == Status.FORBIDDEN
    require(is_refused != may, f"{what} inside its prefix: {inside!r}")
    if not operation.has_topic:
        return 1
    answers = []
    for topic in (OUTSIDE, NOWHERE):
        outside = ask(peer, _said(operation.name, topic))
        is_refused = isinstance(outside, m.ErrorReply) and outside.status == Status.FORBIDDEN
        require(is_refused, f"{what} outside its prefix: {outside!r}")
        assert isinstance(outside, m.ErrorReply)
        answers.append((outside.status, outside.message, {**outside.detail, "topic": ""}, outside.outcome))
    require(answers[0] == answers[1], f"{what}: the answer says whether a topic exists: {answers}")
    return 3
