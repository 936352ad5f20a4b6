"""Attacks below the protocol: connection floods, foreign identities, invalid handshakes, huge messages."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import time

import zmq

from chaos.attack.arena import ANSWER_S, QUIET_S, Arena, a_frame, a_producer, ask, hear, hello
from ringlog.drill.checks import require
from ringlog.envelope import messages as m
from ringlog.envelope.wire import PROTOCOL, encode
from ringlog.limits import FRAME_BYTES_MAX

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""First bytes of a ZMTP 3.1 greeting."""
IDLE_CONNECTIONS = 1_500
DROPPED_CONNECTIONS = 500
DROPPED_SUBSCRIBERS = 8
UNFINISHED = 20
HANDSHAKE_S = 5.0
"""Time limit (s) of a handshake, from docs/explanation/security.md."""
PARTS = 100_000
CHUNK = 65_536
REPLAY_ROUNDS = 8
_TAILS = (
    b"", bytes(20), b"NULL" + bytes(16) + bytes(32), b"CURVE" + bytes(15) + b"\0" + bytes(31),
    b"PLAIN" + bytes(15) + bytes(32), b"\xff" * 52,
)  # fmt: skip
"""Bytes after the signature: none, zeros, each mechanism, random."""


def floods(arena: Arena, dice: random.Random, *, idle: int = IDLE_CONNECTIONS) -> int:
    """Open idle connections and unfinished handshakes, and drop connections, also of subscribers (RF-94).

    The canary and a new client must be served, and the engine must end unfinished handshakes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    idle = min(idle, max(hard - 512, 64))
    opened = 0
    try:
        with contextlib.ExitStack() as held:
            unfinished = [held.enter_context(arena.raw()) for _ in range(UNFINISHED)]
            for raw in unfinished:
                raw.sendall(GREETING[:11])
            for number in range(idle):
                raw = held.enter_context(arena.raw())
                if number % 2:
                    raw.sendall(GREETING[: dice.randrange(1, len(GREETING) + 1)])
                opened += 1
            arena.check_canary()
            with arena.connect() as late:
                page = late.read("mine.log")
                require(page is not None, "a client that connects during the flood is not served")
            for _ in range(DROPPED_CONNECTIONS):
                with arena.raw() as raw:
                    raw.sendall(GREETING)
                opened += 1
            opened += _drop_subscribers(arena, dice)
            arena.check_canary()
            for raw in unfinished:
                require(_is_ended(raw), f"unfinished handshake still open after {HANDSHAKE_S * 2:.0f} s")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return opened


def _drop_subscribers(arena: Arena, dice: random.Random) -> int:
    """Drop connections whose clients wait for topic names, then create a topic and delete it.

    The gateway detects a dropped connection when it sends to it.
    """
    with contextlib.ExitStack() as held:
        for number in range(DROPPED_SUBSCRIBERS):
            peer = held.enter_context(arena.peer(arena.endpoint, arena.owner))
            message = encode(m.Subscribe(dice.getrandbits(32), [], 32, names=True), number + 1)
            answers = [ask(peer, [message])]
            while isinstance(answers[-1], m.TopicsChanged):
                answers.append(hear(peer))
            require(isinstance(answers[-1], m.Subscribed), f"a subscription got {answers!r}")
    with arena.connect() as client:
        topic = f"new-{dice.getrandbits(32)}"
        client.topics.create(topic)
        client.topics.delete(topic)
    return DROPPED_SUBSCRIBERS


def _is_ended(raw: socket.socket) -> bool:
    """Return whether the engine closes the connection within twice the handshake limit."""
    raw.settimeout(HANDSHAKE_S * 2)
    try:
        while raw.recv(CHUNK):
            continue
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def identities(arena: Arena, dice: random.Random) -> int:
    """Use one routing id on two connections, and another client's producer id (RF-96)."""
    with arena.peer(key=arena.owner, ROUTING_ID=b"same") as first:
        require(hello(first), "a client with its own routing id is not served")
        with arena.peer(key=arena.limited, ROUTING_ID=b"same") as second:
            second.send(encode(m.TopicState("canary.log"), 2))
            stolen = hear(second, QUIET_S)
            require(not isinstance(stolen, m.TopicStateReply), "the routing id of a client gave its rights")
            require(hello(first), "a connection was replaced by another one with the same routing id")
    return 2 + _producers(arena, a_producer(dice))


def _producers(arena: Arena, producer_id: int) -> int:
    """Send frames under one producer id from two clients; each number must be stored once.

    A producer id belongs to no client. Any client that may write to the topic may use it.
    """
    cases = 0
    with arena.peer(key=arena.owner) as mine, arena.peer(key=arena.limited) as theirs:
        info = ask(mine, [encode(m.TopicResolve("mine.log"), 1)])
        assert isinstance(info, m.TopicInfo)
        other = ask(mine, [encode(m.TopicResolve("canary.log"), 1)])
        assert isinstance(other, m.TopicInfo)

        def push(
            peer: zmq.Socket[bytes], topic: m.TopicInfo, number: int, payload: bytes
        ) -> m.Message | None:
            made = a_frame(
                payload, topic_id=topic.topic_id, epoch=topic.epoch, producer_id=producer_id,
                producer_seq=number,
            )  # fmt: skip
            return ask(peer, [encode(m.Append(topic.topic, 1), number), made])

        before = ask(mine, [encode(m.TopicState("mine.log"), 1)])
        assert isinstance(before, m.TopicStateReply)
        for number, peer in ((1, mine), (1, theirs), (2, mine), (2, theirs)):
            require(
                isinstance(push(peer, info, number, b"%d" % number), m.Appended), "an append was not answered"
            )
            cases += 1
        refused = push(theirs, other, 3, b"stranger")
        require(
            isinstance(refused, m.ErrorReply), "a client without rights appended under a foreign producer id"
        )
        after = ask(mine, [encode(m.TopicState("mine.log"), 1)])
        assert isinstance(after, m.TopicStateReply)
        stored = after.head_seq - before.head_seq
        require(stored == 2, f"two numbers of one producer, each sent twice, were stored {stored} times")
    return cases + 1


def no_handshakes(arena: Arena, dice: random.Random) -> int:
    """Send random, cut and replayed bytes to every socket (RF-99)."""
    cases = 0
    for endpoint in [arena.endpoint, *arena.sockets()]:
        for tail in (*_TAILS, dice.randbytes(200), dice.randbytes(CHUNK)):
            for head in (GREETING[:10], GREETING, dice.randbytes(12), b"GET / HTTP/1.1\r\n\r\n"):
                _throw(arena, endpoint, [head, tail])
                cases += 1
    arena.check_canary()
    recorded = _recorded_handshake(arena)
    for _ in range(REPLAY_ROUNDS):
        cut = dice.choice([len(recorded), dice.randrange(1, len(recorded))])
        heard = _throw(arena, arena.endpoint, [recorded[:cut]], listen_s=QUIET_S)
        # A server that accepts the old handshake answers the old Hello with READY and Welcome.
        require(b"READY" not in heard, "a replayed handshake was accepted")
        cases += 1
    return cases


def _throw(arena: Arena, endpoint: str, pieces: list[bytes], listen_s: float = 0.0) -> bytes:
    with arena.raw(endpoint) as raw, contextlib.suppress(OSError):
        for piece in pieces:
            raw.sendall(piece)
        raw.settimeout(listen_s or 0.001)
        heard = b""
        deadline = time.monotonic() + listen_s
        while time.monotonic() < deadline and (data := raw.recv(CHUNK)):
            heard += data
        return heard
    return b""


def _recorded_handshake(arena: Arena) -> bytes:
    """Return the bytes that an authorized client sends up to and including its Hello, recorded by a relay."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(ANSWER_S)
        port = listener.getsockname()[1]
        with arena.peer(f"tcp://127.0.0.1:{port}", arena.owner) as client:
            client.send(encode(m.Hello(PROTOCOL, "recorded"), 1))
            inner, _ = listener.accept()
            with inner, arena.raw() as outer:
                return _relay(inner, outer, client)


def _relay(inner: socket.socket, outer: socket.socket, client: zmq.Socket[bytes]) -> bytes:
    said = b""
    deadline = time.monotonic() + ANSWER_S
    inner.settimeout(0.01)
    outer.settimeout(0.01)
    while time.monotonic() < deadline and not client.poll(0):
        for source, target in ((inner, outer), (outer, inner)):
            with contextlib.suppress(TimeoutError):
                data = source.recv(CHUNK)
                target.sendall(data)
                said += data if source is inner else b""
    require(client.poll(0), "a client behind a relay is not served")
    return said


def parts(arena: Arena, dice: random.Random) -> int:
    """Send a part above the size limit, and a message of PARTS parts, as an authorized client (RF-101)."""
    del dice
    with arena.peer(key=arena.limited) as hostile:
        require(hello(hostile), "precondition failed: the attacker's Hello got no Welcome")
        hostile.send_multipart([encode(m.Append("mine.log", 1)), bytes(FRAME_BYTES_MAX + (2 << 20))])
        require(not isinstance(hear(hostile, QUIET_S), m.Appended), "a part beyond the limit was stored")
    arena.check_canary()
    with arena.peer(key=arena.limited, SNDHWM=0) as hostile:
        require(hello(hostile), "precondition failed: the attacker's Hello got no Welcome")
        hostile.send_multipart([encode(m.Append("mine.log", 1)), *([b"x"] * PARTS)])
        require(isinstance(hear(hostile), m.ErrorReply), "a message of many parts was not refused")
        require(hello(hostile), "after one message of many parts the connection gets no answers")
    return 2
