"""Topics for segments that tests damage."""

from __future__ import annotations

from ringlog.client import Client
from ringlog.client.write.fields import NewRecord

SEALED_RECORDS = 20_000
SEALED = {"enabled": True, "own_segment_bytes": 1 << 16}
"""Settings of `storage`."""


def fill(client: Client, topic: str, count: int) -> None:
    client.topics.create(topic, durability="fsync", exist_ok=True)
    made = [NewRecord(data=b"%d" % i, tag=f"t{i % 7}") for i in range(count)]
    for start in range(0, count, 5_000):
        client.append_many(topic, made[start : start + 5_000])
