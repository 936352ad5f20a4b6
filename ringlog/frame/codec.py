"""Build frames from encoded columns, and patch single frames in place.

A producer fills in all fields except base_seq, commit_ts and the seal. The shard sets these three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import BatchTooLarge, UsageError
from ringlog.frame import layout
from ringlog.frame.columns import COLUMN_NAMES, EncodedRecords, encode_values
from ringlog.frame.compress import compress
from ringlog.frame.control import check_control
from ringlog.frame.header import append_header_template, pack_header
from ringlog.frame.kernel import kernel
from ringlog.frame.layout import FrameType
from ringlog.limits import BATCH_RECORDS_MAX
from ringlog.types import Codec, Durability, PayloadKind

I64 = NDArray[np.int64]

_NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})
_hash = xxhash.xxh3_64_intdigest


def frame(
    columns: EncodedRecords,
    *,
    topic_id: int,
    producer_id: int = 0,
    producer_seq: int = 0,
    epoch: int = 0,
    durability: Durability = Durability.DISK,
    payload_kind: PayloadKind = PayloadKind.BYTES,
    codec: Codec = Codec.NONE,
) -> bytearray:
    """Build one append frame. If `codec` does not shrink the body, the body is stored uncompressed.

    Raises UsageError for a field out of range.
    """
    header = columns.header._replace(
        topic_id=topic_id, producer_id=producer_id, producer_seq=producer_seq, epoch=epoch,
        flags=flags_of(durability, payload_kind),
    )  # fmt: skip
    if codec != Codec.NONE:
        used, stored = compress(columns.body, codec)
        if used != Codec.NONE:
            frame_len = layout.FRAME_LEN_MIN + len(stored)
            header = header._replace(frame_len=frame_len, codec=used, body_xxh3=_hash(stored))
            return bytearray().join((pack_header(header), stored))
    whole = bytearray(columns.buffer)
    whole[: layout.HEADER_BYTES] = pack_header(header)
    return whole


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
    """Build one control frame around a MessagePack value. `raw_len` is its length before padding.

    With `is_known` the body is not checked: the caller made it itself. Raises UsageError for an append type
    or a field out of range. Raises FrameInvalid for a body that is not one value of the types that control.py
    permits.
    """
    if frame_type in layout.TYPES_WITH_COLUMNS:
        raise UsageError("frame_type must be a control type, got an append", frame_type=frame_type.name)
    if not is_known:
        check_control(body)
    try:
        return kernel.control(
            frame_type, topic_id, base_seq, commit_ts, epoch, flags_of(durability, PayloadKind.BYTES), body
        )
    except OverflowError:
        raise UsageError(
            "frame header field out of range", type=frame_type, topic_id=topic_id, epoch=epoch,
            base_seq=base_seq, commit_ts=commit_ts,
        ) from None  # fmt: skip


def encode_frames(
    payloads: Sequence[bytes | None],
    records: int,
    columns: Mapping[str, Any] = _NO_COLUMNS,
    *,
    topic_id: int,
    producer_id: int = 0,
    first_producer_seq: int = 0,
    epoch: int = 0,
    durability: Durability | int = Durability.DISK,
    payload_kind: PayloadKind = PayloadKind.BYTES,
) -> tuple[bytearray, I64]:
    """Build adjacent frames of `records` records each. The last frame has the remaining records.

    `columns` maps argument names of encode_records to lists of values. Returns the buffer and (n + 1,) int64
    offsets: frame i is `buffer[offsets[i]:offsets[i + 1]]` and has producer_seq `first_producer_seq + i`.
    Raises as encode_records, and BatchTooLarge for too many records per frame.
    """
    if not 0 < records <= BATCH_RECORDS_MAX:
        raise BatchTooLarge(
            f"records per frame must be in 1..{BATCH_RECORDS_MAX}, got {records}",
            records=records,
            max=BATCH_RECORDS_MAX,
        )
    header = append_header_template(
        topic_id, producer_id, first_producer_seq, epoch, flags_of(durability, payload_kind)
    )
    buffer, offsets = encode_values(_values(payloads, columns), header, records=records)
    return buffer, np.frombuffer(offsets, dtype=np.int64)


def encode_single_frame(
    payloads: Sequence[bytes | None], columns: Mapping[str, Any], header: bytes
) -> bytearray:
    """Build one frame of all records, as encode_frames, with a header from `append_header_template`."""
    return encode_values(_values(payloads, columns), header)[0]


def _values(payloads: Sequence[bytes | None], columns: Mapping[str, Any]) -> tuple[Any, ...]:
    return (payloads, *map(columns.get, COLUMN_NAMES[1:])) if columns else (payloads,)


def patch_header(
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

    The checksum of the body stays valid, the seal does not. Raises UsageError for a value that does not fit
    its field.
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
            raise UsageError("frame header field out of range", word=word, value=value) from None


def seal(buffer: Any, seed: int, offset: int = 0) -> int:
    """Seal one frame of a private, writable buffer under `seed`. Return the seal. For many: batch.seals."""
    return kernel.seal_at(buffer, offset, seed)


def total_bytes_at(buffer: Any, offset: int = 0) -> int:
    """Return the size of the frame at `offset` according to its frame_len, which is not validated."""
    with memoryview(buffer).cast("B") as view:
        return (
            int.from_bytes(view[offset : offset + layout.LEN_FIELD_BYTES], "little") + layout.LEN_FIELD_BYTES
        )


def flags_of(durability: Durability | int, payload_kind: PayloadKind) -> int:
    return int(durability) | int(payload_kind) << layout.PAYLOAD_KIND_SHIFT


def _with_epoch(word: int, epoch: int) -> int:
    if not 0 <= epoch < 1 << 32:
        raise UsageError("frame header field out of range", epoch=epoch)
    return (word & 0xFFFFFFFF) | epoch << layout.EPOCH_SHIFT
