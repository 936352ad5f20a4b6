"""From encoded columns to whole frames, and patching single frames in place.

A producer fills in everything but base_seq, commit_ts and the seal, which are the shard's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import BatchTooLarge, InvalidRequest, PayloadTooLarge, RecordTooLarge, UsageError
from ringlog.frame import layout
from ringlog.frame.batch import body_hashes, scan
from ringlog.frame.columns import Columns, encode_records
from ringlog.frame.compress import compress
from ringlog.frame.control import check_control
from ringlog.frame.header import Header, pack_header
from ringlog.frame.kernel import encode_plain
from ringlog.frame.layout import Column, FrameType
from ringlog.limits import BATCH_RECORDS_MAX, FRAME_BYTES_MAX, RECORD_BYTES_MAX
from ringlog.types import Codec, Durability, PayloadKind

I64 = NDArray[np.int64]

_PADS = tuple(bytes(n) for n in range(8))
_ONE_RECORD_PREFIX = layout.HEADER_BYTES + 8
"""Header and the two offsets of a one-record, payload-only frame: the payload begins here."""
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


def frames_of_one(
    payloads: Sequence[bytes],
    *,
    topic_id: int,
    producer_id: int = 0,
    first_producer_seq: int = 0,
    epoch: int = 0,
    durability: Durability = Durability.DISK,
    payload_kind: PayloadKind = PayloadKind.BYTES,
) -> tuple[bytearray, I64]:
    """Build n one-record, payload-only frames back to back; frame i has producer_seq first + i.

    Returns the buffer and (n + 1,) int64 offsets: frame i is `buffer[offsets[i]:offsets[i + 1]]`.
    Raises InvalidRequest for none, RecordTooLarge naming index, bytes and max, PayloadTooLarge when
    the buffer would exceed the limit of one message.
    """
    template = Header(
        0, FrameType.APPEND, layout.VERSION, 1 << Column.PAYLOAD, topic_id, 0, 0, 1, epoch, producer_id,
        first_producer_seq, 0, Codec.NONE, _flags(durability, payload_kind), 0, 0, 0,
    )  # fmt: skip
    found = encode_plain(payloads, 1, pack_header(template))
    if found is not None:
        return found
    try:
        alike = _alike_length(payloads)
        if _is_small(payloads, alike) and len(payloads) <= BATCH_RECORDS_MAX:
            return _frames_alike(payloads, alike, template)
    except TypeError as e:
        raise UsageError("payloads must be a sequence of bytes", reason=str(e)) from None
    lengths = _payload_lengths(payloads)
    totals = _ONE_RECORD_PREFIX + ((lengths + 7) & ~7)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(totals, out=offsets[1:])
    if offsets[-1] > FRAME_BYTES_MAX:
        raise PayloadTooLarge("too many bytes in one call", bytes=int(offsets[-1]), max=FRAME_BYTES_MAX)
    rows = _prefix_rows(template, lengths, totals)
    try:
        buffer = _join_mixed(payloads, rows, lengths)
    except TypeError as e:
        raise UsageError("payloads must be a sequence of bytes", reason=str(e)) from None
    if len(buffer) != offsets[-1]:
        raise UsageError(
            "a payload is not a buffer of single bytes", bytes=len(buffer), expected=int(offsets[-1])
        )
    words = np.frombuffer(buffer, dtype="<u8")
    words[(offsets[:-1] >> 3) + layout.W_BODY_XXH3] = body_hashes(buffer, scan(words))
    return buffer, offsets


def frames_of(
    payloads: Sequence[bytes],
    records: int,
    *,
    topic_id: int,
    producer_id: int = 0,
    first_producer_seq: int = 0,
    epoch: int = 0,
    durability: Durability = Durability.DISK,
    payload_kind: PayloadKind = PayloadKind.BYTES,
) -> tuple[bytearray, I64]:
    """As frames_of_one with `records` payloads a frame; the last frame holds what is left.

    Payloads of one length that fill all frames are laid out together; others frame by frame.
    """
    if records == 1:
        return frames_of_one(
            payloads, topic_id=topic_id, producer_id=producer_id, first_producer_seq=first_producer_seq,
            epoch=epoch, durability=durability, payload_kind=payload_kind,
        )  # fmt: skip
    if not 0 < records <= BATCH_RECORDS_MAX:
        raise BatchTooLarge("too many records in one write", records=records, max=BATCH_RECORDS_MAX)
    template = Header(
        0, FrameType.APPEND, layout.VERSION, 1 << Column.PAYLOAD, topic_id, 0, 0, records, epoch,
        producer_id, first_producer_seq, 0, Codec.NONE, _flags(durability, payload_kind), 0, 0, 0,
    )  # fmt: skip
    found = encode_plain(payloads, records, pack_header(template))
    if found is not None:
        return found
    try:
        alike = _alike_length(payloads)
        if _is_small(payloads, alike) and len(payloads) % records == 0:
            return _tables_alike(payloads, records, alike, template)
    except TypeError as e:
        raise UsageError("payloads must be a sequence of bytes", reason=str(e)) from None
    whole = [
        frame(
            encode_records(payloads[start : start + records]), topic_id=topic_id, producer_id=producer_id,
            producer_seq=first_producer_seq + start // records, epoch=epoch, durability=durability,
            payload_kind=payload_kind,
        )
        for start in range(0, len(payloads), records)
    ]  # fmt: skip
    if not whole:
        raise InvalidRequest("a write holds at least one record", records=0, min=1)
    offsets = np.zeros(len(whole) + 1, dtype=np.int64)
    np.cumsum([len(one) for one in whole], out=offsets[1:])
    return bytearray().join(whole), offsets


def _tables_alike(
    payloads: Sequence[bytes], records: int, length: int, template: Header
) -> tuple[bytearray, I64]:
    """frames_of for full frames of payloads of one length: all have the same offsets and the same size.

    Every payload is copied once, by one join of all frames.
    """
    count, data_bytes = len(payloads) // records, records * length
    ends = np.arange(0, data_bytes + 1, length, dtype="<i4").tobytes()
    ends += _PADS[-len(ends) & 7]
    body = len(ends) + layout.padded(data_bytes)
    total = layout.HEADER_BYTES + body
    head = pack_header(template._replace(frame_len=total - layout.LEN_FIELD_BYTES, raw_len=body)) + ends
    pad = _PADS[-data_bytes & 7]
    pieces: list[bytes] = []
    for start in range(0, len(payloads), records):
        pieces.append(head)
        pieces += payloads[start : start + records]
        pieces.append(pad)
    buffer = bytearray().join(pieces)
    if len(buffer) != count * total:
        raise TypeError("a payload is not a buffer of single bytes")
    view = memoryview(buffer)
    words = np.frombuffer(buffer, dtype="<u8").reshape(count, total >> 3)
    words[:, layout.W_PRODUCER_SEQ] += np.arange(count, dtype=np.uint64)
    hashes = [_hash(view[at + layout.HEADER_BYTES : at + total]) for at in range(0, count * total, total)]
    words[:, layout.W_BODY_XXH3] = np.array(hashes, dtype=np.uint64)
    return buffer, np.arange(0, count * total + 1, total, dtype=np.int64)


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


def _flags(durability: Durability, payload_kind: PayloadKind) -> int:
    return int(durability) | int(payload_kind) << layout.PAYLOAD_KIND_SHIFT


def _with_epoch(word: int, epoch: int) -> int:
    if not 0 <= epoch < 1 << 32:
        raise UsageError("a frame's header field is out of range", epoch=epoch)
    return (word & 0xFFFFFFFF) | epoch << layout.EPOCH_SHIFT


def _alike_length(payloads: Sequence[bytes]) -> int:
    """The length of every payload, where all have one above 0; otherwise 0. Raises UsageError."""
    try:
        lengths = set(map(len, payloads))
    except TypeError as e:
        raise UsageError("payloads must be a sequence of bytes", reason=str(e)) from None
    return lengths.pop() if len(lengths) == 1 else 0


def _is_small(payloads: Sequence[bytes], length: int) -> bool:
    """Within every limit by far, so that nothing has to be checked one by one."""
    return (
        0 < length <= RECORD_BYTES_MAX and len(payloads) > 1 and length * len(payloads) < FRAME_BYTES_MAX >> 1
    )


def _frames_alike(payloads: Sequence[bytes], length: int, template: Header) -> tuple[bytearray, I64]:
    """frames_of_one for payloads of one length: whole columns of words at a time."""
    count, body = len(payloads), 8 + layout.padded(length)
    total = layout.HEADER_BYTES + body
    header = template._replace(frame_len=total - layout.LEN_FIELD_BYTES, raw_len=body)
    head = pack_header(header) + (length << 32).to_bytes(8, "little")
    buffer = bytearray(count * total)
    words = np.frombuffer(buffer, dtype="<u8").reshape(count, total >> 3)
    words[:, : layout.HEADER_WORDS + 1] = np.frombuffer(head, dtype="<u8")
    words[:, layout.W_PRODUCER_SEQ] += np.arange(count, dtype=np.uint64)
    joined = b"".join(payloads)
    if len(joined) != count * length:
        raise TypeError("a payload is not a buffer of single bytes")
    data = np.frombuffer(joined, dtype=np.uint8).reshape(count, length)
    words.view(np.uint8)[:, _ONE_RECORD_PREFIX : _ONE_RECORD_PREFIX + length] = data
    bodies = np.ndarray((count,), f"V{body}", buffer, layout.HEADER_BYTES, (total,)).tolist()
    words[:, layout.W_BODY_XXH3] = np.fromiter(map(_hash, bodies), dtype=np.uint64, count=count)
    return buffer, np.arange(0, count * total + 1, total, dtype=np.int64)


def _payload_lengths(payloads: Sequence[bytes]) -> I64:
    try:
        lengths = np.fromiter(map(len, payloads), dtype=np.int64, count=len(payloads))
    except TypeError as e:
        raise UsageError("payloads must be a sequence of bytes", reason=str(e)) from None
    if not len(lengths):
        raise InvalidRequest("a write holds at least one record", records=0, min=1)
    longest = int(lengths.argmax())
    if lengths[longest] > RECORD_BYTES_MAX:
        raise RecordTooLarge(
            "record too large", index=longest, bytes=int(lengths[longest]), max=RECORD_BYTES_MAX
        )
    return lengths


def _prefix_rows(template: Header, lengths: I64, totals: I64) -> NDArray[np.uint64]:
    """(n, 11) words: the header of each frame and the two offsets of its payload."""
    words = np.frombuffer(pack_header(template), dtype="<u8")
    rows = np.empty((len(lengths), layout.HEADER_WORDS + 1), dtype="<u8")
    rows[:, : layout.HEADER_WORDS] = words
    rows[:, layout.W_HEAD] += (totals - layout.LEN_FIELD_BYTES).astype(np.uint64)
    rows[:, layout.W_PRODUCER_SEQ] += np.arange(len(lengths), dtype=np.uint64)
    rows[:, layout.W_TAIL] += (totals - layout.HEADER_BYTES).astype(np.uint64)
    rows[:, layout.HEADER_WORDS] = lengths.astype(np.uint64) << np.uint64(32)
    return rows


def _join_mixed(payloads: Sequence[bytes], rows: NDArray[np.uint64], lengths: I64) -> bytearray:
    parts: list[Any] = [b""] * (3 * len(lengths))
    parts[0::3] = rows.view(f"V{_ONE_RECORD_PREFIX}").ravel().tolist()
    parts[1::3] = payloads
    parts[2::3] = map(_PADS.__getitem__, (-lengths & 7).tolist())
    return bytearray().join(parts)
