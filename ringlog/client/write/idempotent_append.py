"""Append of records with dedup ids: each is appended once within its topic's window, regardless of sender and
retries.

One write is one frame, and a frame is appended atomically. If the topic has some of the ids, the shard
returns their seqs and appends nothing; the client sends the other records again as a smaller frame. Each
reply reduces the number of records. If a reply is lost, the request is resent, and the shard then knows all
ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlog.client.requests.results import Appended, AppendedOnce
from ringlog.client.requests.validation import check_str
from ringlog.client.write.assembler import Assembler
from ringlog.client.write.keyed_append import append_keyed_frame
from ringlog.client.write.stream import Stream
from ringlog.digests import DIGEST_BYTES
from ringlog.errors import BatchTooLarge, InvalidRequest, UsageError
from ringlog.limits import DEDUP_IDS_PER_WRITE_MAX, DURATION_MS_MAX, IDEMPOTENCY_KEY_BYTES_MAX
from ringlog.link.futures import Steps
from ringlog.names import utf8

if TYPE_CHECKING:
    from ringlog.client.connection.session import Session

_NO_ID = bytes(DIGEST_BYTES)


def check_window(window_ms: int | None) -> int:
    """Check a deduplication window in milliseconds. None returns 0, the topic's window."""
    if window_ms is None:
        return 0
    if not isinstance(window_ms, int) or isinstance(window_ms, bool) or not 0 < window_ms <= DURATION_MS_MAX:
        raise UsageError(
            f"dedup_window_ms must be an integer from 1 to {DURATION_MS_MAX} ms", found=repr(window_ms)[:64]
        )
    return window_ms


def check_dedup_write(records: Assembler, topic: str, key: str = "") -> None:
    """Check a write with dedup ids before it is sent. Raises InvalidRequest or BatchTooLarge."""
    if key:
        raise InvalidRequest("a write must have idempotency_key or dedup ids, not both", topic=topic)
    if len(records.payloads) > DEDUP_IDS_PER_WRITE_MAX:
        raise BatchTooLarge(
            f"a write with dedup ids must have at most {DEDUP_IDS_PER_WRITE_MAX} records, "
            f"got {len(records.payloads)}",
            records=len(records.payloads), max=DEDUP_IDS_PER_WRITE_MAX,
        )  # fmt: skip


def append_idempotent(
    session: Session, stream: Stream, records: Assembler, encode: Callable[[Assembler], bytearray],
    window_ms: int,
) -> Steps[Appended]:  # fmt: skip
    """Append the records whose ids are new. `encode` makes a frame."""
    size = len(records.payloads)
    seqs = [0] * size
    repeated: set[int] = set()
    find_first: dict[bytes, int] = {}
    for row, digest in records.ids.items():
        find_first.setdefault(digest, row)
    # If one write contains an id twice, the second record is a repeat of the first.
    rows = [row for row in range(size) if find_first.get(records.ids.get(row, b""), row) == row]
    stamps, reached, epoch = set(), None, 0
    while rows:
        part = records.only(rows)
        ids = b"".join(part.ids.get(at, _NO_ID) for at in range(len(rows)))
        done, known = yield from append_keyed_frame(
            session, stream, encode(part), ids=ids, window_ms=window_ms
        )
        numbers: list[Any] = np.frombuffer(known, dtype="<u8").tolist() or [0] * len(rows)
        if not known and done.first_seq:
            numbers = list(range(done.first_seq, done.last_seq + 1))
        elif known:
            repeated.update(row for row, seq in zip(rows, numbers, strict=True) if seq)
        for row, seq in zip(rows, numbers, strict=True):
            seqs[row] = seq
        # Without `known` the frame is settled, even if the engine has forgotten the seqs of a retried frame.
        rows = [row for row in rows if not seqs[row]] if known else []
        stamps.add(done.commit_ts)
        reached, epoch = done.durability, done.epoch
    for row in range(size):
        first = find_first.get(records.ids.get(row, b""), row)
        if first != row:
            seqs[row] = seqs[first]
            repeated.add(row)
    assert reached is not None
    return AppendedOnce(
        stream.topic, epoch, seqs[0], seqs[-1], size, reached, len(repeated) == size, max(stamps),
        seqs=tuple(seqs), repeated=frozenset(repeated),
    )  # fmt: skip


def check_idempotency_key(key: str | None) -> str:
    """Check an idempotency key. None returns "", no key."""
    if key is None:
        return ""
    size = len(utf8(check_str(key, "idempotency_key"), "idempotency_key"))
    if size > IDEMPOTENCY_KEY_BYTES_MAX:
        raise InvalidRequest(
            f"idempotency_key must have at most {IDEMPOTENCY_KEY_BYTES_MAX} bytes, got {size}", bytes=size,
            max=IDEMPOTENCY_KEY_BYTES_MAX,
        )  # fmt: skip
    return key
