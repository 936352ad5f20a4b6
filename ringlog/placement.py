"""Which shard and which scheduler a topic belongs to. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_hash = xxhash.xxh3_64_intdigest


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


def scheduler_of(topic_id: int, schedulers: int) -> int:
    """Scheduler that looks after a topic."""
    return _hash(topic_id.to_bytes(8, "little")) % schedulers
