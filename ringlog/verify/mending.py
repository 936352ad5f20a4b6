"""A damaged log file mended: what is whole stays where it is, what is not becomes announced loss.

Offsets are what files say of one another, so nothing may move. Bytes that are no frame are replaced, in a
copy, by control frames of together the same length: a LOST_RANGE for each topic that misses numbers there,
and one for topic 0, which is nobody, to fill the rest. The mark behind them names the seal of the frame
before it; it is sealed anew, and so are marks that name that one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgpack
import xxhash

from ringlog.verify.findings import Range, extend
from ringlog.verify.frame_decoder import VerifyError, check_frame
from ringlog.verify.wal_decoder import HEADER_BYTES, Header, Seen, Walk, frame_at, mark_of, read_header

_HEADER = struct.Struct("<IBBHQQQIIQQIBBHQ")
_FRAME_HEADER_BYTES = 80
_APPEND, _MARK, _LOST = 1, 12, 13
_PIECE_BYTES = 1 << 20
_PREV_SEAL_AT = 104


@dataclass(slots=True)
class Spot:
    """Bytes [start, stop) of a file that are no frames, and what was lost with them."""

    start: int
    stop: int
    lost: dict[tuple[int, int], list[Range]] = field(default_factory=dict)
    """(topic_id, epoch) -> numbers."""
    has_first_marks: bool = False
    """One of the file's first two marks is gone: what it said of earlier files is not known any more."""


@dataclass(slots=True)
class Islands:
    """A damaged file as far as it can be read: whole frames, with spots between them."""

    header: Header
    frames: list[Seen] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)


class NotMendable(VerifyError):
    """The damage cannot be cut out of this file."""


def islands_in(data: bytes, limit: int = 0) -> Islands:
    """Find every whole frame of a file, also behind damage, up to `limit` (0 = the end).

    Zeros behind the last frame are no spot. Raises VerifyError when the header is gone.
    """
    found = Islands(read_header(data))
    data = data[: limit or len(data)]
    at, marks = HEADER_BYTES, 0
    while True:
        frames = list(_whole(data, at, found.header.salt))
        found.frames += frames
        marks += sum(seen.frame.type == _MARK for seen in frames)
        at = frames[-1].offset + frames[-1].frame.total if frames else at
        behind = _next_whole(data, at, found.header.salt)
        if behind is None:
            return found
        spot = Spot(at, behind, has_first_marks=marks < 2 and found.header.n == 0)
        _headers_in(spot, data, found.header.salt)
        found.spots.append(spot)
        at = behind


def _whole(data: bytes, at: int, salt: int) -> Iterator[Seen]:
    """Frames from `at` on that verify by themselves; the chain of marks is mended, not believed."""
    while at + _FRAME_HEADER_BYTES <= len(data) and data[at : at + 4] != b"\0\0\0\0":
        try:
            seen = frame_at(data, at, salt)
        except VerifyError:
            return
        yield seen
        at += seen.frame.total


def _next_whole(data: bytes, start: int, salt: int) -> int | None:
    """Offset of the next frame that verifies, or None."""
    for at in range((start + 7) & ~7, (len(data) & ~7) - _FRAME_HEADER_BYTES, 8):
        if data[at + 5] == 1 and 0 < data[at + 4] < 17 and data[at : at + 4] != b"\0\0\0\0":
            try:
                frame_at(data, at, salt)
            except VerifyError:
                continue
            return at
    return None


def _headers_in(spot: Spot, data: bytes, salt: int) -> None:
    """Appends whose header verifies and whose body does not: their numbers are known to be lost."""
    at = spot.start
    while at + _FRAME_HEADER_BYTES <= spot.stop:
        (sealed,) = struct.unpack_from("<Q", data, at + 72)
        if xxhash.xxh3_64_intdigest(data[at : at + 72], salt) != sealed:
            at += 8
            continue
        frame_len, kind = struct.unpack_from("<IB", data, at)
        topic_id, base_seq = struct.unpack_from("<QQ", data, at + 8)
        count, epoch = struct.unpack_from("<II", data, at + 32)
        if kind == _APPEND:
            extend(spot.lost.setdefault((topic_id, epoch), []), base_seq, base_seq + count - 1)
        at += frame_len + 4


def mend(data: bytes, found: Islands, limit: int = 0) -> bytes:
    """The file with every spot filled; raises NotMendable when a spot has no room for what it must say."""
    whole = bytearray(data[: limit or len(data)])
    salt = found.header.salt
    for spot in found.spots:
        if spot.has_first_marks:
            raise NotMendable("what this file said of earlier ones is gone", offset=spot.start)
        whole[spot.start : spot.stop] = _filling(spot, salt)
    _reseal(whole, salt)
    end = Walk(bytes(whole), salt)
    for _ in end.frames():
        continue
    if end.reason:
        raise NotMendable(end.reason, offset=end.stop)
    # Behind the last frame nothing but zeros may lie, or the end would be in doubt.
    return bytes(whole[: end.stop])


def _filling(spot: Spot, salt: int) -> bytes:
    says = [
        control_frame(_LOST, topic_id, epoch, msgpack.packb([first, last]), salt)
        for (topic_id, epoch), ranges in sorted(spot.lost.items())
        for first, last in ranges
    ]
    left = spot.stop - spot.start - sum(map(len, says))
    if left and left < _FRAME_HEADER_BYTES + 8:
        raise NotMendable("no room to say what was lost", offset=spot.start)
    while left:
        piece = left if left <= _PIECE_BYTES else min(_PIECE_BYTES, left - _FRAME_HEADER_BYTES - 8) & ~7
        says.append(_filler(piece, salt))
        left -= piece
    return b"".join(says)


def _filler(size: int, salt: int) -> bytes:
    """A LOST_RANGE of topic 0, which nobody has, `size` bytes long."""
    room = size - _FRAME_HEADER_BYTES
    body = (
        b"\x92\x00\x00" if room < 16 else b"\x93\x00\x00\xc6" + struct.pack(">I", room - 8) + bytes(room - 8)
    )
    return control_frame(_LOST, 0, 0, body, salt)


def control_frame(kind: int, topic_id: int, epoch: int, body: bytes, salt: int) -> bytes:
    """One control frame of class fsync, sealed under `salt`."""
    stored = body + bytes(-len(body) % 8)
    head = _HEADER.pack(
        _FRAME_HEADER_BYTES + len(stored) - 4, kind, 1, 0, topic_id, 0, 0, 0, epoch, 0, 0, len(body), 0, 3, 0,
        xxhash.xxh3_64_intdigest(stored),
    )  # fmt: skip
    return head + xxhash.xxh3_64_intdigest(head, salt).to_bytes(8, "little") + stored


def _reseal(whole: bytearray, salt: int) -> None:
    """Make every mark name the seal of the frame that lies before it now."""
    at, before = HEADER_BYTES, 0
    while at + _FRAME_HEADER_BYTES <= len(whole) and whole[at : at + 4] != b"\0\0\0\0":
        frame, stored = check_frame(bytes(whole[at : at + _total(whole, at)]), 0, salt)
        if frame.type == _MARK:
            said = mark_of(frame_at(bytes(whole[at : at + frame.total]), 0, salt)).prev_seal
            if said != before:
                whole[at : at + frame.total] = _mark_with(stored, said, before, salt)
        (before,) = struct.unpack_from("<Q", whole, at + 72)
        at += frame.total


def _total(whole: bytearray, at: int) -> int:
    return int.from_bytes(whole[at : at + 4], "little") + 4


def _mark_with(stored: bytes, said: int, prev_seal: int, salt: int) -> bytes:
    """The mark, its body `stored`, with another seal in the place of the one it names."""
    old, new = (b"\xcf" + struct.pack(">Q", seal) for seal in (said, prev_seal))
    if stored.count(old) != 1:
        raise NotMendable("a mark does not fit in its place any more")
    value = stored.replace(old, new)
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(value)
    unpacker.skip()
    return control_frame(_MARK, 0, 0, value[: unpacker.tell()], salt)


def with_prev_seal(data: bytes, prev_seal: int) -> bytes:
    """A log file whose header names another seal of the file before it."""
    head = data[:_PREV_SEAL_AT] + struct.pack("<Q", prev_seal) + data[_PREV_SEAL_AT + 8 : HEADER_BYTES - 8]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + data[HEADER_BYTES:]


# -- snapshots ----------------------------------------------------------------------------------------


def with_lost(data: bytes, lost: dict[int, list[Range]]) -> bytes:
    """A snapshot whose rows of these topics (by id) announce further lost ranges."""
    magic_to_created, facts_bytes, topics = data[:48], *struct.unpack_from("<QQ", data, 56)
    table = 96 + (facts_bytes + 7) // 8 * 8
    ids = struct.unpack_from(f"<{topics}Q", data, table)
    starts = struct.unpack_from(f"<{topics + 1}Q", data, table + 8 * topics)
    rows_at = table + 8 * (2 * topics + 1)
    rows = []
    for i, topic_id in enumerate(ids):
        row = data[rows_at + starts[i] : rows_at + starts[i + 1]]
        rows.append(_row_with(row, lost[topic_id]) if topic_id in lost else row)
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row))
    body = data[96 : table + 8 * topics] + struct.pack(f"<{topics + 1}Q", *bounds) + b"".join(rows)
    head = magic_to_created + struct.pack(
        "<QQQQQ", len(body), facts_bytes, topics, bounds[-1], xxhash.xxh3_64_intdigest(body)
    )
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little") + body


_COUNT, _LOST_AT = 6, 18


def _row_with(row: bytes, lost: list[Range]) -> bytes:
    """Lost numbers join the row's ranges; they no longer count as live."""
    fields = msgpack.unpackb(row, raw=False, strict_map_key=False)
    known = list(zip(fields[_LOST_AT][::2], fields[_LOST_AT][1::2], strict=True))
    joined: list[Range] = []
    for first, last in sorted([*known, *lost]):
        extend(joined, first, last)
    fields[_LOST_AT] = [number for span in joined for number in span]
    fields[_COUNT] = max(fields[_COUNT] - sum(last - first + 1 for first, last in lost), 0)
    packed: bytes = msgpack.packb(fields)
    return packed
