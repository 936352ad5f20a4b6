"""Settle entries: the result of one frame, from the shard to the producer. Eight 64-bit words, 64 bytes.

word  meaning                        if refused
 0    position                       the same
 1    first_seq                      detail a
 2    commit_ts, microseconds        detail b
 3    bits 0..31 count | bits 32..47 status (errors.Status) | bits 48..63 flags
 4    head_seq at settlement         detail c
 5    epoch of the topic             detail d
 6    topic_id                       topic_id
 7    producer_seq                   producer_seq

`position` is the byte position of the frame in its ring, counted since the creation of the ring without
wrap-around. For a frame sent by socket it is the index of the frame in its message. Entries come in the order
of positions. After a restart of the shard an entry may come twice; the producer ignores the second one by its
position. DETAILS defines the details of each refusal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import Outcome, Refused, Status, TopicHalted, error_from_status
from ringlog.limits import SETTLE_ENTRY_BYTES

WORDS = SETTLE_ENTRY_BYTES // 8
S_POSITION, S_FIRST_SEQ, S_COMMIT_TS, S_COUNT_STATUS, S_HEAD_SEQ, S_EPOCH, S_TOPIC, S_PRODUCER_SEQ = range(
    WORDS
)
STATUS_SHIFT = 32
FLAGS_SHIFT = 48
FLAG_DEDUPED = 1

SettleEntries = NDArray[np.uint64]
"""(n, 8) uint64."""

FENCED = (
    "producer fenced: a producer with this name was opened later on this topic. Close this producer, "
    "and give concurrent producers different names"
)
CAP_BYTES, CAP_RECORDS = 1, 2
"""Limit that a too large frame exceeds, in the third detail of RECORD_TOO_LARGE; 0 = the record limit."""
TOTAL_BYTES = 1
"""The limit of the engine in the third detail of THROTTLED: `limits.max_total_bytes`; 0 = another reason."""
TOTAL_FULL = (
    "the engine has as many bytes of records as limits.max_total_bytes allows ({max}): delete records, or "
    "raise the limit"
)
DISK_FULL = "disk full: free at least {missing} bytes, or restart the engine with a lower data.min_free_bytes"
DETAILS: dict[Status, tuple[str, tuple[str, ...]]] = {
    Status.INVALID_REQUEST: ("invalid frame", ("field", "found")),
    Status.BATCH_TOO_LARGE: ("too many records in one write", ("records", "max")),
    Status.RECORD_TOO_LARGE: ("record too large", ("bytes", "max", "exceeds_cap")),
    Status.TOPIC_NOT_FOUND: ("no such topic", ()),
    Status.STALE_EPOCH: ("topic was deleted and created again; open it again", ("sent_epoch", "epoch")),
    Status.PAYLOAD_TOO_LARGE: ("frame too large", ("bytes", "max")),
    Status.TOPIC_FULL: ("topic is full", ("cap_records", "cap_bytes", "head_seq", "earliest_seq")),
    Status.THROTTLED: ("throttled", ("retry_after_ms", "max", "limit")),
    Status.INTERNAL: (
        "write failed in the engine: no log file can be created, retry later",
        ("missing_bytes",),
    ),
    Status.NOT_READY: ("not ready", ("retry_after_ms",)),
    Status.SHUTTING_DOWN: ("shutting down", ()),
    Status.CORRUPT_FRAME: ("frame is corrupt: its seal, checksum or structure is invalid", ("offset",)),
    Status.FORBIDDEN: ("forbidden", ()),
    Status.STORAGE_READ_ONLY: ("engine is read-only: data directory is not writable", ("in_doubt", "shard")),
    Status.PRODUCER_FENCED: (FENCED, ("in_doubt",)),
    Status.TOPIC_HALTED: (TopicHalted.TEXT, ("in_doubt", "segment", "first_seq")),
}
"""Message, and names of the details a, b, c, d, for each status."""

_DETAIL_WORDS = (S_FIRST_SEQ, S_COMMIT_TS, S_HEAD_SEQ, S_EPOCH)


def refused_entry(
    position: int, status: Status, topic_id: int, producer_seq: int, *details: int
) -> list[int]:
    """Return a refused entry as a list of eight words."""
    words = [position, 0, 0, int(status) << STATUS_SHIFT, 0, 0, topic_id, producer_seq]
    for word, value in zip(_DETAIL_WORDS, details, strict=False):
        words[word] = value & 0xFFFFFFFFFFFFFFFF
    return words


def entry_error(entry: Any, topic: str) -> Refused | None:
    """Return the error of one entry (eight words), or None if the entry is an ack."""
    status = (int(entry[S_COUNT_STATUS]) >> STATUS_SHIFT) & 0xFFFF
    if status == Status.OK:
        return None
    try:
        message, names = DETAILS[Status(status)]
    except (ValueError, KeyError):
        message, names = "refused", ()
    facts: dict[str, Any] = {name: int(entry[word]) for name, word in zip(names, _DETAIL_WORDS, strict=False)}
    if status == Status.RECORD_TOO_LARGE and facts["exceeds_cap"] == CAP_RECORDS:
        message = "records in one write must be <= cap_records of the topic"
        facts = {"records": facts["bytes"], "max": facts["max"], "exceeds_cap": 1}
    if not facts.get("exceeds_cap", 1):
        del facts["exceeds_cap"]
    if status == Status.THROTTLED and facts.pop("limit") == TOTAL_BYTES:
        message = TOTAL_FULL.format(max=facts["max"])
        facts["limit"] = "max_total_bytes"
    if status == Status.INTERNAL:
        missing = facts.pop("missing_bytes")
        if missing:
            message = DISK_FULL.format(missing=missing)
            facts |= {"reason": "disk_full", "missing_bytes": missing}
    if status == Status.STORAGE_READ_ONLY:
        facts["directory"] = f"wal/shard-{facts.pop('shard'):02d}"
    if status == Status.TOPIC_HALTED:
        segment, first = facts.pop("segment"), facts.pop("first_seq")
        part = f"packs/pack-{segment:016x}"
        if first:
            part = f"topics/{int(entry[S_TOPIC]):016x}/seg-{first:020d}-{segment:016x}"
        facts["part"] = part
    # An earlier incarnation of the shard or of the producer may have written this frame.
    outcome: Outcome = "unknown" if facts.pop("in_doubt", 0) else "not_applied"
    return error_from_status(status, message, {"topic": topic, **facts}, outcome)
