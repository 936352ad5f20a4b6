"""Independent decoder of frames, written from docs/reference/format.md only.

It consists of plain loops over plain bytes and shares no code with ringlog.frame; speed does not matter. If
the two decoders disagree about any bytes, one of them is wrong, or the format page is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import lz4.block
import msgpack
import xxhash
import zstandard

from ringlog.errors import RinglogError

_MIB = 1 << 20
_FRAME_BYTES_MAX = 66 * _MIB
_CONTROL_BYTES_MAX = 1 * _MIB
_CONTROL_DEPTH_MAX = 16
_RATIO_MAX = 1_000
_WINDOW_BYTES_MAX = 8 * _MIB
_APPEND, _ROUTED = 1, 15
TYPES = range(1, 18)
VERSIONS = (1, 2)
_HOPS_MAX = 8
_PREFIX = struct.Struct("<5Q")
_COPY = struct.Struct("<7Q")
_BYTES_COLUMNS = {0: "payload", 1: "key", 2: "tag", 3: "node", 5: "meta"}
_TEXT_COLUMNS = ("tag", "node", "meta")
_VALIDITY = {11: "payload", 12: "key", 13: "tag", 14: "node"}
_TIME_COLUMNS = {6: "event_ts", 7: "expires_at", 8: "not_before", 10: "commit_ts"}


class VerifyError(RinglogError):
    """The bytes do not follow the format page."""

    code = "verify"


@dataclass(slots=True)
class DecodedFrame:
    """One decoded frame. `columns` has the present columns by name, as stored: a null is None.

    In version 1, and in columns without validity bits, a missing value has no null and is a normal value.
    """

    total: int
    type: int
    topic_id: int
    base_seq: int
    commit_ts: int
    count: int
    epoch: int
    producer_id: int
    producer_seq: int
    codec: int
    durability: int
    payload_kind: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    control: Any = None
    hops: int = 0
    copies: list[DecodedCopy] = field(default_factory=list)
    """For a routed frame: its copies, without columns. The columns of all copies are `columns`."""


class DecodedCopy(NamedTuple):
    """One copy in a routed frame. `cursor` is the router's new position in its source."""

    topic_id: int
    base_seq: int
    records: int
    epoch: int
    router: int
    cursor: int


def decode_frame(data: bytes, offset: int = 0, seed: int | None = None) -> DecodedFrame:
    """Decode and verify the frame at `offset` (bytes). The seal is verified unless `seed` is None.

    Raises VerifyError for anything that the format page does not allow.
    """
    found, bitmap, raw_len, stored = _header(data, offset, seed)
    if found.type == _ROUTED:
        _routed(found, stored)
        return found
    if found.type != _APPEND:
        _need(not any(stored[raw_len:]), "padding is not zero")
        found.control = _control(stored[:raw_len])
        return found
    body = stored if found.codec == 0 else _decompressed(stored, found.codec, raw_len)
    found.columns = _columns(body, bitmap, found.count)
    return found


def record_ranges(frame: DecodedFrame) -> list[tuple[int, int, int, int]]:
    """Return (topic id, epoch, first seq, number of records) for each topic of a decoded frame."""
    if frame.type == _APPEND:
        return [(frame.topic_id, frame.epoch, frame.base_seq, frame.count)]
    return [(copy.topic_id, copy.epoch, copy.base_seq, copy.records) for copy in frame.copies]


def check_frame(data: bytes, offset: int = 0, seed: int | None = None) -> tuple[DecodedFrame, bytes]:
    """Decode the header of the frame at `offset`, and verify both checksums but not the body's contents.

    Returns (frame, stored body with padding). Raises VerifyError.
    """
    found, _, _, stored = _header(data, offset, seed)
    return found, stored


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise VerifyError(message)


def _header(data: bytes, offset: int, seed: int | None) -> tuple[DecodedFrame, int, int, bytes]:
    _need(offset >= 0 and offset % 8 == 0 and offset + 80 <= len(data), "no room for a header")
    (frame_len,) = struct.unpack_from("<I", data, offset)
    total = frame_len + 4
    _need(80 <= total <= _FRAME_BYTES_MAX and total % 8 == 0, "impossible length")
    _need(offset + total <= len(data), "cut short")
    kind, version, bitmap = struct.unpack_from("<BBH", data, offset + 4)
    topic_id, base_seq, commit_ts = struct.unpack_from("<QQQ", data, offset + 8)
    count, epoch, producer_id, producer_seq = struct.unpack_from("<IIQQ", data, offset + 32)
    raw_len, codec, flags, hops, reserved = struct.unpack_from("<IBBBB", data, offset + 56)
    body_xxh3, seal_xxh3 = struct.unpack_from("<QQ", data, offset + 64)
    _need(kind in TYPES, "unknown type")
    _need(version in VERSIONS, "unknown version")
    _need(bitmap < 1 << (11 if version == 1 else 15), "unknown column")
    _need(bitmap >> 11 & ~bitmap == 0, "validity of a column that is not there")
    _need(reserved == 0 and flags & 0b1100_1100 == 0, "reserved bits are set")
    _need(flags >> 4 < 3, "unknown payload kind")
    _need(codec < 3, "unknown codec")
    _need(base_seq + count <= 1 << 63 and commit_ts < 1 << 63, "seq or time is out of range")
    _need(hops <= (_HOPS_MAX if kind == _APPEND else 0), "too many hops")
    if kind == _APPEND:
        _need(count > 0 and bitmap & 1 == 1, "no records")
        _need(raw_len % 8 == 0, "raw_len is not whole")
    else:
        _need(count == 0 and bitmap == 0 and codec == 0, "control frame with records or codec")
    if codec == 0:
        _need(-(-raw_len // 8) * 8 == total - 80, "raw_len is not the body's")
    else:
        _need(0 < raw_len <= _FRAME_BYTES_MAX - 80, "impossible raw_len")
    stored = bytes(data[offset + 80 : offset + total])
    _need(xxhash.xxh3_64_intdigest(stored) == body_xxh3, "body does not match its checksum")
    if seed is not None:
        seal = xxhash.xxh3_64_intdigest(bytes(data[offset : offset + 72]), seed)
        _need(seal == seal_xxh3, "header does not match its seal")
    found = DecodedFrame(
        total, kind, topic_id, base_seq, commit_ts, count, epoch, producer_id, producer_seq, codec,
        flags & 3, flags >> 4, hops=hops,
    )  # fmt: skip
    return found, bitmap, raw_len, stored


# -- routed frames ----------------------------------------------------------------------------------------


def _routed(found: DecodedFrame, stored: bytes) -> None:
    """Decode the body of a routed frame: prefix, copies, columns."""
    _need(len(stored) >= _PREFIX.size, "no prefix")
    rows, head, tail, body_xxh3, count = _PREFIX.unpack_from(stored)
    columns_at = _PREFIX.size + _COPY.size * rows
    _need(rows > 0 and columns_at <= len(stored), "no room for the copies")
    columns = stored[columns_at:]
    _need(xxhash.xxh3_64_intdigest(columns) == body_xxh3, "columns do not match their checksum")
    _need(count < 1 << 32 and tail >> 40 & 3 == 0, "prefix makes no sense")
    for row in range(rows):
        topic_id, base_seq, stamp, epoch, router, cursor, durability = _COPY.unpack_from(
            stored, _PREFIX.size + _COPY.size * row
        )
        _need(epoch < 1 << 32 and durability < 4, "a copy makes no sense")
        words = (head, topic_id, base_seq, stamp, count | epoch << 32, 0, 0, tail, body_xxh3, 0)
        copy, bitmap, raw_len, body = _header(struct.pack("<10Q", *words) + columns, 0, None)
        _need(copy.type == _APPEND and copy.total == 80 + len(columns), "a copy is no append")
        found.copies.append(DecodedCopy(topic_id, base_seq, count, epoch, router, cursor))
        if not row:
            plain = body if copy.codec == 0 else _decompressed(body, copy.codec, raw_len)
            found.columns = _columns(plain, bitmap, count)


# -- columns ------------------------------------------------------------------------------------------


class _BodyReader:
    """Reads a body from front to back."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.at = 0

    def take_padded(self, length: int) -> bytes:
        """Read `length` bytes and their padding, which must be zeros."""
        stop = self.at + length
        end = -(-stop // 8) * 8
        _need(end <= len(self.body), "column runs past the body")
        taken = self.body[self.at : stop]
        _need(not any(self.body[stop:end]), "padding is not zero")
        self.at = end
        return taken

    def offsets(self, entries: int) -> list[int]:
        """Read entries + 1 ascending offsets, the first of which is 0."""
        found = [value for (value,) in struct.iter_unpack("<i", self.take_padded(4 * (entries + 1)))]
        _need(found[0] == 0, "offsets do not start at 0")
        for a, b in pairwise(found):
            _need(a <= b, "offsets fall")
        return found

    def values(self, entries: int, text: bool) -> list[Any]:
        """Read a column of byte strings, decoded as UTF-8 if `text`."""
        bounds = self.offsets(entries)
        data = self.take_padded(bounds[-1])
        values = [data[a:b] for a, b in pairwise(bounds)]
        return [_text(value) for value in values] if text else values


def _columns(body: bytes, bitmap: int, count: int) -> dict[str, list[Any]]:
    reader = _BodyReader(body)
    found: dict[str, list[Any]] = {}
    for bit in range(11):
        if not bitmap >> bit & 1:
            continue
        if bit in _BYTES_COLUMNS:
            name = _BYTES_COLUMNS[bit]
            found[name] = reader.values(count, name in _TEXT_COLUMNS)
        elif bit in _TIME_COLUMNS:
            found[_TIME_COLUMNS[bit]] = [
                v for (v,) in struct.iter_unpack("<q", reader.take_padded(8 * count))
            ]
        elif bit == 9:
            found["priority"] = list(reader.take_padded(count))
        else:
            lists = reader.offsets(count)
            keys = reader.values(lists[-1], text=True)
            values = reader.values(lists[-1], text=False)
            pairs = list(zip(keys, values, strict=True))
            found["headers"] = [pairs[a:b] for a, b in pairwise(lists)]
    for bit, name in _VALIDITY.items():
        if bitmap >> bit & 1:
            found[name] = _with_nulls(found[name], reader.take_padded(-(-count // 8)))
    _need(reader.at == len(body), "bytes left over")
    return found


def _with_nulls(values: list[Any], bits: bytes) -> list[Any]:
    """Replace values without a validity bit by None. There is one bit for each record, lowest bit first."""
    valid = [byte >> bit & 1 for byte in bits for bit in range(8)]
    _need(not any(valid[len(values) :]), "padding is not zero")
    _need(
        all(is_valid or not value for value, is_valid in zip(values, valid, strict=False)), "a null has bytes"
    )
    return [value if is_valid else None for value, is_valid in zip(values, valid, strict=False)]


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise VerifyError("text is not UTF-8") from None


# -- compressed bodies --------------------------------------------------------------------------------


def _decompressed(stored: bytes, codec: int, raw_len: int) -> bytes:
    _need(len(stored) >= 8, "no compressed length")
    (length,) = struct.unpack_from("<Q", stored)
    _need(8 + -(-length // 8) * 8 == len(stored), "compressed length is not the body's")
    _need(not any(stored[8 + length :]), "padding is not zero")
    _need(raw_len <= length * _RATIO_MAX, "grows too much")
    packed = stored[8 : 8 + length]
    try:
        raw = (
            _zstd(packed, raw_len) if codec == 2 else lz4.block.decompress(packed, uncompressed_size=raw_len)
        )
    except (lz4.block.LZ4BlockError, zstandard.ZstdError):
        raise VerifyError("does not decompress") from None
    _need(len(raw) == raw_len, "decompresses to another length")
    return bytes(raw)


def _zstd(packed: bytes, raw_len: int) -> bytes:
    """Decompress a Zstandard frame. Its header (RFC 8878, 3.1.1.1) is checked before any allocation."""
    _need(packed[:4] == b"\x28\xb5\x2f\xfd" and len(packed) > 5, "not a Zstandard frame")
    descriptor = packed[4]
    single = descriptor >> 5 & 1
    _need(descriptor & 0b0000_1000 == 0, "reserved bit of the Zstandard header")
    at = 5
    window = 0
    if not single:
        exponent, mantissa = packed[at] >> 3, packed[at] & 7
        window = (1 << 10 + exponent) + (1 << 10 + exponent) // 8 * mantissa
        at += 1
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    _need(not any(packed[at : at + dictionary_bytes]), "needs a dictionary")
    at += dictionary_bytes
    size_bytes = (single, 2, 4, 8)[descriptor >> 6]
    _need(size_bytes > 0 and at + size_bytes <= len(packed), "declares no size")
    size = int.from_bytes(packed[at : at + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    _need(size == raw_len, "declares another size")
    _need((size if single else window) <= _WINDOW_BYTES_MAX, "window too large")
    return zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)


# -- control bodies -----------------------------------------------------------------------------------


def _control(body: bytes) -> Any:
    _need(len(body) <= _CONTROL_BYTES_MAX, "control body too large")
    try:
        value = msgpack.unpackb(
            body, raw=False, strict_map_key=False, object_pairs_hook=_map_of, ext_hook=_no_extension
        )
    except VerifyError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise VerifyError("control body is not one MessagePack value", reason=str(e)) from None
    _check_plain(value, 0)
    return value


def _map_of(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        _need(isinstance(key, str), "key is not text")
        _need(key not in found, "doubled key")
        found[key] = value
    return found


def _no_extension(code: int, data: bytes) -> Any:
    raise VerifyError("extension type", extension=code, bytes=len(data))


def _check_plain(value: Any, depth: int) -> None:
    if isinstance(value, dict | list):
        _need(depth < _CONTROL_DEPTH_MAX, "nested too deeply")
        for inner in value.values() if isinstance(value, dict) else value:
            if type(inner) is not int:  # most values are integers
                _check_plain(inner, depth + 1)
    else:
        _need(
            value is None or isinstance(value, bool | int | float | str | bytes), "type that is not allowed"
        )
