"""Attacks within the protocol: extreme values in messages and frames, stale epochs, forged ids, replays."""

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
from ringlog.drill.checks import require
from ringlog.envelope import messages as m
from ringlog.envelope.messages import KINDS
from ringlog.envelope.wire import PROTOCOL, encode
from ringlog.frame import layout
from ringlog.frame.settle_entry import S_COUNT_STATUS, STATUS_SHIFT, WORDS
from ringlog.limits import MILLIS_MAX
from ringlog.testing.real_engine import wait_until
from tests.support.extremes import EXTREMES, extreme_bodies, plain_body

EDGES: Mapping[str, Any] = {
    **EXTREMES,
    "1": 1, "255": 255, "2**16": 1 << 16, "2**31-1": (1 << 31) - 1, "a word": "x", "a topic": "mine.log",
    "255 characters": "a" * 255, "256 characters": "a" * 256, "1.5": 1.5, "inf": float("inf"),
    "list": [1] * 9, "no map": {}, "ttl_ms": {"ttl_ms": -1}, "type": {"type": "log"},
    "cap_bytes": {"cap_bytes": 1 << 63}, "Eq": ["tag", "Eq", "x"], "no tag": ["tag", "Glob", 1], "*": "*",
    "a*b": "a*b",
}  # fmt: skip
"""Field values: 0, 1, maximum, maximum + 1, negative, wrong type, missing, nested."""
ALWAYS = ("NUL", "a path", "-1", "2**63", "2**64-1", "surrogate")
"""Values that every field of every message gets. The seed selects only among the other values."""
WAITS = frozenset({"wait_ms", "settle_ms", "within_ms"})
"""Fields that set a wait time.

Legal wait times other than 0 are omitted, because an answer may take that long.
"""
ENDING = frozenset({"EngineStop"})
"""Messages that stop the engine. The local user may send them, so local sockets never get them here."""
REMOVING = frozenset({"TopicDelete", "RecordsDelete", "RouterDelete", "RouterDrop", "GroupDelete"})
STRIKES = 12
"""Messages over one connection. After 16 invalid messages, the engine stops reading from a connection."""
CONNECTIONS = 24
"""Connections to one socket that send their messages at the same time."""
SHAPES = 5
"""Number of whole-body variants that `variants` yields before the field values."""
PER_KIND = 16
"""Random variants of one message kind for one socket, selected by the seed."""
_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_HEADER_FIELDS = {
    "frame_len": (0, 4), "type": (4, 1), "version": (5, 1), "columns": (6, 2), "topic": (8, 8),
    "base_seq": (16, 8), "commit_ts": (24, 8), "count": (32, 4), "epoch": (36, 4), "producer_id": (40, 8),
    "producer_seq": (48, 8), "raw_len": (56, 4), "codec": (60, 1), "flags": (61, 1), "reserved": (62, 2),
    "body_xxh3": (64, 8), "seal": (72, 8),
}  # fmt: skip


def known(arena: Arena) -> dict[str, Any]:
    """Create test topics, a group and a router; return field values that refer to them."""
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
        "frame": -1, "start": 0, "pid": 0, "pid_started": 0, "call": 0, **dict.fromkeys(WAITS, 0),
    }  # fmt: skip


def variants(
    name: str, edges: Mapping[str, Any], about: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[list[Any]]:
    """Yield bodies of one kind: valid, short, doubled, empty, nested, and each field with each of `edges`."""
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
    """Send every message kind with extreme values to every socket (RF-100).

    Each message must get an answer, no process may die, and records of other clients must not change.
    """
    sent = 0
    before = arena.check_acknowledged()
    passes = arena.passes()
    for endpoint in [arena.endpoint, *arena.sockets()]:
        about = known(arena)
        key = arena.limited if endpoint == arena.endpoint else None
        kinds = [name for name in sorted(KINDS, key=_order) if key is not None or name not in ENDING]
        refused = _refused(arena, endpoint, key, [name for name in kinds if name not in REMOVING], about)
        bursts = []
        for name in kinds:
            if name in refused:
                # The socket refuses this kind before it decodes the body. A few shapes are enough.
                chosen = list(variants(name, {}, about))
            else:
                always = list(variants(name, {edge: EDGES[edge] for edge in ALWAYS}, about))
                others = list(variants(name, EDGES, about))[SHAPES:]
                chosen = always + dice.sample(others, min(per_kind, len(others)))
            # A request for a full pass (checkpoint, scrub) also waits for the data that earlier rounds wrote.
            patience = ANSWER_S + SLOWER_MAX * passes.get(name, 0.0)
            bursts += [_Burst(name, list(some), patience) for some in _batched(chosen, STRIKES)]
        for together in _batched(bursts, CONNECTIONS):
            sent += _send_all(arena, endpoint, key, together)
    sent += _frames(arena, a_producer(dice))
    require(arena.check_acknowledged() == before, "records of another client changed")
    return sent


def _order(name: str) -> tuple[bool, str]:
    """Return a sort key that puts removing messages last, because the other messages need existing topics."""
    return name in REMOVING, name


def _refused(arena: Arena, endpoint: str, key: Any, kinds: list[str], about: Mapping[str, Any]) -> set[str]:
    """Return the message kinds that this socket refuses from every client."""
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
    """Messages of one kind for one connection."""

    name: str
    bodies: list[list[Any]]
    patience: float
    """Time limit (s) for each answer."""


def _batched(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def _send_all(arena: Arena, endpoint: str, key: Any, bursts: Sequence[_Burst]) -> int:
    """Send each burst over its own connection, all at the same time; return the number of messages.

    They run in parallel because background processes get little CPU time and answer slowly.
    """
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
    """Yield a name and a frame for each header field at each extreme value, and for damaged bodies.

    Frames with a damaged header keep a valid body checksum. Frames with a damaged body get a new checksum.
    """
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
    """Send hostile frames. Each must be refused, or its acknowledged records must be readable."""
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
    """Return the number of records that an answer reports as newly stored. Repeated frames do not count."""
    if not isinstance(answer, m.Appended):
        return 0
    total = 0
    for at in range(0, len(answer.entries), 8 * WORDS):
        word = int.from_bytes(answer.entries[at + 8 * S_COUNT_STATUS : at + 8 * S_COUNT_STATUS + 8], "little")
        is_repeat = word >> 48 & 1
        total += 0 if word >> STATUS_SHIFT & 0xFFFF or is_repeat else word & 0xFFFFFFFF
    return total


def _count(peer: Any, topic: str, after: int) -> int:
    """Return the number of records after seq `after`, read page by page."""
    state = ask(peer, [encode(m.TopicState(topic), 1)])
    assert isinstance(state, m.TopicStateReply)
    seen = 0
    while after < state.head_seq:
        page = ask(peer, [encode(m.Read(topic, after), 2)])
        require(isinstance(page, m.ReadReply), f"acknowledged records cannot be read: {page!r}")
        assert isinstance(page, m.ReadReply)
        require(page.next_after > after, "a read returned no records and did not advance the cursor")
        seen += page.next_after - after
        after = page.next_after
    return seen


def old_news(arena: Arena, dice: random.Random) -> int:
    """Send frames for another epoch or topic, forged producer numbers, and repeated envelopes (RF-104)."""
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
        is_two = isinstance(state, m.TopicStateReply) and state.count == 2
        require(is_two, f"expected 2 records, got {state!r}")
    return cases


def _replayed(arena: Arena, topic: str) -> int:
    """Send one envelope ten times over five connections. It must be stored once."""
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
    """Wait until a topic contains `count` records."""
    with arena.connect() as client:
        wait_until(lambda: client.topics.state(topic).count == count, ANSWER_S, f"{count} records in {topic}")
