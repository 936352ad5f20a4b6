"""Deduplication of writes by idempotency key, and of single records by dedup ids.

If a topic already has some records of a write, the shard appends nothing. The reply contains the known
records and their seqs, and the sender retries with the other records. One frame thus remains one atomic
write, and the shard never splits frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlog.digests import DIGEST_BYTES, digest_of_key
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.settle_entry import (
    FLAG_DEDUPED,
    FLAGS_SHIFT,
    S_COMMIT_TS,
    S_COUNT_STATUS,
    S_EPOCH,
    S_FIRST_SEQ,
    S_HEAD_SEQ,
    S_PRODUCER_SEQ,
    S_TOPIC,
    WORDS,
)
from ringlog.limits import DEDUP_IDS_PER_WRITE_MAX, IDEMPOTENCY_KEY_BYTES_MAX
from ringlog.settings import CALL_SETTINGS
from ringlog.topic.idempotency import IdempotencyEntry
from ringlog.topic.state import ShardTopic

NO_ID = bytes(DIGEST_BYTES)


def check_idempotency(message: m.Append, batch: frames.FrameBatch) -> None:
    """Raise InvalidRequest if the idempotency key or the dedup ids do not match the frames of the request."""
    key, ids = message.idempotency_key, message.ids
    if not key and not ids:
        return
    CALL_SETTINGS["window_ms"].check(message.window_ms)
    if len(key.encode()) > IDEMPOTENCY_KEY_BYTES_MAX:
        raise InvalidRequest(
            f"idempotency_key must have at most {IDEMPOTENCY_KEY_BYTES_MAX} bytes, got {len(key.encode())}",
            max=IDEMPOTENCY_KEY_BYTES_MAX,
        )  # fmt: skip
    if len(batch) != 1:
        raise InvalidRequest(
            f"a write with an idempotency key or dedup ids must have one frame, got {len(batch)}",
            found=len(batch),
        )  # fmt: skip
    if not ids:
        return
    if key:
        raise InvalidRequest("a write must have idempotency_key or dedup ids, not both", topic=message.topic)
    records = int(batch.words[0, layout.W_COUNT_EPOCH]) & 0xFFFFFFFF
    if len(ids) != records * DIGEST_BYTES or records > DEDUP_IDS_PER_WRITE_MAX:
        raise InvalidRequest(
            f"a write must have one dedup id per record and at most {DEDUP_IDS_PER_WRITE_MAX} records",
            records=records, bytes=len(ids), max=DEDUP_IDS_PER_WRITE_MAX,
        )  # fmt: skip
    given = [each for each in digests(ids) if each != NO_ID]
    if len(set(given)) != len(given):
        raise InvalidRequest("dedup ids of a write must be unique", topic=message.topic)


def digests(ids: bytes) -> list[bytes]:
    """Split `ids` into one digest for each record."""
    return [ids[at : at + DIGEST_BYTES] for at in range(0, len(ids), DIGEST_BYTES)]


def find_duplicate(
    topic: ShardTopic, message: m.Append, batch: frames.FrameBatch, now_us: int, *, is_whole: bool = False
) -> tuple[Any, bytes] | None:
    """Find an earlier write with the same key, or with one of the same dedup ids.

    Return (settle entry, known), or None if neither is known. `known` has one uint64 for each record: its
    seq, or 0 if it is new. `known` is empty if all records are duplicates by key or by producer number. With
    `is_whole`, return None if only some of the dedup ids are known.
    """
    window = topic.config.idempotency_window_ms
    if message.idempotency_key:
        seen = topic.keys.find(digest_of_key(message.idempotency_key), now_us, window)
        return None if seen is None else (_entries(topic, batch, seen), b"")
    if not message.ids:
        return None
    if (sent_before := _frame_again(topic, batch)) is not None:
        return sent_before, b""
    past = [topic.keys.find(each, now_us, window) if each != NO_ID else None for each in digests(message.ids)]
    known = np.array([0 if each is None else each.first_seq for each in past], dtype=np.uint64)
    if not known.any() or (is_whole and not known.all()):
        return None
    first = next(each for each in past if each is not None)
    records = len(past) if known.all() else 0
    return _entries(topic, batch, first._replace(records=records)), known.tobytes()


def _frame_again(topic: ShardTopic, batch: frames.FrameBatch) -> Any:
    """Return the settle entry of a frame that was appended before and is sent again; None for a new frame.

    This check comes before the check of dedup ids, because a record without id is known only by its frame. If
    the reply listed only the records with ids, the sender would append the other records twice.
    """
    words = batch.words[0]
    producer, number = (
        topic.producers.get(int(words[layout.W_PRODUCER_ID])),
        int(words[layout.W_PRODUCER_SEQ]),
    )
    epoch = int(words[layout.W_COUNT_EPOCH] >> np.uint64(layout.EPOCH_SHIFT))
    if producer is None or not producer.is_settled(number) or epoch not in {0, topic.epoch}:
        return None
    first_seq, count = producer.find(number) or (0, int(frames.counts_of(batch.words)[0]))
    return _entries(topic, batch, IdempotencyEntry(first_seq, count, topic.last_ts, 0))


def remember_write(topic: ShardTopic, key: str, ids: bytes, entry: IdempotencyEntry) -> None:
    """Store the first use of a key for all records of `entry`, or of each dedup id for its record."""
    config = topic.config
    window, most = config.idempotency_window_ms, config.idempotency_max
    if key:
        topic.keys.remember(digest_of_key(key), entry, window, most)
    for row, digest in enumerate(digests(ids)):
        if digest != NO_ID:
            one = entry._replace(first_seq=entry.first_seq + row, records=1)
            topic.keys.remember(digest, one, window, most)


def _entries(topic: ShardTopic, batch: frames.FrameBatch, seen: IdempotencyEntry) -> Any:
    entries = np.zeros((1, WORDS), dtype=np.uint64)
    entries[0, S_FIRST_SEQ] = seen.first_seq
    entries[0, S_COMMIT_TS] = seen.commit_ts
    entries[0, S_COUNT_STATUS] = seen.records | (FLAG_DEDUPED << FLAGS_SHIFT)
    # The reply waits for the current commit batch, because the batch may contain the first copy.
    entries[0, S_HEAD_SEQ] = topic.next_seq - 1
    entries[0, S_EPOCH] = topic.epoch
    entries[0, S_TOPIC] = topic.topic_id
    entries[0, S_PRODUCER_SEQ] = batch.words[0, layout.W_PRODUCER_SEQ]
    return entries
