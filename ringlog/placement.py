"""Mapping of topics to shards and schedulers. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_hash = xxhash.xxh3_64_intdigest


def home_shard(name: str, shards: int) -> int:
    """Return the home shard of a topic name: it creates the topic and answers lookups of the name."""
    return _hash(name.encode()) % shards


def shard_of(topic_id: int, shards: int) -> int:
    """Return the shard that owns a topic: XXH3-64 of its id as 8 little-endian bytes, modulo `shards`."""
    return _hash(topic_id.to_bytes(8, "little")) % shards


def shards_of(topic_ids: NDArray[Any], shards: int) -> NDArray[np.int64]:
    """Return the (n,) shards of (n,) topic ids. Same result as shard_of for each."""
    raw = np.ascontiguousarray(topic_ids, dtype="<u8").tobytes()
    hashes = [_hash(raw[at : at + 8]) for at in range(0, len(raw), 8)]
    return (np.array(hashes, dtype=np.uint64) % np.uint64(shards)).astype(np.int64)


def scheduler_of(topic_id: int, schedulers: int) -> int:
    """Return the scheduler that delivers a topic."""
    return _hash(topic_id.to_bytes(8, "little")) % schedulers
