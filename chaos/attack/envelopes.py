"""Attacks within the protocol: every message and every field at its edges, frames likewise, old news."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import xxhash

from chaos.attack.arena import ANSWER_S, SLOWER_MAX, Arena, a_frame, a_producer, ask, head_of, hear
from chaos.order import require
from ringlog.envelope import messages as m
from ringlog.envelope.messages import KINDS
from ringlog.envelope.wire import PROTOCOL, encode
from ringlog.frame import layout
from ringlog.frame.settle_entry import S_COUNT_STATUS, STATUS_SHIFT, WORDS
from ringlog.limits import MILLIS_MAX
from ringlog.testing.extremes import EXTREMES, extreme_bodies, plain_body
from ringlog.testing.real_engine import wait_until

EDGES: Mapping[str, Any] = {
    **EXTREMES,
    "1": 1, "255": 255, "2**16": 1 << 16, "2**31-1": (1 << 31) - 1, "a word": "x", "a topic": "mine.log",
    "255 characters": "a" * 255, "256 characters": "a" * 256, "1.5": 1.5, "inf": float("inf"),
    "list": [1] * 9, "no map": {}, "ttl_ms": {"ttl_ms": -1}, "type": {"type": "log"},
    "cap_bytes": {"cap_bytes": 1 << 63}, "Eq": ["tag", "Eq", "x"], "no tag": ["tag", "Glob", 1], "*": "*",
    "a*b": "a*b",
}  # fmt: skip
"""0, 1, most, one more, negative, of another type, absent, nested."""
ALWAYS = ("NUL", "a path", "-1", "2**63", "2**64-1", "surrogate")
"""Edges that every field of every message is put to, whatever the seed picks of the others."""
WAITS = frozenset({"wait_ms", "settle_ms", "within_ms"})
"""Fields that an answer may wait for: the protocol bounds that, but half a minute is too long for here."""
ENDING = frozenset({"EngineStop", "Drain"})
"""What the engine's own user may ask for and gets: not sent to sockets of his."""
REMOVING = frozenset({"TopicDelete", "RecordsDelete", "RouterDelete", "RouterDrop", "GroupDelete"})
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
_HEADER_FIELDS = {
    "frame_len": (0, 4), "type": (4, 1), "version": (5, 1), "columns": (6, 2), "topic": (8, 8),
    "base_seq": (16, 8), "commit_ts": (24, 8), "count": (32, 4), "epoch": (36, 4), "producer_id": (40, 8),
    "producer_seq": (48, 8), "raw_len": (56, 4), "codec": (60, 1), "flags": (61, 1), "reserved": (62, 2),
    "body_xxh3": (64, 8), "seal": (72, 8),
}  # fmt: skip


def known(arena: Arena) -> dict[str, Any]:
    """Values of fields with which requests are about what is there."""
    with arena.connect() as client:
        client.topics.create("mine.queue", type="queue", dead_letter="mine.dead", exist_ok=True)
        client.topics.create("mine.log", exist_ok=True)
        client.group("mine.log", "g", mode="queue").stats()
        client.routers.create("mine.router", "mine.log", "mine.copy")
    with arena.peer(key=arena.owner) as peer:
        log, copy = (ask(peer, [encode(m.TopicResolve(name), 1)]) for name in ("mine.log", "mine.copy"))
    assert isinstance(log, m.TopicInfo)
    assert isinstance(copy, m.TopicInfo)
    return {
        "topic_id": log.topic_id, "dest_id": copy.topic_id, "shard": 0, "slot": 0, "group": "g", "node": "w",
        "name": "mine.router", "router": 1, "source": "mine.log", "dest": "mine.copy", "filter": "",
        "flags": 3, "seqs": b"\1" + bytes(7), "tokens": b"", "dead_letter": "mine.dead", "config": {},
        "frame": -1, "start": 0, "pid": 0, "born": 0, "call": 0, **dict.fromkeys(WAITS, 0),
    }  # fmt: skip


def variants(
    name: str, edges: Mapping[str, Any], about: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[list[Any]]:
    """Bodies of one kind: as it is, short, doubled, empty, and each field at each edge, nested ones too."""
    kind = KINDS[name]
    facts = {"topic": "mine.queue" if name.startswith("Jobs") else "mine.log", **about}
    if name in {"RouterCreate", "RouterGet", "RouterDelete", "RouterInfo"}:
        facts["router"] = "mine.router"
    plain = plain_body(kind, facts)
    yield from (plain, plain[:-1], plain + plain, [], [plain])
    waits = [n for n, field in enumerate(kind.__struct_fields__) if field in WAITS]
    for _, body in extreme_bodies(kind, facts, edges):
        if not any(isinstance(body[n], int) and 0 < body[n] <= MILLIS_MAX for n in waits):
            yield body


def edges(arena: Arena, dice: random.Random, *, per_kind: int = PER_KIND) -> int:
    """RF-100: to every socket, every kind; each is answered, nothing dies, nobody else's data moves."""
    sent = 0
    before = arena.audit()
    passes = arena.passes()
    for endpoint in [arena.endpoint, *arena.sockets()]:
        about = known(arena)
        key = arena.limited if endpoint == arena.endpoint else None
        kinds = [name for name in sorted(KINDS, key=_order) if key is not None or name not in ENDING]
        refused = _refused(arena, endpoint, key, [name for name in kinds if name not in REMOVING], about)
        bursts = []
        for name in kinds:
            if name in refused:
                # What it does not take it does not look into: any shape will do.
                chosen = list(variants(name, {}, about))
            else:
                always = list(variants(name, {edge: EDGES[edge] for edge in ALWAYS}, about))
                others = list(variants(name, EDGES, about))[SHAPES:]
                chosen = always + dice.sample(others, min(per_kind, len(others)))
            # What asks for a pass over everything that the rounds so far have written is answered behind it.
            patience = ANSWER_S + SLOWER_MAX * passes.get(name, 0.0)
            bursts += [_Burst(name, list(some), patience) for some in _batched(chosen, STRIKES)]
        for together in _batched(bursts, CONNECTIONS):
            sent += _send_all(arena, endpoint, key, together)
    sent += _frames(arena, a_producer(dice))
    require(arena.audit() == before, "records of somebody else moved")
    return sent


def _order(name: str) -> tuple[bool, str]:
    """What removes comes last: the others are about what is there."""
    return name in REMOVING, name


def _refused(arena: Arena, endpoint: str, key: Any, kinds: list[str], about: Mapping[str, Any]) -> set[str]:
    """Kinds that this socket takes from nobody."""
    found = set()
    with arena.peer(endpoint, key) as peer:
        for name in kinds:
            peer.send_multipart([_encoder.encode([PROTOCOL, name, 7, next(variants(name, {}, about))])])
        for _ in kinds:
            answer = hear(peer)
            if isinstance(answer, m.ErrorReply) and list(answer.detail) == ["kind"]:
                found.add(str(answer.detail["kind"]))
    return found


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
                require(
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
            require(answer is not None, f"a frame with {what} got no answer")
            stored += _acked(answer)
            sent += 1
        readable = _count(peer, topic, before)
    require(readable == stored, f"{stored} records of strange frames were acked, {readable} can be read")
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
        require(isinstance(page, m.ReadReply), f"what was acked cannot be read: {page!r}")
        assert isinstance(page, m.ReadReply)
        require(page.next_after > after, "reading does not move on")
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
            require(_acked(append(topic_id, epoch, 1)) == 0, f"a frame for {topic_id:x}, {epoch} was stored")
            cases += 1
        require(_acked(append(info.topic_id, info.epoch, 5)) == 1, "a good frame was refused")
        for number in (5, 5, 4, 3, 1):
            require(
                _acked(append(info.topic_id, info.epoch, number)) == 0, f"number {number} is stored again"
            )
            cases += 1
        cases += _replayed(arena, topic)
        state = ask(peer, [encode(m.TopicState(topic), 1)])
        require(isinstance(state, m.TopicStateReply) and state.count == 2, f"not two records: {state!r}")
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
    require(stored == 1, f"one envelope sent ten times was stored {stored} times")
    return 10


def settled(arena: Arena, topic: str, count: int) -> None:
    """Wait until a topic holds so many records."""
    with arena.connect() as client:
        wait_until(lambda: client.topics.state(topic).count == count, ANSWER_S, f"{count} records in {topic}")
