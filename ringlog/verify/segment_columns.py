"""Per-record columns of a segment's index, decoded from docs/reference/format.md only."""

from __future__ import annotations

import struct
from typing import NamedTuple, Protocol

import xxhash

from ringlog.verify.frame_decoder import DecodedFrame, VerifyError

_SIZES, _STAMPS, _EXPIRES, _NOT_BEFORE, _PRIORITY = 1, 2, 4, 8, 16


class EntryFacts(Protocol):
    """A row of the index's frame table."""

    @property
    def records(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def ts_min(self) -> int: ...
    @property
    def expires_min(self) -> int: ...
    @property
    def columns_at(self) -> int: ...


class DecodedRecordColumns(NamedTuple):
    """One value for each record of a frame."""

    sizes: list[int]
    stamps: list[int]
    expires: list[int]
    not_before: list[int]
    priorities: list[int]


def read_columns(index: bytes, entry: EntryFacts) -> DecodedRecordColumns:
    """Return the record columns of one frame from a whole index file. Raises VerifyError."""
    count, at = entry.records, entry.columns_at
    sizes, stamps = [entry.bytes // count] * count, [entry.ts_min] * count
    expires = [entry.expires_min] * count
    not_before, priorities = [0] * count, [0] * count
    if not at:
        return DecodedRecordColumns(sizes, stamps, expires, not_before, priorities)
    if at + 16 > len(index):
        raise VerifyError("a block of record columns lies outside of the index")
    checksum, kinds = struct.unpack_from("<QQ", index, at)
    if kinds >> 5:
        raise VerifyError("unknown record columns")
    sizes_bytes = -(-4 * count // 8) * 8 if kinds & _SIZES else 0
    stamps_bytes = 8 * count if kinds & _STAMPS else 0
    marks = at + 16 + sizes_bytes + stamps_bytes + (8 * count if kinds & _EXPIRES else 0)
    levels = marks + (8 * count if kinds & _NOT_BEFORE else 0)
    stop = levels + (-(-count // 8) * 8 if kinds & _PRIORITY else 0)
    if stop > len(index) or xxhash.xxh3_64_intdigest(index[at + 8 : stop]) != checksum:
        raise VerifyError("record columns: checksum mismatch")
    if kinds & _SIZES:
        sizes = list(struct.unpack_from(f"<{count}I", index, at + 16))
    if kinds & _STAMPS:
        stamps = list(struct.unpack_from(f"<{count}q", index, at + 16 + sizes_bytes))
    if kinds & _EXPIRES:
        expires = list(struct.unpack_from(f"<{count}q", index, at + 16 + sizes_bytes + stamps_bytes))
    if kinds & _NOT_BEFORE:
        not_before = list(struct.unpack_from(f"<{count}q", index, marks))
    if kinds & _PRIORITY:
        priorities = list(index[levels : levels + count])
    return DecodedRecordColumns(sizes, stamps, expires, not_before, priorities)


def expected_columns(frame: DecodedFrame) -> DecodedRecordColumns:
    """Return the columns that the index must have for the records of a frame."""
    columns, count = frame.columns, frame.count
    metas = columns.get("meta") or [""] * count
    return DecodedRecordColumns(
        [len(data or b"") + len(meta.encode()) for data, meta in zip(columns["payload"], metas, strict=True)],
        columns.get("commit_ts") or [frame.commit_ts] * count,
        columns.get("expires_at") or [0] * count,
        columns.get("not_before") or [0] * count,
        columns.get("priority") or [0] * count,
    )
