"""From encoded columns to whole frames, and patching single frames in place.

A producer fills in everything but base_seq, commit_ts and the seal, which are the shard's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import BatchTooLarge, InvalidRequest, PayloadTooLarge, RecordTooLarge, UsageError
from ringlog.frame import layout
from ringlog.frame.columns import Columns
from ringlog.frame.compress import compress
from ringlog.frame.control import check_control
from ringlog.frame.header import Header, pack_header
from ringlog.frame.kernel import LIMITS, kernel
from ringlog.frame.layout import Column, FrameType
from ringlog.limits import BATCH_RECORDS_MAX, FRAME_BYTES_MAX, RECORD_BYTES_MAX
from ringlog.types import Codec, Durability, PayloadKind

I64 = NDArray[np.int64]

_PADS = tuple(bytes(n) for n in range(8))
_HEADERS_MAX = 64
"""Headers kept: a client's frames get topic and producer later, and differ in class and kind alone."""
_NO_COLUMNS = (None,) * 9
_hash = xxhash.xxh3_64_intdigest


def frame(
    columns: Columns,
    *,
    topic_id: int,
    producer_id: int = 0,
    producer_seq: int = 0,
    epoch: int = 0,
    durability: Durability = Durability.DISK,
    payload_kind: PayloadKind = PayloadKind.BYTES,
    codec: Codec = Codec.NONE,
) -> bytearray:
    """Build one append frame. The codec is what to try: a body it does not shrink is stored as it is.

    Raises UsageError for a field out of range and for values that are not bytes.
    """
    header = _append_header(
        columns, topic_id, _flags(durability, payload_kind), producer_id, producer_seq, epoch
    )
    if codec == Codec.NONE:
        whole = columns.joined(pack_header(header))
    else:
        used, stored = compress(columns.body, codec)
        header = header._replace(frame_len=layout.FRAME_LEN_MIN + len(stored), codec=used)
        whole = bytearray().join((pack_header(header), stored))
    with memoryview(whole) as view, view.cast("Q") as words:
        words[layout.W_BODY_XXH3] = _hash(view[layout.HEADER_BYTES :])
    return whole


def frame_pieces(
    columns: Columns, *, topic_id: int, durability: Durability = Durability.DISK
) -> tuple[list[Any], int]:
    """(pieces, bytes) of the frame that `frame` would build, for a writer that gathers: nothing is copied.

    The columns' values must not change before the pieces are written. Raises as frame.
    """
    whole, size = xxhash.xxh3_64(), 0
    for piece in columns.pieces:
        try:
            whole.update(piece)
            size += memoryview(piece).nbytes
        except TypeError as e:
            raise UsageError("a value is not bytes", reason=str(e)) from None
    if size != columns.raw_len:
        raise UsageError("a value is not a buffer of single bytes", bytes=size)
    header = _append_header(columns, topic_id, _flags(durability, PayloadKind.BYTES))
    pieces = [pack_header(header._replace(body_xxh3=whole.intdigest())), *columns.pieces]
    return pieces, layout.HEADER_BYTES + size


def control_frame(
    frame_type: FrameType,
    topic_id: int,
    body: bytes,
    *,
    epoch: int = 0,
    base_seq: int = 0,
    commit_ts: int = 0,
    durability: Durability = Durability.FSYNC,
    is_known: bool = False,
) -> bytearray:
    """Build one control frame around a MessagePack value; `raw_len` is its length before padding.
    `is_known`: the body is one of those that records.py makes, and is not looked at.

    Raises UsageError for an append type or a field out of range, FrameInvalid for a body that is not
    one value of the types that control.py allows.
    """
    if frame_type in layout.TYPES_WITH_COLUMNS:
        raise UsageError("an append is not a control frame", frame_type=frame_type.name)
    if not is_known:
        check_control(body)
    stored = body + _PADS[-len(body) & 7]
    header = Header(
        frame_len=layout.FRAME_LEN_MIN + len(stored), type=frame_type, version=layout.VERSION, columns=0,
        topic_id=topic_id, base_seq=base_seq, commit_ts=commit_ts, records=0, epoch=epoch, producer_id=0,
        producer_seq=0, raw_len=len(body), codec=Codec.NONE, flags=_flags(durability, PayloadKind.BYTES),
        hops=0, body_xxh3=_hash(stored), seal_xxh3=0,
    )  # fmt: skip
    return bytearray().join((pack_header(header), stored))


def frames_of(
    payloads: Sequence[bytes],
    records: int,
    *,
    topic_id: int,
    producer_id: int = 0,
    first_producer_seq: int = 0,
    epoch: int = 0,
    durability: Durability | int = Durability.DISK,
    payload_kind: PayloadKind = PayloadKind.BYTES,
) -> tuple[bytearray, I64]:
    """Build frames of `records` payloads each back to back; the last frame holds what is left.

    Returns the buffer and (n + 1,) int64 offsets: frame i is `buffer[offsets[i]:offsets[i + 1]]` and has
    producer_seq first + i. Raises InvalidRequest for no payload, BatchTooLarge for too many records a frame,
    RecordTooLarge naming index, bytes and max, PayloadTooLarge when the buffer would exceed the limit of one
    message, UsageError for payloads that are not bytes.
    """
    if not 0 < records <= BATCH_RECORDS_MAX:
        raise BatchTooLarge("too many records in one write", records=records, max=BATCH_RECORDS_MAX)
    header = _payload_header(
        topic_id, producer_id, first_producer_seq, epoch, _flags(durability, payload_kind)
    )
    try:
        values = payloads if isinstance(payloads, list) else list(payloads)
    except TypeError as e:
        raise UsageError("payloads must be a sequence of bytes", reason=str(e)) from None
    found = _encoded(values, records, header)
    if found is None:
        found = _encoded(_as_bytes(values), records, header)
    if found is None:
        raise PayloadTooLarge("too many bytes in one call", max=FRAME_BYTES_MAX)
    return found[0], np.frombuffer(found[1], dtype=np.int64)


def _encoded(payloads: list[bytes], records: int, header: bytes) -> tuple[bytearray, bytes] | None:
    columns = (payloads, *_NO_COLUMNS)
    return kernel.encode(columns, len(payloads), records, header, FRAME_BYTES_MAX, LIMITS)


@lru_cache(_HEADERS_MAX)
def _payload_header(topic_id: int, producer_id: int, producer_seq: int, epoch: int, flags: int) -> bytes:
    """What frames of payloads alone have in common; the kernel fills in the rest."""
    return pack_header(
        Header(
            0, FrameType.APPEND, layout.VERSION, 1 << Column.PAYLOAD, topic_id, 0, 0, 0, epoch, producer_id,
            producer_seq, 0, Codec.NONE, flags, 0, 0, 0,
        )
    )  # fmt: skip


def _as_bytes(payloads: Sequence[Any]) -> list[bytes]:
    """Payloads that are buffers as bytes; raises for what cannot be one, and for one that is too large."""
    try:
        views = [memoryview(payload) for payload in payloads]
    except TypeError as e:
        raise UsageError("payloads must be a sequence of bytes", reason=str(e)) from None
    if not views:
        raise InvalidRequest("a write holds at least one record", records=0, min=1)
    for index, view in enumerate(views):
        if view.nbytes != len(view):
            raise UsageError("a payload is not a buffer of single bytes", index=index, bytes=view.nbytes)
        if view.nbytes > RECORD_BYTES_MAX:
            raise RecordTooLarge("record too large", index=index, bytes=view.nbytes, max=RECORD_BYTES_MAX)
    total = sum(view.nbytes for view in views)
    if total > FRAME_BYTES_MAX:
        raise PayloadTooLarge("too many bytes in one call", bytes=total, max=FRAME_BYTES_MAX)
    return [bytes(view) for view in views]


def patch(
    buffer: Any,
    offset: int = 0,
    *,
    topic_id: int | None = None,
    epoch: int | None = None,
    producer_id: int | None = None,
    producer_seq: int | None = None,
    base_seq: int | None = None,
    commit_ts: int | None = None,
) -> None:
    """Change header fields of the frame at `offset` of a private, writable buffer.

    The body's checksum stays right; the seal, if there was one, does not. Raises UsageError for a
    value that does not fit its field.
    """
    with memoryview(buffer).cast("B")[offset : offset + layout.HEADER_BYTES].cast("Q") as words:
        changes = (
            (layout.W_TOPIC, topic_id),
            (layout.W_BASE_SEQ, base_seq),
            (layout.W_COMMIT_TS, commit_ts),
            (layout.W_PRODUCER_ID, producer_id),
            (layout.W_PRODUCER_SEQ, producer_seq),
            (
                layout.W_COUNT_EPOCH,
                None if epoch is None else _with_epoch(words[layout.W_COUNT_EPOCH], epoch),
            ),
        )
        try:
            for word, value in changes:
                if value is not None:
                    words[word] = value
        except (ValueError, TypeError):
            raise UsageError("a frame's header field is out of range", word=word, value=value) from None


def seal(buffer: Any, seed: int, offset: int = 0) -> int:
    """Seal one frame of a private, writable buffer under `seed`; return the seal. Many: batch.seals."""
    with memoryview(buffer).cast("B")[offset : offset + layout.HEADER_BYTES] as header:
        value = _hash(header[: layout.SEALED_BYTES], seed)
        with header.cast("Q") as words:
            words[layout.W_SEAL_XXH3] = value
    return value


def total_bytes_at(buffer: Any, offset: int = 0) -> int:
    """Whole size of the frame that begins at `offset`, as its frame_len says. Judges nothing."""
    with memoryview(buffer).cast("B") as view:
        return (
            int.from_bytes(view[offset : offset + layout.LEN_FIELD_BYTES], "little") + layout.LEN_FIELD_BYTES
        )


def _append_header(
    columns: Columns, topic_id: int, flags: int, producer_id: int = 0, producer_seq: int = 0, epoch: int = 0
) -> Header:
    """Of an append that is not compressed; without its checksum."""
    return Header(
        layout.FRAME_LEN_MIN + columns.raw_len, FrameType.APPEND, layout.VERSION, columns.bitmap, topic_id,
        0, 0, columns.count, epoch, producer_id, producer_seq, columns.raw_len, Codec.NONE, flags, 0, 0, 0,
    )  # fmt: skip


def _flags(durability: Durability | int, payload_kind: PayloadKind) -> int:
    return int(durability) | int(payload_kind) << layout.PAYLOAD_KIND_SHIFT


def _with_epoch(word: int, epoch: int) -> int:
    if not 0 <= epoch < 1 << 32:
        raise UsageError("a frame's header field is out of range", epoch=epoch)
    return (word & 0xFFFFFFFF) | epoch << layout.EPOCH_SHIFT
