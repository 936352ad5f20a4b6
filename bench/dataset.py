"""The data set of the storage benchmarks: one topic of tagged records, grown in steps and sealed.

Of 10,000 consecutive records, one has the tag `exact0`, one `exact1`, … `exact4`. 1,000 each have a tag that
begins with `p0.`, `p1.`, `p2.`. All others have one of 500 tags `x.NNN`.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from bench.host import Host
from ringlog.cli.maintenance import COMPACTOR, request_actor
from ringlog.client.write.fields import NewRecord
from ringlog.envelope.messages import CheckpointMade, CheckpointNow

TOPIC = "big"
TAIL = "tail"
SIZE = 100
FRAME = 1_000
CYCLE = 10
"""Number of frames after which tags repeat."""
EXACT_TAGS = 5
PREFIXES = 3
IN_FLIGHT = 64
CHECKPOINT_S = 600.0
TAIL_RECORD_BYTES = 64 << 10


def frames() -> list[list[NewRecord]]:
    """Return the records of CYCLE different frames, which are sent repeatedly."""
    payloads = [os.urandom(SIZE) for _ in range(FRAME)]
    return [[NewRecord(data=payloads[i], tag=_tag(k, i)) for i in range(FRAME)] for k in range(CYCLE)]


def _tag(frame: int, i: int) -> str:
    if frame == 0 and i < EXACT_TAGS:
        return f"exact{i}"
    if 100 <= i < 100 * (PREFIXES + 1):
        return f"p{i // 100 - 1}.{i % 100:02d}"
    return f"x.{(frame * FRAME + i) % 500:03d}"


def grow(host: Host, have: int, want: int) -> None:
    """Append records number have+1 to want. Both are multiples of FRAME."""
    made = frames()
    host.client.topics.create(TOPIC, durability="disk", exist_ok=True)
    with host.client.producer(TOPIC, max_buffer_bytes=64 << 20) as out:
        pending: deque[Any] = deque()
        for k in range(have // FRAME, want // FRAME):
            pending.append(out.send_many(made[k % CYCLE]))
            if len(pending) > IN_FLIGHT:
                pending.popleft().result(60)


def write_tail(host: Host, size: int) -> None:
    """Append about `size` bytes that stay in the log. The records are large, so that only bytes matter."""
    host.client.topics.create(TAIL, durability="disk", exist_ok=True)
    record = os.urandom(TAIL_RECORD_BYTES)
    with host.client.producer(TAIL, max_buffer_bytes=64 << 20) as out:
        for _ in range(-(-size // (TAIL_RECORD_BYTES * 8))):
            out.send_many([record] * 8)


def checkpoint(host: Host) -> list[str]:
    """Turn all log into segments now. Returns the files of a consistent copy."""
    asked = request_actor(host.shm_dir, COMPACTOR, CheckpointNow(), CheckpointMade, timeout_s=CHECKPOINT_S)
    return asked.files


def segments(host: Host) -> int:
    """Return the number of segments on disk."""
    return sum(1 for top in ("packs", "topics") for _ in (host.data_dir / top).rglob("*.idx"))
