"""Topics for segments that tests damage."""

from __future__ import annotations

from ringlog.cli.maintenance import COMPACTOR, request_actor
from ringlog.client import Client
from ringlog.client.write.fields import NewRecord
from ringlog.envelope.messages import CheckpointMade, CheckpointNow

SEALED_RECORDS = 20_000
SEALED = {"enabled": True, "own_segment_bytes": 1 << 16}
"""Settings of `storage`."""


def fill(client: Client, topic: str, count: int) -> None:
    client.topics.create(topic, durability="fsync", exist_ok=True)
    made = [NewRecord(data=b"%d" % i, tag=f"t{i % 7}") for i in range(count)]
    for start in range(0, count, 5_000):
        client.append_many(topic, made[start : start + 5_000])


def checkpoint(shm_dir: str) -> None:
    request_actor(shm_dir, COMPACTOR, CheckpointNow(), CheckpointMade)
