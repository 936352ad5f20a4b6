"""Repair of damaged log files. Valid frames keep their place, and damaged bytes become announced losses.

A file that is missing or unreadable is replaced by a file that contains only the announcement.

Files refer to one another by offset, so no frame may move. In a copy, bytes that are no frame are replaced by
control frames of the same total length. These are a LOST_RANGE for each topic that lost seqs there, and one
for topic 0, which does not exist, to fill the rest. The next mark names the seal of the frame before it, so
the mark is sealed again, and so are the marks that refer to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

import msgpack
import xxhash

from ringlog.verify.findings import Range, extend_ranges
from ringlog.verify.frame_decoder import TYPES, VERSIONS, VerifyError, check_frame, decode_frame
from ringlog.verify.wal_decoder import (
    HEADER_BYTES,
    DecodedMark,
    DecodedWalFrame,
    DecodedWalHeader,
    WalFrameWalk,
    frame_at,
    mark_of,
    read_header,
)

_HEADER = struct.Struct("<IBBHQQQIIQQIBBHQ")
_FRAME_HEADER_BYTES = 80
_APPEND, _MARK, _LOST = 1, 12, 13
_COPIED = 1
_WAL_HEADER = struct.Struct("<8sIIIIQQ16s16sQQQQQQ")
_PIECE_BYTES = 1 << 20
_PREV_SEAL_AT = 104


@dataclass(slots=True)
class DamagedSpan:
    """Bytes [start, stop) of a file that are no valid frames, and the records that were lost with them."""

    start: int
    stop: int
    known: dict[tuple[int, int], list[Range]] = field(default_factory=dict)
    """(topic_id, epoch) -> seqs that valid frame headers place here."""
    lost: dict[tuple[int, int], list[Range]] = field(default_factory=dict)
    """(topic_id, epoch) -> seqs to announce as lost here."""
    mark: DecodedMark | None = None
    """Mark to write first, if one of the file's first two marks is damaged. Without it the file would look
    like that of an incarnation that never served. The old mark's facts about earlier files are lost."""


@dataclass(slots=True)
class PartialLog:
    """The readable part of a damaged file: valid frames, and damaged spans between them."""

    header: DecodedWalHeader
    frames: list[DecodedWalFrame] = field(default_factory=list)
    damaged_spans: list[DamagedSpan] = field(default_factory=list)


class NotRepairable(VerifyError):
    """The damage in this file cannot be replaced."""


def read_partial_log(data: bytes, limit: int = 0, needed: int = 0) -> PartialLog:
    """Find all valid frames of a file, also after damage, up to offset `limit` (0 = the end of the file).

    `needed` is the offset up to which this file was durable according to other files. Zeros after the last
    frame count as damage only below it. Raises VerifyError if the header is invalid.
    """
    found = PartialLog(read_header(data))
    data = data[: limit or len(data)]
    at = HEADER_BYTES
    while True:
        frames = list(_valid_frames(data, at, found.header.salt))
        found.frames += frames
        at = frames[-1].offset + frames[-1].frame.total if frames else at
        next_valid = _find_next_valid(data, at, found.header.salt)
        if next_valid is None and at >= needed:
            break
        damage = DamagedSpan(at, needed if next_valid is None else next_valid)
        _find_lost_appends(damage, data, found.header.salt)
        found.damaged_spans.append(damage)
        at = damage.stop
    _restore_first_marks(found)
    return found


def placeholder_log(header: DecodedWalHeader, stop: int) -> PartialLog:
    """Return a stand-in for a file that ends at `stop` and of which nothing is left."""
    found = PartialLog(header, damaged_spans=[DamagedSpan(HEADER_BYTES, stop)])
    _restore_first_marks(found)
    return found


def reseal_log(data: bytes, header: DecodedWalHeader) -> bytes:
    """Return a log file with a damaged header under the new `header`.

    Without the salt no seal can be verified. Frames are accepted by the checksums of their bodies and the
    chain of marks. Raises VerifyError without such a chain.
    """
    repaired = bytearray(header_bytes(header) + data[HEADER_BYTES:])
    at, before, marks = HEADER_BYTES, 0, 0
    while at + _FRAME_HEADER_BYTES <= len(repaired) and repaired[at : at + 4] != b"\0\0\0\0":
        try:
            frame, stored = check_frame(data, at)
        except VerifyError:
            break
        if frame.type == _MARK:
            mark = mark_of(DecodedWalFrame(at, decode_frame(data, at), 0))
            if mark.prev_stop != at or mark.prev_seal != before:
                break
            marks += 1
        (before,) = struct.unpack_from("<Q", data, at + 72)
        sealed = xxhash.xxh3_64_intdigest(data[at : at + 72], header.salt)
        repaired[at + 72 : at + 80] = sealed.to_bytes(8, "little")
        at += _FRAME_HEADER_BYTES + len(stored)
    if not marks:
        raise VerifyError("neither the header nor any commit batch can be read")
    _reseal(repaired, header.salt, at)
    return bytes(repaired)


def _restore_first_marks(found: PartialLog) -> None:
    """Plan replacements for damaged first marks.

    A file begins with a mark, and one of the first two marks of an incarnation records that it served.
    """
    marks = [mark_of(seen) for seen in found.frames if seen.frame.type == _MARK]
    second = next((mark for mark in marks if mark.offset > HEADER_BYTES), None)
    has_served = any(mark.flags & _COPIED for mark in marks[:2]) or found.header.n > 0
    for damage in found.damaged_spans:
        if damage.start == HEADER_BYTES:
            stop = second.offset if second is not None and not found.header.n else damage.stop
            size = stop - HEADER_BYTES
            flags = 0 if has_served else _COPIED
            damage.mark = DecodedMark(HEADER_BYTES, 0, HEADER_BYTES, 0, HEADER_BYTES, size, flags, [], [])
        elif not has_served and marks and damage.start == HEADER_BYTES + marks[0].group_bytes:
            size, seal = damage.stop - damage.start, _seal_before(found, damage.start)
            damage.mark = DecodedMark(
                damage.start, 1, damage.start, seal, HEADER_BYTES, size, _COPIED, [], []
            )


def _seal_before(found: PartialLog, offset: int) -> int:
    return next(seen.seal for seen in found.frames if seen.offset + seen.frame.total == offset)


def _valid_frames(data: bytes, at: int, salt: int) -> Iterator[DecodedWalFrame]:
    """Yield the consecutive frames from `at` on that verify by themselves. The chain of marks is ignored."""
    while at + _FRAME_HEADER_BYTES <= len(data) and data[at : at + 4] != b"\0\0\0\0":
        try:
            seen = frame_at(data, at, salt)
        except VerifyError:
            return
        yield seen
        at += seen.frame.total


def _find_next_valid(data: bytes, start: int, salt: int) -> int | None:
    """Return the offset of the next valid frame, or None."""
    for at in range((start + 7) & ~7, (len(data) & ~7) - _FRAME_HEADER_BYTES, 8):
        if data[at + 5] in VERSIONS and data[at + 4] in TYPES and data[at : at + 4] != b"\0\0\0\0":
            try:
                frame_at(data, at, salt)
            except VerifyError:
                continue
            return at
    return None


def _find_lost_appends(damage: DamagedSpan, data: bytes, salt: int) -> None:
    """Collect appends with a valid header and an invalid body: the seqs of their lost records are known."""
    at, stop = damage.start, min(damage.stop, len(data))
    while at + _FRAME_HEADER_BYTES <= stop:
        (sealed,) = struct.unpack_from("<Q", data, at + 72)
        if xxhash.xxh3_64_intdigest(data[at : at + 72], salt) != sealed:
            at += 8
            continue
        frame_len, kind = struct.unpack_from("<IB", data, at)
        topic_id, base_seq = struct.unpack_from("<QQ", data, at + 8)
        count, epoch = struct.unpack_from("<II", data, at + 32)
        if kind == _APPEND:
            extend_ranges(damage.known.setdefault((topic_id, epoch), []), base_seq, base_seq + count - 1)
        at += frame_len + 4


def repair_log(data: bytes, found: PartialLog, limit: int = 0) -> bytes:
    """Return the file with every damaged span replaced.

    Raises NotRepairable if a span is too small for its announcements.
    """
    repaired = bytearray(data[: limit or len(data)])
    salt = found.header.salt
    for damage in found.damaged_spans:
        repaired += bytes(max(damage.stop - len(repaired), 0))
        repaired[damage.start : damage.stop] = _filling(damage, salt)
    # After the last span or frame there are only zeros, or data that was never acknowledged.
    ends = [damage.stop for damage in found.damaged_spans] + [
        seen.offset + seen.frame.total for seen in found.frames[-1:]
    ]
    del repaired[max(ends, default=HEADER_BYTES) :]
    _reseal(repaired, salt, len(repaired))
    end = WalFrameWalk(bytes(repaired), salt)
    for _ in end.frames():
        continue
    if end.reason:
        raise NotRepairable(end.reason, offset=end.stop)
    return bytes(repaired)


def header_bytes(header: DecodedWalHeader) -> bytes:
    """Return the first 4096 bytes of a log file."""
    head = _WAL_HEADER.pack(b"RLOGWAL1", 1, *astuple(header)).ljust(HEADER_BYTES - 8, b"\0")
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")


def _filling(damage: DamagedSpan, salt: int) -> bytes:
    parts = [] if damage.mark is None else [_mark_frame(damage.mark, salt)]
    lost = [(key, span) for key, ranges in sorted(damage.lost.items()) for span in ranges]
    parts += [_lost_frame(*key, *span, 0, salt) for key, span in lost]
    left = damage.stop - damage.start - sum(map(len, parts))
    if lost and 0 < left < _FRAME_HEADER_BYTES + 8:
        key, span = lost[-1]
        parts[-1] = _lost_frame(*key, *span, left, salt)
        left = 0
    if left and left < _FRAME_HEADER_BYTES + 8:
        raise NotRepairable("damaged span is too small for the announcement of the loss", offset=damage.start)
    while left:
        piece = left if left <= _PIECE_BYTES else min(_PIECE_BYTES, left - _FRAME_HEADER_BYTES - 8) & ~7
        parts.append(_filler(piece, salt))
        left -= piece
    return b"".join(parts)


def _lost_frame(topic_id: int, epoch: int, first: int, last: int, padding: int, salt: int) -> bytes:
    """Return a LOST_RANGE frame, padded by `padding` bytes."""
    body: bytes = msgpack.packb([first, last])
    if padding:
        size = (len(body) + 7) // 8 * 8 + padding
        body = b"\x94" + body[1:] + b"\xc2\xc6"
        body += struct.pack(">I", size - len(body) - 4) + bytes(size - len(body) - 4)
    return control_frame(_LOST, topic_id, epoch, body, salt)


def _mark_frame(mark: DecodedMark, salt: int) -> bytes:
    # Encode numbers as 8 bytes each: the seal may be replaced later, in place.
    numbers = b"".join(b"\xcf" + struct.pack(">Q", number) for number in mark[1:7])
    return control_frame(_MARK, 0, 0, b"\x98" + numbers + b"\x90\x90", salt)


def _filler(size: int, salt: int) -> bytes:
    """Return a LOST_RANGE frame of `size` bytes for topic 0, which does not exist."""
    room = size - _FRAME_HEADER_BYTES
    body = (
        b"\x92\x00\x00" if room < 16 else b"\x93\x00\x00\xc6" + struct.pack(">I", room - 8) + bytes(room - 8)
    )
    return control_frame(_LOST, 0, 0, body, salt)


def control_frame(kind: int, topic_id: int, epoch: int, body: bytes, salt: int) -> bytes:
    """Return one control frame of class fsync, sealed under `salt`."""
    stored = body + bytes(-len(body) % 8)
    head = _HEADER.pack(
        _FRAME_HEADER_BYTES + len(stored) - 4, kind, VERSIONS[-1], 0, topic_id, 0, 0, 0, epoch, 0, 0,
        len(body), 0, 3, 0, xxhash.xxh3_64_intdigest(stored),
    )  # fmt: skip
    return head + xxhash.xxh3_64_intdigest(head, salt).to_bytes(8, "little") + stored


def _reseal(repaired: bytearray, salt: int, stop: int) -> None:
    """Update every mark up to `stop` to the seal of the frame that now precedes it."""
    at, before = HEADER_BYTES, 0
    while at + _FRAME_HEADER_BYTES <= stop and repaired[at : at + 4] != b"\0\0\0\0":
        frame, stored = check_frame(bytes(repaired[at : at + _total(repaired, at)]), 0, salt)
        if frame.type == _MARK:
            old_seal = mark_of(frame_at(bytes(repaired[at : at + frame.total]), 0, salt)).prev_seal
            if old_seal != before:
                repaired[at : at + frame.total] = _mark_with(stored, old_seal, before, salt)
        (before,) = struct.unpack_from("<Q", repaired, at + 72)
        at += frame.total


def _total(repaired: bytearray, at: int) -> int:
    return int.from_bytes(repaired[at : at + 4], "little") + 4


def _mark_with(stored: bytes, old_seal: int, prev_seal: int, salt: int) -> bytes:
    """Return a mark frame with the body `stored`, in which `old_seal` is replaced by `prev_seal`."""
    old, new = (b"\xcf" + struct.pack(">Q", seal) for seal in (old_seal, prev_seal))
    if stored.count(old) != 1:
        raise NotRepairable("a mark cannot be resealed in place")
    value = stored.replace(old, new)
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(value)
    unpacker.skip()
    return control_frame(_MARK, 0, 0, value[: unpacker.tell()], salt)


def with_prev_seal(data: bytes, prev_seal: int) -> bytes:
    """Return a log file whose header names another seal of the previous file."""
    head = data[:_PREV_SEAL_AT] + struct.pack("<Q", prev_seal) + data[_PREV_SEAL_AT + 8 : HEADER_BYTES - 8]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + data[HEADER_BYTES:]


# -- snapshots ----------------------------------------------------------------------------------------


def rewrite_snapshot(data: bytes, lost: dict[int, list[Range]], dropped: set[int], cold: set[int]) -> bytes:
    """Return a snapshot with further losses and other segments.

    The rows of topics in `lost` (by id) announce the further lost ranges. Segments with a number in `dropped`
    are removed from the list. Segments in `cold` are listed as moved to the cold tier.
    """
    magic_to_created, facts_bytes, topics = data[:48], *struct.unpack_from("<QQ", data, 56)
    table = 96 + (facts_bytes + 7) // 8 * 8
    ids = struct.unpack_from(f"<{topics}Q", data, table)
    starts = struct.unpack_from(f"<{topics + 1}Q", data, table + 8 * topics)
    rows_at = table + 8 * (2 * topics + 1)
    facts = _facts_with(data[96 : 96 + facts_bytes], dropped, cold)
    rows = []
    for i, topic_id in enumerate(ids):
        row = data[rows_at + starts[i] : rows_at + starts[i + 1]]
        rows.append(_row_with(row, lost[topic_id]) if topic_id in lost else row)
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row))
    body = facts + bytes(-len(facts) % 8) + data[table : table + 8 * topics]
    body += struct.pack(f"<{topics + 1}Q", *bounds) + b"".join(rows)
    head = magic_to_created + struct.pack(
        "<QQQQQ", len(body), len(facts), topics, bounds[-1], xxhash.xxh3_64_intdigest(body)
    )
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little") + body


_SEGMENTS, _TIER, _COLD = 6, 7, 2
_COUNT, _BYTES, _LOST_AT = 6, 7, 18


def _facts_with(facts: bytes, dropped: set[int], cold: set[int]) -> bytes:
    fields = msgpack.unpackb(facts, raw=False, strict_map_key=False)
    fields[_SEGMENTS] = [
        [*each[:_TIER], _COLD, *each[_TIER + 1 :]] if each[0] in cold else each
        for each in fields[_SEGMENTS]
        if each[0] not in dropped
    ]
    packed: bytes = msgpack.packb(fields)
    return packed


def _row_with(row: bytes, lost: list[Range]) -> bytes:
    """Add lost seqs to a topic's row.

    They no longer count as live records. The bytes are reduced in proportion, because the size of a lost
    record is unknown.
    """
    fields = msgpack.unpackb(row, raw=False, strict_map_key=False)
    known = list(zip(fields[_LOST_AT][::2], fields[_LOST_AT][1::2], strict=True))
    joined: list[Range] = []
    for first, last in sorted([*known, *lost]):
        extend_ranges(joined, first, last)
    fields[_LOST_AT] = [number for span in joined for number in span]
    before = fields[_COUNT]
    fields[_COUNT] = max(before - sum(last - first + 1 for first, last in lost), 0)
    fields[_BYTES] = fields[_BYTES] * fields[_COUNT] // before if before else 0
    packed: bytes = msgpack.packb(fields)
    return packed
