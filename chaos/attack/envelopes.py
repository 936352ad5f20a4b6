"""Attacks within the protocol: every message and every field at its edges, frames likewise, old news."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import xxhash

from chaos.attack.arena import ANSWER_S, SLOWER_MAX, Arena, a_frame, a_producer, ask, head_of, hear, must
from ringlog.envelope import messages as m
from ringlog.envelope.messages import KINDS
from ringlog.envelope.wire import PROTOCOL, encode
from ringlog.frame import layout
from ringlog.frame.settle import S_COUNT_STATUS, STATUS_SHIFT, WORDS
from ringlog.testing.real_engine import wait_until

EDGES: tuple[Any, ...] = (
    0, 1, -1, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    -(1 << 63), "", "x", "mine.log", "a" * 255, "a" * 256, "../../x", "a\0b", b"", bytes(9),
    b"\xff" * 64, None, True, 1.5, float("nan"), float("inf"), [], [1] * 9, [[[[[]]]]], {}, {"a": 1},
    {"ttl_ms": -1}, {"type": "log"}, {"cap_bytes": 1 << 63}, ["tag", "Eq", "x"], ["tag", "Glob", "x*"],
    ["tag", "Glob", 1], "*", "a*b",
)  # fmt: skip
"""0, 1, most, one more, negative, of another type, absent, nested."""
ALWAYS = frozenset({"a\0b", "../../x", -1, 1 << 63})
"""Edges that every field of every message is put to, whatever the seed picks of the others."""
ENDING = frozenset({"EngineStop", "Drain"})
"""What the engine's own user may ask for and gets: not sent to sockets of his."""
STRIKES = 12
"""Messages over one connection; after sixteen that are none it is not listened to any more."""
CONNECTIONS = 24
"""Connections to one socket that say their messages at once."""
SHAPES = 5
"""Variants of a body before the fields' edges begin."""
PER_KIND = 16
"""Variants of one kind for one socket; the seed picks which."""
_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_PLAIN = {str: "mine.log", int: 1, bool: False, bytes: b"", float: 0.0}
_HEADER_FIELDS = {
    "frame_len": (0, 4), "type": (4, 1), "version": (5, 1), "columns": (6, 2), "topic": (8, 8),
    "base_seq": (16, 8), "commit_ts": (24, 8), "count": (32, 4), "epoch": (36, 4), "producer_id": (40, 8),
    "producer_seq": (48, 8), "raw_len": (56, 4), "codec": (60, 1), "flags": (61, 1), "reserved": (62, 2),
    "body_xxh3": (64, 8), "seal": (72, 8),
}  # fmt: skip


def plain_fields(kind: type[m.Message]) -> list[Any]:
    """Fields that make some sense."""
    made = []
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            made.append(field.default)
        elif field.default_factory is not msgspec.NODEFAULT:
            made.append(field.default_factory())
        else:
            made.append(_PLAIN.get(field.type, []))
    return made


def _is_hashable(edge: Any) -> bool:
    return not isinstance(edge, list | dict)


def variants(name: str, edges: Iterable[Any]) -> Iterator[list[Any]]:
    """Bodies of one kind: as it is, short, doubled, empty, and each field at each edge."""
    plain = plain_fields(KINDS[name])
    yield from (plain, plain[:-1], plain + plain, [], [plain])
    edges = tuple(edges)
    for i in range(len(plain)):
        for edge in edges:
            # A wait is bounded by the protocol, but thirty seconds are too long for here.
            is_wait = name == "Read" and i == 5 and isinstance(edge, int) and edge > 0
            yield [*plain[:i], 1 if is_wait else edge, *plain[i + 1 :]]


def edges(arena: Arena, dice: random.Random, *, per_kind: int = PER_KIND) -> int:
    """RF-100: to every socket, every kind; each is answered, nothing dies, nobody else's data moves."""
    sent = 0
    before = arena.audit()
    passes = arena.passes()
    for endpoint in [arena.endpoint, *arena.sockets()]:
        key = arena.limited if endpoint == arena.endpoint else None
        bursts = []
        for name in sorted(KINDS):
            if key is None and name in ENDING:
                continue
            always = list(variants(name, [edge for edge in EDGES if _is_hashable(edge) and edge in ALWAYS]))
            others = list(variants(name, EDGES))[SHAPES:]
            chosen = always + dice.sample(others, min(per_kind, len(others)))
            # What asks for a pass over everything that the rounds so far have written is answered behind it.
            patience = ANSWER_S + SLOWER_MAX * passes.get(name, 0.0)
            bursts += [_Burst(name, list(some), patience) for some in _batched(chosen, STRIKES)]
        for together in _batched(bursts, CONNECTIONS):
            sent += _send_all(arena, endpoint, key, together)
    sent += _frames(arena, a_producer(dice))
    must(arena.audit() == before, "records of somebody else moved")
    return sent


@dataclass(frozen=True, slots=True)
class _Burst:
    """What goes over one connection."""

    name: str
    bodies: list[list[Any]]
    patience: float
    """Seconds until each is answered."""


def _batched(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def _send_all(arena: Arena, endpoint: str, key: Any, bursts: Sequence[_Burst]) -> int:
    """Each over a connection of its own, all at once: background processes are slow to get a processor."""
    where, patience = endpoint.rpartition("/")[2], max(burst.patience for burst in bursts)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(arena.peer(endpoint, key)) for _ in bursts]
        for peer, burst in zip(peers, bursts, strict=True):
            for body in burst.bodies:
                attached = [a_frame(b"edge")] if burst.name == "Append" else []
                peer.send_multipart([_encoder.encode([PROTOCOL, burst.name, 7, body]), *attached])
        for peer, burst in zip(peers, bursts, strict=True):
            for answered in range(len(burst.bodies)):
                must(
                    peer.poll(round(patience * 1000)),
                    f"{where}: {burst.name} got {answered} answers to {len(burst.bodies)}: {burst.bodies!r}\n"
                    f"{arena.log_tail()}",
                )
                peer.recv_multipart()
    return sum(len(burst.bodies) for burst in bursts)


def hostile_frames(topic_id: int, epoch: int, producer_id: int = 77) -> Iterator[tuple[str, bytes]]:
    """A good frame with each field of its header at its edges, its body's checksum right and wrong."""
    good = a_frame(b"one", b"two", topic_id=topic_id, epoch=epoch, producer_id=producer_id)
    for field, (at, size) in _HEADER_FIELDS.items():
        most = (1 << 8 * size) - 1
        now = int.from_bytes(good[at : at + size], "little")
        for value in {0, 1, most, most - 1, most >> 1, (most >> 1) + 1, now + 1 & most, max(now - 1, 0)}:
            if value != now:
                yield f"{field}={value}", good[:at] + value.to_bytes(size, "little") + good[at + size :]
    for at in range(layout.HEADER_BYTES, len(good), 4):
        body = bytearray(good)
        body[at : at + 4] = b"\xff\xff\xff\x7f"
        body[64:72] = xxhash.xxh3_64_intdigest(bytes(body[80:])).to_bytes(8, "little")
        yield f"body at {at}", bytes(body)


def _frames(arena: Arena, producer_id: int) -> int:
    """Each is refused, or what was acked of it can be read."""
    topic = "mine.frames"
    with arena.connect() as client:
        client.topics.create(topic, exist_ok=True)
        before = head_of(client, topic)
    with arena.peer(key=arena.limited) as peer:
        info = ask(peer, [encode(m.TopicResolve(topic), 1)])
        assert isinstance(info, m.TopicInfo)
        stored, sent = 0, 0
        for what, frame in hostile_frames(info.topic_id, info.epoch, producer_id):
            answer = ask(peer, [encode(m.Append(topic, 1), 1), frame])
            must(answer is not None, f"a frame with {what} got no answer")
            stored += _acked(answer)
            sent += 1
        readable = _count(peer, topic, before)
    must(readable == stored, f"{stored} records of strange frames were acked, {readable} can be read")
    return sent


def _acked(answer: m.Message | None) -> int:
    """Records that an answer says are stored now, repeats apart."""
    if not isinstance(answer, m.Appended):
        return 0
    total = 0
    for at in range(0, len(answer.entries), 8 * WORDS):
        word = int.from_bytes(answer.entries[at + 8 * S_COUNT_STATUS : at + 8 * S_COUNT_STATUS + 8], "little")
        is_repeat = word >> 48 & 1
        total += 0 if word >> STATUS_SHIFT & 0xFFFF or is_repeat else word & 0xFFFFFFFF
    return total


def _count(peer: Any, topic: str, after: int) -> int:
    """Records behind the number `after`, read one page after the other."""
    state = ask(peer, [encode(m.TopicState(topic), 1)])
    assert isinstance(state, m.TopicStateReply)
    seen = 0
    while after < state.head_seq:
        page = ask(peer, [encode(m.Read(topic, after), 2)])
        must(isinstance(page, m.ReadReply), f"what was acked cannot be read: {page!r}")
        assert isinstance(page, m.ReadReply)
        must(page.next_after > after, "reading does not move on")
        seen += page.next_after - after
        after = page.next_after
    return seen


def old_news(arena: Arena, dice: random.Random) -> int:
    """RF-104: another life's frames, another topic's, forged numbers, an envelope sent again and again."""
    topic = "mine.lives"
    with arena.connect() as client:
        client.topics.create(topic, exist_ok=True)
        client.append(topic, b"first life")
        client.topics.delete(topic)
        client.topics.create(topic)
    with arena.peer(key=arena.limited) as peer:
        info = ask(peer, [encode(m.TopicResolve(topic), 1)])
        assert isinstance(info, m.TopicInfo)
        cases = 0

        def append(topic_id: int, epoch: int, number: int, producer_id: int = 99) -> m.Message | None:
            made = a_frame(
                b"news", topic_id=topic_id, epoch=epoch, producer_id=producer_id, producer_seq=number
            )
            return ask(peer, [encode(m.Append(topic, 1), number), made])

        for topic_id, epoch in (
            (info.topic_id, info.epoch - 1), (info.topic_id, info.epoch + 1), (info.topic_id, 0xFFFFFFFF),
            (info.topic_id ^ 1, info.epoch), (dice.getrandbits(63), info.epoch),
        ):  # fmt: skip
            must(_acked(append(topic_id, epoch, 1)) == 0, f"a frame for {topic_id:x}, {epoch} was stored")
            cases += 1
        must(_acked(append(info.topic_id, info.epoch, 5)) == 1, "a good frame was refused")
        for number in (5, 5, 4, 3, 1):
            must(_acked(append(info.topic_id, info.epoch, number)) == 0, f"number {number} was stored again")
            cases += 1
        cases += _replayed(arena, topic)
        state = ask(peer, [encode(m.TopicState(topic), 1)])
        must(isinstance(state, m.TopicStateReply) and state.count == 2, f"not two records: {state!r}")
    return cases


def _replayed(arena: Arena, topic: str) -> int:
    """One envelope, many times over many connections: one record."""
    message = [encode(m.Append(topic, 1), 9), a_frame(b"again", producer_id=123, producer_seq=1)]
    stored = 0
    for _ in range(5):
        with arena.peer(key=arena.limited) as peer:
            peer.send_multipart(message)
            peer.send_multipart(message)
            stored += _acked(hear(peer)) + _acked(hear(peer))
    must(stored == 1, f"one envelope sent ten times was stored {stored} times")
    return 10


def settled(arena: Arena, topic: str, count: int) -> None:
    """Wait until a topic holds so many records."""
    with arena.connect() as client:
        wait_until(lambda: client.topics.state(topic).count == count, ANSWER_S, f"{count} records in {topic}")
