"""Deletes, and reads of a shard's topic by a reader that respects floors and deletions."""

from __future__ import annotations

from typing import Any

from pyroaring import BitMap64

from ringlog.envelope import messages as m
from ringlog.frame import encode_records, frame
from ringlog.topic.tombstone import Floors, Gap, plan_read
from tests.support.shard_world import World


def delete(world: World, name: str, before: int = 0, match: Any = None, seqs: list[int] | None = None) -> Any:
    """Request a delete and return the reply."""
    numbers = BitMap64(seqs).serialize() if seqs is not None else b""
    return world.request(m.RecordsDelete(name, before, match, numbers))


def state(world: World, name: str) -> m.TopicStateReply:
    return world.request(m.TopicState(name))


def append(world: World, name: str, payloads: list[bytes], **columns: Any) -> int:
    """Append one frame with columns (tags, expires_at, metas) and return its first seq."""
    number = world._producer_seqs.get((name, 1), 0) + 1
    world._producer_seqs[name, 1] = number
    topic = world.topic(name)
    sent = frame(
        encode_records(payloads, **columns), topic_id=topic.topic_id, producer_id=1, producer_seq=number
    )
    entry = world.send(name, [sent])[0]
    assert not int(entry[3]) >> 32 & 0xFFFF, "refused"
    return int(entry[1])


def read(world: World, name: str, after: int = 0) -> tuple[Gap | None, list[int]]:
    """Read once from a cursor. Return the tombstone, if any, and the delivered seqs."""
    located = world.request(m.Locate(name, after))
    floors = Floors(
        located.head_seq, located.earliest_seq, located.cap_floor, located.ttl_floor, located.trim_floor
    )
    plan = plan_read(after, floors, located.lost, recreated=located.recreated)
    deleted = BitMap64.deserialize(located.deleted) if located.deleted else BitMap64()
    found = [seq for seq, _ in world.records(name, plan.after) if seq <= plan.stop and seq not in deleted]
    return plan.gap, found
