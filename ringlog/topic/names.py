"""What a topic may be called, and which shard it belongs to. Pure."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import InvalidRequest
from ringlog.limits import ROUTER_NAME_BYTES_MAX, TOPIC_NAME_BYTES_MAX

_TOPIC_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:-]{{0,{TOPIC_NAME_BYTES_MAX - 1}}}")
_ROUTER_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:>-]{{0,{ROUTER_NAME_BYTES_MAX - 1}}}")
_RULE = "1 to 255 of A-Z a-z 0-9 . _ : - and the first a letter or a digit"
_SHOWN_CHARS_MAX = 64
_hash = xxhash.xxh3_64_intdigest


def is_topic_name(name: object) -> bool:
    """Say whether `name` is a legal topic name; reads and deletes treat others as absent topics."""
    return isinstance(name, str) and _TOPIC_NAME.fullmatch(name) is not None


def is_router_name(name: object) -> bool:
    """Say whether `name` is a legal name of a router (N-2)."""
    return isinstance(name, str) and _ROUTER_NAME.fullmatch(name) is not None


def check_topic_name(name: object, field: str = "topic") -> None:
    """Raise InvalidRequest, naming `field`, unless `name` is a legal topic name."""
    if not isinstance(name, str):
        raise InvalidRequest("a topic name must be a string", field=field, found=type(name).__name__)
    if _TOPIC_NAME.fullmatch(name) is None:
        raise InvalidRequest(
            "not a legal topic name", field=field, rule=_RULE, found=name[:_SHOWN_CHARS_MAX], chars=len(name)
        )


def home_shard(name: str, shards: int) -> int:
    """Shard at which the topic called `name` is created and asked for."""
    return _hash(name.encode()) % shards


def shard_of(topic_id: int, shards: int) -> int:
    """Shard a topic's frames are written by: XXH3-64 of the eight little-endian bytes of its id."""
    return _hash(topic_id.to_bytes(8, "little")) % shards


def shards_of(topic_ids: NDArray[Any], shards: int) -> NDArray[np.int64]:
    """(n,) shard of each of (n,) topic ids; the same as shard_of, for many."""
    raw = np.ascontiguousarray(topic_ids, dtype="<u8").tobytes()
    hashes = [_hash(raw[at : at + 8]) for at in range(0, len(raw), 8)]
    return (np.array(hashes, dtype=np.uint64) % np.uint64(shards)).astype(np.int64)
