"""The durable state of a topic as one row of a snapshot: a MessagePack array. Pure.

A row is the state that a replay of the log up to its time would give, with published state only (C2). Only
the shard decodes it; for other processes it is opaque. It contains no records: these are in segments or in
the log. A later version uses defaults for missing fields and ignores unknown ones. Fields may be appended and
are never moved.

Records of class `ephemeral` do not survive their shard. In a row their seqs count as used: the head includes
them, and their range counts as lost.
"""

from __future__ import annotations

import builtins
import itertools
import struct
from collections.abc import Iterable
from dataclasses import astuple
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from pyroaring import BitMap64

from ringlog.digests import DIGEST_BYTES, digest_of_key
from ringlog.errors import CorruptData, InvalidRequest, InvariantViolation
from ringlog.leases.snapshot import decode_group, decode_queue_leases, encode_group, encode_queue_leases
from ringlog.limits import SEQ_MAX
from ringlog.topic.config import TopicConfig
from ringlog.topic.dedup import ProducerHistory
from ringlog.topic.idempotency import IdempotencyEntry
from ringlog.topic.routers import Router
from ringlog.topic.state import ShardTopic, with_range

ROW_VERSION = 1
IS_RESERVING = 1
HAS_MARKS = 2
"""Some record may have a `not_before` or a priority."""

U64 = Annotated[int, Meta(ge=0)]
Volatile = Iterable[tuple[int, int, int]]
"""For each volatile file with records of the topic: (last seq + 1, records, bytes)."""


class _TopicRow(msgspec.Struct, array_like=True, frozen=True):
    version: int
    epoch: U64
    name: str
    config: msgspec.Raw
    """Only the settings that differ from the defaults, and the durability class."""
    head_seq: U64
    last_ts: U64
    count: U64
    bytes: U64
    flags: U64 = 0
    topic_version: U64 = 0
    cap_floor: U64 = 1
    ttl_floor: U64 = 1
    trim_floor: U64 = 1
    delete_floor: U64 = 1
    reserved: U64 = 0
    due_us: U64 = 0
    last_read_us: U64 = 0
    dead: builtins.bytes = b""
    """A portable 64-bit roaring bitmap; empty = none."""
    lost: list[U64] = []
    """first, last, first, last …"""
    producers: list[list[U64]] = []
    """For each producer, the one with the longest silence first: its id, then
    `ProducerHistory.to_numbers`."""
    keys: list[tuple[str, U64, U64, U64, U64]] = []
    """Idempotency keys in clear text, in the format from before `ids`."""
    trimmed: list[U64] = []
    """first, last, first, last …: those of `lost` that a router's source had lost."""
    routers: list[tuple[U64, str, str, U64, U64, U64, str, U64, U64]] = []
    """For each router the fields of `Router` in their order. They are stored together with the topic's
    content."""
    groups: list[builtins.bytes] = []
    """Consumer groups, each encoded by ringlog/leases/snapshot.py."""
    leases: builtins.bytes = b""
    """Durable leases, encoded by ringlog/leases/snapshot.py; empty = none."""
    ids: builtins.bytes = b""
    """For each idempotency key and dedup id, the oldest first: its digest and the fields of
    IdempotencyEntry."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_TopicRow).decode
_DEFAULTS = TopicConfig().to_dict()
_ID = struct.Struct(f"<{DIGEST_BYTES}s5Q")


def encode_row(topic: ShardTopic, now_us: int = 0, volatile: Volatile = ()) -> bytes:
    """Encode the published state of a topic. Call it only while nothing of the topic is staged."""
    lost, count, size = topic.lost, topic.count, topic.bytes
    for stop, records, accounted in volatile:
        first = max(stop - records, topic.evict_floor)
        lost = with_range(lost, first, stop - 1) if first < stop else lost
        count, size = max(count - records, 0), max(size - accounted, 0)
    keys = topic._keys.items(now_us, topic.config.idempotency_window_ms) if topic._keys else ()
    config = msgspec.Raw(_config_of(topic.config))
    return _encode(
        _TopicRow(
            ROW_VERSION, topic.epoch, topic.name, config, topic.head_seq, topic.last_ts,
            count, size, _flags_of(topic), topic.version, topic.cap_floor,
            topic.ttl_floor, topic.trim_floor, topic.delete_floor,
            topic._reservation.reserved if topic._reservation else 0, topic.due_us, topic.last_read_us,
            topic.dead.serialize() if topic.dead else b"",
            [number for pair in lost for number in pair],
            [[each, *past.to_numbers()] for each,
            past in topic._producers.items()] if topic._producers else [],
            [],
            [number for pair in topic.trimmed for number in pair],
            [astuple(router) for router in topic.routers.values()],
            [encode_group(group) for group in topic.groups.values()],
            encode_queue_leases(topic.leases) if topic.leases is not None else b"",
            b"".join(_ID.pack(digest, *seen) for digest, seen in keys),
        )
    )  # fmt: skip


def decode_row(topic_id: int, data: Any) -> ShardTopic:
    """Decode a topic from its row. Raises CorruptData for a row that no version can have written."""
    try:
        row = _decode(data)
        if row.version != ROW_VERSION:
            raise CorruptData(
                f"snapshot row has unknown version {row.version}, expected {ROW_VERSION}", version=row.version
            )
        topic = ShardTopic(topic_id, row.epoch, row.name, _config_from(bytes(row.config)))
        _fill(topic, row)
        topic.check()
    except (msgspec.MsgspecError, ValueError, RecursionError, InvalidRequest, InvariantViolation) as e:
        raise CorruptData(
            "snapshot row of a topic cannot be decoded", topic_id=topic_id, reason=str(e)
        ) from None
    except CorruptData as e:
        e.detail["topic_id"] = topic_id
        raise
    return topic


def _fill(topic: ShardTopic, row: _TopicRow) -> None:
    topic.head_seq, topic.next_seq = row.head_seq, row.head_seq + 1
    topic.last_ts, topic.last_read_us, topic.due_us = row.last_ts, row.last_read_us, min(row.due_us, SEQ_MAX)
    topic.count = topic.staged_count = row.count
    topic.bytes = topic.staged_bytes = row.bytes
    topic.is_reserving = bool(row.flags & IS_RESERVING)
    topic.attributes_to = row.head_seq if row.flags & HAS_MARKS else 0
    topic.version = row.topic_version
    topic.cap_floor, topic.ttl_floor = row.cap_floor, row.ttl_floor
    topic.trim_floor, topic.delete_floor = row.trim_floor, row.delete_floor
    topic.dead = BitMap64.deserialize(row.dead) if row.dead else None
    topic.lost, topic.trimmed = _pairs(row.lost), _pairs(row.trimmed)
    topic.routers = {router[0]: Router(*router) for router in row.routers}
    topic.groups = {group.number: group for group in map(decode_group, row.groups)}
    if row.leases:
        topic.leases = decode_queue_leases(row.leases)
    if row.reserved:
        topic.reservation.restore(row.reserved)
    for producer_id, *past in row.producers:
        if topic.producers.get(producer_id) is not None:
            raise ValueError("snapshot row contains a producer twice")
        topic.producers.restore(producer_id, ProducerHistory.from_numbers(past))
    if len(row.ids) % _ID.size:
        raise ValueError("dedup ids of a snapshot row are truncated")
    config = topic.config
    for key, *past in row.keys:
        topic.keys.remember(digest_of_key(key), IdempotencyEntry(*past), config.idempotency_window_ms)
    for digest, *seen in _ID.iter_unpack(row.ids):
        topic.keys.remember(
            digest, IdempotencyEntry(*seen), config.idempotency_window_ms, config.idempotency_max
        )


def _flags_of(topic: ShardTopic) -> int:
    return (IS_RESERVING if topic.is_reserving else 0) | (HAS_MARKS if topic.attributes_to else 0)


def _pairs(flat: list[int]) -> list[tuple[int, int]]:
    if len(flat) % 2 or any(a > b for a, b in itertools.pairwise(flat)):
        raise ValueError("lost ranges are not ascending pairs")
    return list(zip(flat[::2], flat[1::2], strict=True))


@lru_cache(maxsize=4_096)
def _config_from(data: bytes) -> TopicConfig:
    return TopicConfig.from_bytes(data)


@lru_cache(maxsize=4_096)
def _config_of(config: TopicConfig) -> bytes:
    """Encode the settings that differ from the defaults.

    The class is always included, because it decides about records.
    """
    plain = config.to_dict()
    del plain["durable"]
    stored = {
        name: value for name, value in plain.items() if name == "durability" or value != _DEFAULTS[name]
    }
    return _encode(stored)
