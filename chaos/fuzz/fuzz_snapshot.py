"""Snapshots and their rows: the engine's decoder and the verifier's succeed or raise a typed error.

The first byte selects one of: a file unchanged, a file with corrected checksums, one row, shard facts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import numpy as np
import xxhash

from ringlog.actors.wal_shard.recovery.shard_facts import decode_facts
from ringlog.errors import CorruptData
from ringlog.storage.snapshot import HEADER_BYTES, Snapshot, decode_snapshot, encode_snapshot
from ringlog.topic.config import TopicConfig
from ringlog.topic.row import decode_row, encode_row
from ringlog.topic.state import ShardTopic
from ringlog.verify.directory import DECODE_ERRORS
from ringlog.verify.snapshot_decoder import decode_shard_facts, decode_topic_row, verify_snapshot

MAX_LEN = 1_024
SHARE = 1.5
PATH = "meta/snapshot-00.0000000000000001"
AS_IT_IS, MENDED, ROW, FACTS = range(4)


def check(data: bytes) -> None:
    """Decode one input. The engine raises CorruptData only, the verifier DECODE_ERRORS only."""
    how, rest = (data[0] % 4, data[1:]) if data else (0, b"")
    if how == ROW:
        _row(rest)
    elif how == FACTS:
        _facts(rest)
    else:
        _file(mended(rest) if how == MENDED else rest)


def _file(data: bytes) -> None:
    try:
        snapshot = decode_snapshot(data, PATH)
    except CorruptData:
        snapshot = None
    if snapshot is not None:
        _facts(snapshot.facts)
        for i, topic_id in enumerate(snapshot.ids.tolist()):
            _row(bytes(snapshot.row(i)), topic_id)
    try:
        verify_snapshot(PATH, data)
    except DECODE_ERRORS:
        return


def _row(data: bytes, topic_id: int = 1) -> None:
    try:
        topic = decode_row(topic_id, data)
    except CorruptData:
        topic = None
    if topic is not None:
        again = encode_row(topic)
        if encode_row(decode_row(topic_id, again)) != again:
            raise AssertionError("a row that was read is written differently each time")
    try:
        decode_topic_row(topic_id, data)
    except DECODE_ERRORS:
        return


def _facts(data: bytes) -> None:
    with contextlib.suppress(CorruptData):
        decode_facts(data, PATH)
    with contextlib.suppress(*DECODE_ERRORS):
        decode_shard_facts(data)


def mended(data: bytes) -> bytes:
    """Return a snapshot file whose header has the correct length and checksums."""
    if len(data) < HEADER_BYTES:
        return data
    body = data[HEADER_BYTES:]
    made = bytearray(data[: HEADER_BYTES - 8])
    made[48:56] = len(body).to_bytes(8, "little")
    made[80:88] = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    return bytes(made) + xxhash.xxh3_64_intdigest(bytes(made)).to_bytes(8, "little") + body


def rows() -> list[bytes]:
    """Return the encoded rows of two topics."""
    plain = ShardTopic(1, 1, "t", TopicConfig())
    other = ShardTopic(2, 3, "u", TopicConfig.parse({"ttl_ms": 1_000, "durability": "fsync"}))
    other.head_seq, other.next_seq, other.count, other.staged_count = 9, 10, 5, 5
    other.lost = [(2, 3)]
    return [encode_row(plain), encode_row(other)]


def seeds() -> Iterator[bytes]:
    """Yield a snapshot of two topics, its rows, rows with invalid fields, and shard facts."""
    made = rows()
    starts = np.array([0, len(made[0]), len(made[0]) + len(made[1])], dtype="<u8")
    snapshot = Snapshot(1, 0, 1, 1, 1, b"", np.array([1, 2], dtype="<u8"), starts, b"".join(made))
    whole = b"".join(encode_snapshot(snapshot))
    yield bytes([AS_IT_IS]) + whole
    yield bytes([MENDED]) + whole
    for row in made:
        yield bytes([ROW]) + row
        fields = msgspec.msgpack.decode(row)
        for i in range(len(fields)):
            for odd in (-1, (1 << 64) - 1, b"\0" * 8, b"\xff" * 16, [1, 0], [[1, 2, 3]], None):
                yield bytes([ROW]) + msgspec.msgpack.encode([*fields[:i], odd, *fields[i + 1 :]])
    good: list[object] = [
        1,
        2,
        3,
        4,
        [5],
        [[6, "wal/shard-00/wal-1-0.log"]],
        [list(range(8))],
        {"a": [1, 2]},
        ["b"],
    ]
    strange: object
    for i in range(len(good)):
        for strange in (good[i], -1, [], [[]], "x", {"a": 1}, [[1]]):
            yield bytes([FACTS]) + msgspec.msgpack.encode([*good[:i], strange, *good[i + 1 :]])
